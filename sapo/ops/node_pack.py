"""Moving a node: packed on one machine, unpacked on another, where it goes on bit for bit.

A node must not run twice: two copies of one journal sign different groups of the same name, which peers
refuse as equivocation. So a folder that was packed is marked, and its node does not start there any more.
"""

import json
import shlex
import shutil
import socket
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, get_args

from sapo.core.atomic_file import sync_directory, whole_file, write_atomically
from sapo.core.config import foreign
from sapo.core.config.home import ASKED, BLOCKED, Home, check_reasoning_gym, existing, parse_manifest
from sapo.core.config.load import Config, given, load, modern, parse
from sapo.core.config.manifest import Manifest
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError
from sapo.core.types import file_sha256
from sapo.ops.node_archive import (
    CARD,
    INDEX,
    JOURNAL,
    KEY,
    Pack,
    PackedFile,
    Progress,
    damaged,
    opened,
    read_index,
    silent,
    unpack,
)
from sapo.peers.keyring import find_card
from sapo.peers.signing import Identity
from sapo.policy import checkpoint
from sapo.policy.kept_files import KeptFiles
from sapo.store.journal import foreign_journal
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import Owed
from sapo.store.journal.schema import connect, explained

FREE_AFTER = 100 * 2**20
"""Bytes of the disk that unpacking must leave free."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A node that was unpacked."""

    pack: Pack
    home: Home


# -- packing ------------------------------------------------------------------------------------------------


def pack_node(home: Home, name: str, output: Path, progress: Progress = silent) -> Pack:
    """Pack a node's key, journal, newest checkpoint, config and manifest, and mark its folder as moved.

    The file holds the private key and only its owner may read it. What stays: MLflow, the embedded bus, and
    a history in this home, with the checkpoints its replay begins at; those go along when `history.uri` names
    a store. Raises `UserError` for a node that runs, was moved, is unknown or damaged, or a file that exists.
    """
    home.load_manifest()
    if name not in home.node_names():
        raise UserError("NODE", name, "has no journal here", f"nodes here: {', '.join(home.node_names())}")
    if output.exists():
        raise UserError("--output", str(output), "exists already", "name another file")
    if not output.parent.is_dir():
        raise UserError("--output", str(output), "its folder does not exist", "make it, or name another")
    with NodeLock(home.node(name)), tempfile.TemporaryDirectory(prefix="sapo-pack-") as scratch:
        home.refuse_moved(name)
        copy = Path(scratch) / JOURNAL
        copy_journal(home.journal(name), copy)
        sources = _sources(home, name, copy)
        pack = _index(home, name, sources, progress)
        with whole_file(output, mode=0o600) as new, new.open("wb") as file:
            _write(file, pack, sources, progress)
            why = f"was packed into {output.absolute()} on {time.strftime('%Y-%m-%d %H:%M')}"
            mark_moved(home, name, f"{why} at {socket.gethostname()}")
    return pack


def copy_journal(path: Path, target: Path) -> None:
    """A consistent copy of a journal in one file, what lies in its write-ahead log included."""
    with (
        explained(path),
        closing(connect(path, read_only=True)) as source,
        closing(sqlite3.connect(target)) as destination,
    ):
        source.backup(destination)


def mark_moved(home: Home, name: str, why: str) -> None:
    """From now on the node does not start in this home; `why` completes the sentence "node n0 ..."."""
    home.make_node(name)
    write_atomically(home.moved(name), json.dumps({"node": name, "why": why}, indent=1) + "\n")
    sync_directory(home.node(name))


def _sources(home: Home, name: str, journal: Path) -> dict[str, Path]:
    folder = home.node(name)
    if not (folder / KEY).exists():
        raise UserError("NODE", name, f"has no {KEY}", "restore its folder from a backup")
    sources = {KEY: folder / KEY, JOURNAL: journal}
    sources |= {file: folder / file for file in (CARD, ASKED, BLOCKED) if (folder / file).exists()}
    with Journal.read_only(home.journal(name)) as held:
        done, kept = held.finished_rounds(), held.pinned_checkpoints()
        newest = checkpoint.load_latest(home.checkpoints(name), incarnation=held.incarnation, at_most=done)
        if newest is None and done:
            raise UserError("NODE", name, "has no whole checkpoint", "restore its folder from a backup")
        kept |= _replayed_from(home, name, held.checkpoints(), done) | ({newest.path} if newest else set())
    kept = {path for path in kept if path.is_dir()}
    for path in sorted(kept):
        for file in sorted(entry for entry in path.rglob("*") if entry.is_file()):
            sources[f"checkpoints/{path.name}/{file.relative_to(path).as_posix()}"] = file
    oldest = min((checkpoint.round_of(path) for path in kept), default=0)
    sources |= {f"gossip/{path.name}": path for path in KeptFiles(home.gossip(name)).since(oldest)}
    return sources


