"""No foreign group does more to a step than an own one, whatever its author chose."""

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learn_support import batch, gradients, group
from makers import make_sample
from searches import searching

from sapo.core.config.load import LearnConfig
from sapo.core.types import BatchGroup
from sapo.learn.foreign_bound import Bound, Part, weights
from sapo.learn.loss import LOSSES, LossInputs
from sapo.learn.update import Learner

LONGEST, MOST = 40, 64
LENGTHS = st.lists(st.integers(1, LONGEST), min_size=1, max_size=MOST)


def masks(lengths: list[int]) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@given(
    own=st.lists(LENGTHS, min_size=1, max_size=3),
    foreign=LENGTHS,
    spread=st.sampled_from((0.01, 1.0, 30.0)),
    strangeness=st.sampled_from((0.0, 40.0)),
    loss=st.sampled_from(sorted(LOSSES)),
    advantage=st.sampled_from(("centred", "mean_std")),
    sizes=st.lists(st.floats(-8.0, 8.0, width=32), min_size=MOST, max_size=MOST),
    seed=st.integers(0, 2**32),
)
def test_no_foreign_group_has_more_gradient_or_tokens_than_an_own_one_may_have(
    own: list[list[int]],
    foreign: list[int],
    spread: float,
    strangeness: float,
    loss: str,
    advantage: str,
    sizes: list[float],
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    size = surprise = 0.0
    for lengths in own:
        mask = masks(lengths)
        scores = spread * torch.randn(*mask.shape, 5, generator=random)
        part = Part.of(loss, scores.log_softmax(-1)[..., 0], mask)
        size += float(part.size.sum())
        surprise += float(part.surprise.sum())
    bound = Bound.of(size, surprise, len(own), advantage)
    mask = masks(foreign)
    logits = spread * torch.randn(*mask.shape, 5, generator=random)
    logits[..., 0] -= strangeness
    logits.requires_grad_()
    logprobs = logits.log_softmax(-1)[..., 0]
    part = Part.of(loss, logprobs, mask)
    advantages = torch.tensor(sizes[: len(foreign)])
    among = torch.full((len(foreign),), len(foreign))
    found = weights(part, advantages, among, bound)
    inputs = LossInputs(logprobs, logprobs.detach(), advantages * found.float(), mask, 1.0)
    LOSSES[loss](inputs).loss.backward()
    assert logits.grad is not None
    assert float(logits.grad.double().abs().sum()) / 2 <= bound.effect * (1 + 1e-4)
    assert float((found * part.size).sum()) <= bound.size * (1 + 1e-9)
    assert float(found.max()) <= 1


@pytest.mark.parametrize(("advantage", "size"), [("centred", 0.5), ("mean_std", 1.0)])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_answers_like_the_own_ones_keep_their_whole_weight(loss: str, advantage: str, size: float) -> None:
    """Half of a group's answers are right; `size` is what that makes of each one's advantage."""
    mask = masks([5] * 8)
    logprobs = torch.full(mask.shape, -0.7)
    part = Part.of(loss, logprobs, mask)
    bound = Bound.of(float(part.size.sum()), float(part.surprise.sum()), 1, advantage)
    found = weights(part, torch.full((8,), size), torch.full((8,), 8), bound)
    assert found.tolist() == pytest.approx([1.0] * 8)


VOCABULARY = 256


class Table(torch.nn.Module):
    """A model whose weights are its logits: by the last token, those of the next."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=random))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def answers(position: int, lengths: Sequence[int], ids: "count[int]", **about: Any) -> BatchGroup:
    """A group whose tokens stand nowhere else, so that no two gradients cancel out; each second is right."""
    scores = [float(k % 2) for k in range(len(lengths))]
    made = group((0,), [(1,)] * len(lengths), scores, position=position, **about)
    samples = [
        make_sample(
            sample.k,
            (next(ids),),
            tuple(next(ids) for _ in range(length)),
            advantage=sample.advantage,
            score=sample.score,
        )
        for sample, length in zip(made.samples, lengths, strict=True)
    ]
    return made.model_copy(update={"samples": tuple(samples)})


def sizes_of_gradient(
    groups: Sequence[BatchGroup], learn: LearnConfig, seed: int, strangeness: float
) -> dict[str, float]:
    """What own and foreign groups have of a step's gradient, in L1 norms."""
    model = Table(seed)
    for one in groups:
        for sample in one.samples:
            pair = sample.token_ids[:-1], sample.token_ids[1:]
            model.table.data[pair] += 3.0 if one.source == "local" else -strangeness
    made = Learner(model, learn, temperature=1.0)
    assert made.step(batch(*groups)).skipped is None
    (found,) = gradients(made).values()
    rows = {"local": 0.0, "external": 0.0}
    for one in groups:
        used = [token for sample in one.samples for token in sample.token_ids[:-1]]
        rows[one.source] += float(found[used].double().abs().sum())
    return rows


OWN = st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=4), min_size=1, max_size=3)


@searching(40)
@given(
    own=OWN.map(lambda groups: [lengths[: len(lengths) // 2 * 2] for lengths in groups]),
    foreign=st.lists(st.integers(1, 20), min_size=2, max_size=8),
    strangeness=st.sampled_from((-3.0, 0.0, 40.0)),
    loss=st.sampled_from(sorted(LOSSES)),
    seed=st.integers(0, 2**32),
)
def test_a_step_has_no_more_of_a_foreign_group_than_of_an_own_one_half_of_whose_answers_are_right(
    own: list[list[int]], foreign: list[int], strangeness: float, loss: str, seed: int
) -> None:
    """Whatever both are divided by: an own group loses no more of its weight than to another own one."""
    learn, ids = LearnConfig(loss=loss, lr=1e-3, grad_clip=1e9, foreign="as_if_own"), count()
    groups = [answers(position, lengths, ids) for position, lengths in enumerate(own)]
    stranger = answers(len(own), foreign, ids, source="external", producer="n1")
    alone = sizes_of_gradient(groups, learn, seed, strangeness)
    among = sizes_of_gradient([*groups, stranger], learn, seed, strangeness)
    assert among["external"] <= among["local"] / len(own) * (1 + 1e-3)
    assert among["local"] >= alone["local"] * len(own) / (len(own) + 1) * (1 - 1e-3)
