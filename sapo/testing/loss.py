"""What every policy loss promises. `check_loss` holds another one to it.

Shapes are those of `sapo.learn.loss`: S sequences, T trained tokens of the longest.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sapo.learn.loss import Loss, LossInputs

NAN = float("nan")
RATIOS = [[1.1, 0.5, 1.4], [0.7, 1.0, 1.3], [1.0, 1.0, 2.0], [0.9, 0.95, 1.2]]
ADVANTAGES, LENGTHS = [1.0, -2.0, 0.5, -1.0], [3, 1, 2, 3]


def inputs(
    ratios: Sequence[Sequence[float]],
    advantages: Sequence[float],
    lengths: Sequence[int] | None = None,
    count: float = 1.0,
    **bounds: float,
) -> LossInputs:
    """Inputs with given ratios: old log-probability -1 everywhere, new one -1 + ln(ratio)."""
    new = (torch.tensor(ratios, dtype=torch.float64).log() - 1.0).requires_grad_()
    width = new.shape[1]
    mask = torch.tensor([[i < n for i in range(width)] for n in lengths or [width] * len(ratios)])
    return LossInputs(
        new, torch.full_like(new, -1.0), torch.tensor(advantages).double(), mask, count, **bounds
    )


def gradient(loss: Loss, given: LossInputs) -> Tensor:
    """Gradient [S, T] of the log-probabilities."""
    loss(given).loss.backward()
    assert given.logprobs.grad is not None, "no gradient reaches the log-probabilities"
    return given.logprobs.grad


def no_gradient_flows_into_old_logprobs_or_advantages(loss: Loss) -> None:
    given = inputs([[1.1, 0.9]], [1.0])
    old = given.old_logprobs.clone().requires_grad_()
    advantages = given.advantages.clone().requires_grad_()
    loss(LossInputs(given.logprobs, old, advantages, given.mask, 1.0)).loss.backward()
    assert old.grad is None
    assert advantages.grad is None
    assert given.logprobs.grad is not None


def terms_add_up_to_the_loss_and_carry_no_gradient(loss: Loss) -> None:
    out = loss(inputs([[1.1, 0.5, 1.4], [0.7, 1.0, 1.3]], [1.0, -2.0], lengths=[3, 2], count=5.0))
    assert math.isclose(out.terms.sum().item(), out.loss.item(), rel_tol=1e-6)
    assert not out.terms.requires_grad
    assert out.terms[1, 2] == 0, "a token outside of the mask has a part in the loss"


def a_token_without_a_finite_logprob_is_left_out_and_counted(loss: Loss) -> None:
    for old, new in ((NAN, -1.0), (-1.0, NAN), (-math.inf, -1.0), (-math.inf, -math.inf)):
        logprobs = torch.tensor([[-1.0, new]], dtype=torch.float64).requires_grad_()
        olds = torch.tensor([[-1.0, old]], dtype=torch.float64)
        out = loss(LossInputs(logprobs, olds, torch.tensor([2.0]).double(), torch.ones(1, 2).bool(), 1.0))
        out.loss.backward()
        alone = loss(inputs([[1.0]], [2.0]))
        assert math.isclose(out.loss.item(), alone.loss.item(), rel_tol=1e-6)
        assert out.metrics["nonfinite"] == 1
        assert out.metrics["tokens"] == 1
        assert logprobs.grad is not None
        assert logprobs.grad[0, 1] == 0


def a_huge_log_ratio_neither_overflows_nor_hides(loss: Loss) -> None:
    for gap in (1000.0, -1000.0):
        logprobs = torch.tensor([[-1.0 + gap]]).requires_grad_()
        given = LossInputs(
            logprobs, torch.tensor([[-1.0]]), torch.tensor([-1.0]), torch.ones(1, 1).bool(), 1.0
        )
        out = loss(given)
        out.loss.backward()
        assert math.isfinite(out.loss.item())
        assert logprobs.grad is not None
        assert logprobs.grad.isfinite().all()
        assert out.metrics["clamped"] == 1


def losses_of_micro_batches_add_up_to_the_loss_of_the_batch(loss: Loss) -> None:
    one = gradient(loss, inputs(RATIOS, ADVANTAGES, LENGTHS, count=9.0))
    parts = [inputs([RATIOS[i]], [ADVANTAGES[i]], [LENGTHS[i]], count=9.0) for i in range(len(RATIOS))]
    assert torch.allclose(torch.cat([gradient(loss, part) for part in parts]), one)


def an_empty_mask_gives_zero_loss_and_zero_gradient(loss: Loss) -> None:
    given = inputs([[1.0, 1.0]], [1.0], lengths=[0])
    assert loss(given).loss.item() == 0.0
    assert torch.equal(gradient(loss, given), torch.zeros(1, 2, dtype=torch.float64))


def the_same_inputs_give_the_same_bits(loss: Loss) -> None:
    """Replay makes an update again from its batch."""
    torch.manual_seed(1)
    first = gradient(loss, inputs(RATIOS, ADVANTAGES, LENGTHS))
    torch.manual_seed(2)
    assert torch.equal(gradient(loss, inputs(RATIOS, ADVANTAGES, LENGTHS)), first)


def what_is_counted_adds_up_over_micro_batches(loss: Loss) -> None:
    counts = loss(inputs(RATIOS, ADVANTAGES, LENGTHS)).metrics
    assert {"tokens", "sequences", "clipped", "clamped", "nonfinite"} <= counts.keys()
    assert counts["tokens"] == sum(LENGTHS)
    assert counts["sequences"] == len(LENGTHS)


PROMISES: tuple[Callable[[Loss], None], ...] = (
    no_gradient_flows_into_old_logprobs_or_advantages,
    terms_add_up_to_the_loss_and_carry_no_gradient,
    a_token_without_a_finite_logprob_is_left_out_and_counted,
    a_huge_log_ratio_neither_overflows_nor_hides,
    losses_of_micro_batches_add_up_to_the_loss_of_the_batch,
    an_empty_mask_gives_zero_loss_and_zero_gradient,
    the_same_inputs_give_the_same_bits,
    what_is_counted_adds_up_over_micro_batches,
)


def check_loss(loss: Loss) -> None:
    """Hold a loss to what all promise. Raises `AssertionError` at the first that is not kept."""
    for promise in PROMISES:
        promise(loss)
