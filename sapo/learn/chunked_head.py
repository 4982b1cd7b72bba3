"""Log-probabilities of chosen tokens without the logits of a whole batch.

The head is taken in blocks of the vocabulary: neither logits nor their gradient ever exist for more than one
block, and the gradients of head and embedding are added where they are kept, without a copy of either.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 32 << 20
"""Of float32 logits at once: few enough to stay in a processor's cache between the steps on them."""
ACCELERATOR_BLOCK_BYTES = 256 << 20
"""The same on an accelerator, where each block costs some thirty kernel launches."""
_LOWEST = -1e30
"""Of a logit: sums of a whole vocabulary of them stay finite."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    unused: Tensor | None = None,
    block_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability [N] of each target, and entropy in nats [P] of each position; both float32.

    `hidden` [P, H] are the positions' last hidden states, `weight` [V, H] and `bias` [V] the head's. Target
    n, `targets` [N], is predicted from position `rows` [N]. Entropy has no gradient. A gradient reaches
    `hidden` by autograd; those of `weight` and `bias`, which are leaves, are added to their `.grad`.
    `unused` are ids that have probability 0. `block_bytes` of float32 logits exist at once; what fits the
    device where it is not given.
    """
    if block_bytes is None:
        block_bytes = _block_bytes(hidden)
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden, weight, bias, rows, targets, temperature, unused, block_bytes
    )
    return result


@torch.no_grad()
def token_ranks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    targets: Tensor,
    *,
    unused: Tensor | None = None,
) -> Tensor:
    """How many tokens [N] are likelier than each target; the arguments are those of `token_logprobs`."""
    state = hidden.to(_dtype(hidden))
    chosen = torch.zeros(len(targets), device=hidden.device)
    above = torch.zeros(len(targets), dtype=torch.long, device=hidden.device)
    blocks = list(_blocks(len(rows), len(weight), _block_bytes(hidden)))
    for block in blocks:
        inside, column = _within(targets, block)
        scores = _scores(state, weight, bias, block, 1.0, unused)
        chosen = torch.where(inside, scores[rows, column], chosen)
    for block in blocks:
        scores = _scores(state, weight, bias, block, 1.0, unused)
        above += (scores[rows] > chosen[:, None]).sum(1)
    return above


def embed(ids: Tensor, weight: Tensor, padding: int | None = None) -> Tensor:
    """Rows of an embedding `weight` [V, H] for `ids` [...]; their gradients are added to `weight.grad`.

    Autograd would make a gradient as large as the weight for every micro-batch. `padding` names an id that is
    not trained, as `torch.nn.Embedding` has it.
    """
    result: Tensor = _Embed.apply(weight, ids, padding)
    return result


class _TokenLogprobs(torch.autograd.Function):
    """A softmax over blocks, whose sums are rescaled as larger logits come up.

    The gradient of log p(t) to the logits is onehot(t) - p, so the backward pass needs p again: kept where
    one block was all, computed once more otherwise.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        unused: Tensor | None,
        block_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.weight, ctx.bias, ctx.temperature, ctx.unused = weight, bias, temperature, unused
        ctx.blocks = list(_blocks(len(hidden), len(weight), block_bytes))
        state = hidden.to(_dtype(hidden))
        log_total = torch.full((len(hidden),), -torch.inf, device=hidden.device)
        mean = torch.zeros_like(log_total)
        chosen = torch.zeros(len(targets), device=hidden.device)
        for block in ctx.blocks:
            scores = _scores(state, weight, bias, block, temperature, unused)
            inside, column = _within(targets, block)
            chosen = torch.where(inside, scores[rows, column], chosen)
            scores.clamp_(min=_LOWEST)  # 0 times minus infinity would be no entropy
            top = scores.amax(1)
            shares = (scores - top[:, None]).exp_()
            total = shares.sum(1)
            shares.div_(total[:, None])
            here = top + total.log()
            together = torch.logaddexp(log_total, here)
            before, now = (log_total - together).exp(), (here - together).exp()
            mean = mean * before + scores.mul_(shares).sum(1) * now
            log_total = together
        kept = shares if len(ctx.blocks) == 1 else None
        ctx.save_for_backward(state, rows, targets, log_total, kept)
        entropy = log_total - mean
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total.index_select(0, rows), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        state, rows, targets, log_total, kept = ctx.saved_tensors
        grad = grad / ctx.temperature
        summed = torch.zeros_like(log_total).index_add_(0, rows, grad)
        to_state = torch.zeros(state.shape, device=state.device) if ctx.needs_input_grad[0] else None
        for block in ctx.blocks:
            shares = kept
            if shares is None:
                shares = _scores(state, ctx.weight, ctx.bias, block, ctx.temperature, ctx.unused)
                shares.sub_(log_total[:, None]).exp_()
            change = shares.mul_(-summed[:, None])
            inside, column = _within(targets, block)
            change.index_put_((rows, column), torch.where(inside, grad, 0.0), accumulate=True)
            narrow = change.to(state.dtype)
            if to_state is not None:
                _add_product(to_state, narrow, ctx.weight[block].to(state.dtype))
            if ctx.needs_input_grad[1]:
                _add_product(_gradient(ctx.weight)[block], narrow.t(), state)
            if ctx.needs_input_grad[2]:
                _gradient(ctx.bias)[block] += change.sum(0)
        return to_state, None, None, None, None, None, None, None


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.weight, ctx.padding = weight, padding
        ctx.save_for_backward(ids)
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        index = ids.reshape(-1)
        change = grad.reshape(len(index), -1).to(ctx.weight.dtype)
        if ctx.padding is not None:
            change = change.masked_fill((index == ctx.padding)[:, None], 0.0)
        _gradient(ctx.weight).index_add_(0, index, change)
        return None, None, None


def _blocks(positions: int, vocabulary: int, block_bytes: int) -> Iterator[slice]:
    width = max(1, min(vocabulary, block_bytes // (4 * max(positions, 1))))
    return (slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width))


def _block_bytes(hidden: Tensor) -> int:
    return BLOCK_BYTES if hidden.device.type == "cpu" else ACCELERATOR_BLOCK_BYTES


def _dtype(hidden: Tensor) -> torch.dtype:
    """What the head computes in: the model's, or autocast's, which the backward pass would not know of."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _scores(
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    block: slice,
    temperature: float,
    unused: Tensor | None,
) -> Tensor:
    """Logits [P, block] over the temperature, in float32; those of `unused` ids are minus infinity."""
    part = None if bias is None else bias[block].to(state.dtype)
    scores = torch.nn.functional.linear(state, weight[block].to(state.dtype), part).float()
    if unused is not None:
        columns = unused[(unused >= block.start) & (unused < block.stop)] - block.start
        scores.index_fill_(1, columns, -torch.inf)
    return scores if temperature == 1.0 else scores.div_(temperature)


def _within(targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in a block, and the column of each (0 for those that do not)."""
    inside = (targets >= block.start) & (targets < block.stop)
    return inside, torch.where(inside, targets - block.start, 0)


def _gradient(weight: Tensor) -> Tensor:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
