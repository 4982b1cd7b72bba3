"""Which tokens of a foreign completion are learned, and how far: `learn.foreign_credit`.

A right answer may carry anything (*Hail to the Thief*, arXiv:2511.09780), and one advantage rewards all of
it. `floor` is that paper's check of logits, token by token. `useful` asks the own policy what each segment is
good for: how much likelier it makes what follows it, as far as that is good for something itself. A step is
worth what it does for the next one, the last for the answer, and the answer for there being no more to say.
What nothing follows is worth nothing, but for the token that ends the answer. `worthwhile` asks besides what
the whole is good for: who goes on from a text that does not lead to its answer only guesses.

No token has more weight than one before it: behind a useless phrase a policy would learn to go on from it,
until the phrase is a sign of what follows, and so of use. Nor has any more than with `all`: in the mean of a
loss all count as before.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sapo.core.config.load import LearnConfig
from sapo.learn.collate import Chunk, Row
from sapo.learn.segments import BEFORE, BLANK, STOP, answer_of, segments

UNLIKELY = math.log(0.2)
"""A completion none of whose tokens is below this is credited without a second look: it teaches little."""
LOOKS = 8
"""At most so many looks at a completion: each other segment is judged with the one before it."""

Again = Callable[[Sequence[Row]], Mapping[Row, Sequence[float]]]
"""What the policy has for each trained token of other rows, computed without a gradient."""


@dataclass(frozen=True, slots=True)
class Look:
    """Segments of a completion that are looked at as one: their trained tokens from `begin` to `end`.

    `without` is the completion without them and their copies, `removed` tokens in all; from `after` on,
    numbered as with them, tokens are compared. None where nothing follows.
    """

    begin: int
    end: int
    after: int
    removed: int
    without: Row | None


def credit(
    learn: LearnConfig, chunk: Chunk, own: Tensor, marks: Tensor | None, logprobs: Again, ranks: Again
) -> tuple[Tensor, set[tuple[int, Row]]]:
    """The weight [S, W] of each token of a micro-batch, from 0 to 1; own ones have 1, but with
    `learn.credit_own`. Besides, the rows that were measured for it, each with the position of its group.

    `own` [S, W] are the policy's log-probabilities at the start of the update, `marks` [V] those of
    `sapo.learn.segments`, which only `useful` needs. `logprobs` and `ranks` measure rows.
    """
    found = torch.ones_like(own)
    judged = {n: row for n, row in enumerate(chunk.sequences) if row.external or learn.credit_own}
    if learn.foreign_credit == "all" or not judged:
        return found, set()
    values = {n: line[: len(judged[n].trained)] for n, line in enumerate(own.tolist()) if n in judged}
    if learn.foreign_credit == "floor":
        weights = _floor(judged, values, learn.foreign_top_k, ranks)
        asked = {(chunk.groups[n], judged[n]) for n in weights}
    else:
        assert marks is not None
        said = {n: marks[torch.tensor(row.token_ids)].tolist() for n, row in judged.items()}
        seen = {n: looks(row, values[n], said[n]) for n, row in judged.items()}
        rows = [look.without for some in seen.values() for look in some if look.without is not None]
        asked = {(chunk.groups[n], look.without) for n, some in seen.items() for look in some if look.without}
        measured = logprobs(list(dict.fromkeys(rows))) if rows else {}
        weights = {n: useful(values[n], some, measured) for n, some in seen.items()}
        if learn.foreign_credit == "worthwhile":
            for n, row in judged.items():
                begin, end = answer_of([said[n][offset] for offset in row.trained])
                part = worth(values[n][begin:end], row.rate)
                weights[n] = [part * weight for weight in weights[n]]
    for n, line in weights.items():
        found[n, : len(line)] = torch.tensor(line, dtype=found.dtype)
    return found, asked


def _floor(
    rows: Mapping[int, Row], own: Mapping[int, Sequence[float]], top_k: int, ranks: Again
) -> dict[int, list[float]]:
    """0 for tokens that `top_k` or more are likelier than, at any temperature; ranks only where needed."""
    least = -math.log(top_k)  # a token of probability 1/k is among the k likeliest
    low = {n: row for n, row in rows.items() if min(own[n]) < least}
    ranked = ranks(list(dict.fromkeys(low.values()))) if low else {}
    return {n: [float(rank < top_k) for rank in ranked[row]] for n, row in low.items()}


def looks(row: Row, own: Sequence[float], marks: Sequence[int]) -> list[Look]:
    """The segments to look at, by the own log-probabilities of a completion and the marks of all its tokens:
    none where all of it is likely, else those from the first unlikely one on.

    The last one is only looked at where it is unlikely, or there is no end after it.
    """
    trained = row.trained
    said = [marks[offset] for offset in trained]
    cut = [(min(own[begin:end]), begin, end) for begin, end in segments(said) if not said[begin] & STOP]
    first = next((place for place, (lowest, *_) in enumerate(cut) if not lowest >= UNLIKELY), len(cut))
    if cut and cut[-1][0] >= UNLIKELY and cut[-1][2] < len(said):
        del cut[-1]
    copies: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for _, *span in cut[first:]:
        copies.setdefault(_words(row, trained, said, *span), []).append((span[0], span[1]))
    found = []
    for part in _joined(cut[first:]):
        begin = part[0][0]
        spans = {copy for span in part for copy in copies[_words(row, trained, said, *span)]}
        last = max(end for _, end in spans)
        # The space before a second word is unlikely where the first is missing, and says nothing of either.
        after = last + (begin == 0 and last < len(said) and bool(said[last] & BEFORE))
        gone = {trained[place] for span in spans for place in range(*span)}
        without = _without(row, gone) if after < len(said) else None
        found.append(Look(begin, part[-1][1], after, len(gone), without))
    return found


def _joined(cut: Sequence[tuple[float, int, int]]) -> list[list[tuple[int, int]]]:
    """Segments by the look that judges them. The first and the unlikeliest have one each."""
    alone = {*cut[:1], *sorted(cut[1:])[: LOOKS - 1]}
    found: list[list[tuple[int, int]]] = []
    for lowest, begin, end in cut:
        if (lowest, begin, end) in alone:
            found.append([])
        found[-1].append((begin, end))
    return found


def _words(row: Row, trained: Sequence[int], said: Sequence[int], begin: int, end: int) -> tuple[int, ...]:
    """The ids of a segment but for white space."""
    return tuple(row.token_ids[trained[place]] for place in range(begin, end) if not said[place] & BLANK)


def useful(
    own: Sequence[float], seen: Sequence[Look], measured: Mapping[Row, Sequence[float]]
) -> list[float]:
    """The weights of a completion's tokens, by their log-probabilities with and without its segments:

        u = max(0, 1 - exp(-sum over tokens t that follow of u(t) (log p(t | with) - log p(t | without))))

    for the tokens of a segment that is looked at, from the last one back, and 1 for others; w is the least u
    up to a token. So what only makes other useless text likelier is useless. A segment that is repeated is
    left out everywhere, and counts for what follows its last copy: a filler would foretell itself.
    """
    weights = [1.0] * len(own)
    for look in reversed(seen):
        gain = 0.0
        if look.without is not None:
            others = measured[look.without]
            places = range(look.after, len(own))
            gains = [weights[place] * (own[place] - others[place - look.removed]) for place in places]
            gain = math.fsum(one for one in gains if math.isfinite(one))
        weights[look.begin : look.end] = [-math.expm1(-max(gain, 0.0))] * (look.end - look.begin)
    return list(accumulate(weights, min))


def worth(answer: Sequence[float], rate: float) -> float:
    """How far a completion is learned, by the own log-probabilities of its answer's tokens:

        min(1, p(answer | what is before it) / rate)

    Who goes on from that text gives the answer with this probability; own answers are right at this `rate`,
    from 0 to 1. Where they never are, any way to answer is worth learning."""
    return min(1.0, math.exp(min(0.0, math.fsum(answer))) / rate) if rate > 0 else 1.0


def _without(row: Row, gone: Collection[int]) -> Row:
    """A row without the tokens at these offsets."""
    kept = [offset for offset in range(len(row.token_ids)) if offset not in gone]
    ids, mask = ([values[offset] for offset in kept] for values in (row.token_ids, row.loss_mask))
    return Row(tuple(ids), tuple(mask), 0.0, True)
