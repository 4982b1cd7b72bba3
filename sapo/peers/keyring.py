"""Where keys are kept, in their nodes' folders and in the user's data folder, and whose keys a config names.

The second copy outlives checkouts, runs and reinstalls. Beside a key lies its card: whose it is, which
incarnations wrote with it, and the invitation it holds.
"""

import logging
import os
import re
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from sapo.core.atomic_file import write_atomically, write_first
from sapo.core.config.home import KEY, MOVED, Home
from sapo.core.config.load import Config
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError
from sapo.core.types import Hex64, Incarnation, Invitation, Name, Record
from sapo.peers.signing import Identity

log = logging.getLogger(__name__)

MAX_INCARNATIONS = 1000
"""Of those a card remembers: the newest."""
SHOWN = 3
"""Older keys that a line of the log names."""
WHOLE = re.compile("[0-9a-f]{64}")


class Card(Record):
    """What is known of a key, besides itself."""

    key: Hex64
    swarm: Name
    node: Name
    created: float
    """Unix seconds."""
    folder: str
    """Where its node was last."""
    incarnations: Annotated[tuple[Incarnation, ...], Field(max_length=MAX_INCARNATIONS)] = ()
    """Of the node's journals, the present one last."""
    invitation: Invitation | None = None


@dataclass(frozen=True, slots=True)
class KeyAndCard:
    """A key and its card."""

    identity: Identity
    card: Card


def data_folder() -> Path:
    """Where keys are kept for good: `$SAPO_KEYS`, else a folder `sapo/keys` where the system keeps data.

    Raises `UserError` where that is in the home folder of a user who has none.
    """
    named = os.environ.get("SAPO_KEYS")
    usual = "~/Library/Application Support" if sys.platform == "darwin" else "~/.local/share"
    place = named or os.path.join(os.environ.get("XDG_DATA_HOME") or usual, "sapo", "keys")
    try:
        return Path(place).expanduser().absolute()
    except RuntimeError:
        remedy = "name a folder for keys in SAPO_KEYS"
        raise UserError("SAPO_KEYS", named, f"{place} is in no home folder that is known", remedy) from None


def take(home: Home, swarm: str, node: str, now: float) -> KeyAndCard:
    """The key of a node, made where it has none, and kept in the data folder too.

    `now` is in unix seconds. Raises `UserError` for files that are damaged or that others may read, and for a
    folder that is a copy of one in which a node runs.
    """
    path, folder = home.key(node), home.node(node)
    older = [] if path.exists() else homeless(swarm, node)
    identity = Identity.load_or_create(path)
    card = _read_card(home.card(node)) if home.card(node).exists() else None
    if card is None or card.key != identity.key:
        card = Card(key=identity.key, swarm=swarm, node=node, created=now, folder=str(folder))
    _refuse_second(card, folder)
    if older:
        names = ", ".join(one.key for one in older[:SHOWN]) + (", ..." if len(older) > SHOWN else "")
        again = f"sapo keys restore {older[0].key} --node {node} --home {home.root}"
        log.warning(
            "%s has a new key, %s: it is a new author. Older keys of %s in %s, which no folder holds now: "
            "%s. To go on as the newest, stop the node, move %s away, and say: %s",
            *(node, identity.key, node, swarm, names, folder, again),
        )
    card = card.model_copy(update={"swarm": swarm, "node": node, "folder": str(folder)})
    return note(home, KeyAndCard(identity, card))


def invited_until(home: Home, node: str) -> int | None:
    """When the invitation ends that a node holds, in unix seconds; None where it holds none."""
    card = find_card(home.card(node))
    return card.invitation.until if card is not None and card.invitation is not None else None


def note(home: Home, held: KeyAndCard) -> KeyAndCard:
    """Write a key's card if it changed, and keep both in the data folder."""
    path = home.card(held.card.node)
    text = held.card.canonical() + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)
    try:
        keep(held)
    except OSError as error:
        log.warning(
            "the key of %s is kept in its folder only (%s: %s); name a folder for keys in SAPO_KEYS",
            *(held.card.node, error.filename or data_folder(), error.strerror or error),
        )
    return held


def remember(home: Home, held: KeyAndCard, incarnation: str) -> KeyAndCard:
    """Write down an incarnation of the node's journal, so that it is known for its own ever after."""
    card = find_card(home.card(held.card.node))
    if card is None or card.key != held.identity.key:
        card = held.card
    # an invitation may have been accepted since the key was taken
    held = KeyAndCard(held.identity, card)
    known = tuple(one for one in card.incarnations if one != incarnation)
    if (*known, incarnation) == card.incarnations:
        return held
    newest = (*known, incarnation)[-MAX_INCARNATIONS:]
    return note(home, KeyAndCard(held.identity, card.model_copy(update={"incarnations": newest})))


def keep(held: KeyAndCard) -> None:
    """Put a key and its card into the data folder; what is known there of its past stays.

    Raises `OSError` where that cannot be written, and `UserError` where others may look into it.
    """
    folder = _private_folder()
    pem, card = folder / f"{held.identity.key}.pem", folder / f"{held.identity.key}.json"
    before = find_card(card)
    past = [one for one in before.incarnations if one not in held.card.incarnations] if before else []
    whole = (*past, *held.card.incarnations)[-MAX_INCARNATIONS:]
    created = min(before.created, held.card.created) if before else held.card.created
    text = held.card.model_copy(update={"incarnations": whole, "created": created}).canonical() + "\n"
    if before is None or card.read_text(encoding="utf-8") != text:
        write_atomically(card, text)
    if not _holds(pem, held.identity.key):
        pem.unlink(missing_ok=True)
        write_first(pem, held.identity.to_pem())


