"""Updates of random weights and tokens in a given shape: what profiles and GPU steps measure."""

import random
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from sapo.core.types import Batch, BatchGroup, Recipe, Sample, sha256
from sapo.learn.advantage import centred


@dataclass(frozen=True)
class Shape:
    """A model and a batch."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    groups: int
    completions: int
    prompt: int
    length: int
    threads: int

    def model(self) -> Qwen2ForCausalLM:
        """Random weights of this shape, in float32."""
        torch.manual_seed(0)
        sizes = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=True,
        )
        return Qwen2ForCausalLM(sizes)

    def batch(self) -> Batch:
        """Groups of random tokens, every other completion right."""
        draw = random.Random(0)
        groups = tuple(self._group(position, draw) for position in range(self.groups))
        return Batch(
            swarm="s",
            node="n0",
            incarnation="0" * 16,
            round=0,
            policy_version=0,
            learn="{}",
            temperature=1.0,
            groups=groups,
        )

    def _group(self, position: int, draw: random.Random) -> BatchGroup:
        def tokens(length: int) -> tuple[int, ...]:
            return tuple(draw.randrange(self.vocabulary) for _ in range(length))

        prompt = tokens(self.prompt)
        mask: list[Literal[0, 1]] = [0] * self.prompt
        mask += [1] * self.length
        scores = [float(k % 2) for k in range(self.completions)]
        samples = tuple(
            Sample(
                k=k,
                token_ids=prompt + tokens(self.length),
                loss_mask=tuple(mask),
                text="",
                finish_reason="stop",
                outcome="score",
                score=scores[k],
                advantage=advantage,
            )
            for k, advantage in enumerate(centred(scores))
        )
        return BatchGroup(
            position=position,
            group_id=sha256(str(position)),
            content_sha256=sha256("content"),
            source="local",
            producer="n0",
            producer_key=sha256("n0"),
            producer_version=0,
            recipe=Recipe.make("chain_sum", {}, position),
            question="",
            age_s=0.0,
            samples=samples,
        )
