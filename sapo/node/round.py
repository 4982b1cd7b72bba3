"""One node: Algorithm 1 of arXiv:2509.08721 as five stages over a journal, in plain Python.

generate -> publish -> consume_sample -> verify -> grpo_update. Each stage can be entered again after a
crash: what the journal holds is taken from there, the rest is done once more.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from sapo.core.errors import Paused
from sapo.core.rng import rng
from sapo.core.types import Batch, Group, Outcome, Received, RoundResult, SignedGroup, canonical
from sapo.learn.advantage import informative
from sapo.learn.batch_metrics import reward_metrics, source_metrics
from sapo.learn.update import StepResult
from sapo.node import rollout
from sapo.node.async_rollout import Ahead, Answered
from sapo.node.batch import batch_group, begin_scoring, score_groups
from sapo.node.parts import NodeParts, open_parts
from sapo.node.receive import Arrivals, own_standards, receive, take_in, verdicts
from sapo.node.recovery import CHECKPOINT_TIME, checkpoint_due, recover, roll_back, take_checkpoint
from sapo.peers import sampling
from sapo.peers.allowance import excess
from sapo.peers.pool import Entry
from sapo.peers.signing import seal
from sapo.peers.trust import believes
from sapo.policy.tokenise import Tokens
from sapo.policy.weights_hash import Digests
from sapo.store.journal.rows import Heard
from sapo.tasks.questions import Drawing

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""How often an update may die before it is made without what others wrote."""
UPDATING = "updating"
"""File in a node's folder while an update is made: the round, and how often its update has died."""


