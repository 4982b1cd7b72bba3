"""The servers on this machine are asked directly, whatever proxy the environment names for the rest."""

from collections.abc import MutableMapping

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NAMES = ("no_proxy", "NO_PROXY")


def never_by_proxy(environment: MutableMapping[str, str]) -> None:
    """Add the loopback addresses to the hosts that `environment` exempts from a proxy. Clients differ in
    which of the two spellings they read, so both get all hosts that either names."""
    named = [host.strip() for name in _NAMES for host in environment.get(name, "").split(",")]
    hosts = "*" if "*" in named else ",".join(dict.fromkeys([*filter(None, named), *LOOPBACK]))
    for name in _NAMES:
        environment[name] = hosts
