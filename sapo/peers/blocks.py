"""Authors that a node leaves out: `blocked.json` in its folder, which `sapo peer block` writes, and which the
node reads in every round."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.core.errors import UserError
from sapo.core.types import PublicKey, Record, is_sound_key
from sapo.peers.keyring import WHOLE, key_of
from sapo.peers.membership import day
from sapo.store.journal.journal import Journal

SHOWN, LISTED = 12, 8
"""Digits of a key that are shown, and are enough for `sapo peer block`; authors that a message lists."""


class Blocked(Record):
    """An author who is left out, by the name that was known, since a moment in unix seconds."""

    key: PublicKey
    name: str
    since: float

    def __str__(self) -> str:
        return f"{self.name} ({self.key[:SHOWN]})" if self.name else self.key


_FILE = TypeAdapter(tuple[Blocked, ...])


def read(path: Path) -> dict[str, Blocked]:
    """Who is left out, by key. Raises `UserError` for a file that is damaged."""
    try:
        return {one.key: one for one in _FILE.validate_json(path.read_bytes())}
    except FileNotFoundError:
        return {}
    except ValidationError:
        remedy = "delete it, and block with `sapo peer block` whom it is to name"
        raise UserError("blocked.json", str(path), "is damaged", remedy) from None


def block(home: Home, nodes: Sequence[str], text: str, now: float) -> tuple[Blocked, list[str]]:
    """Have nodes leave out the author that `text` names; returns the author, and the nodes that do.

    No node leaves out itself. Raises `UserError` where `text` names no author, or several.
    """
    met = known(home, nodes)
    key = find(text, met)
    author = Blocked(key=key, name=min(met.get(key, ()), default=""), since=now)
    others = [node for node in nodes if key_of(home, node) != key]
    if not others:
        raise UserError("KEY", text, "is the node's own key", "name another author")
    for node in others:
        home.make_node(node)
        _write(home.blocked(node), {key: author} | read(home.blocked(node)))
    return author, others


def unblock(home: Home, nodes: Iterable[str], text: str) -> tuple[Blocked, list[str]]:
    """Have nodes take in again whom they leave out; returns the author, and the nodes that did. Raises
    `UserError` where none of them leaves it out."""
    found = {node: read(home.blocked(node)) for node in nodes}
    every = {key: one for some in found.values() for key, one in some.items()}
    if not every:
        raise UserError("KEY", text, "nobody is blocked here", "name another home")
    key = find(text, {key: {one.name} for key, one in every.items()})
    if key not in every:
        raise UserError("KEY", text, "is not blocked", f"blocked: {', '.join(map(str, every.values()))}")
    those = [node for node, some in found.items() if key in some]
    for node in those:
        _write(home.blocked(node), {other: one for other, one in found[node].items() if other != key})
    return every[key], those


def known(home: Home, nodes: Iterable[str]) -> dict[str, set[str]]:
    """The authors that nodes have met, by key, with their names as far as these are known."""
    found: dict[str, set[str]] = {}
    for node in nodes:
        if not home.journal(node).exists():
            continue  # it has not begun
        with Journal.read_only(home.journal(node)) as journal:
            for row in journal.peers():
                found.setdefault(row.key, set())
            for key, name in journal.authors():
                found.setdefault(key, set()).add(name)
        found.pop("", None)  # the newcomers' common account
        own = key_of(home, node)
        if own is not None:
            found.setdefault(own, set()).add(node)
    return found


def meant(text: str, authors: Mapping[str, Iterable[str]]) -> list[str]:
    """Keys of the authors that `text` may mean, sorted; `authors` have their names by key. A whole key means
    its owner alone, whatever others call themselves."""
    begun = {key for key in authors if text and key.startswith(text.lower())}
    named = {key for key, names in authors.items() if text in names}
    return sorted(begun if text.lower() in begun else begun | named)


def find(text: str, authors: Mapping[str, Iterable[str]]) -> str:
    """The key that `text` is, or that of the only author whom it means. Raises `UserError` for several or
    none."""
    if WHOLE.fullmatch(text) and is_sound_key(text):
        return text
    keys = meant(text, authors)
    if len(keys) == 1:
        return keys[0]
    if keys:
        shown = ", ".join(key[:SHOWN] for key in keys[:LISTED])
        raise UserError("KEY", text, f"may be {len(keys)} authors: {shown}", "give more of the key")
    there = sorted({name for names in authors.values() for name in names})[:LISTED]
    names = ", ".join(there) or "none is known"
    remedy = f"give a key, the beginning of one that was met, or a name: {names}"
    raise UserError("KEY", text, "is no author met here", remedy)


def told(home: Home, nodes: Sequence[str]) -> list[str]:
    """A sentence for each author who is left out, with the nodes that do."""
    found: dict[Blocked, list[str]] = {}
    for node in nodes:
        for one in read(home.blocked(node)).values():
            found.setdefault(one, []).append(node)
    return [
        f"left out by {', '.join(those)} since {day(one.since)}: {one}; "
        f"`sapo peer unblock {one.key[:SHOWN]}` takes it in again"
        for one, those in found.items()
    ]


def _write(path: Path, blocked: Mapping[str, Blocked]) -> None:
    write_atomically(path, _FILE.dump_json(tuple(blocked.values()), indent=1).decode() + "\n")
