"""Sites of a swarm: the manifest they share, the config and home that each has."""

import ipaddress
import json
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapo.core.atomic_file import write_atomically
from sapo.core.config import toml_dump
from sapo.core.config.advice import Advice, advise, take
from sapo.core.config.home import Home, check_reasoning_gym, manifest_bytes, parse_manifest, refuse_unwritable
from sapo.core.config.load import (
    DEFAULT_PRESET,
    Config,
    keys_of,
    load,
    merge,
    parse,
    preset_of,
    preset_values,
)
from sapo.core.config.manifest import ADVICE, Manifest
from sapo.core.config.schema import KafkaBus, OwnBus, Rules, SqliteBus
from sapo.core.errors import UserError
from sapo.core.own_code import Missing
from sapo.peers import blocks, keyring
from sapo.peers.membership import day
from sapo.store.journal.journal import Journal
from sapo.tasks.pins import left_to_others, missing, with_pins
from sapo.tasks.workers import open_workers

SHARED = ("tasks", "rules", "swarm.name")
"""Settings that the manifest decides, for every site."""
LATELY = 50
"""Rounds that are looked at for what has been refused of late."""
STOLEN = "run only one of two copies, or see docs/identity.md"
SOON_S = 7 * 86_400.0
"""How long before its end an invitation is spoken of."""
SHOWN: Mapping[str, Sequence[str]] = {
    "": ("model", "threads"),
    "swarm": ("name", "site", "nodes", "rounds"),
    "rules": tuple(Rules.model_fields),
    "bus": ("type", "servers", "topic", "path"),
    "batch": ("local", "external", "completions"),
    "generate": ("max_new_tokens",),
    "learn": ("lr",),
}
"""Settings that a site's config names even where they have their defaults, by section."""
COMMENTS = {
    "swarm": "name: the manifest's. site: begins the names of the nodes here. rounds: of each node, in all.",
    "tasks": "The manifest's: every site has the same. Only a task's weight, 1 if not set, is its own.",
    "rules": "The manifest's: every site has the same.",
    "bus": "How this site reaches the bus. A secret is named here (env:NAME, file:PATH), never written.",
    "batch": "local, external: own and foreign groups of an update; completions: answers to a question.",
    "node": "Settings of single nodes, by number.",
}


@dataclass(frozen=True, slots=True)
class Founded:
    """What beginning a swarm has made: the first site's config, the manifest's file and the config's.

    `notes` are sentences about what the manifest cannot carry.
    """

    config: Config
    manifest: Path
    file: Path
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """What joining a swarm has made: the site's config and its file, its home, its nodes' public keys.

    `advice` is what it took from the manifest, None where that has none; `lacking` says why sources of tasks
    cannot be used here.
    """

    config: Config
    file: Path
    home: Home
    keys: dict[str, str]
    advice: Advice | None
    lacking: dict[str, Missing]