def _replayed_from(home: Home, name: str, kept: Sequence[checkpoint.Checkpoint], done: int) -> set[Path]:
    """The checkpoints that the node's replay may begin at, where the history is as near to its new place; a
    history in this home stays here, and they with it."""
    history = home.load_config().for_node(name).history
    if history.uri is None:
        return set()
    wanted = checkpoint.anchors([one.round for one in kept], done, history.keep_rounds)
    return {one.path for one in kept if one.round in wanted}


def _index(home: Home, name: str, sources: Mapping[str, Path], progress: Progress) -> Pack:
    total, done = sum(path.stat().st_size for path in sources.values()), 0
    files = {}
    for member, path in sources.items():
        files[member] = PackedFile(bytes=path.stat().st_size, sha256=file_sha256(path))
        done += files[member].bytes
        progress("reading", done, total)
    with Journal.read_only(home.journal(name)) as journal:
        owed = journal.owed_counts()
        if odd := owed.keys() - get_args(Owed):
            problem = f"its journal owes {min(odd)[:40]!a}, as no node does"
            raise UserError("NODE", name, problem, "restore its folder from a copy")
        return Pack(
            sapo=version("sapo-swarm"),
            swarm=home.load_manifest().swarm,
            node=name,
            key=Identity.load_or_create(home.node(name) / KEY).key,
            incarnation=journal.incarnation,
            rounds=journal.finished_rounds(),
            owed=owed,
            manifest=json.loads(home.manifest.read_bytes()),
            config=json.loads(home.config.read_bytes()),
            files=files,
        )


def _write(file: IO[bytes], pack: Pack, sources: Mapping[str, Path], progress: Progress) -> None:
    total, done = pack.unpacked_bytes, 0
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as index:
            index.write(pack.model_dump_json(indent=1))
            index.flush()
            archive.add(index.name, INDEX, filter=_plain)
        for member, path in sources.items():
            archive.add(path, member, filter=_plain)
            done += pack.files[member].bytes
            progress("packing", done, total)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o600
    return member


# -- unpacking ----------------------------------------------------------------------------------------------


def unpack_node(
    file: Path, home: Path | None = None, sets: Sequence[str] = (), progress: Progress = silent
) -> Unpacked:
    """Unpack a node into a home, its own or one of the same site, where it then goes on.

    `sets` change the config, such as how the bus is reached from here. Nothing is put in place before all of
    the pack was read and checked. Raises `UserError` where the pack is damaged or cannot be used here.
    """
    with opened(file) as archive:
        pack = read_index(archive, file)
        manifest = parse_manifest(json.dumps(pack.manifest), "FILE", str(file))
        check_reasoning_gym(manifest, "FILE", str(file))
        target, config = _fitting(file, home, manifest, sets, pack)
        with _scratch(target.root, file, pack) as place:
            unpack(archive, file, pack, place, progress)
            _check_node(place, file, pack)
            _refuse_older(place, target, pack)
            _settle(place, target, config, manifest, pack)
    return Unpacked(pack, target)


@contextmanager
def _scratch(root: Path, file: Path, pack: Pack) -> Iterator[Path]:
    """An empty folder on the disk of a home; refused where that has no room for what is to be unpacked."""
    disk = existing(root.absolute())
    need, free = pack.unpacked_bytes, shutil.disk_usage(disk).free
    if need + FREE_AFTER > free:
        problem = f"needs {need / 2**20:,.0f} MB, {disk} has {free / 2**20:,.0f} MB free"
        raise UserError("FILE", str(file), problem, "free some space or choose another --home")
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".sapo-unpack-", dir=disk)
    except OSError as error:
        raise UserError("--home", str(root), error.strerror or str(error), "choose another folder") from None
    with scratch:
        place = Path(scratch.name) / pack.node
        place.mkdir()
        yield place


