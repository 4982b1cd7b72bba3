"""Checkpoints: snapshots of weights and optimiser, one directory each, whole and verified or not there.

`<directory>/round-000123` holds what a node needs to go on with round 123: the model's files (as the given
`save_model` writes them), `optimizer.pt` and `checkpoint.json`, which names every file's size and SHA-256
and what repeating the rounds after it bit for bit depends on. Importing this module does not import torch.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from sapo.core.atomic_file import sync_directory, sync_file
from sapo.core.errors import SapoError, UserError
from sapo.core.types import canonical, file_sha256, sha256

CHECKPOINT_VERSION = 1
_NAME = re.compile(r"round-(\d{6,})")
_MANIFEST = "checkpoint.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk; `round` is the first round its weights have not seen."""

    path: Path
    round: int
    weights_sha256: str
    policy_version: int
    incarnation: str
    config_digest: str
    torch: str
    threads: int
    cpu: str

    def to_json(self) -> str:
        """Everything but the path, as canonical JSON."""
        return canonical({key: value for key, value in asdict(self).items() if key != "path"})

    @classmethod
    def from_json(cls, path: Path, text: str) -> Self:
        """The checkpoint at `path` that `to_json` described."""
        return cls(path=path, **json.loads(text))


class BrokenCheckpoint(SapoError):
    """Why a directory is not a whole checkpoint."""


def save(
    directory: Path,
    *,
    round: int,
    incarnation: str,
    weights_sha256: str,
    config_digest: str,
    threads: int,
    save_model: Callable[[Path], None],
    optimizer: Mapping[str, Any],
    keep: int = 2,
    pinned: Collection[Path] = (),
) -> Checkpoint:
    """Write, verify and name a checkpoint; then delete leftovers, and of it and those before it all but the
    `keep` newest and `pinned`.

    A whole checkpoint of the same round, weights and incarnation is left as it is. Raises `UserError` when
    the disk is full or the files read back differ from those written; nothing half written stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / f"round-{round:06d}"
    checkpoint = Checkpoint(
        path=final,
        round=round,
        weights_sha256=weights_sha256,
        policy_version=round,
        incarnation=incarnation,
        config_digest=config_digest,
        threads=threads,
        **_versions(),
    )
    if not _is_there(checkpoint):
        temporary = directory / f".{final.name}.{os.getpid()}.tmp"
        with _whole_or_nothing(temporary):
            _write(temporary, checkpoint, save_model, optimizer)
            verify(temporary, checkpoint)
            if final.exists():
                final.replace(directory / f".{final.name}.replaced.{os.getpid()}.tmp")
            temporary.replace(final)
            sync_directory(directory)
    _clean(directory, round, keep, pinned)
    return checkpoint


def load_latest(
    directory: Path, *, incarnation: str | None = None, at_most: int | None = None, set_aside: bool = False
) -> Checkpoint | None:
    """The newest whole checkpoint, of this incarnation and of round `at_most` or earlier where given.

    Every file's digest is checked. Broken ones are passed over and logged with the reason; `set_aside`, for
    the node that owns the directory, renames them so that they no longer count and the next `save` deletes
    them. None when there is no whole one.
    """
    for path in reversed(paths(directory)):
        try:
            found = verify(path)
        except BrokenCheckpoint as reason:
            _log.warning("checkpoint %s is passed over: %s", path, reason)
            if set_aside:
                path.replace(path.with_name(f".{path.name}.broken.{time.time_ns()}.tmp"))
            continue
        if incarnation is not None and found.incarnation != incarnation:
            _log.warning("checkpoint %s is passed over: it is of incarnation %s", path, found.incarnation)
        elif at_most is None or found.round <= at_most:
            return found
    return None


def paths(directory: Path) -> list[Path]:
    """Directories named like checkpoints, by round; `verify` checks whether they are whole."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=round_of)


def round_of(path: Path) -> int:
    """The round that a checkpoint's directory is named after. Raises `ValueError` for another directory."""
    return int(path.name.removeprefix("round-"))