def found_swarm(
    swarm: str, site: str, preset: str | None, sets: Sequence[str], folder: Path, file: Path | None = None
) -> Founded:
    """Write `<swarm>.manifest.json` and `site-<site>.toml` of a new swarm.

    `file` is a config file to begin from. Where the bus is a broker of another machine, and no rule says who
    may publish, it is by invitation: this site's nodes, which get their keys now, are the first members.
    Raises `UserError` where a setting or task is wrong, no other site could reach the bus, or a file exists.
    """
    preset = preset or preset_of(file) or DEFAULT_PRESET
    config = with_pins(_load(preset, file, sets, swarm, site, ()))
    target, written = folder / f"{swarm}.manifest.json", config_file(folder, site)
    _refuse_overwriting(target, written)
    check_tasks(config)
    if _reached_by_strangers(config) and not _says_entry(sets, file):
        config = _by_invitation(config)
    text = site_toml(config, preset)
    refuse_unwritable(folder, "--dir", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    advice, left = advise(config, preset)
    body = Manifest.of(config).model_dump(mode="json") | {ADVICE: advice}
    write_atomically(target, json.dumps(body, indent=2, ensure_ascii=False) + "\n")
    write_atomically(written, text)
    return Founded(config, target, written, tuple(left))


def _says_entry(sets: Sequence[str], file: Path | None) -> bool:
    given = [item.partition("=")[0].strip() for item in sets]
    return "rules.entry" in [*given, *(keys_of(file) if file is not None else ())]


def _reached_by_strangers(config: Config) -> bool:
    """Whether the bus is a broker that is not on this machine alone, or one of which that is not known."""
    if isinstance(config.bus, OwnBus):
        return True
    if not isinstance(config.bus, KafkaBus):
        return False
    hosts = [server.rpartition(":")[0].strip("[]") for server in config.bus.servers.split(",")]
    return any(host != "localhost" and not _is_loopback(host) for host in hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name


def _by_invitation(config: Config) -> Config:
    """The config with its own nodes as members, who may invite others; their keys are made."""
    keys = list(_make_keys(Home.of(None, config), config).values())
    return load(base=config, sets=['rules.entry="invite"', f"rules.members={json.dumps(keys)}"], env={})


def _make_keys(home: Home, config: Config) -> dict[str, str]:
    now = time.time()
    return {name: keyring.take(home, config.swarm.name, name, now).card.key for name in config.nodes}


def join_swarm(
    path: Path,
    site: str,
    preset: str | None,
    sets: Sequence[str],
    folder: Path,
    home: Path | None,
    file: Path | None = None,
) -> Joined:
    """Set up a site of an existing swarm: its config, its home and a key for each of its nodes.

    The manifest's advice lies below `preset`, the config `file` and `sets`. Raises `UserError` where the
    manifest cannot be obeyed here, a setting is wrong or goes against it, or something of that name exists.
    """
    data = manifest_bytes(path, "MANIFEST", str(path))
    manifest = parse_manifest(data, "MANIFEST", str(path))
    check_reasoning_gym(manifest, "MANIFEST", str(path))
    _refuse_shared(sets, file)
    advice = take(json.loads(data).get(ADVICE), manifest)
    own = preset or preset_of(file)
    begun = (advice.preset if advice is not None else None) or own or DEFAULT_PRESET
    values = preset_values(begun)
    if begun != own:
        values.pop("node", None)  # which GPU a node has is the founder's machine's
    below = merge(values, {} if advice is None else advice.settings)
    config = _load(own, file, sets, manifest.swarm, site, shared_settings(manifest), below)
    lacking = missing(config.tasks)
    if len(lacking) == len({task.dataset for task in config.tasks}):
        name, why = next(iter(lacking.items()))
        problem = f"none of its tasks can be asked here; {name}: {why.problem}"
        raise UserError("MANIFEST", str(path), problem, why.remedy)
    config = config.model_copy(update={"tasks": left_to_others(config.tasks)})
    differing = Manifest.of(config).differing(manifest)
    if differing:
        problem = f"gives this site other {', '.join(differing)} than the manifest"
        raise UserError("--set", "node", problem, "leave tasks to the manifest")
    written, target = config_file(folder, site), Home.of(home, config)
    _refuse_overwriting(written, target.manifest)
    text = site_toml(config, own or begun)
    check_tasks(config)
    target.prepare(config, manifest)
    keys = _make_keys(target, config)
    refuse_unwritable(folder, "--dir", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(written, text)
    return Joined(config, written, target, keys, advice, lacking)


def _refuse_shared(sets: Sequence[str], file: Path | None) -> None:
    given = [("--set", item, item.partition("=")[0].strip()) for item in sets]
    if file is not None:
        given += [("--config", str(file), key) for key in sorted(keys_of(file))]
    for field, value, key in given:
        if any(key == name or key.startswith(f"{name}.") for name in SHARED):
            problem = f"{key} is for the whole swarm to say"
            raise UserError(field, value, problem, "leave it out: the manifest has it")


def join_sets(config: Config) -> tuple[str, ...]:
    """What others add to `sapo join MANIFEST --site OTHER` to reach a config's bus. Whose user and password,
    each site knows."""
    bus = config.bus
    if isinstance(bus, SqliteBus):
        return () if bus.path is None else (f"bus.path={Path(bus.path).expanduser().absolute()}",)
    if isinstance(bus, OwnBus):
        named = (f"bus.config.{name}={json.dumps(value)}" for name, value in bus.config.items())
        return ("bus.type=own", f"bus.open={bus.open}", *named)
    if not isinstance(bus, KafkaBus):
        return ()
    found = ["bus.type=kafka", f"bus.servers={bus.servers}"]
    if bus.topic != f"sapo.{config.swarm.name}":
        found.append(f"bus.topic={bus.topic}")
    if bus.cluster_id is not None:
        found.append(f"bus.cluster_id={bus.cluster_id}")
    if bus.ca_file is not None:
        found.append(f"bus.ca_file={Path(bus.ca_file).name}")
    if bus.username is not None:
        found.append("bus.username=USER")
    return tuple(found)


def config_file(folder: Path, site: str) -> Path:
    """Where a site's config lies."""
    return folder / f"site-{site}.toml"


def shared_settings(manifest: Manifest) -> tuple[str, ...]:
    """A manifest's content as settings."""
    tasks = [task.model_dump(mode="json") | {"config": json.loads(task.config)} for task in manifest.tasks]
    rules = {name: getattr(manifest, name) for name in SHOWN["rules"]}
    return (
        f"tasks={json.dumps(tasks)}",
        *(f"rules.{name}={json.dumps(rule)}" for name, rule in rules.items()),
    )


def _load(
    preset: str | None,
    file: Path | None,
    sets: Sequence[str],
    swarm: str,
    site: str,
    more: Sequence[str],
    below: Mapping[str, Any] | None = None,
) -> Config:
    """The config of a site on a bus that other sites can reach.

    It has one node if neither the file says how many nor the preset has settings for single nodes.
    `below` are settings that lie under everything else; `more` those that win over everything else.
    """
    names = (f"swarm.name={json.dumps(swarm)}", f"swarm.site={json.dumps(site)}")
    several = preset is not None and "node" in preset_values(preset)
    several |= file is not None and "swarm.nodes" in keys_of(file)
    alone = [] if several else ["swarm.nodes=1"]
    try:
        config = load(preset, file, [*alone, *sets, *more, *names], base=below)
    except UserError as error:
        if error.field == "swarm.site":
            remedy = "write small letters, such as a or berlin; digits and dashes inside only"
            raise UserError("--site", site, "cannot begin a node's name", remedy) from None
        if error.field == "swarm.name":
            raise UserError("--swarm", swarm, error.problem, error.remedy) from None
        raise
    bus = config.bus
    if isinstance(bus, OwnBus) or (isinstance(bus, SqliteBus) and bus.path is not None):
        return config
    if isinstance(bus, KafkaBus):
        return load(base=config, sets=[f"bus.topic={json.dumps(bus.topic or f'sapo.{swarm}')}"], env={})
    remedy = "--set bus.type=kafka --set bus.servers=HOST:9092; on one machine --set bus.path=FILE does, too"
    raise UserError("bus.type", bus.type, "is inside one home, where no other site can reach it", remedy)


def check_tasks(config: Config) -> None:
    """Raise `UserError` for a data set that is unknown here, or parameters that it does not take."""
    with open_workers(config) as workers:
        workers.check(config.manifest_tasks())


def _refuse_overwriting(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            remedy = "move it away, or choose another place or site"
            raise UserError("file", str(path), "exists already", remedy)


def site_toml(config: Config, preset: str) -> str:
    """A site's config as TOML with comments: its preset, what it changes, and what a site may want to change.
    Raises `UserError` for a value that TOML cannot hold."""
    for name in (preset, DEFAULT_PRESET):  # TOML cannot unset what a preset sets
        text = _site_toml(config, name)
        values = tomllib.loads(text)
        if parse(merge(preset_values(values.pop("preset")), values)) == config:
            return text
    raise UserError("--set", "null", "TOML has no such value", "leave the setting out")


def _site_toml(config: Config, preset: str) -> str:
    values = config.model_dump(mode="json")
    bus = type(config.bus).model_fields
    usual = parse(preset_values(preset)).model_dump(mode="json")
    chosen = _chosen(values, usual | {"bus": {name: field.default for name, field in bus.items()}})
    chosen["tasks"] = [task.model_dump(mode="json", exclude_defaults=True) for task in config.tasks]
    if values["bus"].get("username"):
        chosen["bus"]["password"] = values["bus"]["password"]
    head = f"# Site {config.swarm.site} of swarm {config.swarm.name}. What is not named here is the preset's."
    top = {"preset": preset} | {key: v for key, v in chosen.items() if not _is_section(v)}
    sections = [head + "\n" + toml_dump.dumps(top)]
    # tasks first: short ones make a list in one key, which a section before it would take for its own
    for name in ("tasks", "swarm", "rules", "bus", *(key for key in chosen if _is_section(chosen[key]))):
        if name in chosen and _is_section(chosen[name]):
            comment = f"# {COMMENTS[name]}\n" if name in COMMENTS else ""
            sections.append(comment + toml_dump.dumps({name: chosen.pop(name)}).lstrip("\n"))
    return "\n".join(sections)


def notes(home: Home, config: Config) -> list[str]:
    """What is to be said of a site's nodes: which live elsewhere, whose name or key others use, whose
    invitation ends, and whom they leave out."""
    found = []
    for name in config.nodes:
        try:
            home.refuse_moved(name)
        except UserError as error:
            found.append(f"{name} {error.problem}")
            continue
        if count := refused_lately(home, name, "own_name"):
            what = f"{count} groups on the bus are of another node {name}, and refused"
            found.append(f"{what}: give each site its own swarm.site")
        if count := refused_lately(home, name, "own_key"):
            found.append(
                f"{count} groups on the bus are signed with the key of {name} and not its own: {STOLEN}"
            )
        found += _ending(home, name)
    return found + blocks.told(home, config.nodes)


def refused_lately(home: Home, name: str, reason: str) -> int:
    """How many groups a node has lately refused for a reason."""
    if not home.journal(name).exists():
        return 0
    with Journal.read_only(home.journal(name)) as journal:
        results = journal.results(journal.finished_rounds() - 1 - LATELY)
    return int(sum(result.metrics.get(f"pool/refused/{reason}", 0.0) for result in results))


def _ending(home: Home, name: str) -> list[str]:
    card = keyring.find_card(home.card(name))
    if card is None or card.invitation is None or home.load_manifest().entry != "invite":
        return []
    until = card.invitation.until
    soon = until - time.time() <= SOON_S
    return [f"the invitation of {name} is good until {day(until)}: ask a member for another"] if soon else []


def _chosen(values: Mapping[str, Any], usual: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """What differs from the usual, and what is shown in any case; what is not set is left out."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        default = usual.get(key)
        if isinstance(value, dict) and isinstance(default, dict) and not section and key != "node":
            value = _chosen(value, default, key)
            if not value:
                continue
        elif value is None or (value == default and key not in SHOWN.get(section, ())):
            continue
        result[key] = value
    return result


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))
