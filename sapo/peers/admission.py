"""What must hold before a peer's group may enter the pool.

`sapo.peers.group_rules` asks what needs no memory; here a group meets this node: its keys, its clock, its
tokenizer, and what it has met before. docs/admission.md lists every reason with what it proves.
"""

from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

from sapo.core.config.manifest import Manifest
from sapo.core.errors import Refused
from sapo.core.types import Group, Received
from sapo.peers.dedup import DedupIndex
from sapo.peers.group_rules import check_rules, check_size
from sapo.peers.signing import unseal
from sapo.store.journal.rows import SeenGroup
from sapo.tasks.questions import drawn_by

PROVEN = frozenset({"equivocation", "held_out", "key_reuse", "question_mismatch", "token_ids"})
"""Reasons that prove, by the author's own signature, that the author breaks the rules. Others do not: anybody
can resend an author's bytes, and a machine can fail. A `copy` is by `decide`."""
Fate = Literal["stays", "copy", "proven"]
"""A copy is refused; a `proven` one counts against its author, too."""


class Fates(NamedTuple):
    """Of two groups that say the same: of the arriving one, and of the one met before."""

    arrives: Fate
    met: Fate


def admit(
    received: Received,
    *,
    manifest: Manifest,
    own_key: str,
    own_node: str,
    now: float,
    max_age_s: float,
    seen: DedupIndex,
    has_control_tokens: Callable[[str], bool],
    has_false_ids: Callable[[Group], bool] = lambda group: False,
    own_group: Callable[[Group], bool] = lambda group: True,
    drawn: Callable[[SeenGroup], bool] = lambda met: met.stamp is None,
    blocked: Collection[str] = (),
) -> Group:
    """The group inside, if it may enter the pool. Raises `Refused` otherwise; changes nothing.

    `now` is compared with the bus's time stamp, never with the producer's clock. `own_group` decides what of
    our key's this node may have made, `drawn` whether a group met before answers a question that was its
    author's to draw; `blocked` are keys whose authors are left out.

    Codes, besides those of `sapo.peers.group_rules` and `sapo.peers.signing.unseal`: `blocked`, `own_echo`,
    `own_key` (signed with our key elsewhere), `duplicate`, `equivocation` (a known id with another content),
    `own_name` (our name under another key), `control_tokens`, `token_ids` (ids of our vocabulary that do not
    decode to the text), `stale`, `future`, `copy` (content published before under another id).
    """
    signed = received.signed
    if signed.key in blocked:
        raise Refused("blocked")
    check_size(signed, manifest)
    known = seen.get(signed.group_id)
    if known is not None and known.content_sha256 == signed.content_sha256:
        raise Refused("own_echo" if signed.key == own_key else "duplicate")
    group = unseal(signed)
    if signed.key == own_key:
        if known is None and own_group(group):
            raise Refused("own_echo")
        place = f"round {group.round} of incarnation {group.incarnation}"
        raise Refused("own_key", f"{place}, not made here", group)
    if known is not None:
        raise Refused("equivocation", f"{signed.group_id} was {known.content_sha256} before", group)
    check_rules(group, manifest, received.timestamp)
    if group.node == own_node:
        raise Refused("own_name", f"{group.key} calls itself {group.node}", group)
    age = now - received.timestamp
    if age > max_age_s:
        raise Refused("stale", f"{age:.0f} s old", group)
    if age < -max_age_s:
        raise Refused("future", f"stamped {-age:.0f} s from now", group)
    if any(has_control_tokens(completion.text) for completion in group.completions):
        raise Refused("control_tokens", "a completion spells one of our control tokens", group)
    if has_false_ids(group):
        raise Refused("token_ids", "ids of our vocabulary do not say what the text says", group)
    found = said_before(group, received.timestamp, seen, drawn)
    if found is not None and found[1].arrives != "stays":
        original, fates = found
        raise Refused("copy", f"says what {original.group_id} says", group, fates.arrives == "proven")
    return group


def said_before(
    group: Group, timestamp: float, seen: DedupIndex, drawn: Callable[[SeenGroup], bool]
) -> tuple[SeenGroup, Fates] | None:
    """The known group with the same content as one stamped by the bus at `timestamp`, and which is the
    copy."""
    met = seen.alike(group)
    if met is None:
        return None
    return met, decide(
        met_first=met.stamp is None or met.stamp <= timestamp,
        arrives_drawn=drawn_by(group),
        met_drawn=drawn(met),
        same_author=met.key == group.key,
    )


def decide(*, met_first: bool, arrives_drawn: bool, met_drawn: bool, same_author: bool) -> Fates:
    """Who copied whom, of two groups that answer one question in the same words.

    The earlier by the bus's clock is the original, unless the later one answers a question that its author
    was to draw: who can compute an author's next question could publish the likely answers first. `met_first`
    is whether the known one is earlier; own groups always are, and drawn. Of a group that has left the pool
    that is not known, and False. An author cannot copy from itself: for one author, `proven` is `copy`.

    | met first | arrives drawn | met drawn | arrives | met |
    |---|---|---|---|---|
    | yes | yes | any | stays | stays |
    | yes | no | yes | proven | stays |
    | yes | no | no | copy | stays |
    | no | any | yes | stays | stays |
    | no | yes | no | stays | proven |
    | no | no | no | stays | copy |
    """
    mine, other = (arrives_drawn, met_drawn) if met_first else (met_drawn, arrives_drawn)
    later: Fate = "stays" if mine else "proven" if other and not same_author else "copy"
    return Fates(later, "stays") if met_first else Fates("stays", later)
