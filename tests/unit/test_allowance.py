"""What a foreign group may cost to learn from: bounds against the node's own groups, worked by hand."""

from typing import Any

import pytest
from learn_support import batch
from makers import make_batch_group, make_sample
from swarms import small_config

from sapo.core.config.load import LearnConfig
from sapo.core.types import BatchGroup
from sapo.learn.collate import costs
from sapo.peers.quotas import COMPLETION, GROUP, beyond, divide, excess

CONFIG = small_config(["batch.completions=4", "generate.max_new_tokens=10"])


def group(position: int, author: str, *lengths: int, source: Any = "external") -> BatchGroup:
    """Half of whose completions, the first, third and so on, are right."""
    samples = [
        make_sample(k, (1, 1, 1), (1,) * length, score=float(k % 2 == 0), advantage=0.5 - k % 2)
        for k, length in enumerate(lengths)
    ]
    return make_batch_group(position, samples, source=source, producer=author, producer_key=author * 64)


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ([10, 10, 10, 10], None),
        ([10 * COMPLETION, 1], None),
        ([10 * COMPLETION + 1, 1], "too_long"),
        ([20] * (2 * GROUP), None),
        ([20] * (2 * GROUP) + [1], "too_costly"),
    ],
)
def test_completions_and_groups_are_bounded_by_own_ones(lengths: list[int], why: str | None) -> None:
    assert beyond(CONFIG, lengths) == why


def nobody(key: str) -> bool:
    return False


def test_what_authors_have_more_than_the_mean_own_group_is_charged() -> None:
    own = [group(0, "0", 5, 5, 5, 5, source="local"), group(1, "0", 10, 10, 10, 10, source="local")]
    others = [group(2, "a", 5, 5, 5, 5), group(3, "b", 40, 1, 5, 1), group(4, "b", 20, 1, 20, 1)]
    taken = batch(*own, *others)
    tokens = costs(taken, LearnConfig())
    # those above the mean alone are learned from
    assert excess(taken, tokens, {}, nobody) == {"b" * 64: 15 + 10}
    assert excess(taken, costs(taken, LearnConfig(foreign="as_if_own")), {}, nobody) == {"b" * 64: 17 + 12}
    assert excess(taken, tokens, {2: 30.0, 4: 70.0}, nobody) == {"b" * 64: 15 + 10 + 40}, (
        "and what was looked at"
    )


def test_the_seconds_of_an_update_are_own_work_or_charged_above_own_groups_by_tokens() -> None:
    taken = batch(group(0, "0", 10, 10, source="local"), group(1, "a", 60, 10), group(2, "b", 10, 10))
    tokens = costs(taken, LearnConfig(foreign="as_if_own"))
    assert tokens == {0: 20, 1: 70, 2: 20}
    assert divide(11.0, taken, tokens, {}, nobody) == (pytest.approx(2.0), {"a" * 64: pytest.approx(5.0)})
    looked = {1: 30.0, 2: 80.0}
    charges = {"a" * 64: pytest.approx(3.0), "b" * 64: pytest.approx(3.0)}
    assert divide(11.0, taken, tokens, looked, nobody) == (pytest.approx(1.0), charges), (
        "looks take time, too"
    )
    found = divide(12.0, taken, tokens, {0: 10.0}, nobody)
    assert found == (pytest.approx(3.0), {"a" * 64: pytest.approx(5.0)}), "at own groups, too"


def test_who_pays_in_full_is_charged_for_all_that_learning_from_it_took() -> None:
    taken = batch(group(0, "0", 10, 10, source="local"), group(1, "a", 5, 5), group(2, "b", 15, 10))
    tokens = costs(taken, LearnConfig(foreign="as_if_own"))
    found = excess(taken, tokens, {1: 10.0}, lambda key: key == "a" * 64)
    assert found == {"a" * 64: 10 + 10, "b" * 64: 5}


def test_prompts_count_with_each_completion_where_the_model_computes_them_so() -> None:
    taken = batch(group(0, "0", 5, 5, source="local"), group(1, "a", *[1] * 9))
    assert costs(taken, LearnConfig()) == {0: 10, 1: 5}
    assert costs(taken, LearnConfig(), shared=False) == {0: 16, 1: 20}
    assert beyond(CONFIG, [1] * (4 * GROUP), 300) is None
    assert beyond(CONFIG, [1] * (5 * GROUP), 300) == "too_costly"
