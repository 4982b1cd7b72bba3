"""No foreign group does more to a step than an own one, whatever its author chose."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sapo.learn.foreign_bound import Bound, Part, weights
from sapo.learn.loss import LOSSES, LossInputs

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