def _fitting(
    file: Path, home: Path | None, manifest: Manifest, sets: Sequence[str], pack: Pack
) -> tuple[Home, Config]:
    """Where a node is to live, and the config it is to run with: that of the home where there is one, which
    must be its site's, else what of the pack's own a stranger might say, and `sets`."""
    told = given(sets)
    brought, refused = foreign.brought(modern(pack.config), told)
    prefix = f"{INDEX}: config."
    site = parse({"swarm": brought.get("swarm", {})}, prefix=prefix)
    target = Home.of(home, site)
    base: Config | Mapping[str, Any]
    if target.manifest.exists():
        target.check(manifest)
        target.check_site(site)
        base = target.load_config()
    elif refused:
        name = next(iter(refused))
        problem = f"its config says what only this site may say: {foreign.said_with_values(refused)}"
        raise UserError("FILE", str(file), problem, f"say it here, as in --set {shlex.quote(name)}=...")
    else:
        base = brought if told else parse(brought, prefix=prefix)
    if "swarm.nodes" not in told and pack.node not in site.nodes:
        raise damaged(file, f"its site has no node {pack.node}")
    config = load(base=base, sets=sets)
    differing = Manifest.of(config).differing(manifest)
    if differing:
        raise UserError("--set", differing[0], "is for the whole swarm to say", "leave it out")
    if pack.node not in config.nodes:
        remedy = f"raise it with --set swarm.nodes={len(site.nodes)}"
        raise UserError("swarm.nodes", config.swarm.nodes, f"the home has no node {pack.node}", remedy)
    if target.journal(pack.node).exists() and not target.moved(pack.node).exists():
        problem = f"{pack.node} lives here already"
        raise UserError("--home", str(target.root), problem, "choose another folder")
    return target, config


def _check_node(place: Path, file: Path, pack: Pack) -> None:
    """Raise `UserError` unless key, journal and checkpoints are whole, and those the index speaks of."""
    if Identity.load_or_create(place / KEY).key != pack.key:
        raise damaged(file, "its key is another")
    if (place / CARD).exists():
        card = find_card(place / CARD)
        if card is None or card.key != pack.key:
            raise damaged(file, "its key card is damaged, or another's")
    try:
        foreign_journal.check(place / JOURNAL)
        with Journal.read_only(place / JOURNAL) as journal:
            held = journal.incarnation, journal.finished_rounds()
    except UserError as error:
        raise damaged(file, f"its journal {error.problem}") from None
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise damaged(file, f"its journal cannot be read ({' '.join(str(error).split())})") from None
    if held != (pack.incarnation, pack.rounds):
        raise damaged(file, "its journal is another")
    folders = sorted((place / "checkpoints").iterdir()) if (place / "checkpoints").exists() else []
    try:
        found = [checkpoint.verify(folder) for folder in folders]
    except (checkpoint.BrokenCheckpoint, RecursionError) as error:
        raise damaged(file, f"checkpoint: {error}") from None
    if pack.rounds and not found:
        raise damaged(file, "it has no checkpoint")


def _refuse_older(place: Path, home: Home, pack: Pack) -> None:
    """Raise `UserError` for a node that was further here: it would sign other groups of the same name."""
    journal = home.journal(pack.node)
    if not journal.exists():
        return
    with Journal.read_only(journal) as here, Journal.read_only(place / JOURNAL) as packed:
        if here.incarnation == packed.incarnation and _reached(here) > _reached(packed):
            rounds, begun = _reached(here)
            problem = f"{pack.node} had {rounds} rounds here, the pack has {pack.rounds}"
            if rounds == pack.rounds and begun:
                problem = f"{pack.node} had begun round {rounds} here, in the pack it has not"
            raise UserError("--home", str(home.root), problem, "unpack one that was made later")


def _reached(journal: Journal) -> tuple[int, bool]:
    """A journal's finished rounds, and whether it holds groups of one more, which peers may have."""
    stage = journal.stage()
    return journal.finished_rounds(), stage is not None and stage[1] != "result"


def _settle(place: Path, home: Home, config: Config, manifest: Manifest, pack: Pack) -> None:
    """Put an unpacked node where it belongs; a folder it had there before is kept aside."""
    fresh = not home.manifest.exists()
    home.prepare(config, manifest)
    if fresh:
        for name in config.nodes:
            if name != pack.node:
                mark_moved(home, name, f"stayed where {pack.node} was packed")
    folder = home.node(pack.node)
    with NodeLock(folder):
        aside = home.root / ".moved" / f"{pack.node}-{time.time_ns()}"
        aside.parent.mkdir(exist_ok=True)
        folder.rename(aside)
        place.rename(folder)
        sync_directory(home.root)
