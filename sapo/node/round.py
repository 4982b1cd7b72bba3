"""One node: Algorithm 1 of arXiv:2509.08721 as five stages over a journal, in plain Python.

docs/house.md has the table of the paper's lines, and where each stage goes on.

Each stage can be entered again after a crash: what the journal holds is taken from there, the rest is done
once more. The journal takes a round in three transactions: groups, batch, result.
"""

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from sapo.core.errors import Paused
from sapo.core.rng import rng
from sapo.core.run_length import SPENT, over
from sapo.core.series import Sieve
from sapo.core.silence import ROUNDS
from sapo.core.types import Batch, Gossiped, Group, Outcome, Received, RoundResult, SignedGroup, canonical
from sapo.learn.advantage import informative
from sapo.learn.batch_metrics import reward_metrics, source_metrics
from sapo.learn.collate import costs
from sapo.learn.logprobs import shares_prompts
from sapo.learn.update import StepResult
from sapo.node.asked import Asked
from sapo.node.async_rollout import Ahead, Answered
from sapo.node.batch import batch_group, foreign_gaps, version_seen
from sapo.node.guard_alarms import GuardAlarms
from sapo.node.parts import NodeParts
from sapo.node.receive import Arrivals
from sapo.node.recovery import CHECKPOINT_TIME
from sapo.node.rollout import Completions, Request
from sapo.node.scoring import begin_scoring, score_groups
from sapo.node.silent_rounds import SilentRounds, series, texts_by_task
from sapo.node.taken_up import TakenUp
from sapo.node.verify import own_standards, tokens_of
from sapo.peers import sampling
from sapo.peers.keyring import keys_of
from sapo.peers.pool import Entry
from sapo.peers.quotas import divide
from sapo.peers.sampling import Draw
from sapo.policy.models import Digests
from sapo.policy.tokenise import Tokens
from sapo.provenance.reexecute import settle
from sapo.tasks.questions import QuestionStream

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""How often an update may die before it is made without what others wrote."""
STAGES = ("generate", "consume", "verify", "update", "gossip")
"""Whose seconds make a round's."""
ASKED_BEFORE = "share/asked_before"
TOO_LONG = "share/too_long"
UPDATING = "updating"
"""File in a node's folder while an update is made: the round, and how often its update has died."""


@dataclass
class _Round:
    """What the stages of the round in hand pass on; all of it can be made again from the journal."""

    groups: list[Group] = field(default_factory=list)
    prompts: Sequence[tuple[int, ...]] = ()
    """Ids of the groups' questions, where they were asked in this process."""
    signed: list[SignedGroup] = field(default_factory=list)
    """The same groups as they are journalled, once they are published."""
    outcomes: list[tuple[Outcome, ...]] | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    order: Sequence[Entry] | None = None
    """The pool in the order in which it is walked, once it is drawn."""
    local: Sequence[int] = ()
    """Places of the own groups that enter the batch."""
    tokens: Sequence[Tokens] = ()
    """Theirs, in that order."""
    draw: Draw | None = None
    batch: Batch | None = None
    """Once it is journalled."""
    metrics: dict[str, float] = field(default_factory=dict)


