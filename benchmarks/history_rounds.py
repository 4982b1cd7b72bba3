"""Rounds of a node as preset `starter` makes them, but small: 2 groups of 4 completions, own and foreign."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Literal

from sapo.core.config.load import load
from sapo.core.types import Batch, BatchGroup, Recipe, RoundResult, Sample, canonical, chained
from sapo.store.journal.rows import ChainLink, OutboxItem, PoolEvent, RefusalRow

SWARM, NODE, INCARNATION = "bench", "n0", "0123456789abcdef"
COMPLETIONS = 4
PER_ROUND = 2 * COMPLETIONS
"""Completions of a round."""
PROMPT: tuple[Literal[0], ...] = (0,) * 22
OWN: tuple[Literal[1], ...] = (1,) * 9
MASK, VOCABULARY = PROMPT + OWN, range(512)
"""Of every completion: a prompt of 22 tokens and 9 of its own."""
TINY = load("starter", env={})
LEARN, GUARD = canonical(TINY.learn.model_dump(mode="json")), canonical(TINY.guard.model_dump(mode="json"))
TASK = TINY.tasks[0]


def due(round: int) -> OutboxItem:
    """A round that is to be delivered."""
    return OutboxItem(seq=round, kind="training", round=round, ref="")


class Rounds:
    """Rounds `first` to `last` - 1, as a journal knows them; what follows on them begins with `chain`."""

    def __init__(self, first: int, last: int, chain: str | None) -> None:
        self._batches, self._links = {}, {}
        for round in range(first, last):
            self._batches[round] = batch(round)
            chain = chained(chain, self._batches[round].digest())
            self._links[round] = ChainLink(round - 1 if round else None, chain)
        self.chain = chain

    def batch(self, round: int) -> Batch:
        """What the update was made of."""
        return self._batches[round]

    def batch_digest(self, round: int) -> str:
        """Of what the update was made of."""
        return self._batches[round].digest()

    def link(self, round: int) -> ChainLink:
        """How it hangs on the rounds before."""
        return self._links[round]

    def result(self, round: int) -> RoundResult:
        """What the update gave; the digest of the weights every 50 rounds, as by default."""
        digest = hashlib.sha256(f"weights {round}".encode()).hexdigest()
        sums = tuple(int.from_bytes(digest.encode()[i : i + 4]) for i in range(12))
        whole = round % 50 == 0
        return RoundResult(
            round=round,
            policy_version=round + 1,
            weights_sha256=digest if whole else "",
            tensors=sums if whole else (),
            metrics={"learn/loss": random.Random(round).gauss(0, 0.1), "time/round": 0.5},
            finished_at=1_700_000_000.0 + round * 0.5,
        )

    def environment(self, round: int) -> Mapping[str, str | int] | None:
        """What the bits of the update depend on besides."""
        return {"torch": "2.13.0", "threads": 1, "cpu": "AVX2", "config": INCARNATION * 4}

    def movements(self, round: int) -> Sequence[PoolEvent]:
        """None: replay does not read them."""
        return ()

    def refusals(self, round: int) -> Sequence[RefusalRow]:
        """None: replay does not read them."""
        return ()


def batch(round: int) -> Batch:
    """A batch of one own group and a foreign one, the same every time."""
    draw = random.Random(round)
    return Batch(
        swarm=SWARM,
        node=NODE,
        incarnation=INCARNATION,
        round=round,
        policy_version=round,
        learn=LEARN,
        guard=GUARD,
        temperature=1.0,
        groups=tuple(_group(draw, round, position) for position in (0, 1)),
    )


def _group(draw: random.Random, round: int, position: int) -> BatchGroup:
    terms = [draw.randrange(1, 10) for _ in range(4)]
    author = "n0" if position == 0 else f"n{1 + draw.randrange(3)}"
    scores = [float(draw.random() < 0.4) for _ in range(COMPLETIONS)]
    mean = sum(scores) / COMPLETIONS
    return BatchGroup(
        position=position,
        group_id=f"{draw.getrandbits(256):064x}",
        content_sha256=f"{draw.getrandbits(256):064x}",
        source="external" if position else "local",
        producer=author,
        producer_key=hashlib.sha256(author.encode()).hexdigest(),
        producer_version=round,
        recipe=Recipe.make(TASK.dataset, TASK.config, seed=draw.getrandbits(30)),
        question=f"State the final answer to the following problem: {' + '.join(map(str, terms))} =",
        age_s=draw.random() * 3 if position else 0.0,
        bus_position=f"0:{round * 8}" if position else None,
        samples=tuple(_sample(draw, k, sum(terms), scores[k], scores[k] - mean) for k in range(COMPLETIONS)),
    )


def _sample(draw: random.Random, k: int, answer: int, score: float, advantage: float) -> Sample:
    text = f"The answer is {answer if score else draw.randrange(40)}."
    return Sample(
        k=k,
        token_ids=tuple(draw.choices(VOCABULARY, k=len(MASK))),
        loss_mask=MASK,
        text=text,
        finish_reason="stop",
        outcome="score",
        score=score,
        advantage=advantage,
        behaviour_logprobs=tuple(-draw.random() for _ in OWN),
    )
