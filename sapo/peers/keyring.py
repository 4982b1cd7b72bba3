"""Where keys are kept, in their nodes' folders and in the user's data folder, and whose keys a config names.

The second copy outlives checkouts, runs and reinstalls. Beside a key lies its card: whose it is, which
incarnations wrote with it, and the invitation it holds.
"""

import logging
import os
import re
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
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
    identity: Identity
    card: Card


def data_folder() -> Path:
    """Where keys are kept for good: `$SAPO_KEYS`, else a folder `sapo/keys` where the system keeps data.
    Raises `UserError` where that is in the home folder of a user who has none."""
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

    `now` is in unix seconds. Raises `UserError` for a key that is damaged or that others may read, and for a
    folder that is a copy of one in which a node runs.
    """
    folder, path = home.make_node(node), home.key(node)
    older = [] if path.exists() else homeless(swarm, node)
    identity = Identity.load_or_create(path)
    # where one of the two cards is lost, damaged or older, the other has what it lacks
    cards = [find_card(_kept(identity.key, "json")), find_card(home.card(node))]
    known = [card for card in cards if card is not None and card.key == identity.key]
    card = known[-1] if known else Card(key=identity.key, swarm=swarm, node=node, created=now, folder="")
    _refuse_second(card, folder)
    if older:
        names = ", ".join(one.key for one in older[:SHOWN]) + (", ..." if len(older) > SHOWN else "")
        again = f"sapo keys restore {older[0].key} --node {node} --home {home.root}"
        log.warning(
            "%s has a new key, %s: it is a new author. Older keys of %s in %s, which no folder holds now: "
            "%s. To go on as the newest, stop the node, move %s away, and say: %s",
            *(node, identity.key, node, swarm, names, folder, again),
        )
    past = dict.fromkeys(one for card in known for one in card.incarnations)
    changes = {"swarm": swarm, "node": node, "folder": str(folder), "incarnations": _newest(past)}
    return note(home, KeyAndCard(identity, card.model_copy(update=changes)))


def remember(home: Home, held: KeyAndCard, incarnation: str) -> KeyAndCard:
    """Write down an incarnation of the node's journal, so that it is known for its own ever after."""
    card = find_card(home.card(held.card.node)) or held.card  # the file may hold a new invitation
    past = dict.fromkeys(one for one in card.incarnations if one != incarnation)
    changes = {"incarnations": _newest((*past, incarnation))}
    return note(home, KeyAndCard(held.identity, card.model_copy(update=changes)))


def note(home: Home, held: KeyAndCard) -> KeyAndCard:
    """Write a key's card if it changed, and keep both in the data folder."""
    text = held.card.canonical() + "\n"
    _write(home.card(held.card.node), text)
    try:
        folder = data_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & 0o077:
            problem = f"others may look into it (mode {mode:o})"
            raise UserError("SAPO_KEYS", str(folder), problem, "chmod 700 it")
        _write(_kept(held.card.key, "json"), text)
        write_first(_kept(held.card.key, "pem"), held.identity.to_pem())
    except OSError as error:
        log.warning(
            "the key of %s is kept in its folder only (%s: %s); name a folder for keys in SAPO_KEYS",
            *(held.card.node, error.filename or data_folder(), error.strerror or error),
        )
    return held


def homeless(swarm: str, node: str) -> list[Card]:
    """The kept keys that a node of a swarm had, and that no folder holds any more; newest first."""
    kept = (find_card(path.with_suffix(".json")) for path in data_folder().glob("*.pem"))
    own = [card for card in kept if card is not None and (card.swarm, card.node) == (swarm, node)]
    return sorted((card for card in own if _lives(card) is None), key=lambda card: -card.created)


def load_kept(text: str) -> KeyAndCard:
    """The kept key that `text` names or begins. Raises `UserError` where there is none, or several."""
    folder = data_folder()
    names = sorted(path.stem for path in folder.glob("*.pem") if text and path.stem.startswith(text))
    if len(names) != 1:
        problem = f"begins {len(names)} keys in {folder}" if names else f"no such key is kept in {folder}"
        remedy = "give all of it" if names else "name one of the files there, or a backup"
        raise UserError("KEY", text, problem, remedy)
    identity = Identity.load(_kept(names[0], "pem"))
    card = find_card(_kept(names[0], "json"))
    if card is None or card.key != identity.key:
        card = Card(key=identity.key, swarm="unknown", node="unknown", created=0.0, folder="")
    return KeyAndCard(identity, card)


def place(home: Home, held: Sequence[KeyAndCard], swarm: str, node: str | None) -> list[KeyAndCard]:
    """Put keys that were kept elsewhere into their nodes' folders, or a single one into another node's: all
    of them or none.

    Raises `UserError` where another key is there, a node runs, or a key's node lives in another folder.
    """
    places = [(one, node or one.card.node) for one in held]
    for one, name in places:
        _refuse_placing(home, one, name)
    with ExitStack() as locks:
        for one, name in places:
            locks.enter_context(NodeLock(home.make_node(name)))
            _refuse_placing(home, one, name)  # again: another process may have made a key meanwhile
        for one, name in places:
            write_first(home.key(name), one.identity.to_pem())
            here = find_card(home.card(name))
            if here is None or here.key != one.card.key:
                _write(home.card(name), one.card.canonical() + "\n")
        return [take(home, swarm, name, one.card.created) for one, name in places]


def find_card(path: Path) -> Card | None:
    """The card in a file; None where there is none, or none that can be read."""
    try:
        return Card.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def key_of(home: Home, node: str) -> str | None:
    """The public key of a node that has one."""
    card = find_card(home.card(node))
    return None if card is None else card.key


def _kept(key: str, kind: str) -> Path:
    return data_folder() / f"{key}.{kind}"


def _newest(incarnations: Iterable[Incarnation]) -> tuple[Incarnation, ...]:
    return tuple(incarnations)[-MAX_INCARNATIONS:]


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != text:
        write_atomically(path, text)


def _refuse_placing(home: Home, held: KeyAndCard, node: str) -> None:
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
    try:
        return folder if Identity.load(folder / KEY).key == card.key else None
    except UserError:
        return None


def keys_of(names: Sequence[str], home: Home) -> frozenset[str]:
    """The keys among `names`, and those that the nodes of this site have which are named there: whose
    log-probabilities are believed, or weights averaged with.

    Anybody may call itself by a name, so a name stands for the key that the node of this site has.
    """
    keys = (name if WHOLE.fullmatch(name) else key_of(home, name) for name in names)
    return frozenset(key for key in keys if key is not None)


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
