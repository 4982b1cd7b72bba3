"""What peers may cost this node: who is known here, whose records are looked at, whose groups are verified.

An author is a *newcomer* until `pool.newcomer_groups` of their groups were verified here and found sound, and
informative: their answers differ in score. Whatever a peer costs is bounded by the shares of
`sapo.core.shares`: asked for before, charged after. For seconds of admission, of verification, and of what a
group costs more to learn from than an own one, the bound is what rounds earn, `pool.verify_share` of the
node's own work:

    seconds(newcomers) <= newcomer_share * earned + CREDIT_S + the last of their groups
    seconds(author)    <= max_peer_share * (earned - newcomers' part) + CREDIT_S + the last of its groups

What the newcomers' common account cannot hold, and all the rest, is dealt out evenly among known authors;
what one does not need flows to the others. So no other author's spending lowers a known author's account.
Every newcomer has an account besides, filled up only when it is empty: a slow one silences itself before the
others. Nothing is verified for an account in debt, and for each one group at a time: it may cost all it has.

An own group has at most `batch.completions` times `generate.max_new_tokens` tokens to learn from: the
*allowance*. A foreign completion may have `COMPLETION` times the tokens of an own one, and a foreign group
`GROUP` allowances (`beyond`). What an author's groups have more than the batch's own ones, in the mean, is
charged to it at what a token cost in that update (`excess`). Once anybody is known, newcomers pay for all
that theirs have (`pays_in_full`), and are learned from only while they have time to spare (`may_teach`).

A name that behaves becomes known, whoever is behind it: where that is too cheap, a swarm goes by invitation.
"""

import math
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sapo.bus.base import Limits
from sapo.core.config.load import Config, PoolConfig
from sapo.core.shares import Meter, Shares, by_turns, in_turns
from sapo.core.types import Batch, Received, sha256
from sapo.peers.pool import Entry, places_of
from sapo.peers.signing import verify
from sapo.store.journal.rows import PeerRow

MEMORY = 4096
"""Newcomers remembered, and as many known authors; those of whom nothing was verified longest go first."""
LOOKS = 48
"""Records looked at in a round per place in the pool: forgers of a known key may have sent most of them."""
PASSING = 4
"""So many records that do not stay in the pool take one of its places."""
CREDIT_S = 0.5
"""What an account begins with, and may hold in any case; whoever has some may go into debt for one group."""
CREDIT_ROUNDS = 3.0
"""How many rounds' worth an account may hold where that is more."""
RECENT = 50
"""Rounds for which an author who became known is counted as recent: work is cheap for a crowd of names."""
FLOOR_S = 0.02
"""What a round earns at least, in seconds: own work may be faster than any clock can tell."""
REPENTANCE = 8
"""So many times `pool.newcomer_groups` have to be found sound besides, to become known after a proven lie."""
COMPLETION, GROUP = 4, 4
ALWAYS = ("looked", "faults", "seconds", "seconds/newcomers")
"""Series that are there in each round, also at 0."""


@dataclass(slots=True)
class _Account:
    balance: float
    sound: int = 0
    turn: int = 0
    """When something of the author was verified last, counted in verifications."""
    since: int = 0
    """The round in which the author became known."""


