"""Peers for benchmarks: keys of their own, and really signed groups of a chosen size."""

import hashlib
import math
import random
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sapo.core.rng import rng
from sapo.core.types import Completion, Group, Recipe, SignedGroup
from sapo.peers.signing import Identity, seal

INCARNATION = "0123456789abcdef"
Completions = Callable[[random.Random], tuple[Completion, ...]]


class Author:
    """A peer that publishes groups, each of another recipe; equal numbers make equal groups."""

    def __init__(self, number: int, completions: Completions) -> None:
        secret = hashlib.sha256(f"author {number}".encode()).digest()
        self.identity = Identity(Ed25519PrivateKey.from_private_bytes(secret))
        self._number, self._made, self._completions = number, 0, completions
        self._rng = rng("author", number)
        self._phase = self._rng.random()

    def due(self, round: int, pace: float) -> int:
        """How many groups it publishes in a round: `pace` on average, at even distances."""
        return math.floor((round + 1) * pace + self._phase) - math.floor(round * pace + self._phase)

    def groups(self, count: int) -> list[SignedGroup]:
        """The author's next groups."""
        return [self._next() for _ in range(count)]

    def _next(self) -> SignedGroup:
        self._made += 1
        group = Group(
            swarm="s",
            node=f"p{self._number}",
            key=self.identity.key,
            incarnation=INCARNATION,
            round=self._made,
            position=0,
            recipe=Recipe.make("chain_sum", {}, seed=self._number * 100_000 + self._made),
            question=f"What is {self._number} + {self._made}?",
            completions=self._completions(self._rng),
            policy_version=self._made,
            created_at=0.0,
        )
        return seal(group, self.identity)


def tiny(chance: random.Random) -> tuple[Completion, ...]:
    """Two short answers: for where only the number of groups counts."""
    return tuple(Completion(text=f"{chance.random()}", finish_reason="stop") for _ in range(2))


def small(chance: random.Random) -> tuple[Completion, ...]:
    """Eight answers of 16 tokens with ids and log-probabilities, as the starter policy gives: some 3 KB."""
    return tuple(
        Completion(
            text=_words(chance, 12),
            finish_reason="stop",
            token_ids=tuple(chance.randrange(512) for _ in range(16)),
            logprobs=tuple(round(-4 * chance.random(), 6) for _ in range(16)),
        )
        for _ in range(8)
    )


def large(chance: random.Random) -> tuple[Completion, ...]:
    """Eight answers of a real model, text alone: some 40 KB."""
    return tuple(Completion(text=_words(chance, 950), finish_reason="stop") for _ in range(8))


def _words(chance: random.Random, count: int) -> str:
    """Text that packs about as well as reasoning does: some words are frequent, many are rare."""
    return " ".join(chance.choices(VOCABULARY, cum_weights=FREQUENCIES, k=count))


_LETTERS = rng("vocabulary")
VOCABULARY = ["".join(_LETTERS.choices("etaoinshrdlucmfwypvbgk0123456789", k=1 + i % 8)) for i in range(2000)]
FREQUENCIES = [math.sqrt(i + 1) for i in range(2000)]
