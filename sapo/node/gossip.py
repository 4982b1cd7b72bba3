"""Gossip: every so many rounds a node averages its weights with those of one other (docs/gossip.md).

In the round before an outer step a node offers slow weights and pseudo-gradient: a file in its folder, which
the deliverer puts into the store and announces. In the round of the step it draws one of those who announced
something since its last one, fetches that file, and averages; whatever is wrong with it, the step is made
alone. Nothing is waited for. The arithmetic is in `sapo.learn.gossip`.
"""

import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sapo.bus.base import Bus
from sapo.core.atomic_file import sync_directory, whole_file
from sapo.core.config.home import Home
from sapo.core.errors import SapoError, Unavailable
from sapo.core.types import Batch, Gossiped, Received, RoundResult
from sapo.learn.gossip import Partner, SlowWeights
from sapo.learn.update import Learner
from sapo.node.author import Author
from sapo.peers import blocks
from sapo.peers.announcements import Announcement, Heard, Partners, announce
from sapo.peers.keyring import keys_of
from sapo.policy import exchange
from sapo.policy.exchange import Unusable, checked
from sapo.policy.kept_files import SUFFIX, KeptFiles
from sapo.policy.models import LoadedPolicy
from sapo.store.file_store import FileStore, NotFetched
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import OutboxItem

log = logging.getLogger(__name__)

OFFERED = 2
"""Own files that stay in the node's folder: the deliverer may be at the one before the newest."""


@dataclass(frozen=True)
class _Found:
    """A partner's file that is averaged with, how far its weights are, and how much of the difference
    counts."""

    announcement: Announcement
    pair: Partner
    distance: float
    share: float


class _Alone(SapoError):
    """Why an outer step is made without a partner; `code` is counted."""

    def __init__(self, code: str, detail: str, who: str = "") -> None:
        self.code, self.who = code, who
        super().__init__(detail)


