"""The engine that samples with the learner's own model: no copy of the weights, no server.

Prompts are left-padded and prefilled once per group; their key-value cache is then repeated for the group's
completions, and one decoding loop serves all groups.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from sapo.generate.base import refuse_long
from sapo.models import LoadedPolicy
from sapo.records import Completion, Sampling
from sapo.seeds import torch_generator

KEEP_SHARE = 0.8
"""Finished rows leave the cache once no more than this share of the rows still runs: moving it costs too."""


class TransformersEngine:
    """Samples from a `LoadedPolicy`. `max_rows` bounds the completions that are decoded side by side."""

    def __init__(self, policy: LoadedPolicy, max_rows: int = 512) -> None:
        self.policy = policy
        self.max_rows = max_rows
        self._stops = torch.tensor(policy.stop_ids)

    def update_weights(self) -> None:
        """Nothing to do: it samples with the live weights."""

    def close(self) -> None:
        """Nothing to free."""

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
        only, not on what else is in the batch.

        Raises `UserError` for a prompt that leaves no room in the model's context (TRAPS 26).
        """
        refuse_long(self.policy, prompts)
        rows: list[list[Completion]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        step = max(1, self.max_rows // completions)
        model = self.policy.model
        training = model.training
        model.eval()
        try:
            for start in range(0, len(order), step):
                chosen = order[start : start + step]
                draws = None if greedy else _draws(seed, chosen, completions, max_new_tokens)
                found = self._chunk(
                    [prompts[i] for i in chosen], completions, max_new_tokens, sampling, draws
                )
                for place, i in enumerate(chosen):
                    rows[i] = found[place * completions : (place + 1) * completions]
        finally:
            model.train(training)
        return rows

    def _chunk(
        self,
        prompts: Sequence[Sequence[int]],
        repeats: int,
        max_new_tokens: int,
        sampling: Sampling,
        draws: torch.Tensor | None,
    ) -> list[Completion]:
        """Completions of some prompts, `repeats` each, prompt by prompt; `draws` is [rows, tokens]."""
        model: Any = self.policy.model
        cache, logits, mask, lengths = self._prefill(prompts, repeats)
        rows = len(prompts) * repeats
        limits = (self.policy.max_length - lengths).clamp(max=max_new_tokens)
        steps = int(limits.max())
        tokens = torch.zeros(rows, steps, dtype=torch.long)
        logprobs = torch.zeros(rows, steps)
        counts = torch.zeros(rows, dtype=torch.long)
        stopped = torch.zeros(rows, dtype=torch.bool)
        row = torch.arange(rows)
        live = torch.ones(rows, dtype=torch.bool)
        for t in range(steps):
            token, logprob = _pick(logits, sampling, None if draws is None else draws[row, t])
            now = row[live]
            tokens[now, t], logprobs[now, t], counts[now] = token[live], logprob[live], t + 1
            ended = torch.isin(token, self._stops)
            stopped[now] = ended[live]
            live = live & ~ended & (limits[row] > t + 1)
            if not bool(live.any()):
                break
            if int(live.sum()) <= KEEP_SHARE * len(live):
                kept = live.nonzero().squeeze(1)
                cache.batch_select_indices(kept)
                row, token, live = row[kept], token[kept], live[kept]
                mask = None if mask is None else mask[kept]
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(row), 1)], dim=1)
            logits = model(
                input_ids=token[:, None],
                attention_mask=mask,
                # A finished row that was kept runs on to no effect, inside the context.
                position_ids=(lengths[row] + t).clamp(max=self.policy.max_length - 1)[:, None],
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        return [
            self._completion(ids[:count], values[:count], ended)
            for ids, values, count, ended in zip(
                tokens.tolist(), logprobs.tolist(), counts.tolist(), stopped.tolist(), strict=True
            )
        ]

    def _prefill(
        self, prompts: Sequence[Sequence[int]], repeats: int
    ) -> tuple[DynamicCache, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Cache, next-token logits, attention mask (None where nothing is padded) and prompt lengths.

        Each prompt is run once; the results are repeated for its completions.
        """
        model: Any = self.policy.model
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask: torch.Tensor | None = None
        if int(lengths.min()) < width:
            # Masks come from lengths, never from ids: the pad id may be a real token (TRAPS 21).
            mask = (torch.arange(width) >= width - lengths[:, None]).long()
        positions = (torch.arange(width) - (width - lengths[:, None])).clamp(min=0)
        cache = DynamicCache(config=model.config)
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        if repeats > 1:
            cache.batch_repeat_interleave(repeats)
            logits = logits.repeat_interleave(repeats, dim=0)
            lengths = lengths.repeat_interleave(repeats)
            mask = None if mask is None else mask.repeat_interleave(repeats, dim=0)
        return cache, logits, mask, lengths

    def _completion(self, ids: list[int], logprobs: list[float], stopped: bool) -> Completion:
        return Completion(
            text=self.policy.decode(ids),
            finish_reason="stop" if stopped else "length",
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
        )


def _draws(seed: int, prompts: Sequence[int], completions: int, tokens: int) -> torch.Tensor:
    """Uniform numbers [prompts * completions, tokens], counted by the prompts' places in the call."""
    blocks = [
        torch.rand(completions, tokens, generator=torch_generator(seed, "draw", i), dtype=torch.float64)
        for i in prompts
    ]
    return torch.cat(blocks)


def _pick(
    logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row of `logits` [rows, vocabulary] and its log-probability at the temperature.

    Sampling inverts the distribution function at `uniform`; None takes the most probable token. The
    log-probability is that of the whole distribution, before top_k, top_p and min_p cut it (TRAPS 3, 4).
    """
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    if uniform is None:
        token = logprobs.argmax(dim=-1)
    else:
        probabilities = logprobs.double().exp()
        if not sampling.whole_support:
            probabilities = _cut(probabilities, sampling)
        upto = probabilities.cumsum(dim=-1)
        target = uniform[:, None] * upto[:, -1:]
        token = torch.searchsorted(upto, target, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
    return token, logprobs.gather(1, token[:, None]).squeeze(1)


def _cut(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Set to zero what top_k, then top_p (of what is left), then min_p exclude. The likeliest token stays."""
    values, order = probabilities.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        values[:, sampling.top_k :] = 0
    share = values / values.sum(dim=-1, keepdim=True)
    before = share.cumsum(dim=-1) - share
    values = values.masked_fill(before >= sampling.top_p, 0) if sampling.top_p < 1 else values
    values = values.masked_fill(values < sampling.min_p * values[:, :1], 0)
    return torch.zeros_like(probabilities).scatter(1, order, values)
