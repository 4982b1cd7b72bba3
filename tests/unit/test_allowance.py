"""What a foreign group may cost to learn from: bounds against the node's own groups, worked by hand."""

from typing import Any

import pytest
from makers import INCARNATION
from swarms import small_config

from sapo.core.types import BatchGroup, Recipe, Sample
from sapo.peers.allowance import COMPLETION, GROUP, allowance, excess, too_costly, too_long

CONFIG = small_config(["batch.completions=4", "generate.max_new_tokens=10"])


def group(*lengths: int) -> BatchGroup:
    masks: list[Any] = [(0,) * 3 + (1,) * length for length in lengths]
    samples = [
        Sample(
            k=k,
            token_ids=(1,) * (3 + length),
            loss_mask=masks[k],
            text="",
            finish_reason="stop",
            outcome="score",
            score=0.0,
            advantage=0.0,
        )
        for k, length in enumerate(lengths)
    ]
    return BatchGroup(
        position=0,
        group_id="0" * 64,
        content_sha256="0" * 64,
        source="external",
        producer="peer",
        producer_key="0" * 64,
        producer_version=0,
        recipe=Recipe.make("chain_sum", {}, 0),
        question=INCARNATION,
        age_s=0.0,
        samples=tuple(samples),
    )


def test_an_own_group_s_tokens_are_the_measure() -> None:
    assert allowance(CONFIG) == 40
    assert not too_long(CONFIG, [10, 10, 10, 10])
    assert not too_costly(CONFIG, [10, 10, 10, 10])


@pytest.mark.parametrize(
    ("lengths", "long", "costly"),
    [
        ([10 * COMPLETION, 1], False, False),
        ([10 * COMPLETION + 1, 1], True, False),
        ([20] * (2 * GROUP), False, False),
        ([20] * (2 * GROUP) + [1], False, True),
    ],
)
def test_completions_and_groups_are_bounded_by_it(lengths: list[int], long: bool, costly: bool) -> None:
    assert (too_long(CONFIG, lengths), too_costly(CONFIG, lengths)) == (long, costly)


def test_only_what_is_above_one_allowance_is_charged() -> None:
    assert excess(CONFIG, group(10, 10, 10, 10)) == 0
    assert excess(CONFIG, group(40, 40, 5)) == 45
