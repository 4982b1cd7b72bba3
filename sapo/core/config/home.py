"""Where a swarm's files lie: one home, one folder per node inside."""

import errno
import json
import os
import re
import shlex
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sapo.core.atomic_file import write_atomically
from sapo.core.config.foreign import said
from sapo.core.config.load import Config, modern, parse
from sapo.core.config.manifest import ADVICE, Manifest
from sapo.core.config.patterns import in_words
from sapo.core.errors import UserError
from sapo.core.exam_size import sized
from sapo.core.figures import Sweep
from sapo.core.install import package_command
from sapo.core.types import SCHEMA_VERSION, SchemaVersion

DEFAULT_SITE = "n"
MAX_MANIFEST_BYTES = 16_000_000
KEY, CARD, LOCK, MOVED = "key.pem", "key.json", "lock", "moved.json"
ASKED, BLOCKED = "asked.bin", "blocked.json"


class _File:
    """A path of a home, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, home: "Home", kind: type) -> Path:
        return home.root / self._name


class _OfNode:
    """A path in a node's folder, by its name there: a function of the node's name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, home: "Home", kind: type) -> Callable[[str], Path]:
        return lambda node: home.node(node) / self._name


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of one swarm's home."""

    root: Path
    given: str | None = field(default=None, compare=False, repr=False)
    """The folder as the user wrote it."""

    config = _File("config.json")
    manifest = _File("manifest.json")
    """What all nodes of the swarm agree on."""
    bus = _File("bus.sqlite")
    history = _File("history")
    """Delta tables `rollouts`, `training`, `receipts`, `quarantine`."""
    archive_index = _File("archive.sqlite")
    """Which groups the history holds, as the archive here knows."""
    mlflow_db = _File("mlflow.db")
    artifacts = _File("artifacts")
    prefect = _File("prefect")
    """This swarm's own PREFECT_HOME."""
    logs = _File("logs")
    """One log per process."""
    services = _File("services.json")
    """Addresses, passwords and pids of the servers that run now; for the owner only."""
    swarm_state = _File("swarm.json")
    """How the swarm's processes stand, or stood when it ended."""
    held_out = _File("held-out.json")
    """The evaluation questions, regenerated once and kept."""
    evaluation = _File("evaluation.json")
    """The last full held-out evaluation."""
    evaluating = _File("evaluating.json")
    """How far one is that runs now."""
    verdicts = _File("judge.sqlite")
    """What the judge found, round by round."""
    report = _File("report.html")
    summary = _File("summary.json")
    lineage = _File("lineage")
    """Pages about who taught what."""
    gossip_store = _File("gossip")
    """Where gossiping nodes put their weights if `gossip.store` is not set."""
    stop_flag = _File("stop")
    """Exists while the swarm is asked to stop after the rounds in hand."""

    key = _OfNode(KEY)
    card = _OfNode(CARD)
    """What is known of a node's key: whose it is, and which incarnations wrote with it."""
    journal = _OfNode("journal.sqlite")
    probes = _OfNode("probes.jsonl")
    """What a node's probes found, question by question."""
    asked = _OfNode(ASKED)
    blocked = _OfNode(BLOCKED)
    phrases = _OfNode("phrases.json")
    """Phrases of others that a node watches, and those it took up."""
    page = _OfNode("page.url")
    """The link to the page where people answer for a member that runs now; for the owner only."""
    waiting = _OfNode("waiting.txt")
    """Why a member that runs has no answers now; exists only while it waits for what answers."""
    checkpoints = _OfNode("checkpoints")
    gossip = _OfNode("gossip")
    """The weights of others that a node has averaged with, and its own that it offers."""
    moved = _OfNode(MOVED)
    """Exists in the folder of a node that lives elsewhere: it was packed, or never was here."""

    @classmethod
    def at(cls, path: Path | str | None, swarm: str) -> "Home":
        """`path`, else `$SAPO_HOME`, else `./runs/<swarm>`; always absolute. Raises `UserError` for a path
        that a library cannot read back as it is."""
        chosen = path or os.environ.get("SAPO_HOME") or Path("runs") / swarm
        root = Path(chosen).expanduser().absolute()
        refuse_unreadable(root, "--home", str(chosen))
        return cls(root, str(chosen))

    @property
    def shown(self) -> str:
        """The home as the user named it, for commands to type next."""
        return self.given or str(self.root)

    @classmethod
    def of(cls, path: Path | str | None, config: Config) -> "Home":
        """The home of a config's site; `./runs/<swarm>-<site>` by default where the site has a name."""
        swarm = config.swarm
        return cls.at(path, swarm.name if swarm.site == DEFAULT_SITE else f"{swarm.name}-{swarm.site}")

    def node(self, name: str) -> Path:
        """A node's folder; only its owner writes there."""
        return self.root / name

    def here(self, config: Config) -> list[str]:
        """The nodes of a config that live in this home."""
        return [name for name in config.nodes if not self.moved(name).exists()]

    def begun(self, config: Config) -> list[str]:
        """The nodes of a config that live in this home and have a journal."""
        return [name for name in self.here(config) if self.journal(name).exists()]

    def refuse_moved(self, name: str) -> None:
        """Raise `UserError` for a node that lives elsewhere: two copies would sign different groups of the
        same name, which peers refuse as equivocation."""
        mark = self.moved(name)
        if mark.exists():
            why = str(_read_json(mark, str(self.root)).get("why", "lives elsewhere"))
            remedy = f"run it where it lives now; if it is nowhere else, delete {mark}"
            raise UserError("node", name, why, remedy)

    def check_node(self, config: Config, name: str, option: str = "--node") -> None:
        """Raise `UserError` naming `option` unless a config has a node of this name."""
        if name not in config.nodes:
            raise UserError(option, name, f"the swarm has {', '.join(config.nodes)}", "name one of them")

    def choose_nodes(self, config: Config, names: Sequence[str] | None, option: str = "--node") -> list[str]:
        """The nodes that `option` named, else all that have begun here. Raises `UserError` for one that is
        unknown or lives elsewhere, and where none has begun."""
        if config.member is not None:
            problem = "the nodes here only answer: they have no model"
            raise UserError("member.type", config.member.type, problem, "name the home of a site that learns")
        for name in names or ():
            self.check_node(config, name, option)
            self.refuse_moved(name)
        chosen = list(names or self.begun(config))
        if not chosen:
            raise UserError("--home", self.shown, "no node has run here", "start one with `sapo swarm`")
        return chosen

    def prepare(self, config: Config, manifest: Manifest) -> None:
        """Create the home, or check that it belongs to this swarm and site. Raises `UserError` where not.
        Members that the manifest has and the home's has not, or no longer, are written into the home's."""
        if self.manifest.exists():
            self.check(manifest)
            self.check_site(config)
            self._check_policies(config)
        elif self.root.exists() and not all(_before_all(entry) for entry in self.root.iterdir()):
            raise self._wrong("is not empty and holds no swarm", "choose another folder")
        refuse_unwritable(self.root, "--home", self.shown)
        self.make()
        self.logs.mkdir(exist_ok=True)
        write_atomically(self.config, sized(config).model_dump_json(indent=1) + "\n")
        found = self.load_manifest() if self.manifest.exists() else None
        wanted = manifest if found is None else found.model_copy(update={"members": manifest.members})
        if wanted != found:
            write_atomically(self.manifest, wanted.canonical() + "\n")

    def make(self) -> None:
        """Create the home's folder, closed to other users: whoever reads a file may also lock it."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def make_node(self, name: str) -> Path:
        """Create a node's folder, and the home round it."""
        self.make()
        folder = self.node(name)
        folder.mkdir(exist_ok=True)
        return folder

    def exposed(self) -> str | None:
        """A warning with its remedy if other users may enter the home; None if not."""
        mode = stat.S_IMODE(self.root.stat().st_mode)
        if not mode & 0o077:
            return None
        problem = f"other users may read and lock the files of this home (mode {mode:o})"
        return f"{problem}: chmod 700 {shlex.quote(self.shown)}"

    def check_site(self, config: Config) -> None:
        """Raise `UserError` where the home is another site's of the swarm: each has a home of its own."""
        if not self.config.exists():
            return
        site = _read_json(self.config, str(self.root)).get("swarm", {}).get("site", DEFAULT_SITE)
        if site != config.swarm.site:
            problem = f"is the home of site {site!r}, this is {config.swarm.site!r}"
            raise self._wrong(problem, "choose another folder or swarm.site")

    def _check_policies(self, config: Config) -> None:
        """Raise `UserError` where a node that has begun would go on with another model. Its checkpoints hold
        that model's weights, or only an adapter's; the base is then the config's."""
        before = self.load_config() if self.config.exists() else config
        for name in sorted({*self.node_names()} & {*before.nodes} & {*config.nodes}):
            begun = any(self.checkpoints(name).glob("round-*"))
            old, new = before.for_node(name).policy(), config.for_node(name).policy()
            for key in (key for key in {**old, **new} if begun and new.get(key) != old.get(key)):
                problem = f"{name} began with {old.get(key)!r}, and its weights are of that {key}"
                remedy = "leave it as it was, or begin anew in another folder"
                raise UserError(key, new.get(key), problem, remedy)

    def check(self, manifest: Manifest) -> None:
        """Raise `UserError` unless the home was made by the same swarm, schema and rules."""
        found = self.load_manifest()
        differing = found.differing(manifest)
        if "swarm" in differing:
            raise self._wrong(f"belongs to swarm {found.swarm!r}", "choose another folder or swarm.name")
        check_reasoning_gym(found, "--home", str(self.root))
        if differing:
            problem = f"its swarm has other tasks or rules than this config ({', '.join(differing)})"
            remedy = "choose another folder, or resume with the config it was started with"
            raise self._wrong(problem, remedy)

    def load_manifest(self) -> Manifest:
        """The manifest of an existing home. Raises `UserError` where there is none."""
        self._exists(self.manifest)
        return read_manifest(self.manifest, "--home", str(self.root))

    def load_config(self) -> Config:
        """The config an existing home was last started with. Raises `UserError` where there is none."""
        self._exists(self.config)
        return parse(modern(_read_json(self.config, str(self.root))), prefix="config.json: ")

    def load_evaluation(self) -> Sweep | None:
        """The last full held-out evaluation or None. Raises `UserError` for a broken file."""
        if not self.evaluation.exists():
            return None
        try:
            return Sweep.model_validate_json(self.evaluation.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            problem = " ".join(["is no evaluation:", *map(str, first["loc"]), first["msg"]])
        remedy = "delete it, or make it anew with `sapo evaluate`"
        raise UserError("evaluation.json", str(self.evaluation), problem, remedy)

    def _exists(self, path: Path) -> None:
        if not path.exists():
            raise self._wrong("holds no swarm", "start one with `sapo swarm`, or name its folder")

    def _wrong(self, problem: str, remedy: str) -> UserError:
        return UserError("--home", str(self.root), problem, remedy)

    def node_names(self) -> list[str]:
        """Nodes that have a journal here, n2 before n10."""
        names = [path.parent.name for path in self.root.glob("*/journal.sqlite")]
        return sorted(names, key=lambda name: (len(name), name))


_UNREADABLE = re.compile(r"[?\[\]^|\\\x00-\x1f\x7f\ud800-\udfff]|%[0-9A-Fa-f]{2}|'(?=.*\")|\"(?=.*')")
"""In a path: deltalake takes `%20` for a space and refuses brackets, `^`, `|`, `\\` and control
characters; in the address of an SQLite file `?` ends the path; MLflow cannot begin where both kinds of quotes
are."""


def refuse_unreadable(folder: Path, option: str, value: str) -> None:
    """Raise `UserError` on `option` = `value` for a folder that a library cannot read back as it is."""
    unreadable = _UNREADABLE.search(str(folder))
    remedy = "choose another folder, or rename it"
    if unreadable:
        problem = f"MLflow and Delta tables cannot lie in a folder with {unreadable[0]!r} in its path"
        raise UserError(option, value, problem, remedy)
    try:
        os.stat(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(option, value, "is longer than the file system allows", remedy) from None


def existing(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    while not os.path.exists(folder):  # unlike Path.exists, it takes what is too long for a name
        folder = folder.parent
    return folder


def refuse_unwritable(folder: Path, option: str, value: str) -> None:
    """Raise `UserError` on `option` = `value` unless files can be made in a folder, or where it will be. A
    file is made and removed at once: permissions alone do not show a read-only file system."""
    place = existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        problem = f"{place} cannot be written: {os.strerror(error.errno or 0)}"
        raise UserError(option, value, problem, "choose a folder that can be written") from None


def _read_json(path: Path, home: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        problem = "" if isinstance(found, dict) else "not an object"
    except ValueError as error:
        found, problem = {}, str(error)
    if problem:
        remedy = "restore the file from a backup, or choose another home"
        raise UserError("--home", home, f"its {path.name} is damaged: {problem}", remedy)
    return dict(found)


def _before_all(entry: Path) -> bool:
    """Whether an entry of a home may be there before its manifest is: hidden; a node's key alone, which
    `sapo keys show` makes, with what is left of it where that was killed; or what `prepare` writes first,
    where another node's did so just now or was killed."""
    home = Home(entry.parent)
    if entry.name.startswith("."):
        return True
    if not entry.is_dir():
        with suppress(UserError):
            return entry == home.config and bool(home.load_config())
        return False
    inside = {file.name for file in entry.iterdir() if file.name[0] != "."}
    return inside <= {KEY, CARD, LOCK} if KEY in inside else entry == home.logs and not inside


def read_manifest(path: Path, field: str, value: str) -> Manifest:
    """A manifest from its file. Raises `UserError` on `field` = `value` where it cannot be obeyed here."""
    return parse_manifest(manifest_bytes(path, field, value), field, value)


def manifest_bytes(path: Path, field: str, value: str) -> bytes:
    """A manifest's file, of bounded size. Raises `UserError` on `field` = `value` where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise UserError(field, value, error.strerror or str(error), "name a readable manifest") from None
    if len(data) > MAX_MANIFEST_BYTES:
        problem = f"is longer than {MAX_MANIFEST_BYTES / 1e6:.0f} MB"
        raise UserError(field, value, problem, "name what `sapo init` wrote: <swarm>.manifest.json")
    return data


def parse_manifest(data: bytes | str, field: str, value: str) -> Manifest:
    """The rules of a manifest from its JSON, without its advice (`sapo.core.config.advice.take`).

    One of the next schema version is taken if it sets no rule that is unknown here. Raises `UserError` on
    `field` = `value` where the rules cannot be obeyed here.
    """
    try:
        found = json.loads(data)
        known = found["schema_version"] is not None
    except (ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise UserError(field, value, "is no manifest", "name what `sapo init` wrote: <swarm>.manifest.json")
    schema = ascii(found["schema_version"])[:40]
    try:
        TypeAdapter(SchemaVersion).validate_python(found["schema_version"], strict=True)
    except ValidationError:
        problem = f"was written with schema version {schema}, this is {SCHEMA_VERSION}"
        raise UserError(field, value, problem, "choose another, or a sapo release that reads it") from None
    known_names = {*Manifest.model_fields, ADVICE}
    unknown = [name for name in found if name not in known_names and found[name] is not None]
    if unknown:
        remedy = "install the sapo release that the swarm's other sites run"
        raise UserError(field, value, f"has rules this release does not know: {said(unknown)}", remedy)
    rules = {name: rule for name, rule in found.items() if name in Manifest.model_fields}
    try:
        return Manifest.model_validate_json(json.dumps(rules))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"is damaged: {'.'.join(str(part) for part in first['loc'])[:80]}: {in_words(first)[:200]}"
        raise UserError(field, value, problem, "restore it from another site") from None


def check_reasoning_gym(manifest: Manifest, field: str, value: str) -> None:
    """Raise `UserError` unless the installed reasoning-gym makes the questions that the swarm agreed on."""
    installed = version("reasoning-gym")
    if manifest.reasoning_gym != installed:
        problem = f"pins reasoning-gym {manifest.reasoning_gym}, installed is {installed}"
        remedy = package_command(f"reasoning-gym=={manifest.reasoning_gym}")
        raise UserError(field, value, problem, remedy)
