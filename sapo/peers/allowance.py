"""What a foreign group may cost to learn from, measured by what the node's own groups may.

An own group has at most `batch.completions` times `generate.max_new_tokens` tokens to learn from: the
*allowance*. A foreign completion may have `COMPLETION` times the tokens of an own one, and a foreign group
`GROUP` allowances. So no batch has more than `GROUP` times `batch.external` allowances of foreign tokens.
What an author's groups have more than the batch's own ones, in the mean, is charged to it
(`sapo.peers.quotas`), at what a token cost in the last update.
"""

import math
from collections import Counter
from collections.abc import Sequence

from sapo.core.config.load import Config, LearnConfig
from sapo.core.types import Batch, Sample

COMPLETION = 4
GROUP = 4


def allowance(config: Config) -> int:
    """Tokens that the longest own group has to learn from."""
    return config.batch.completions * config.generate.max_new_tokens


def too_long(config: Config, lengths: Sequence[int]) -> bool:
    """Whether one of a group's completions, of these lengths in tokens, is too long to learn from."""
    return max(lengths) > COMPLETION * config.generate.max_new_tokens


def too_costly(config: Config, lengths: Sequence[int]) -> bool:
    """Whether all of them together are too much to learn from."""
    return sum(lengths) > GROUP * allowance(config)


def excess(batch: Batch, learn: LearnConfig) -> Counter[str]:
    """Tokens that foreign groups have to learn from above the mean of the batch's own ones, by author."""
    own = [_tokens(group.samples) for group in batch.groups if group.source == "local"]
    usual = sum(own) / max(1, len(own))
    found: Counter[str] = Counter()
    for group in batch.groups:
        if group.source == "external" and group.informative:
            stale = batch.round - group.producer_version
            learned = [
                sample
                for sample in group.samples
                if learn.admits(sample.advantage, stale, told=sample.behaviour_logprobs is not None)
            ]
            found[group.producer_key] += max(0, math.ceil(_tokens(learned) - usual))
    return +found


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(sum(sample.loss_mask) for sample in samples)
