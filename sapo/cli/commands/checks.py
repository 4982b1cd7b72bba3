"""What commands check first: before a model library is loaded, a question drawn or a server started.

Nothing is written, and torch is loaded only for a config that names a GPU.
"""

import time
from collections.abc import Collection, Sequence

from sapo.cli.commands.options import program
from sapo.core.config.home import Home
from sapo.core.config.load import Config, merge, parse
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.ops.supervisor import who_runs
from sapo.store.journal.journal import rounds_made


def check_start(config: Config, home: Home, names: Sequence[str]) -> Config:
    """Raise `UserError` where the nodes `names` cannot run: wrong place, key, bus, engine, device or model.
    Returns the config with the Kafka cluster that was found, which is from now on the run's."""
    check_built(config)
    config = check_place(config, home)
    refuse_outsiders(config, home, names)
    return config


def refuse_running(home: Home, *names: str) -> None:
    """Raise `UserError` where one of these runs in a home already: nodes, or "swarm" for the whole."""
    running = who_runs(home)
    for name in names:
        if name in running:
            what = "a swarm" if name == "swarm" else name
            remedy = "watch it with `sapo status`, stop it with `sapo stop`, or choose another folder"
            problem = f"{what} is running here already, with pid {running[name]}"
            raise UserError("--home", home.shown, problem, remedy)


def refuse_member(config: Config, remedy: str | None = None) -> None:
    """Raise `UserError` for a site whose nodes only answer, where a command is about nodes with models."""
    if config.member is not None:
        remedy = remedy or f"run it with `{program()} member`, or leave section member out"
        raise UserError("member.type", config.member.type, "this site only answers", remedy)


def check_rounds(home: Home, name: str, first: int | None, last: int | None) -> None:
    """Raise `UserError` for a range of rounds, `--from` and `--to`, that a node cannot have made."""
    if first is not None and last is not None and first > last:
        raise UserError("--from", first, f"is after --to {last}", "swap them")
    if not home.journal(name).exists():
        return  # the history may have rounds of a node whose journal is elsewhere
    made = rounds_made(home.journal(name))
    if not made:
        raise UserError("NODE", name, "has made no round yet", "let it run, and deliver a round")
    for option, value in (("--from", first), ("--to", last)):
        if value is not None and value >= made:
            problem, remedy = f"{name} has made {made} rounds", f"name a round from 0 to {made - 1}"
            raise UserError(option, value, problem, remedy)


def refuse_fewer_rounds(config: Config, home: Home, rounds: int | None) -> None:
    """Raise `UserError` where `--rounds` asks for less than every node of a home has made."""
    made = [rounds_made(home.journal(name)) for name in home.begun(config)]
    if rounds is not None and made and rounds < min(made):
        remedy = f"name more than {max(made)} to go on"
        raise UserError("--rounds", rounds, f"every node has made {min(made)} rounds already", remedy)


def check_built(config: Config) -> None:
    """Raise `UserError` for a bus that works only inside one process, and for what `check_parts` finds."""
    if config.bus.type == "memory":
        raise UserError(
            "bus.type", "memory", "works inside one process only", 'set it to "sqlite" or "kafka"'
        )
    check_parts(config)


def check_parts(config: Config) -> None:
    """Raise `UserError` for a node's engine, device, package or model that is not here."""
    from sapo.core import own_code
    from sapo.peers.keyring import refuse_strange_names
    from sapo.policy.engines import check_engine
    from sapo.policy.model_source import check_source

    for name in config.nodes:
        own = config.for_node(name)
        refuse_strange_names(own)
        own_code.check(own)
        if config.member is not None:
            continue
        check_engine(own)
        check_source(own)
        if own.device.startswith("cuda") or own.learn.compile:  # a GPU not asked for is not looked for
            from sapo.policy.device import resolve_device

            resolve_device(own)


def check_place(config: Config, home: Home) -> Config:
    """Raise `UserError` for a home that is another swarm's, a disk that is full, a port in use, or a bus that
    cannot be used. Returns the config as `check_start` does."""
    from sapo.bus import check_buses
    from sapo.ops import services
    from sapo.ops.doctor import require_space

    if home.manifest.exists():
        home.check(Manifest.of(config))
        home.check_site(config)
    if "swarm" not in who_runs(home):
        services.refuse_opened(home)
    require_space(home.root)
    for port, field in ((config.track.port, "track.port"), (config.flow.port, "flow.port")):
        if port is not None and "swarm" not in who_runs(home):
            services.bind(port, field).close()
    return pinned(config, {facts.cluster_id for facts in check_buses(config)})


def pinned(config: Config, clusters: Collection[str]) -> Config:
    """`config` with the one cluster its bus was found to be, so that no other is taken for it later."""
    if config.bus.type != "kafka" or config.bus.cluster_id is not None or len(clusters) != 1:
        return config
    (cluster,) = clusters
    return parse(merge(config.model_dump(mode="json"), {"bus": {"cluster_id": cluster}}))


def refuse_outsiders(config: Config, home: Home, names: Sequence[str]) -> None:
    """Raise `UserError` where a node that is to run may not publish in its swarm."""
    from sapo.peers import keyring
    from sapo.peers.membership import refuse_kind, refuse_outsider

    manifest, now = Manifest.of(config), time.time()
    refuse_kind(config.author, manifest)
    for name in names if manifest.entry != "open" else ():
        if not home.key(name).exists():
            remedy = f"make it with `{program()} keys show`, and have it put into rules.members"
            raise UserError("rules.members", None, f"{name} has no key that could be a member's", remedy)
        held = keyring.take(home, manifest.swarm, name, now)
        refuse_outsider(name, held.identity.key, held.card.invitation, manifest, now)
