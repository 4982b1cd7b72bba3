"""The engine that samples with the learner's own model: no server, and no copy of the weights unless asked.

Prompts are prefilled once: first what all of them begin with (a chat template's system turn, examples), then
the rest of each, left-padded. From there every completion walks a tree: completions of a prompt that have
written the same so far share a row of the key-value cache and of every forward pass. A confident policy
writes few different answers, so there are far fewer rows than completions.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, DynamicCache

from sapo.core.errors import SapoError
from sapo.core.rng import torch_generator
from sapo.core.types import Completion, Sampling
from sapo.learn.logprobs import shares_prompts
from sapo.learn.unused_ids import hide_unused
from sapo.policy.engines.attention import causal_mask, sampling_attention
from sapo.policy.engines.base import NOT_FINITE, refuse_long
from sapo.policy.engines.whole_weights import whole_weights

if TYPE_CHECKING:
    from sapo.policy.models import LoadedPolicy

KEEP_SHARE = 0.8
"""Finished rows leave the cache once no more than this share of the rows still runs: moving it costs too."""
BLOCK = 512
"""Tokens whose probabilities are summed before a draw looks at single ones."""
LEAST_SHARED = 16
"""Tokens that prompts must have in common for a pass of their own to pay."""
GREEDY = -1.0
"""In the place of a uniform number: take the most probable token."""
BELOW_ONE = 1.0 - 2.0**-53


class TransformersEngine:
    """Samples from a `LoadedPolicy`. `max_rows` bounds the completions that are decoded side by side.

    With `own_copy` it samples from a copy of the model, which `update_weights` brings up to date: then the
    policy may be trained meanwhile. An adapter is merged into such a copy: beside its model it would take as
    long again as the model itself.
    """

    def __init__(self, policy: "LoadedPolicy", max_rows: int = 512, *, own_copy: bool = False) -> None:
        self.policy = policy
        self.max_rows = max_rows
        self.answered: Callable[[int], None] | None = None
        self._model: Any = policy.model
        self._shares = shares_prompts(policy.model)
        if own_copy or policy.lora:
            # As trainable as the original: torch multiplies in another order by what wants no gradient.
            self._model = copy.deepcopy(policy.model)
        if policy.lora:
            self._model = self._model.unload()
            self.update_weights()

    def update_weights(self) -> None:
        """Copy the policy's weights; nothing to do where they are shared."""
        if self._model is self.policy.model:
            return
        own = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, value in whole_weights(self.policy):
                own[name].copy_(value)

    def close(self) -> None:
        """Let go of the model."""
        self._model = None

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        completions: int,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        greedy: bool = False,
    ) -> list[list[Completion]]:
        """See `Engine.generate`. The draw of (prompt i, completion k, token t) depends on `seed`, i, k and t
        only, not on what else is in the batch."""
        refuse_long(self.policy, prompts)
        rows: list[list[Completion]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        repeats = completions + greedy
        step = max(1, self.max_rows // repeats)
        beginning = self._beginning(prompts)
        with sampling_attention(self._model) if self._shares else nullcontext():
            for start in range(0, len(order), step):
                chosen = order[start : start + step]
                found = self._chunk(
                    beginning,
                    [prompts[i] for i in chosen],
                    repeats,
                    max_new_tokens,
                    sampling,
                    _draws(seed, chosen, completions, max_new_tokens, greedy=greedy),
                    before=start * repeats,
                )
                for place, i in enumerate(chosen):
                    rows[i] = found[place * repeats : (place + 1) * repeats]
        return rows

    def _chunk(
        self,
        beginning: Cache | None,
        prompts: Sequence[Sequence[int]],
        repeats: int,
        max_new_tokens: int,
        sampling: Sampling,
        draws: Tensor,
        *,
        before: int,
    ) -> list[Completion]:
        """Completions of some prompts, `repeats` each, prompt by prompt; `draws` is [completions, tokens].

        `before` is the completions of the call that have ended already.
        `row` is the cache row of each running completion; `who` is which one it is.
        """
        cache, logits, mask, lengths = self._prefill(beginning, prompts)
        device = logits.device
        draws = draws.to(device)
        stops = torch.tensor(self.policy.stop_ids, device=device)
        row = torch.arange(len(prompts), device=device).repeat_interleave(repeats)
        who = torch.arange(len(row), device=device)
        limits = (self.policy.max_length - lengths).clamp(max=max_new_tokens)[row]
        steps = int(limits.max())
        # -1 where a completion has ended; a last column, so that there is always one
        tokens = torch.full((len(row), steps + 1), -1, device=device)
        logprobs = torch.zeros(len(row), steps, device=device)
        for t in range(steps):
            token, logprob = _pick(logits, row, sampling, draws[who, t])
            tokens[who, t], logprobs[who, t] = token, logprob
            going = (~torch.isin(token, stops) & (limits[who] > t + 1)).nonzero().squeeze(1)
            if self.answered is not None:
                self.answered(before + len(tokens) - len(going))
            if not len(going):
                break
            who = who[going]
            parent, ids, row = _branch(row[going], token[going], len(logits))
            if parent is not None:
                cache.batch_select_indices(parent)
                lengths = lengths[parent]
                mask = None if mask is None else mask[parent]
            if mask is not None:
                mask = functional.pad(mask, (0, 1), value=0.0 if mask.is_floating_point() else 1)
            logits = self._next(
                beginning,
                input_ids=ids[:, None],
                attention_mask=mask,
                # A finished row that was kept runs on to no effect, inside the context.
                position_ids=(lengths + t).clamp(max=self.policy.max_length - 1)[:, None],
                past_key_values=cache,
            )
        return self._completions(tokens.tolist(), logprobs.tolist())

    def _beginning(self, prompts: Sequence[Sequence[int]]) -> Cache | None:
        """A cache that has read what all prompts begin with; None where they have little in common, or the
        model cannot be told to go on from it in every row.

        The last token of the shortest prompt is never part of it: each row reads one at least. A mixture
        weighs its experts by what they make of whole prompts, so it shares nothing.
        """
        alike = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
        length = min(sum(1 for _ in alike), min(map(len, prompts), default=0) - 1)
        if not self._shares or _has_own_cache(self._model) or length < LEAST_SHARED or len(prompts) < 2:
            return None
        cache = _empty_cache(self._model)
        ids = torch.tensor([prompts[0][:length]], device=self._model.device)
        self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def _prefill(
        self, beginning: Cache | None, prompts: Sequence[Sequence[int]]
    ) -> tuple[Any, Tensor, Tensor | None, Tensor]:
        """Cache of what follows the beginning, next-token logits, what the next token's attention mask begins
        with, and prompt lengths.

        The mask is [rows, 1, 1, tokens] in a model that `shares_prompts`; else [rows, tokens], or None
        where nothing is padded.
        """
        device = self._model.device
        read = 0 if beginning is None else beginning.get_seq_length()
        rests = [list(prompt[read:]) for prompt in prompts]
        lengths = torch.tensor([len(rest) for rest in rests], device=device)
        width = max(len(rest) for rest in rests)
        ids = torch.tensor([[0] * (width - len(rest)) + rest for rest in rests], device=device)
        places = torch.arange(width, device=device) - (width - lengths[:, None])
        # Masks come from lengths, never from ids: the pad id may be a real token.
        padded = min(len(rest) for rest in rests) < width
        mask = after = (places >= 0).long() if padded else None
        if self._shares:
            mask = causal_mask(places >= 0, self._model.dtype)
            after = mask[:, :, -1:]
        cache = _empty_cache(self._model)
        logits = self._next(
            beginning,
            input_ids=ids,
            attention_mask=mask,
            position_ids=places.clamp(min=0) + read,
            past_key_values=cache,
            logits_to_keep=1,
        )
        return cache, logits, after, lengths + read

    def _next(self, beginning: Cache | None, **arguments: Any) -> Tensor:
        if beginning is not None:
            arguments["beginning"] = beginning
        return hide_unused(self._model, self._model(**arguments, use_cache=True).logits[:, -1])

    def _completions(self, tokens: list[list[int]], logprobs: list[list[float]]) -> list[Completion]:
        """Records of rows of ids, each ended by -1; equal answers are decoded once."""
        texts: dict[tuple[int, ...], str] = {}
        found = []
        for row, values in zip(tokens, logprobs, strict=True):
            ids = tuple(row[: row.index(-1)])
            if ids not in texts:
                texts[ids] = self.policy.decode(ids)
            found.append(
                Completion(
                    text=texts[ids],
                    finish_reason="stop" if ids[-1] in self.policy.stop_ids else "length",
                    token_ids=ids,
                    logprobs=tuple(values[: len(ids)]),
                )
            )
        return found


def _empty_cache(model: Any) -> Any:
    """A cache that has read nothing; a mixture of models has a kind of its own."""
    return model.empty_cache() if _has_own_cache(model) else DynamicCache(config=model.config)


def _has_own_cache(model: Any) -> bool:
    return hasattr(model, "empty_cache")


def _branch(row: Tensor, token: Tensor, rows: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """The next rows: which of the `rows` rows each goes on from (None: they stay where they are), the token
    it reads, and the row of every completion.

    Completions in one row that drew the same token stay together.
    """
    size = int(token.max()) + 1
    distinct, place = torch.unique(row * size + token, return_inverse=True)
    parent, ids = distinct // size, distinct % size
    alone = len(parent) == len(torch.unique_consecutive(parent))
    if not alone or len(parent) <= KEEP_SHARE * rows:
        return parent, ids, place
    everywhere = ids.new_zeros(rows)
    everywhere[parent] = ids
    return None, everywhere, parent[place]


def _draws(seed: int, prompts: Sequence[int], completions: int, tokens: int, *, greedy: bool) -> Tensor:
    """Uniform numbers [prompts * completions, tokens], counted by the prompts' places in the call. If
    `greedy`, each prompt's block begins with a row of `GREEDY`."""
    blocks = []
    for i in prompts:
        generator = torch_generator(seed, "draw", i)
        block = torch.rand(completions, tokens, generator=generator, dtype=torch.float64)
        blocks.append(functional.pad(block, (0, 0, int(greedy), 0), value=GREEDY))
    return torch.cat(blocks)


def _pick(logits: Tensor, row: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token per entry of `row` [completions], its place in `logits` [rows, vocabulary],
    and its log-probability at the temperature.

    Sampling inverts the distribution function at `uniform`; `GREEDY` takes the most probable token. The
    log-probability is that of the whole distribution, before top_k, top_p and min_p cut it.
    Raises `SapoError` for logits that make no distribution.
    """
    scaled = logits.float() if sampling.temperature == 1.0 else logits.float() / sampling.temperature
    highest, likeliest = scaled.max(dim=-1, keepdim=True)
    rows, size = scaled.shape
    padded = scaled.new_zeros(rows, -(-size // BLOCK), BLOCK)
    weights = padded.view(rows, -1)[:, :size]
    torch.sub(scaled, highest, out=weights).exp_()
    norm = highest.squeeze(1) + weights.sum(dim=-1).log()
    if not norm.isfinite().all():
        raise SapoError(NOT_FINITE)
    token = likeliest.squeeze(1)[row]
    if (drawn := uniform >= 0).any():
        if not sampling.whole_support:
            _cut(weights, sampling)
        token[drawn] = _invert(padded, row[drawn], uniform[drawn])
    return token, scaled[row, token] - norm[row]


def _invert(weights: Tensor, row: Tensor, uniform: Tensor) -> Tensor:
    """The token of each entry of `row` at which the distribution `weights` [rows, blocks, BLOCK] reaches
    `uniform` [completions]; never one without weight.

    First over blocks of the vocabulary, then inside one: float64 is needed for few numbers only.
    """
    upto = weights.sum(dim=-1).double().cumsum(dim=-1)[row]
    target = (uniform * upto[:, -1]).clamp(max=upto[:, -1] * BELOW_ONE)[:, None]
    block = torch.searchsorted(upto, target, right=True)
    left = upto.gather(1, block) - target
    inside = weights[row, block.squeeze(1)].double().cumsum(dim=-1)
    end = inside[:, -1:]
    place = torch.searchsorted(inside, (end - left).clamp(min=0.0).minimum(end * BELOW_ONE), right=True)
    return (block * BLOCK + place).squeeze(1)


def _cut(weights: Tensor, sampling: Sampling) -> None:
    """Set to zero what top_k, then top_p (of what is left), then min_p exclude. The likeliest token stays."""
    values, order = weights.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        values[:, sampling.top_k :] = 0
    share = values.double() / values.sum(dim=-1, keepdim=True, dtype=torch.float64)
    before = share.cumsum(dim=-1) - share
    values = values.masked_fill(before >= sampling.top_p, 0) if sampling.top_p < 1 else values
    values = values.masked_fill(values < sampling.min_p * values[:, :1], 0)
    weights.scatter_(1, order, values)
