"""What must hold before a peer's group may enter the pool.

`sapo.peers.group_rules` asks what needs no memory; here a group meets this node: its keys, its clock, its
tokenizer, and what it has met before. docs/admission.md lists every reason with what it proves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sapo.core.config.manifest import Manifest
from sapo.core.config.schema import FILE
from sapo.core.errors import Refused
from sapo.core.own_code import Missing
from sapo.core.types import Group, Received, SignedGroup
from sapo.peers.blocks import Blocked
from sapo.peers.group_rules import check_rules, check_size
from sapo.peers.pool import Entry, Pool, Verdict
from sapo.peers.resend_guard import ResendGuard
from sapo.peers.signing import unseal
from sapo.store.journal.rows import SeenGroup
from sapo.tasks.questions import drawn_by

PROVEN = frozenset(
    {"equivocation", "held_out", "key_reuse", "malformed", "not_drawn", "question_mismatch", "token_ids"}
)
"""Reasons that prove, by the author's own signature, that the author breaks the rules. Others do not: anybody
can resend an author's bytes, and a machine can fail. A `copy` is by `decide`."""
Fate = Literal["stays", "copy", "proven"]
"""A copy is refused; a `proven` one counts against its author, too."""


class Fates(NamedTuple):
    """Of two groups that say the same: of the arriving one, and of the one met before."""

    arrives: Fate
    met: Fate


Met = tuple[SeenGroup, Fates]
"""A known group that says what an arriving one says, and what becomes of both."""


@dataclass
class Admission:
    """What a node holds a peer's group against: the swarm's rules, its own key and name, its tokenizer, and
    what it has met before."""

    manifest: Manifest
    key: str
    """The node's own."""
    name: str
    pool: Pool
    """It names the age that is too old, and remembers what was in it."""
    has_control_tokens: Callable[[str], bool]
    """Whether a text spells a control token of the node's tokenizer."""
    has_false_ids: Callable[[Group], bool] = lambda group: False
    """Whether ids of the node's vocabulary do not decode to the text."""
    may_be_own: Callable[[Group, float], bool] = lambda group, timestamp: True
    """Whether the node may have made a group that its key has signed, stamped by the bus then."""
    streams: ResendGuard = field(default_factory=ResendGuard)
    lacking: Mapping[str, Missing] = field(default_factory=dict)
    """Sources of tasks that cannot be used here."""
    dropped: set[str] = field(default_factory=set)
    """Groups used or evicted before the node was opened: a resent copy must not come in again."""
    blocked: Mapping[str, Blocked] = field(default_factory=dict)
    """Authors who are left out, by key."""

    def let_in(self, received: Received, now: float) -> tuple[Entry, tuple[Refused, Received] | None]:
        """Put a group into the pool; its entry, and the refusal of a copy that came first (partitions may
        lag) and leaves the pool for it. Raises `Refused`, and changes nothing then, as `admit` does."""
        group, met = self.admit(received, now)
        copy = self._turn_out_copy(group, met)
        entry = Entry(received=received, group=group, received_at=now, verdict=Verdict.at_sight(group))
        self.streams.note(group, received.timestamp)
        self.pool.add(entry)
        return entry, copy

    def admit(self, received: Received, now: float) -> tuple[Group, Met | None]:
        """The group inside, and the known one that says the same and is the copy, if there is one. Raises
        `Refused` if the group does not pass the checks, in this order; changes nothing.

        `now` is compared with the bus's time stamp, never with the producer's clock. Codes, besides those of
        `sapo.peers.group_rules`, `sapo.peers.signing.unseal` and `ResendGuard.check`: `duplicate`, `blocked`,
        `own_echo`, `own_key` (signed with our key elsewhere), `equivocation` (a known id with another
        content), `own_name` (our name under another key), `stale`, `future`, `control_tokens`, `token_ids`
        (ids of our vocabulary that do not decode to the text), `copy` (content published before under another
        id), `unavailable`.
        """
        known = self._check_envelope(received.signed)
        group = unseal(received.signed)
        self._check_author(group, received.timestamp, known)
        check_rules(group, self.manifest, received.timestamp)
        if group.node == self.name:
            raise Refused("own_name", f"{group.key} calls itself {group.node}", group)
        self._check_age(group, now - received.timestamp)
        self._check_texts(group)
        found = self.said_before(group, received.timestamp)
        if found is not None and found[1].arrives != "stays":
            original, fates = found
            raise Refused("copy", f"says what {original.group_id} says", group, fates.arrives == "proven")
        if (dataset := group.recipe.dataset) in self.lacking:
            raise Refused("unavailable", f"{dataset}: {self.lacking[dataset].problem}", group)
        self.streams.check(group, received.timestamp)
        if group.group_id in self.pool:  # the memory of ids is bounded, and may have forgotten it
            raise Refused("duplicate", "it is in the pool", group)
        return group, found

    def said_before(self, group: Group, timestamp: float) -> Met | None:
        """The known group with the same content as one stamped by the bus at `timestamp`, and which is the
        copy."""
        met = self.pool.seen.alike(group)
        if met is None:
            return None
        entry = self.pool.get(met.group_id)
        rows = group.recipe.dataset.startswith(FILE)
        return met, decide(
            met_first=met.stamp is None or met.stamp <= timestamp,
            arrives_drawn=drawn_by(group),
            # equal answers to a row may be chance, which is no proof of a lie
            met_drawn=not rows and (met.stamp is None or (entry is not None and drawn_by(entry.group))),
            same_author=met.key == group.key,
        )

    def _check_envelope(self, signed: SignedGroup) -> SeenGroup | None:
        """What needs no signature; what was met before under this id."""
        if signed.group_id in self.dropped:
            raise Refused("duplicate")
        if signed.key in self.blocked:
            raise Refused("blocked")
        check_size(signed, self.manifest)
        known = self.pool.seen.get(signed.group_id) or self.pool.seen.get(signed.content_sha256)
        if known is not None and known.content_sha256 == signed.content_sha256:
            raise Refused("own_echo" if signed.key == self.key else "duplicate")
        return known

    def _check_author(self, group: Group, timestamp: float, known: SeenGroup | None) -> None:
        if group.key == self.key:
            if known is None and self.may_be_own(group, timestamp):
                raise Refused("own_echo")
            place = f"round {group.round} of incarnation {group.incarnation}"
            raise Refused("own_key", f"{place}, not made here", group)
        if known is not None:
            raise Refused("equivocation", f"{group.group_id} was {known.content_sha256} before", group)

    def _check_age(self, group: Group, age: float) -> None:
        most = self.pool.config.max_age_s
        if age > most:
            raise Refused("stale", f"{age:.0f} s old", group)
        if age < -most:
            raise Refused("future", f"stamped {-age:.0f} s from now", group)

    def _check_texts(self, group: Group) -> None:
        if any(self.has_control_tokens(completion.text) for completion in group.completions):
            raise Refused("control_tokens", "a completion spells one of our control tokens", group)
        if self.has_false_ids(group):
            raise Refused("token_ids", "ids of our vocabulary do not say what the text says", group)

    def _turn_out_copy(self, original: Group, found: Met | None) -> tuple[Refused, Received] | None:
        entry = self.pool.get(found[0].group_id) if found is not None else None
        if found is None or entry is None or found[1].met == "stays":
            return None
        self.pool.remove([entry.group_id])
        said = f"says what {original.group_id} says"
        return Refused("copy", said, entry.group, found[1].met == "proven"), entry.received


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
