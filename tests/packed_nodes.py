"""Nodes that are small enough to be packed in no time."""

from pathlib import Path

from makers import finish_round

from sapo.core.config.home import Home
from sapo.peers.signing import Identity
from sapo.policy import checkpoint
from sapo.store.journal.journal import Journal


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
        (folder / "weights.bin").write_bytes(bytes(range(256)) * 100)

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