def kept() -> list[Card]:
    """What the data folder knows of its keys, oldest first; one without a readable card is left out."""
    found = [find_card(path.with_suffix(".json")) for path in data_folder().glob("*.pem")]
    return sorted((card for card in found if card is not None), key=lambda card: card.created)


def homeless(swarm: str, node: str) -> list[Card]:
    """The kept keys that a node of a swarm had, and that no folder holds any more; newest first."""
    own = [card for card in reversed(kept()) if (card.swarm, card.node) == (swarm, node)]
    return [card for card in own if _lives(card) is None]


def load_kept(text: str) -> KeyAndCard:
    """The kept key that `text` names or begins. Raises `UserError` where there is none, or several."""
    folder = data_folder()
    names = sorted(path.stem for path in folder.glob("*.pem") if text and path.stem.startswith(text))
    if len(names) != 1:
        problem = f"begins {len(names)} keys in {folder}" if names else f"no such key is kept in {folder}"
        remedy = "give all of it" if names else "name one of the files there, or a backup"
        raise UserError("KEY", text, problem, remedy)
    identity = Identity.load(folder / f"{names[0]}.pem")
    card = find_card(folder / f"{names[0]}.json")
    if card is None or card.key != identity.key:
        card = Card(key=identity.key, swarm="unknown", node="unknown", created=0.0, folder="")
    return KeyAndCard(identity, card)


def place(home: Home, held: KeyAndCard, swarm: str, node: str) -> KeyAndCard:
    """Put a key that was kept elsewhere into a node's folder.

    Raises `UserError` where another key is there, the node runs, or the key's node lives in another folder.
    """
    refuse_placing(home, held, node)
    folder = home.node(node)
    with NodeLock(folder):
        write_first(home.key(node), held.identity.to_pem())
        refuse_placing(home, held, node)  # again: another process may have made a key meanwhile
        card = held.card.model_copy(update={"swarm": swarm, "node": node, "folder": str(folder)})
        return note(home, KeyAndCard(held.identity, card))


def refuse_placing(home: Home, held: KeyAndCard, node: str) -> None:
    """Raise `UserError` where another key is in a node's folder, or the key's node lives in another one."""
    path, folder = home.key(node), home.node(node)
    if path.exists() and Identity.load(path).key != held.identity.key:
        problem = f"{node} has another key already, and what it wrote is signed with it"
        remedy = f"move {folder} away first: the node then begins anew, as the restored author"
        raise UserError("key file", str(path), problem, remedy)
    other = _lives(held.card, besides=folder)
    if other is not None:
        remedy = "run it there, move it with `sapo pack`, or delete that folder if it is not to go on"
        raise UserError("KEY", held.identity.key, f"its node lives in {other}", remedy)


def _refuse_second(card: Card, folder: Path) -> None:
    """Two folders with one key are two authors of one name as soon as both run."""
    other = _lives(card, besides=folder)
    if other is None:
        return
    try:
        with NodeLock(other):
            pass
    except UserError as error:
        problem = f"has the same key as {other}, which {error.problem}"
        remedy = "run only one of them: peers refuse what two nodes write with one key"
        raise UserError("node directory", str(folder), problem, remedy) from None
    log.warning("%s has the same key as %s: never run both", folder, other)


def _lives(card: Card, besides: Path | None = None) -> Path | None:
    """The folder that a card names, if it is another one and holds the key to run with."""
    folder = Path(card.folder)
    if not card.folder or (folder / MOVED).exists() or not (folder / KEY).exists():
        return None
    if besides is not None and besides.exists() and folder.samefile(besides):
        return None
    return folder if _holds(folder / KEY, card.key) else None


def _private_folder() -> Path:
    folder = data_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        raise UserError("SAPO_KEYS", str(folder), f"others may look into it (mode {mode:o})", "chmod 700 it")
    return folder


def _holds(pem: Path, key: str) -> bool:
    with suppress(UserError):
        return Identity.load(pem).key == key
    return False


def find_card(path: Path) -> Card | None:
    """The card in a file; None where there is none, or none that can be read."""
    try:
        return _read_card(path)
    except (OSError, UserError):
        return None


def _read_card(path: Path) -> Card:
    try:
        return Card.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        problem = f"is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        remedy = "delete it: the node then forgets its former incarnations and its invitation"
        raise UserError("key card", str(path), problem, remedy) from None


def keys_of(names: Sequence[str], home: Home) -> frozenset[str]:
    """The keys among `names`, and those that the nodes of this site have which are named there: whose
    log-probabilities are believed, or weights averaged with.

    Anybody may call itself by a name, so a name stands for the key that the node of this site has.
    """
    cards = [find_card(home.card(name)) for name in names if WHOLE.fullmatch(name) is None]
    return frozenset(name for name in names if WHOLE.fullmatch(name)) | {card.key for card in cards if card}


def refuse_strange_names(config: Config) -> None:
    """Raise `UserError` for a trusted peer, or a member to gossip with, that is neither a public key nor a
    node of this site."""
    members = config.gossip.members if config.gossip is not None else []
    for field, names in (("learn.trusted_peers", config.learn.trusted_peers), ("gossip.members", members)):
        for peer in names:
            if WHOLE.fullmatch(peer) is None and peer not in config.nodes:
                raise UserError(
                    field,
                    peer,
                    "is no node of this site, and anybody may take a name",
                    "give the public key that `sapo keys show` prints where it runs",
                )
