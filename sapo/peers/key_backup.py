"""Keys of a home in one file, to be kept elsewhere: each with its card, encrypted where one wants it so."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from sapo.core.atomic_file import write_first
from sapo.core.errors import UserError
from sapo.core.types import Record
from sapo.peers.keyring import Card, KeyAndCard
from sapo.peers.signing import Identity, refuse_readable

PASSPHRASE = "SAPO_KEYS_PASSPHRASE"
"""The variable that a passphrase is taken from."""
MAX_BYTES = 2**24


class BackedUp(Record):
    """One key: its card, and the key itself in PEM."""

    card: Card
    pem: str


class Backup(Record):
    format: Literal[1] = 1
    keys: Annotated[tuple[BackedUp, ...], Field(min_length=1)]

    def of(self, node: str | None, file: Path) -> tuple[BackedUp, ...]:
        """Its keys, or the one of a node. Raises `UserError` where there is none, or several."""
        found = tuple(key for key in self.keys if node in (None, key.card.node))
        if not found or (node is not None and len(found) > 1):
            names = ", ".join(key.card.node for key in self.keys)
            problem = f"{file} holds keys of {names}"
            raise UserError("--node", node, problem, "name one of them, or none for all")
        return found


def write(held: Sequence[KeyAndCard], file: Path, passphrase: str | None) -> None:
    """Write keys into a new file of mode 600. Raises `UserError` where it exists or cannot be written, and
    for a passphrase that cannot encrypt."""
    try:
        pems = [one.identity.to_pem(passphrase).decode("ascii") for one in held]
    except ValueError:
        remedy = "choose one of at most 1023 bytes in UTF-8"
        raise UserError("passphrase", "...", "cannot encrypt keys", remedy) from None
    if not file.name:
        raise UserError("FILE", str(file), "is a folder", "name a file in it")
    keys = tuple(BackedUp(card=one.card, pem=pem) for one, pem in zip(held, pems, strict=True))
    try:
        if write_first(file, (Backup(keys=keys).canonical() + "\n").encode()):
            return
    except OSError as error:
        problem = error.strerror or str(error)
        raise UserError("FILE", str(file), problem, "name a file that can be written") from None
    raise UserError("FILE", str(file), "exists already", "name another file: backups are never overwritten")


def read(file: Path) -> Backup:
    """The backup in a file. Raises `UserError` where it is damaged or others may read it."""
    try:
        refuse_readable(file, "FILE")
        if file.stat().st_size > MAX_BYTES:
            remedy = "name what `sapo keys backup` wrote"
            raise UserError("FILE", str(file), "is too large for a backup", remedy)
        return Backup.model_validate_json(file.read_bytes())
    except OSError as error:
        problem = error.strerror or str(error)
        raise UserError("FILE", str(file), problem, "name a file that can be read") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        problem = f"is no whole backup of keys: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError("FILE", str(file), problem, "name what `sapo keys backup` wrote, whole") from None


def opened(keys: Sequence[BackedUp], file: Path, passphrase: str | None) -> list[KeyAndCard]:
    """The keys themselves. Raises `UserError` for a wrong passphrase, or a key that is not its card's."""
    found = []
    for key in keys:
        if "ENCRYPTED" in key.pem and not passphrase:
            raise UserError("passphrase", None, f"is needed for {file}", f"put it into {PASSPHRASE}")
        identity = Identity.from_pem(key.pem.encode(), "FILE", str(file), passphrase)
        if identity.key != key.card.key:
            raise UserError("FILE", str(file), f"the key of {key.card.node} is another", "use another backup")
        found.append(KeyAndCard(identity, key.card))
    return found
