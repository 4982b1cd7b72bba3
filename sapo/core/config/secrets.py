"""Secrets are named in a config and fetched only where they are used: they never enter what is logged."""

import os
from concurrent.futures import wait
from pathlib import Path
from urllib.parse import urlsplit

from sapo.core.beside import begun
from sapo.core.errors import Unavailable, UserError

BLOCK_S = 5.0
"""How long Prefect may take to hand out a block: a node waits for it when it connects."""


def public(address: str) -> str:
    """An address without the user, the password and the query that may stand in it."""
    parts = urlsplit(address)
    if not parts.netloc:
        return address
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def fetch(reference: str, field: str) -> str:
    """The secret that `env:NAME`, `file:PATH` or `prefect:BLOCK` names.

    Raises `UserError` naming `field` and the reference, never the secret, where there is none, and
    `Unavailable` when the Prefect API that has it does not answer.
    """
    kind, _, name = reference.partition(":")
    readers = {"env": _from_environment, "file": _from_file, "prefect": _from_block}
    secret = readers[kind](name, reference, field)
    if not secret:
        raise UserError(field, reference, "the secret there is empty", "put the secret there")
    return secret


def _from_environment(name: str, reference: str, field: str) -> str:
    if name not in os.environ:
        raise UserError(field, reference, "this environment variable is not set", f"export {name}=...")
    return os.environ[name]


def _from_file(name: str, reference: str, field: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "is not text"
        raise UserError(field, reference, problem, "name a readable file that holds the secret") from None


def _from_block(name: str, reference: str, field: str) -> str:
    from prefect.blocks.system import Secret
    from prefect.settings import get_current_settings

    if get_current_settings().api.url is None:  # Prefect would start a server of its own, which has no blocks
        raise UserError(field, reference, "no Prefect API is named", "export PREFECT_API_URL=http://.../api")

    def load() -> str:
        # mypy cannot see that this is the synchronous half of a method with two
        return str(Secret.load(name, _sync=True).get())  # type: ignore[union-attr,call-arg]

    asked = begun("secret", load)
    if not wait([asked], BLOCK_S).done:
        raise Unavailable(f"{reference}: Prefect did not answer within {BLOCK_S:.0f} s")
    try:
        return asked.result()
    except ValueError:
        remedy = f'make it: Secret(value=...).save("{name}")'
        raise UserError(field, reference, "Prefect has no Secret block of this name", remedy) from None
    except Exception as error:
        raise Unavailable(f"{reference}: Prefect cannot be asked: {error!r}") from None