def anchors(rounds: Sequence[int], done: int, keep_rounds: int) -> set[int]:
    """Of the checkpoints at `rounds`, those that must stay when `done` rounds are done.

    With `keep_rounds` 0 the oldest, so that everything since stays replayable. Otherwise the newest that
    lies `keep_rounds` or more behind `done` (the oldest, where none does), and, spaced by a quarter of
    `keep_rounds`, some after it, to which that place can pass. They are eight at most.
    """
    if not rounds:
        return set()
    order = sorted(rounds)
    if keep_rounds == 0:
        return {order[0]}
    kept = [max((round for round in order if round <= done - keep_rounds), default=order[0])]
    for round in order:
        if round - kept[-1] >= max(1, keep_rounds // 4):
            kept.append(round)
    return set(kept)


def optimizer_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The optimiser state in a checkpoint, on the CPU; only tensors and plain values are unpickled."""
    import torch

    state: dict[str, Any] = torch.load(
        checkpoint.path / "optimizer.pt", map_location="cpu", weights_only=True
    )
    return state


def verify(path: Path, expected: Checkpoint | None = None) -> Checkpoint:
    """Read a whole checkpoint and compare every file's size and digest with its manifest.

    Raises `BrokenCheckpoint` saying what is missing or differs; with `expected` also when it describes
    something else.
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["schema_version"] != CHECKPOINT_VERSION:
            raise BrokenCheckpoint(f"it was written with schema version {manifest['schema_version']}")
        found = Checkpoint.from_json(path, canonical(manifest["checkpoint"]))
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        if sha256(canonical([manifest["checkpoint"], manifest["files"]])) != manifest["sha256"]:
            raise BrokenCheckpoint(f"{_MANIFEST} does not have the digest it was written with")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpoint(f"{_MANIFEST} cannot be read: {error}") from error
    present = set(_files(path))
    if present != listed.keys():
        odd = sorted(present ^ listed.keys())[0]
        raise BrokenCheckpoint(f"{odd} is {'not listed' if odd in present else 'missing'}")
    for name, (size, digest) in listed.items():
        if (path / name).stat().st_size != size:
            raise BrokenCheckpoint(f"{name} has {(path / name).stat().st_size} bytes instead of {size}")
        if file_sha256(path / name) != digest:
            raise BrokenCheckpoint(f"{name} does not have the digest it was written with")
    if expected is not None and found.to_json() != expected.to_json():
        raise BrokenCheckpoint("it describes another round or other weights")
    return found


def _is_there(checkpoint: Checkpoint) -> bool:
    """Whether the very same checkpoint already stands at its place, whole."""
    if not checkpoint.path.exists():
        return False
    try:
        verify(checkpoint.path, checkpoint)
    except BrokenCheckpoint as reason:
        _log.warning("checkpoint %s is written again: %s", checkpoint.path, reason)
        return False
    return True


def _write(
    path: Path, checkpoint: Checkpoint, save_model: Callable[[Path], None], optimizer: Mapping[str, Any]
) -> None:
    import torch

    path.mkdir()
    save_model(path)
    with (path / "optimizer.pt").open("wb") as file:
        try:
            torch.save(dict(optimizer), file)
        except RuntimeError as error:
            # torch ends the file even so, and the error of that hides why it could not be written
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    # what cannot be loaded back is worth nothing: find out now
    torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True)
    files = {
        name: {"bytes": (path / name).stat().st_size, "sha256": file_sha256(path / name)}
        for name in _files(path)
    }
    body: dict[str, Any] = json.loads(checkpoint.to_json())
    manifest = {
        "schema_version": CHECKPOINT_VERSION,
        "checkpoint": body,
        "files": files,
        "sha256": sha256(canonical([body, files])),
    }
    (path / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for name in (*files, _MANIFEST):
        sync_file(path / name)
    for folder in (entry for entry in (path, *path.rglob("*")) if entry.is_dir()):
        sync_directory(folder)


@contextlib.contextmanager
def _whole_or_nothing(temporary: Path) -> Iterator[None]:
    """Remove `temporary` when writing fails; a full disk or files read back wrong become a `UserError`."""
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        remedy = "free some space there and go on with --resume: nothing was half written"
        if _is_full(error):
            raise UserError("checkpoints", str(temporary.parent), "the disk is full", remedy) from error
        if isinstance(error, BrokenCheckpoint):
            remedy = "check the disk: what was read back is not what was written"
            raise UserError("checkpoints", str(temporary.parent), str(error), remedy) from error
        raise


def _is_full(error: BaseException) -> bool:
    """Whether writing failed for lack of space; torch and safetensors say so in words only."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "os error 28" in str(error)


def _clean(directory: Path, round: int, keep: int, pinned: Collection[Path]) -> None:
    """Delete leftovers of crashes, and checkpoints beyond the `keep` newest that are not pinned.

    Those of rounds after `round` are of another course, such as that of a journal since deleted: they must
    not push out the new ones.
    """
    for leftover in directory.glob(".round-*.tmp"):
        shutil.rmtree(leftover)
    held = {path.absolute() for path in pinned}
    for path in [path for path in paths(directory) if round_of(path) <= round][:-keep]:
        if path.absolute() not in held:
            # renamed first: a crash while deleting must not leave something that looks like a checkpoint
            doomed = path.with_name(f".{path.name}.deleted.tmp")
            path.replace(doomed)
            shutil.rmtree(doomed)


def _files(path: Path) -> list[str]:
    names = [str(entry.relative_to(path)) for entry in path.rglob("*") if entry.is_file()]
    return sorted(name for name in names if name != _MANIFEST)


def _versions() -> dict[str, str]:
    import torch

    return {"torch": str(torch.__version__), "cpu": torch.backends.cpu.get_cpu_capability()}