class Quotas:
    """What this node knows of the authors of groups, from the journal's `rows` and this run.

    `trusted` keys are known from the start: the members of a swarm, and the node's own. Equal calls in equal
    order have equal results. Where not `timed`, known authors may always be verified, whatever it costs.
    """

    def __init__(
        self,
        config: PoolConfig,
        trusted: Collection[str] = (),
        rows: Iterable[PeerRow] = (),
        *,
        timed: bool = True,
    ) -> None:
        self.config = config
        self.shares = Shares(config.max_peer_share, config.newcomer_share, self.known, self.on_probation)
        self._timed = timed
        self._trusted = frozenset(trusted)
        self._common = _Account(CREDIT_S)
        self._known: OrderedDict[str, _Account] = OrderedDict()
        self._new: OrderedDict[str, _Account] = OrderedDict()
        for row in sorted(rows, key=lambda row: row.turn):
            account = _Account(row.balance_s, row.sound, row.turn, row.since)
            if not row.key:
                self._common = account
            else:
                (self._known if row.known else self._new)[row.key] = account
        self._turn = max((one.turn for one in (*self._known.values(), *self._new.values())), default=0)
        self._changed: dict[str, None] = {}
        self._gone: dict[str, None] = {}
        self._went: dict[str, float] = defaultdict(float)
        self._reach = 1
        self._round = 0

    def known(self, key: str) -> bool:
        """Whether an author has a share of their own."""
        return key in self._known or (key in self._trusted and key not in self._new)

    def on_probation(self, key: str) -> bool:
        """Whether an author is a newcomer of whom something was found sound: a step that each new name of a
        crowd has yet to make."""
        return key in self._new and self._new[key].sound > 0

    def recent(self, key: str) -> bool:
        """Whether an author is a newcomer, or was one less than `RECENT` rounds ago."""
        if not self.known(key):
            return True
        return key not in self._trusted and self._round - self._known[key].since < RECENT

    def pays_in_full(self, key: str) -> bool:
        """Whether an author is charged for all that an update takes for its groups: a newcomer, unless nobody
        is known yet."""
        return self._timed and bool(self._known) and not self.known(key)

    def may_teach(self, key: str) -> bool:
        """Whether an author's groups may be learned from: who pays in full leaves half a credit of newcomers'
        time for verification."""
        return not self.pays_in_full(key) or self._common.balance > CREDIT_S / 2

    def known_keys(self) -> frozenset[str]:
        """All who are known now."""
        return frozenset(self._known) | (self._trusted - self._new.keys())

    def limits(self, holds: Callable[[str], bool] = lambda key: False) -> Limits:
        """How much of the bus a round reads: as many groups as the pool has places, and more where the last
        poll had many forgeries for each good record. A record is proven by its signature, unless the node
        `holds` its very content: anybody can send that again."""
        return Limits(
            max_bytes=self.config.poll_bytes,
            max_groups=max(1, self._reach) * self.config.max_groups,
            tail=self.config.tail,
            shares=replace(self.shares, known=self.known_keys().__contains__),
            proven=lambda signed: (
                verify(signed.key, signed.signature, signed.payload) and not holds(sha256(signed.payload))
            ),
        )

    # --- before signatures are checked -----------------------------------------------------------------

    def screen(
        self,
        received: Sequence[Received],
        rng: random.Random,
        admit: Callable[[Received], Entry | None],
        waiting: Iterable[Entry] = (),
    ) -> tuple[list[Entry], list[Received]]:
        """Have `admit` look at a poll's records while their authors have room; what it gave, and the rest.

        `admit` checks the signature, charges what that cost, and returns None for what it refuses. Of records
        that have a verdict at sight `PASSING` take a place: they do not stay, but a crowd that teaches
        nothing would keep others out. Authors have room for as many admitted groups as they may hold in the
        pool, and for the looks they are charged for: who forges a known key takes looks of all, `LOOKS` per
        place. Where not all have room, records are looked at in turns, one per author and turn, in an order
        drawn from `rng`: neither a place on the bus nor the number of records is of use. Newcomers who are
        `on_probation` and others come by turns.

        Newcomers' groups that are `waiting` in the pool have their places, if they are verified or can be: no
        more are looked at than there is time for. Looks at newcomers end when half of their seconds are
        spent: the rest is for verification. A known author is looked at while it owes at most `CREDIT_S`.
        """
        places, looks = (Meter(self.shares, many * self.config.max_groups) for many in (PASSING, LOOKS))
        for held in waiting:
            key = held.group.key
            if not self.known(key) and (held.verdict is not None or self.may_verify(key)):
                places.take(key, PASSING * places_of(held.received))
        kept = max(0.0, self._common.balance / 2)
        came: list[Entry] = []
        no_room: list[Received] = []
        for one in self._order(received, rng):
            key, size = one.signed.key, PASSING * places_of(one)
            if not (self._may_look(key, kept) and places.fits(key, size) and looks.take(key)):
                no_room.append(one)
                continue
            charged, entry = self._turn, admit(one)
            if entry is not None:
                came.append(entry)
                places.take(key, size if entry.verdict is None else size // PASSING)
            elif self._turn == charged:
                looks.disown(key)
        looked = len(received) - len(no_room)
        self._reach = min(LOOKS, looked // max(1, len(came)))
        self._went["looked"] += looked
        return came, no_room

    def _may_look(self, key: str, kept: float) -> bool:
        """Whether an author's account allows one more look; newcomers have to leave `kept` seconds."""
        if not self._timed:
            return True
        if self.known(key):
            return self._balance(self._known, key) > -CREDIT_S
        return self._common.balance > kept and self._balance(self._new, key) > 0

    def _order(self, received: Sequence[Received], rng: random.Random) -> list[Received]:
        """The bus's order if there is room for all records; else known authors' in turns, then newcomers'."""
        room = Meter(self.shares, self.config.max_groups)
        if all(room.take(one.signed.key, places_of(one)) for one in received):
            return list(received)
        turns = in_turns(received, lambda one: one.signed.key, rng)
        known, on_probation, new = self.shares.divided(turns, lambda one: one.signed.key)
        return [*known, *by_turns(on_probation, new)]

    # --- verification time -----------------------------------------------------------------------------

    def earn(self, own_seconds: float, round: int = 0) -> None:
        """Credit a round's time for verification, of `own_seconds` of the node's own work; once a round."""
        config, self._round = self.config, round
        earned = max(FLOOR_S, config.verify_share * own_seconds)
        common = config.newcomer_share * earned
        bound = max(CREDIT_S, CREDIT_ROUNDS * common)
        before = self._common.balance
        self._common.balance = min(bound, before + common)
        paid = max(0.0, self._common.balance - before)
        self._changed[""] = None
        debtors = {key: one for key, one in self._new.items() if one.balance <= 0}
        self._deal(debtors, common, most=common, bound=config.max_peer_share * bound)
        rest = earned - paid
        most = config.max_peer_share * rest
        self._deal(self._known, rest, most=most, bound=max(CREDIT_S, CREDIT_ROUNDS * most))

    def _deal(self, accounts: Mapping[str, _Account], seconds: float, *, most: float, bound: float) -> None:
        """Deal out seconds evenly, to each at most `most` and up to `bound`; others get what one leaves."""
        needs = [
            (min(most, bound - one.balance), key) for key, one in accounts.items() if one.balance < bound
        ]
        for key in [key for key, one in accounts.items() if one.balance > bound]:
            accounts[key].balance = bound  # a clock that was set, a machine that slept: no credit for that
            self._changed[key] = None
        for place, (need, key) in enumerate(sorted(needs)):
            share = min(need, seconds / (len(needs) - place))
            accounts[key].balance += share
            seconds -= share
            self._changed[key] = None

    def may_verify(self, key: str, beside: Sequence[str] = ()) -> bool:
        """Whether the author's account covers one more group, while groups of the authors `beside` are being
        verified: of each, and of all newcomers, one at a time, since it may cost all that is left."""
        if self.known(key):
            return not self._timed or (self._balance(self._known, key) > 0 and key not in beside)
        covered = self._common.balance > 0 and self._balance(self._new, key) > 0
        return covered and all(self.known(other) for other in beside)

    def trials(self, want: int) -> int:
        """How many newcomers' groups are verified beside a draw of `want`, which known authors may fill."""
        return math.ceil(self.config.newcomer_share * want)

    def judged(self, key: str, seconds: float, sound: bool) -> None:
        """Charge what verifying a group cost. `sound`: its recipe gave its question; it is informative."""
        account = self.charge(key, seconds)
        account.sound += sound
        if sound and key in self._new and account.sound >= self.config.newcomer_groups:
            self._known[key] = self._new.pop(key)
            account.since = self._round
            self._forget(self._known)

    def charge(self, key: str, seconds: float) -> _Account:
        """Charge an author for seconds that say nothing of their groups: of reading them, or of learning from
        one that is larger than the node's own. Returns the account."""
        account = self._touched(key)
        account.balance -= seconds
        self._went["seconds"] += seconds
        if not self.known(key):
            self._common.balance -= seconds
            self._changed[""] = None
            self._went["seconds/newcomers"] += seconds
        return account

    def fault(self, key: str, code: str) -> None:
        """A proven lie of the key's owner, such as `equivocation`: they are a newcomer again, for long."""
        self._went["faults"] += 1
        self._went[f"faults/{code}"] += 1
        if not self.known(key) and key not in self._new:
            return  # nothing to lose, and not worth remembering
        account = self._touched(key)
        self._known.pop(key, None)
        self._new[key] = account
        account.sound = -REPENTANCE * self.config.newcomer_groups
        account.balance = min(account.balance, self._start)
        self._forget(self._new)

    # --- for the journal and the metrics ---------------------------------------------------------------

    def changed(self) -> list[PeerRow]:
        """Rows that are not as they were when this was last asked."""
        changed, self._changed = self._changed, {}
        return [self._row(key) for key in changed]

    def gone(self) -> list[str]:
        """Keys forgotten since this was last asked."""
        gone, self._gone = self._gone, {}
        return list(gone)

    def metrics(self) -> dict[str, float]:
        """The series `peers/*`: who is remembered, and what went on since this was last asked."""
        went, self._went = self._went, defaultdict(float)
        return {f"peers/{name}": went[name] for name in (*ALWAYS, *went)} | {
            "peers/known": float(len(self._known)),
            "peers/newcomers": float(len(self._new)),
            "peers/credit/newcomers": self._common.balance,
        }

    # --- inside ----------------------------------------------------------------------------------------

    @property
    def _start(self) -> float:
        """What a new author's account holds; a newcomer never gets more of the common account's than this."""
        return self.config.max_peer_share * CREDIT_S

    def _balance(self, accounts: Mapping[str, _Account], key: str) -> float:
        return accounts[key].balance if key in accounts else self._start

    def _touched(self, key: str) -> _Account:
        accounts = self._known if self.known(key) else self._new
        account = accounts.setdefault(key, _Account(self._start))
        self._gone.pop(key, None)
        self._turn += 1
        account.turn = self._turn
        accounts.move_to_end(key)
        self._changed[key] = None
        self._forget(accounts)
        return account

    def _forget(self, accounts: OrderedDict[str, _Account]) -> None:
        while len(accounts) > MEMORY:
            key, _ = accounts.popitem(last=False)
            self._changed.pop(key, None)
            self._gone[key] = None

    def _row(self, key: str) -> PeerRow:
        known = key in self._known
        account = (self._known if known else self._new)[key] if key else self._common
        return PeerRow(key, account.turn, account.sound, known, account.balance, account.since)


def beyond(config: Config, lengths: Sequence[int], prompt: int = 0) -> str | None:
    """Why a group whose completions have so many tokens is not learned from: one of them is `too_long`, or
    all together, each with `prompt` more, are `too_costly`. None where they are not."""
    own = config.generate.max_new_tokens
    if max(lengths) > COMPLETION * own:
        return "too_long"
    most = GROUP * config.batch.completions * (own + prompt)
    return "too_costly" if sum(lengths) + prompt * len(lengths) > most else None


def divide(
    seconds: float,
    batch: Batch,
    tokens: Mapping[int, int],
    looked: Mapping[int, float],
    in_full: Callable[[str], bool],
) -> tuple[float, dict[str, float]]:
    """Divide the seconds of an update by tokens, `tokens` those that groups have to learn from and `looked`
    those that were looked at in them, by position; returns what was own work, and the `excess` of each
    author, by key."""
    learned = {group.position: group for group in batch.groups if group.informative}
    token_s = seconds / max(1.0, sum(tokens[place] for place in learned) + sum(looked.values()))
    own = sum(
        tokens[place] + looked.get(place, 0.0) for place, group in learned.items() if group.source == "local"
    )
    return own * token_s, {
        key: more * token_s for key, more in excess(batch, tokens, looked, in_full).items()
    }


def excess(
    batch: Batch,
    tokens: Mapping[int, int],
    looked: Mapping[int, float],
    in_full: Callable[[str], bool],
) -> Counter[str]:
    """What foreign groups have above the mean of the batch's own ones, by author: of what they have to learn
    from, and of what was `looked` at in them. All of it is excess of an author who pays `in_full`."""
    own = [tokens[group.position] for group in batch.groups if group.source == "local"]
    usual = sum(own) / max(1, len(own))
    found: Counter[str] = Counter()
    for group in batch.groups:
        if group.source == "external" and group.informative:
            key, taken = group.producer_key, (tokens[group.position], looked.get(group.position, 0.0))
            free = 0.0 if in_full(key) else usual
            found[key] += sum(max(0, math.ceil(one - free)) for one in taken)
    return +found