class NodeRuntime:
    """A node's model, journal and round. Open it with `NodeRuntime.open`; use it as a context manager."""

    def __init__(self, parts: NodeParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.name = parts.name
        self.journal = parts.journal
        self.deliverer = parts.deliverer
        self.round = parts.recovery.recover()
        if parts.gossip is None:
            parts.learner.outer = None  # of rounds that gossiped; it begins anew if they do so again
        self._asked = Asked(parts.home.asked(self.name), self.round)
        self._ahead = Ahead(parts.rollouts)
        self._figures = Sieve(self.name)
        recent = self.journal.results(self.round - ROUNDS)
        self._ends = deque((result.finished_at for result in recent), ROUNDS)
        self._alarms = GuardAlarms(self.name)
        self._silent = SilentRounds(self.config, self.name, [result.metrics for result in recent])
        self._taken_up = TakenUp(parts.home, self.name, parts.intake.admission.key, self.journal.incarnation)
        self._own_update_s: float | None = None
        """Seconds of the own part of the last update, where it was made in this process."""
        self._next: QuestionStream | None = None
        """Of the next round's questions, begun beside an update."""
        self.batch: Batch | None = None
        """That of the newest update."""
        self.beside: Callable[[], Mapping[str, float]] = dict
        """More series for every round, of what goes on around the node."""
        self._now = _Round()
        self._last: Mapping[str, float] = recent[-1].metrics if recent else {}
        self._since = parts.clock()  # when the last round ended, or this process began
        if recent and parts.freshness is not None:
            parts.freshness.load(recent[-1].remembered)
        self._load_round()

    @classmethod
    def open(cls, parts: NodeParts) -> Self:
        """Take up the parts of `open_parts` and catch up with the journal; they are closed if that fails."""
        try:
            return cls(parts)
        except BaseException:
            parts.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            unseen = self._ahead.end()
        finally:
            self.parts.close()
        if unseen is not None and error is None:
            raise unseen
        if unseen is not None:
            log.error("%s: sampling ahead failed too", self.name, exc_info=unseen)

    @property
    def finished(self) -> bool:
        return over(self.config, self.round, self._last)

    def run_round(self) -> RoundResult:
        self.generate()
        self.publish()
        self.consume_sample()
        self.verify()
        return self.grpo_update()

    # -- 1. SampleBatch and generation -------------------------------------------------------------------

    def generate(self) -> tuple[str, ...]:
        """Answer B fresh questions L times each; returns the groups' ids."""
        now, parts = self._now, self.parts
        parts.check()
        started = parts.clock()
        if not now.groups:
            ahead = self._ahead.take()  # before the probe, which uses the same engine
            waited = parts.clock() - started
            now.metrics |= parts.prober.probe(self.round)
            if self.round in parts.prober.kept_rounds():
                parts.recovery.take(self.round, last=False)
            started = parts.clock() - waited
            now.groups = self._new_groups(ahead)
            begin_scoring(parts.workers, now.groups)
        now.metrics["tokens/generated"] = float(sum(map(tokens_of, now.groups)))
        if ASKED_BEFORE not in now.metrics:
            now.metrics[ASKED_BEFORE] = self._asked.share_before(self.round, now.groups)
        now.metrics["time/generate"] = parts.clock() - started
        if self.config.generate.ahead:
            now.metrics["staleness/own_rounds"] = float(self.round - now.groups[0].policy_version)
        return tuple(group.group_id for group in now.groups)

    def _new_groups(self, ahead: Answered | None) -> list[Group]:
        parts = self.parts
        if ahead is not None:
            self._now.metrics["time/generate_ahead"] = ahead.seconds
            return self._groups_of(ahead.request, ahead.completions)
        begun, self._next = self._next, None
        if begun is not None and begun.round != self.round:
            begun = None
        asked = parts.rollouts.request(self.round, self.round, begun)
        return self._groups_of(asked, parts.rollouts.answer(asked))

    def _groups_of(self, asked: Request, answers: Completions) -> list[Group]:
        self._now.prompts = asked.prompts
        self._now.metrics[TOO_LONG] = float(asked.too_long)
        return self.parts.rollouts.groups(asked, answers)

    # -- 2. SelectSubset, Communicate --------------------------------------------------------------------

    def publish(self) -> None:
        """Select what peers get, sign and journal the groups (transaction 1), and wake the deliverer. The
        deliverer (`store.journal.outbox`) sends what is owed to the bus beside the round."""
        now, parts, started = self._now, self.parts, self.parts.clock()
        if not now.signed:
            now.groups, now.signed, withheld = parts.maker.publish(self.round, now.groups)
            now.metrics["share/withheld"] = float(withheld)
            for group, signed in zip(now.groups, now.signed, strict=True):
                parts.intake.pool.seen.add(group, signed.content_sha256)
            now.metrics["time/generate"] += parts.clock() - started
        parts.deliverer.notify()

    # -- 3. SampleExternal: what may be drawn, in which order ---------------------------------------------

    def consume_sample(self, past_the_bus: Sequence[Received] = ()) -> int:
        """Read the bus, admit what may enter the pool, draw the order in which it is walked; returns the
        pool's size. An experiment's controls give groups `past_the_bus` and admission."""
        now, parts, pool = self._now, self.parts, self.parts.intake.pool
        parts.check()
        started = parts.clock()
        if now.batch is None and now.order is None:
            if self.config.batch.external > 0 or parts.gossip is not None:
                now.arrivals = parts.intake.receive(self._private_rng("poll"))
                now.metrics |= now.arrivals.metrics
            if past_the_bus:
                parts.intake.take_in(past_the_bus, now.arrivals)
            now.order = sampling.walk(
                pool.entries(), self._private_rng("external"), parts.intake.quotas.known, parts.sampler
            )
        now.metrics["time/consume"] = parts.clock() - started
        return len(pool)

    def ask(self, questions: QuestionStream) -> None:
        """Use these questions in the next round instead of drawing new ones."""
        self._next = questions

    # -- 4. SampleSelf, verification, zero-advantage filter -------------------------------------------------

    def verify(self) -> int:
        """Score own groups, and verify foreign ones along the walk until J of them are informative. Returns
        the number of groups that the round learns from."""
        now, parts, started = self._now, self.parts, self.parts.clock()
        if now.batch is None and now.draw is None:
            assert now.order is not None
            quotas, pool = parts.intake.quotas, parts.intake.pool
            external, tolerance = self.config.batch.external, self.config.learn.zero_tolerance
            want = external if parts.freshness is None else 2 * external  # a choice, at a bounded cost
            now.local = self._sample_self()
            now.tokens = self._tokens(now.local)  # while the workers score
            if now.outcomes is None:
                now.outcomes = score_groups(parts.workers, now.groups)
            standards = own_standards(now.groups, now.outcomes)
            quotas.earn(self._own_seconds(parts.clock() - started), self.round)
            scores = [[outcome.score for outcome in row] for row in now.outcomes]
            now.draw = sampling.sample_external(
                now.order,
                want,
                lambda some: parts.verifier.verified(some, standards),
                tolerance=tolerance,
                share=sampling.informative_share(scores, tolerance),
                ready=lambda entry, beside: quotas.may_verify(
                    entry.group.key, [other.group.key for other in beside]
                ),
                known=quotas.known,
                trials=quotas.trials(want),
            )
            if parts.freshness is not None:
                now.draw = parts.freshness.choose(now.draw, external, self._private_rng("choose"))
            pool.keep(now.draw.verified)
            pool.remove(now.draw.leaving)
        now.metrics["time/verify"] = parts.clock() - started
        if now.batch is not None:
            return len(now.batch.groups)
        assert now.draw is not None
        return len(now.local) + len(now.draw.chosen)

    def _sample_self(self) -> list[int]:
        """Places of the own groups that enter the batch; their scores are waited for only if they decide."""
        now, useful = self._now, None
        if self.config.batch.choose == "informative":
            now.outcomes = score_groups(self.parts.workers, now.groups)
            tolerance = self.config.learn.zero_tolerance
            useful = [informative([outcome.score for outcome in row], tolerance) for row in now.outcomes]
        return sampling.sample_self(len(now.groups), self.config.batch.local, self._rng("self"), useful)

    def _settle(self, batch: Batch, looked: Mapping[int, float], seconds: float) -> None:
        """Take down what of an update's seconds was own work, and charge authors what it took beyond that."""
        tokens = costs(batch, self.config.learn, shared=shares_prompts(self.parts.policy.model))
        quotas = self.parts.intake.quotas
        self._own_update_s, charges = divide(seconds, batch, tokens, looked, quotas.pays_in_full)
        for key, more in charges.items():
            quotas.charge(key, more)

    def _own_seconds(self, scoring: float) -> float:
        """Seconds of the node's own work since the draw before: the own part of the last update, generation,
        `scoring`. What others made it take earns them nothing."""
        if self._own_update_s is None:
            own = 1.0 - self._last.get("learn/token_share_external", 0.0)
            self._own_update_s = own * self._last.get("time/update", 0.0)
        return self._own_update_s + self._now.metrics["time/generate"] + scoring

    def _commit_batch(self) -> Batch:
        """Make the batch, with its advantages, and journal it (transaction 2). What came and went within this
        round is remembered too, so that it stays away."""
        now, parts, pool = self._now, self.parts, self.parts.intake.pool
        assert now.draw is not None
        batch = self._make_batch(now.draw.chosen)
        if now.draw.chosen:
            recent = sum(parts.intake.quotas.recent(entry.group.key) for entry in now.draw.chosen)
            now.metrics["share/external_recent"] = recent / len(now.draw.chosen)
        now.metrics |= parts.intake.refusals.metrics() | parts.intake.quotas.metrics()
        held = self.journal.pool_ids() | {row.group_id for row in now.arrivals.rows}
        self.journal.commit_batch(
            batch,
            positions=now.arrivals.positions or self.journal.positions(),
            pool_added=now.arrivals.rows,
            pool_removed=held - {entry.group_id for entry in pool.entries()},
            verdicts={
                entry.group_id: entry.verdict.canonical() for entry in now.draw.verified if entry.verdict
            },
            rejected={
                group_id: "uninformative" if reason in ("uninformative", "substandard") else "unscorable"
                for group_id, reason in (now.arrivals.useless | now.draw.rejected).items()
            },
            heard=parts.intake.heard(zip(now.groups, now.signed, strict=True), now.arrivals),
        )
        now.metrics |= now.draw.metrics()
        return batch

    def _own(self, batch: Batch) -> dict[str, float]:
        now = self._now
        if now.outcomes is None:  # the batch was journalled before a restart
            now.outcomes = score_groups(self.parts.workers, now.groups)
        found = series(self.config, batch, now.groups, now.outcomes)
        return found | self.parts.traits.shares(texts_by_task(now.groups))

    def _tokens(self, local: Sequence[int]) -> list[Tokens]:
        now, known = self._now, self._now.prompts
        return [Tokens.of(self.parts.policy, now.groups[i], known[i] if known else None) for i in local]

    def _make_batch(self, drawn: Sequence[Entry]) -> Batch:
        parts, now = self.parts, self._now
        assert now.outcomes is not None
        moment = parts.clock()
        groups = [
            batch_group(
                parts.policy,
                self.config.learn,
                now.groups[i],
                now.signed[i],
                now.outcomes[i],
                source="local",
                position=position,
                age_s=0.0,
                tokens=now.tokens[position],
            )
            for position, i in enumerate(now.local)
        ]
        trusted = keys_of(self.config.learn.trusted_peers, parts.home)
        for entry in drawn:
            assert entry.verdict is not None
            stamp, ahead = entry.received.timestamp, self.config.learn.foreign_late
            version = version_seen(entry.group, stamp, self.round, self._ends, ahead)
            groups.append(
                batch_group(
                    parts.policy,
                    self.config.learn,
                    entry.group.model_copy(update={"policy_version": version}),
                    entry.received.signed,
                    entry.verdict.outcomes,
                    source="external",
                    position=len(groups),
                    age_s=moment - stamp,
                    bus_position=entry.received.bus_position,
                    tokens=entry.tokens,
                    believed=entry.group.key in trusted,
                )
            )
        return Batch(
            swarm=self.config.swarm.name,
            node=self.name,
            incarnation=self.journal.incarnation,
            round=self.round,
            policy_version=self.round,
            learn=canonical(self.config.learn.model_dump(mode="json")),
            guard=canonical(self.config.guard.model_dump(mode="json")),
            temperature=self.config.generate.temperature,
            groups=tuple(groups),
        )

    # -- 5. PolicyGradient -------------------------------------------------------------------------------

    def grpo_update(self) -> RoundResult:
        """Make the batch with its advantages, take one optimiser step on it, and journal the result.

        Takes a checkpoint when one is due. Raises `Paused` after the round is journalled when a guard with
        action `pause` was set off.
        """
        now, parts = self._now, self.parts
        if now.batch is None:
            began = parts.clock()
            now.batch = self._commit_batch()
            now.metrics["time/verify"] += parts.clock() - began
        now.metrics |= reward_metrics(now.batch.groups) | self._own(now.batch)
        last = self.round + 1 >= self.config.swarm.rounds
        if not last:
            self._begin_next()
        if parts.gossip is not None:
            parts.gossip.begin(now.batch)
        started = parts.clock()
        step = self._update(now.batch)
        fall = parts.prober.fall(self.round)
        alarm = step.alarm or (fall.alarm if fall is not None else None)
        target = None
        if alarm and self.config.guard.action == "rollback":
            target = parts.recovery.roll_back(None if step.alarm or fall is None else fall.best)
            parts.prober.went_back(self.round + 1, target)
            self._ahead.drop()  # samples of weights that were given up are useless
        gossiped = self._gossip(now.batch, went_back=target is not None)
        finished = parts.clock()
        self._count_time(started, finished)
        self._settle(now.batch, step.looked, now.metrics["time/update"])
        last = over(self.config, self.round + 1, now.metrics)
        checkpoint = parts.recovery.due(self.round + 1, finished, last=last)
        digests = self._digests(checkpoint)
        if self._next is not None:
            self._next.advance()
        now.metrics |= step.metrics | source_metrics(now.batch)
        now.metrics |= self._surroundings()
        if parts.freshness is not None:
            parts.freshness.learned(foreign_gaps(now.batch, step), finished)
        digest, tensors = digests.result() if digests is not None else ("", ())
        result = RoundResult(
            round=self.round,
            policy_version=self.round + 1,
            skipped=step.skipped,
            rolled_back_to=target,
            weights_sha256=digest,
            tensors=tensors,
            metrics=self._figures.kept(now.metrics),
            finished_at=finished,
            remembered="" if parts.freshness is None else parts.freshness.remembered(),
            gossip=gossiped,
        )
        self.journal.commit_result(result)
        self._silent.hear(result.metrics)
        self._taken_up.hear(now.groups, now.batch)
        self._ends.append(finished)
        self._last, self._since = result.metrics, finished
        self.round += 1
        self.batch, self._now = now.batch, _Round()
        if checkpoint:
            parts.recovery.take(self.round, last=last, weights_sha256=digest)
            self._now.metrics[CHECKPOINT_TIME] = parts.recovery.last_s
        parts.deliverer.notify()
        self._alarms.hear(result.round, alarm)
        if alarm and self.config.guard.action == "pause":
            raise Paused(f"{self.name} paused after round {result.round}: {alarm}")
        return result

    def _count_time(self, started: float, finished: float) -> None:
        found = self._now.metrics
        found["time/update"] = finished - started - found.get("time/gossip", 0.0)
        found["time/round"] = sum(found.get(f"time/{stage}", 0.0) for stage in STAGES)
        lasted = max(0.0, finished - self._since)  # a clock may be set back
        found[SPENT] = self._last.get(SPENT, 0.0) + lasted
        if found["time/round"] > 0 and "tokens/generated" in found:
            found["tokens/per_second"] = found["tokens/generated"] / found["time/round"]

    def _gossip(self, batch: Batch, *, went_back: bool) -> Gossiped | None:
        gossip, now, started = self.parts.gossip, self._now, self.parts.clock()
        if gossip is None:
            return None
        done = gossip.end(batch, self._private_rng("gossip"), went_back=went_back)
        now.metrics |= gossip.metrics()
        if done is not None:
            now.metrics["time/gossip"] = self.parts.clock() - started
        return done

    def _update(self, batch: Batch) -> StepResult:
        """The learner's step, without what others wrote if it died `ATTEMPTS` times with it. It may be too
        much for this machine, and would be so at every start."""
        mark, died = self.parts.home.node(self.name) / UPDATING, 0
        if mark.exists():
            round, _, times = mark.read_text().partition(" ")
            died = int(times) + 1 if round == str(self.round) else 0
        if died >= ATTEMPTS:
            batch = self._now.batch = self._own_part(batch, died)
        settle(self.parts.learner, batch)  # it may have been recorded under the config before this one
        mark.write_text(f"{self.round} {died}")
        step = self.parts.learner.step(batch)
        mark.unlink()
        return step

    def _own_part(self, batch: Batch, died: int) -> Batch:
        foreign = [group for group in batch.groups if group.source == "external"]
        if not foreign:
            return batch
        log.warning(
            "%s: round %d: the update did not end %d times; it goes without its %d foreign groups, by %s",
            *(self.name, self.round, died, len(foreign)),
            ", ".join(sorted({group.producer_key for group in foreign})),
        )
        own = tuple(group for group in batch.groups if group.source == "local")
        batch = batch.model_copy(update={"groups": own})
        self.journal.replace_batch(batch)
        return batch

    def _begin_next(self) -> None:
        """Begin to draw the next round's questions, or to answer them too, from the weights before this one's
        update, where that is configured and no outer step moves them further."""
        jumps = self.parts.gossip is not None and self.parts.gossip.ends(self.round)
        if jumps or not self.config.generate.ahead:
            self._next = self.parts.maker.question_stream(self.round + 1)
            self._next.begin()
            return
        now, started = self._now, self.parts.clock()
        self._ahead.begin(self.round + 1, self.round)
        spent = self.parts.clock() - started
        now.metrics["time/generate"] = now.metrics.get("time/generate", 0.0) + spent

    def _digests(self, checkpoint: bool) -> Digests | None:
        if not checkpoint and (self.round + 1) % self.config.checkpoint.weight_digest_every:
            return None
        return Digests(self.parts.policy.model)

    # -- around the round --------------------------------------------------------------------------------

    def _load_round(self) -> None:
        stage = self.journal.stage()
        if stage is None or stage[0] != self.round:
            return
        self._now.signed = list(self.journal.groups(self.round))
        self._now.groups = [Group.model_validate_json(signed.payload) for signed in self._now.signed]
        for group, signed in zip(self._now.groups, self._now.signed, strict=True):
            self.parts.intake.pool.seen.add(group, signed.content_sha256)
        if stage[1] == "batch":
            self._now.batch = self.journal.batch(self.round)

    def _rng(self, stage: str) -> random.Random:
        return rng(self.config.swarm.seed, self.journal.incarnation, self.round, stage)

    def _private_rng(self, stage: str) -> random.Random:
        """Randomness that peers cannot compute; a round that is begun again has the same."""
        secret = self.parts.maker.own.identity.secret(stage)
        return rng(self.config.swarm.seed, self.journal.incarnation, self.round, stage, secret)

    def outages(self) -> dict[str, float]:
        """The series `outage/*`: 1 for every service that is away now."""
        away = self.deliverer.away() | ({"bus"} if self.parts.intake.outage.away else set())
        return {f"outage/{service}": 1.0 for service in sorted(away)}

    def _surroundings(self) -> dict[str, float]:
        """The series `outage/*`, `owed/*` and `adaptive/*`, and what `beside` adds."""
        owed = {f"owed/{kind}": float(count) for kind, count in self.journal.owed_counts().items()}
        freshness = self.parts.freshness
        drawn = {} if freshness is None else freshness.metrics()
        return self.outages() | owed | drawn | dict(self.beside())

    def drain(self, timeout: float) -> bool:
        """Deliver what is owed, within `timeout` seconds; whether nothing is owed any more."""
        return self.deliverer.drain(timeout)

    def close(self) -> None:
        """Stop the deliverer and the workers, release the lock. What is owed stays in the journal.

        Raises the error of sampling ahead if it was not raised before.
        """
        self.__exit__(None, None, None)