@dataclass
class _Round:
    """What the stages of the round in hand tell each other; all of it can be made again from the journal."""

    groups: list[Group] = field(default_factory=list)
    prompts: Sequence[tuple[int, ...]] = ()
    """Ids of the groups' questions, where they were asked in this process."""
    signed: list[SignedGroup] = field(default_factory=list)
    outcomes: list[tuple[Outcome, ...]] | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    batch: Batch | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class NodeRuntime:
    """A node's model, journal and round. Open it with `NodeRuntime.open`; use it as a context manager."""

    def __init__(self, parts: NodeParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.name = parts.name
        self.journal = parts.journal
        self.round = recover(parts)
        self._ahead = Ahead(parts)
        self._update_s: float | None = None
        """Seconds of the last update, where it was made in this process."""
        self._next: Drawing | None = None
        """Of the next round's questions, begun beside an update."""
        self._now = _Round()
        self._load_round()

    @classmethod
    def open(cls, *args: object, **kwargs: object) -> Self:
        """Lock the node's directory, load or create everything in it and catch up with the journal.

        Arguments are those of `sapo.node.parts.open_parts`. Raises `UserError` for a directory in use, a
        home of another swarm, or a model that cannot be loaded.
        """
        parts = open_parts(*args, **kwargs)  # type: ignore[arg-type]
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
        unseen = self._end()
        if unseen is not None and error is None:
            raise unseen
        if unseen is not None:
            log.error("%s: sampling ahead failed too", self.name, exc_info=unseen)

    @property
    def finished(self) -> bool:
        """Whether all rounds of the config are done."""
        return self.round >= self.config.swarm.rounds

    def run_round(self) -> RoundResult:
        """One whole round."""
        self.generate()
        self.publish()
        self.consume_sample()
        self.verify()
        return self.grpo_update()

    # -- 1. SampleBatch and generation -------------------------------------------------------------------

    def generate(self) -> tuple[str, ...]:
        """Answer B fresh questions L times each, sign and journal the groups; returns their ids."""
        now, parts = self._now, self.parts
        parts.check()
        started = parts.clock()
        if not now.signed:
            ahead = self._ahead.take()  # before the probe, which uses the same engine
            waited = parts.clock() - started
            now.metrics |= rollout.probe(parts, self.round)
            started = parts.clock() - waited
            now.groups = self._new_groups(ahead)
            begin_scoring(parts.workers, now.groups)
            now.groups, chosen = rollout.select(parts, self.round, now.groups)
            now.signed = [seal(group, parts.identity) for group in now.groups]
            owed = [
                now.signed[i].group_id
                for i in chosen
                if rollout.within_rules(parts, now.groups[i], now.signed[i])
            ]
            now.metrics["share/withheld"] = float(len(chosen) - len(owed))
            self.journal.commit_groups(self.round, now.signed, owed)
            for group, signed in zip(now.groups, now.signed, strict=True):
                parts.pool.seen.add(group, signed.content_sha256)
        tokens = sum(len(c.token_ids or ()) for group in now.groups for c in group.completions)
        now.metrics["tokens/generated"] = float(tokens)
        now.metrics["time/generate"] = parts.clock() - started
        if self.config.generate.ahead:
            now.metrics["staleness/own_rounds"] = float(self.round - now.groups[0].policy_version)
        return tuple(signed.group_id for signed in now.signed)

    def _new_groups(self, ahead: Answered | None) -> list[Group]:
        """The round's groups, of what was sampled ahead or else from the weights as they are."""
        parts = self.parts
        if ahead is not None:
            self._now.metrics["time/generate_ahead"] = ahead.seconds
            self._now.prompts = ahead.request.prompts
            return rollout.as_groups(parts, ahead.request, ahead.completions)
        begun, self._next = self._next, None
        if begun is not None and begun.round != self.round:
            begun = None
        asked = rollout.request(parts, self.round, self.round, begun)
        self._now.prompts = asked.prompts
        return rollout.as_groups(parts, asked, rollout.answer(parts, asked))

    # -- 2. Communicate ----------------------------------------------------------------------------------

    def publish(self) -> None:
        """Wake the deliverer, which owes this round's groups to the bus; it works beside the round."""
        if self.parts.deliverer is not None:
            self.parts.deliverer.kick()

    # -- 3. What others published ------------------------------------------------------------------------

    def consume_sample(self) -> int:
        """Read the bus, admit what may enter the pool; returns the pool's size."""
        self.parts.check()
        now, started = self._now, self.parts.clock()
        if now.batch is None and self.config.batch.external > 0:
            now.arrivals = receive(self.parts, self._private_rng("poll"))
            now.metrics |= now.arrivals.metrics
        now.metrics["time/consume"] = self.parts.clock() - started
        return len(self.parts.pool)

    @property
    def batch(self) -> Batch | None:
        """The batch of the round in hand, once `verify` has drawn it."""
        return self._now.batch

    def take_in(self, received: Sequence[Received]) -> None:
        """Hold groups that came past the bus and admission, as an experiment's controls have it."""
        take_in(self.parts, received, self._now.arrivals)

    def ask(self, drawing: Drawing) -> None:
        """Use these questions in the next round instead of drawing new ones."""
        self._next = drawing

    # -- 4. SampleSelf, SampleExternal, verification -----------------------------------------------------

    def verify(self) -> int:
        """Score own groups, draw up to J informative foreign ones, journal the batch; returns its groups."""
        now, parts, started = self._now, self.parts, self.parts.clock()
        if now.batch is None:
            entries = parts.pool.entries()
            judged = {entry.group_id for entry in entries if entry.verdict is not None}
            local = self._sample_self()
            tokens = self._tokens(local)  # while the workers score
            if now.outcomes is None:
                now.outcomes = score_groups(parts.workers, now.groups)
            standards = own_standards(now.groups, now.outcomes)
            parts.quotas.earn(self._own_seconds(parts.clock() - started), self.round)
            draw = sampling.sample_external(
                entries,
                self.config.batch.external,
                self._private_rng("external"),
                verify=lambda some: verdicts(parts, some, standards),
                tolerance=self.config.learn.zero_tolerance,
                share=sampling.informative_share(
                    [[outcome.score for outcome in row] for row in now.outcomes],
                    self.config.learn.zero_tolerance,
                ),
                ready=lambda entry, beside: parts.quotas.may_verify(
                    entry.group.key, [other.group.key for other in beside]
                ),
                known=parts.quotas.known,
                trials=parts.quotas.trials(self.config.batch.external),
            )
            now.batch = self._batch(local, tokens, draw.chosen)
            self._charge_excess(now.batch)
            if draw.chosen:
                recent = sum(parts.quotas.recent(entry.group.key) for entry in draw.chosen)
                now.metrics["share/external_recent"] = recent / len(draw.chosen)
            parts.pool.remove(draw.leaving)
            now.metrics |= parts.refusals.metrics() | parts.quotas.metrics()
            undecided = [entry for entry in entries if entry.group_id not in judged]
            self._commit_batch(now.batch, undecided, now.arrivals.useless | draw.rejected)
            now.metrics |= draw.metrics()
        now.metrics |= reward_metrics(now.batch.groups)
        now.metrics["time/verify"] = parts.clock() - started
        return len(now.batch.groups)

    def _sample_self(self) -> list[int]:
        """Places of the own groups that enter the batch; their scores are waited for only if they decide."""
        now, useful = self._now, None
        if self.config.batch.choose == "informative":
            now.outcomes = score_groups(self.parts.workers, now.groups)
            tolerance = self.config.learn.zero_tolerance
            useful = [informative([outcome.score for outcome in row], tolerance) for row in now.outcomes]
        return sampling.sample_self(len(now.groups), self.config.batch.local, self._rng("self"), useful)

    def _charge_excess(self, batch: Batch) -> None:
        """Charge authors what a batch costs more to learn from than if their groups were own ones."""
        if self.round == 0:
            return
        last = self.journal.result(self.round - 1).metrics
        token_s = last["time/update"] / max(1.0, last.get("learn/tokens", 0.0))
        for group in batch.groups:
            more = excess(self.config, group)
            if group.source == "external" and more:
                self.parts.quotas.charge(group.producer_key, more * token_s)

    def _own_seconds(self, scoring: float) -> float:
        """Seconds of the node's own work since the draw before: the last update, generation, `scoring`."""
        if self._update_s is None:
            done = self.round > 0
            self._update_s = self.journal.result(self.round - 1).metrics["time/update"] if done else 0.0
        return self._update_s + self._now.metrics["time/generate"] + scoring

    def _commit_batch(self, batch: Batch, undecided: Sequence[Entry], rejected: Mapping[str, str]) -> None:
        """Transaction 2. What came and went within this round is remembered too, so that it stays away.

        `undecided` are the entries that had no verdict before the draw; the verdicts it gave are kept. The
        receipts tell what is `rejected` for scores that teach nothing from what has none.
        """
        arrivals, pool = self._now.arrivals, self.parts.pool
        pairs = zip(self._now.groups, self._now.signed, strict=True)
        own = [pool.met(group, signed.content_sha256) for group, signed in pairs]
        held = self.journal.pool_ids() | {row.group_id for row in arrivals.rows}
        self.journal.commit_batch(
            batch,
            positions=arrivals.positions or self.journal.positions(),
            pool_added=arrivals.rows,
            pool_removed=held - {entry.group_id for entry in pool.entries()},
            verdicts={entry.group_id: entry.verdict.to_json() for entry in undecided if entry.verdict},
            rejected={
                group_id: "uninformative" if reason in ("uninformative", "substandard") else "unscorable"
                for group_id, reason in rejected.items()
            },
            heard=Heard(
                met=[*own, *arrivals.met],
                forgotten=pool.seen.forgotten(),
                peers=self.parts.quotas.changed(),
                gone=self.parts.quotas.gone(),
                streams=self.parts.streams.changed(),
                refusals=self.parts.refusals.rows(),
            ),
        )

    def _tokens(self, local: Sequence[int]) -> list[Tokens]:
        """Ids of own groups, in the order of their places in the batch."""
        now, known = self._now, self._now.prompts
        return [Tokens.of(self.parts.policy, now.groups[i], known[i] if known else None) for i in local]

    def _batch(self, local: Sequence[int], tokens: Sequence[Tokens], drawn: Sequence[Entry]) -> Batch:
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
                tokens=tokens[position],
            )
            for position, i in enumerate(local)
        ]
        for entry in drawn:
            assert entry.verdict is not None
            groups.append(
                batch_group(
                    parts.policy,
                    self.config.learn,
                    entry.group,
                    entry.received.signed,
                    entry.verdict.outcomes,
                    source="external",
                    position=len(groups),
                    age_s=moment - entry.received.timestamp,
                    bus_position=entry.received.bus_position,
                    tokens=entry.tokens,
                    believed=believes(self.config, parts.home, entry.group),
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
        """One optimiser step on the batch; journals the result and takes a checkpoint when one is due.

        Raises `Paused` after the round is journalled when a guard with action `pause` was set off.
        """
        now, parts = self._now, self.parts
        assert now.batch is not None
        last = self.round + 1 >= self.config.swarm.rounds
        if not last:
            self._begin_next()
        started = parts.clock()
        step = self._update(now.batch)
        target = None
        if step.alarm and self.config.guard.action == "rollback":
            target = roll_back(parts)
            self._ahead.drop()  # samples of weights that were given up are useless
        finished = parts.clock()
        checkpoint = checkpoint_due(parts, self.round + 1, finished, last=last)
        digests = self._digests(checkpoint)
        if self._next is not None:
            self._next.look()
        now.metrics |= step.metrics | source_metrics(now.batch)
        self._update_s = now.metrics["time/update"] = finished - started
        now.metrics["time/round"] = sum(
            now.metrics.get(f"time/{stage}", 0.0) for stage in ("generate", "consume", "verify", "update")
        )
        if now.metrics["time/round"] > 0 and "tokens/generated" in now.metrics:
            now.metrics["tokens/per_second"] = now.metrics["tokens/generated"] / now.metrics["time/round"]
        now.metrics |= parts.metrics()
        digest, tensors = digests.result() if digests is not None else ("", ())
        result = RoundResult(
            round=self.round,
            policy_version=self.round + 1,
            skipped=step.skipped,
            rolled_back_to=target,
            weights_sha256=digest,
            tensors=tensors,
            metrics={name: float(value) for name, value in now.metrics.items()},
            finished_at=finished,
        )
        self.journal.commit_result(result)
        self.round += 1
        self._now = _Round()
        if checkpoint:
            take_checkpoint(parts, self.round, last=last, weights_sha256=digest)
            self._now.metrics[CHECKPOINT_TIME] = parts.last_checkpoint_s
        if parts.deliverer is not None:
            parts.deliverer.kick()
        if step.alarm:
            log.warning("%s: round %d: %s", self.name, result.round, step.alarm)
            if self.config.guard.action == "pause":
                raise Paused(f"{self.name} paused after round {result.round}: {step.alarm}")
        return result

    def _update(self, batch: Batch) -> StepResult:
        """The learner's step, without what others wrote if it died `ATTEMPTS` times with it.

        It may be too much for this machine, and would be so at every start.
        """
        mark, died = self.parts.home.node(self.name) / UPDATING, 0
        if mark.exists():
            round, _, times = mark.read_text().partition(" ")
            died = int(times) + 1 if round == str(self.round) else 0
        if died >= ATTEMPTS:
            batch = self._now.batch = self._own_part(batch, died)
        mark.write_text(f"{self.round} {died}")
        step = self.parts.learner.step(batch)
        mark.unlink()
        return step

    def _own_part(self, batch: Batch, died: int) -> Batch:
        """The batch without foreign groups, in the journal too."""
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
        update, where that is configured."""
        if not self.config.generate.ahead:
            self._next = rollout.drawing(self.parts, self.round + 1)
            self._next.begin()
            return
        now, started = self._now, self.parts.clock()
        self._ahead.begin(self.round + 1, policy_version=self.round)
        spent = self.parts.clock() - started
        now.metrics["time/generate"] = now.metrics.get("time/generate", 0.0) + spent

    def _digests(self, checkpoint: bool) -> Digests | None:
        """Digest of the weights, and checksums of their tensors, where the round records them."""
        if not checkpoint and (self.round + 1) % self.config.checkpoint.weight_digest_every:
            return None
        return Digests(self.parts.policy.model)

    # -- around the round --------------------------------------------------------------------------------

    def _load_round(self) -> None:
        """Take up a round that a crash cut short: its groups, and its batch if that was committed."""
        stage = self.journal.stage()
        if stage is None or stage[0] != self.round:
            return
        self._now.signed = list(self.journal.groups(self.round))
        self._now.groups = [Group.model_validate_json(signed.payload) for signed in self._now.signed]
        for group, signed in zip(self._now.groups, self._now.signed, strict=True):
            self.parts.pool.seen.add(group, signed.content_sha256)
        if stage[1] == "batch":
            self._now.batch = self.journal.batch(self.round)

    def _rng(self, stage: str) -> random.Random:
        return rng(self.config.swarm.seed, self.journal.incarnation, self.round, stage)

    def _private_rng(self, stage: str) -> random.Random:
        """Randomness that peers cannot compute; a round that is begun again has the same."""
        secret = self.parts.identity.secret(stage)
        return rng(self.config.swarm.seed, self.journal.incarnation, self.round, stage, secret)

    def outages(self) -> dict[str, float]:
        """The series `outage/*`: 1 for every service that is away now."""
        return self.parts.outages()

    def drain(self, timeout: float) -> bool:
        """Deliver what is owed, within `timeout` seconds; whether nothing is owed any more."""
        return self.parts.deliverer is None or self.parts.deliverer.drain(timeout)

    def close(self) -> None:
        """Stop the deliverer and the workers, release the lock. What is owed stays in the journal.

        Raises the error of sampling ahead if it was not raised before.
        """
        unseen = self._end()
        if unseen is not None:
            raise unseen

    def _end(self) -> BaseException | None:
        try:
            return self._ahead.end()
        finally:
            self.parts.close()
