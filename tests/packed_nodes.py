"""Nodes that are small enough to be packed in no time, and packs with other members."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from makers import finish_round

from sapo.core.config.home import Home
from sapo.core.types import canonical
from sapo.peers.signing import Identity
from sapo.policy import checkpoint
from sapo.store.journal.journal import Journal

Members = list[tuple[tarfile.TarInfo, bytes]]


def make_node(home: Home, name: str, rounds: int) -> None:
    home.node(name).mkdir()
    Identity.load_or_create(home.node(name) / "key.pem")
    with Journal(home.journal(name)) as journal:
        for round in range(rounds):
            finish_round(journal, name, round, finished_at=float(round))
            if round == 0:
                take_checkpoint(home, name, journal)


def take_checkpoint(home: Home, name: str, journal: Journal, round: int = 1) -> None:
    def save_model(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)

    saved = checkpoint.save(
        home.checkpoints(name),
        round=round,
        keep=99,
        incarnation=journal.incarnation,
        weights_sha256="ab" * 32,
        config_digest="cd" * 32,
        threads=1,
        save_model=save_model,
        optimizer={"step": 1},
    )
    journal.record_checkpoint(saved)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def rewritten(pack: Path, change: Callable[[Members], Members]) -> Path:
    """The same pack with other members."""
    with tarfile.open(pack) as archive:
        members = [(info, file.read() if (file := archive.extractfile(info)) else b"") for info in archive]
    other = pack.with_name("other.tar.gz")
    with tarfile.open(other, "w:gz") as archive:
        for info, content in change(members):
            if info.isreg():
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return other


def indexed(change: Callable[[dict[str, Any]], object]) -> Callable[[Members], Members]:
    """A change of what the index says."""

    def apply(members: Members) -> Members:
        found = json.loads(members[0][1])
        change(found)
        return [(members[0][0], canonical(found).encode()), *members[1:]]

    return apply


def with_content(name: str, content: bytes) -> Callable[[Members], Members]:
    return lambda members: [(info, content if info.name == name else data) for info, data in members]