class Gossip:
    """A node's part in it. Called by whoever runs the round."""

    def __init__(
        self,
        author: Author,
        home: Home,
        policy: LoadedPolicy,
        learner: Learner,
    ) -> None:
        config = author.config.gossiping
        assert config is not None
        self.config, self.author, self.learner = config, author, learner
        self.model = exchange.fingerprint(policy)
        self.store = FileStore(config.store or str(home.gossip_store))
        self.kept = KeptFiles(home.gossip(author.name))
        self.offered = self.kept.folder / "offered"
        """Where the node's own files wait for the deliverer."""
        self._home, self._journal, self._shapes = home, author.journal, exchange.trained(policy)
        known = [Heard.of(content) for content in author.journal.announced().values()]
        swarm, age = author.manifest.swarm, author.config.pool.max_age_s
        self._partners = Partners(swarm, author.identity.key, self.model, age, known)
        self._metrics: dict[str, float] = {}
        self._said: set[tuple[str, str]] = set()
        self._begun: int | None = None
        for leftover in self.kept.folder.glob("**/.*.tmp"):
            leftover.unlink()

    # -- what others announce ----------------------------------------------------------------------------

    def hear(self, records: Sequence[Received], rng: random.Random) -> None:
        """Take what members announced, in the round in hand."""
        round = self._journal.finished_rounds()
        for refused in self._partners.hear(records, self._members(), round, rng):
            self._count(f"gossip/refused/{refused.code}")

    def changed(self) -> dict[str, str]:
        """What the journal is to remember of it, with the batch of the round."""
        return self._partners.changed()

    def _members(self) -> frozenset[str]:
        left_out = blocks.read(self._home.blocked(self.author.name))
        return keys_of(self.config.members, self._home) - {self.author.identity.key} - left_out.keys()

    # -- a round -----------------------------------------------------------------------------------------

    def ends(self, round: int) -> bool:
        """Whether an outer step ends a round."""
        return (round + 1) % self.config.every == 0

    def begin(self, batch: Batch) -> None:
        """Before an update: begin the slow weights where there are none. A round without groups is not in the
        history, so it neither begins nor ends anything here."""
        if self.learner.outer is None and batch.groups:
            self.learner.begin_outer()
            self._begun = batch.round

    def end(self, batch: Batch, rng: random.Random, *, went_back: bool) -> Gossiped | None:
        """After an update: offer weights, or make the outer step, where that is due; None where nothing was.

        A round that `went_back` to older weights is not ended by a step: they are what a guard chose.
        """
        round, outer = batch.round, self.learner.outer
        done = Gossiped(begun=self._begun == round)
        if outer is not None and batch.groups:
            if self.ends(round) and not went_back:
                done = self._step(round, outer, done, rng)
            elif self.ends(round + 1):
                done = self._offer(round, outer, done)
        return None if done == Gossiped() else done

    def metrics(self) -> dict[str, float]:
        """The series `gossip/*` since this was last asked."""
        found, self._metrics = self._metrics, {}
        return found

    def _offer(self, round: int, outer: SlowWeights, done: Gossiped) -> Gossiped:
        folder = self.offered
        about: dict[str, str | int] = {"key": self.author.identity.key, "round": round}
        about["incarnation"] = self.author.incarnation
        weights = self.learner.weights()
        if not all(bool(one.isfinite().all()) for one in weights):
            return done
        digest = exchange.write(folder, about, outer.offered(weights))
        sync_directory(folder)
        files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        for old in files[:-OFFERED]:
            old.unlink()
        size = (folder / f"{digest}{SUFFIX}").stat().st_size
        self._metrics["gossip/bytes_out"] = float(size)
        return done.model_copy(update={"offered": digest, "offered_bytes": size})

    def _step(self, round: int, outer: SlowWeights, done: Gossiped, rng: random.Random) -> Gossiped:
        config, weights = self.config, self.learner.weights()
        found, reason = None, None
        try:
            found = self._find(round, outer, rng)
        except _Alone as alone:
            reason = alone.code
            self._count(f"gossip/alone/{reason}")
            self._say(alone)
        factors = {"alpha": config.alpha, "beta": config.beta, "gamma": config.gamma}
        partner, share = (None, 1.0) if found is None else (found.pair, found.share)
        outer.step(weights, **factors, partner=partner, share=share)
        self._metrics["gossip/jump"] = self.learner.land()
        self._metrics |= {"gossip/steps": 1.0, "gossip/partners": float(found is not None)}
        said = {"stepped": True, "reason": reason, **factors}
        if found is not None:
            said |= {"partner": found.announcement.key, "file": found.announcement.file}
            said |= {"distance": found.distance, "share": found.share if found.share < 1.0 else None}
        return done.model_copy(update=said)

    def _find(self, round: int, outer: SlowWeights, rng: random.Random) -> _Found:
        members = self._members()
        fresh = self._partners.fresh(members, since=round + 1 - self.config.every)
        self._metrics["gossip/candidates"] = float(len(fresh))
        chosen = rng.choice(fresh) if fresh else None
        if chosen is None and self._partners.fresh(members, since=0):
            raise _Alone("stale", "nobody announced weights since the last outer step")
        if chosen is None:
            raise _Alone("nobody", "no member has announced weights")
        path = self.kept.path(round, chosen.file)
        try:
            self._fetch(chosen, path)
            pair = checked(path, chosen.file, self._shapes, chosen.about())
            return _Found(chosen, pair, *self._distance(outer, pair))
        except (NotFetched, Unusable) as error:
            path.unlink(missing_ok=True)
            raise _Alone(error.code, str(error), chosen.node) from None
        except Unavailable as error:
            raise _Alone("store_away", str(error), chosen.node) from None

    def _fetch(self, chosen: Announcement, path: Path) -> None:
        """Have the file in the node's folder, for good; it may be there since before a crash."""
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        limit, until = exchange.size_limit(self._shapes), time.monotonic() + self.config.fetch_s
        with whole_file(path) as new:
            digest = self.store.fetch(chosen.name, new, limit=limit, late=lambda: time.monotonic() > until)
            self._metrics["gossip/bytes_in"] = float(new.stat().st_size)
            if digest != chosen.file:
                raise Unusable("bad_digest", "its bytes are not those that were announced")

    def _distance(self, outer: SlowWeights, pair: Partner) -> tuple[float, float]:
        """How far away it is, and how much of that counts."""
        found, factor = outer.distance(self.learner.weights(), pair), self.config.max_norm
        reach, limit = outer.reach(found.own, factor), outer.limit(found.own, factor)
        if math.isfinite(found.partner):
            self._metrics |= {"gossip/distance": found.partner, "gossip/reach": reach}
        if not found.partner <= limit:
            raise Unusable("too_far", f"it is {found.partner:.4g} away, more than {limit:.4g}")
        return found.partner, reach / max(reach, found.partner) if reach else 1.0

    def _count(self, name: str) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + 1.0

    def _say(self, alone: _Alone) -> None:
        """Say it once of each partner and reason; a node that begins has nobody yet."""
        if (alone.who, alone.code) not in self._said and alone.code != "nobody":
            self._said.add((alone.who, alone.code))
            who = f" {alone.who}:" if alone.who else ""
            log.warning(
                "%s: an outer step was made alone (%s):%s %s", self.author.name, alone.code, who, alone
            )


class AnnounceSink:
    """Puts offered weights into the store, then announces them on the bus; twice does no harm. Only the
    newest of those owed is of use: what came before it is passed over."""

    kind = "gossip"

    def __init__(self, gossip: Gossip, bus: Bus) -> None:
        self._gossip, self._bus = gossip, bus

    def deliver(self, items: Sequence[OutboxItem], journal: Journal) -> None:
        """Deliver what `items` name. Raises `Unavailable` when store or bus are away."""
        result = journal.result(items[-1].round)
        path = self._gossip.offered / f"{items[-1].ref}{SUFFIX}"
        if result.gossip is None or not path.exists():
            return  # newer ones have come, or the node was moved without it
        announcement = self._announcement(result, result.gossip)
        self._gossip.store.put(path, announcement.name)
        self._bus.publish([announce(announcement, self._gossip.author.identity)])

    def _announcement(self, result: RoundResult, gossiped: Gossiped) -> Announcement:
        author = self._gossip.author
        assert gossiped.offered is not None
        return Announcement(
            bytes=gossiped.offered_bytes,
            created_at=result.finished_at,
            file=gossiped.offered,
            incarnation=author.incarnation,
            key=author.identity.key,
            model=self._gossip.model,
            node=author.name,
            round=result.round,
            swarm=author.manifest.swarm,
        )
