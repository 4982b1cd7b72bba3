"""Commands for swarms of several sites: `init`, `join`, `archive`, `pack`, `unpack`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sapo.cli.commands.options import (
    ConfigOption,
    HomeOption,
    PresetOption,
    SetOption,
    counted,
    find_home,
    program,
    typed,
    warn,
)
from sapo.core.errors import UserError
from sapo.core.unicode import say

if TYPE_CHECKING:
    from sapo.core.config.advice import Advice
    from sapo.core.config.load import Config

SiteOption = Annotated[
    str, typer.Option("--site", metavar="S", help="This site's name; its nodes are S0, S1, ...")
]
NodesOption = Annotated[
    int | None, typer.Option("--nodes", metavar="N", help="How many nodes run at this site. [default: 1]")
]
DirOption = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="Where the files are written; made if need be.")
]


def init(
    swarm: Annotated[str, typer.Option("--swarm", metavar="NAME", help="The swarm's name.")],
    site: SiteOption,
    preset: PresetOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    nodes: NodesOption = None,
    folder: DirOption = Path("."),
) -> None:
    """Begin a swarm of several sites: write its manifest and this site's config.

    The manifest (NAME.manifest.json) is what all sites agree on: tasks, limits, what is held out. It also
    carries what this site runs (model, batch, generate, learn) as advice for those who join. Hand it to them;
    nothing in it is secret. The config (site-S.toml) is this site's own.

    The bus must be one that other sites reach: --set bus.type=kafka --set bus.servers=HOST:9092
    """
    from sapo.core.config.advice import describe
    from sapo.core.config.home import Home
    from sapo.ops import sites
    from sapo.tasks.unearned import unearned

    made = sites.found_swarm(swarm, site, preset, counted(sets, nodes), folder, config)
    say(f"{made.manifest}: what all sites agree on; hand it to whoever joins")
    say(f"{made.file}: this site's settings")
    for line in (*describe(made.config, made.config.nodes), *made.notes):
        say(line)
    for name, why in unearned(made.config.manifest_tasks()).items():
        warn(f"{name}: {why}; a swarm learns that instead of solving it")
    _say_next(made.file, made.config, None)
    sets_of_others = [word for item in sites.join_sets(made.config) for word in ("--set", item)]
    words = ["sapo", "join", made.manifest.name, "--site", "OTHER", *sets_of_others]
    say(f"others join with: {shlex.join(words)}")
    if made.config.rules.entry == "invite":
        home = shlex.quote(str(Home.of(None, made.config).root))
        say("who joins needs an invitation for each key that join prints, made once this site runs:")
        say(f"  sapo keys invite KEY --home {home}")
        say("(--set rules.entry=open lets anybody in who reaches the broker)")
    if made.config.bus.type == "kafka" and made.config.bus.ca_file is not None:
        say(f"hand them {made.config.bus.ca_file}, too")
    if made.config.bus.type == "kafka" and made.config.bus.username is not None:
        say("USER is a user that the broker has for them; its password is in SAPO_KAFKA_PASSWORD there")


def join(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="What sapo init wrote.")],
    site: SiteOption,
    preset: PresetOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    nodes: NodesOption = None,
    folder: DirOption = Path("."),
    home: HomeOption = None,
) -> None:
    """Set up a site of an existing swarm: its config, its home, and a key for each of its nodes.

    Tasks and rules are the manifest's. Model, batch, generate and learn are those the manifest advises,
    unless --preset, --config or --set say otherwise. How the bus is reached must be set, as in
    --set bus.type=kafka --set bus.servers=HOST:9092
    """
    from sapo.core.config.advice import describe
    from sapo.ops import sites

    joined = sites.join_swarm(manifest, site, preset, counted(sets, nodes), folder, home, config)
    say_advice(joined.advice, joined.config)
    for name, why in joined.lacking.items():
        warn(f"{name}: {why.problem}: its questions are left to others, their groups refused; {why.remedy}")
    say(f"{joined.file}: this site's settings")
    say(f"{joined.home.root}: its home")
    for name, key in joined.keys.items():
        say(f"{name}: public key {key}")
    for line in describe(joined.config, joined.config.nodes):
        say(line)
    if joined.config.rules.entry == "invite":
        place = shlex.quote(str(joined.home.root))
        say("send these keys to a member, who types for each: sapo keys invite KEY")
        say(f"then here: sapo keys accept TOKEN --node {joined.config.nodes[0]} --home {place}")
    _say_next(joined.file, joined.config, home)


def say_advice(advice: "Advice | None", config: "Config") -> None:
    """Print what a joining site took from its manifest and what it changed; warn of what is missing."""
    from sapo.core.config.advice import beyond, differing
    from sapo.core.config.load import DEFAULT_PRESET

    if advice is None:
        if config.member is None:
            warn("the manifest does not say what the swarm runs: ask for its model and settings")
        return
    for text in advice.passed_over:
        warn(text)
    if advice.settings:
        preset = advice.preset or DEFAULT_PRESET
        more = ", ".join(beyond(preset, advice.settings))
        say(f"the manifest advises: preset {preset}" + (f", {more}" if more else ""))
    other = differing(advice.settings, config)
    if other:
        say(f"different here: {', '.join(other)}")
    if advice.model is None:
        warn(f"the manifest names no model: this site takes {config.model}; name another with --set model=")


def _say_next(file: Path, config: "Config", home: Path | None) -> None:
    place = shlex.join(["--config", str(file), *([] if home is None else ["--home", str(home)])])
    one = "" if len(config.nodes) == 1 else f"{config.nodes[0]} "
    if config.member is not None:
        say(f"start it: {program()} member {one}{place}")
        return
    say(f"start it: {program()} swarm {place}  (nodes, history, Prefect and MLflow)")
    say(f"      or: {program()} node {one}{place}  (one node, in this terminal)")


def archive(
    home: HomeOption = None,
    once: Annotated[bool, typer.Option("--once", help="End when all is archived that is there now.")] = False,
) -> None:
    """Write what is published on the bus into the history of a site, until Ctrl-C.

    A swarm that runs archives by itself; this is for a site whose nodes run by `sapo node`, or for one that
    has no nodes. It archives the whole bus, all sites' groups, each exactly once, however many archive.
    """
    found = find_home(home)
    config = found.load_config()  # said before libraries are imported, which takes seconds

    from sapo.ops.supervisor import run_archive

    say(f"archiving the bus of {found.load_manifest().swarm} (log: {found.logs / 'archive.log'})", flush=True)
    run_archive(config, found, once=once)
    say("all that was on the bus is archived")


def pack(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node that moves.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="The pack. [default: ./<swarm>-<node>.tar.gz]"),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Pack a node that does not run, to move it to another machine: key, journal, newest checkpoint.

    It does not start here any more. Over there `sapo unpack` makes it go on in the same round, as the same
    author. The pack holds the node's private key. History and MLflow stay where they are.
    """
    from sapo.cli.commands.checks import refuse_member
    from sapo.cli.report.live_view import open_view
    from sapo.core.config.foreign import brought
    from sapo.ops.node_pack import pack_node
    from sapo.ops.supervisor import holder

    found = find_home(home)
    config = found.load_config()
    refuse_member(config, "stop it and move its whole home: that holds all it needs")
    if holder(found.root) is not None:
        raise UserError("--home", str(found.root), "a swarm runs here", "stop it first with `sapo stop`")
    target = output or Path(f"{config.swarm.name}-{node}.tar.gz")
    with open_view(config.swarm.name) as view:
        made = pack_node(found, node, target, view.step)
    say(f"{target}: {node} after {made.rounds} rounds, {target.stat().st_size / 2**20:.1f} MB")
    if made.owed:
        owed = ", ".join(f"{count} {kind}" for kind, count in made.owed.items())
        say(f"what it has yet to deliver goes with it: {owed}")
    if config.bus.type == "sqlite":
        warn("bus.path: the bus is a file on this machine; over there, name another with sapo unpack --set")
    own = [word for name in brought(made.config)[1] for word in ("--set", f"{name}=...")]
    warn(f"{target} holds the private key of {node}: send it on a safe way, delete it when it has arrived")
    say(f"over there: sapo unpack {shlex.join([target.name, *own])}")
    if own:
        say("(programs, paths, addresses and secrets are for each site to say, and no pack's)")


def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What sapo pack wrote.")],
    sets: SetOption = None,
    home: HomeOption = None,
) -> None:
    """Unpack a node that was packed elsewhere, into a home of its own or one of the same site.

    It goes on where it was. --set changes its settings, such as how the bus is reached from here. Unpack it
    once: two copies of a node would contradict each other, and its peers would refuse them.
    """
    from sapo.cli.report.live_view import open_view
    from sapo.ops.node_pack import unpack_node

    with open_view("unpack") as view:
        found = unpack_node(file, home, sets or (), view.step)
    name = found.pack.node
    say(f"{found.home.node(name)}: {name} after {found.pack.rounds} rounds, public key {found.pack.key}")
    say(f"it goes on with: {typed(found.home, 'node', name)}")
