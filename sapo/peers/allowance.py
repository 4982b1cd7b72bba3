"""What a foreign group may cost to learn from, measured by what the node's own groups may.

An own group has at most `batch.completions` times `generate.max_new_tokens` tokens to learn from: the
*allowance*. A foreign completion may have `COMPLETION` times the tokens of an own one, and a foreign group
`GROUP` allowances. So no batch has more than `GROUP` times `batch.external` allowances of foreign tokens.
What a group has above one is charged to its author (`sapo.peers.quotas`), at what a token cost in the last
update.
"""

from collections.abc import Sequence

from sapo.core.config.load import Config
from sapo.core.types import BatchGroup

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


def excess(config: Config, group: BatchGroup) -> int:
    """Tokens that a group has to learn from above one allowance."""
    return max(0, sum(sum(sample.loss_mask) for sample in group.samples) - allowance(config))
