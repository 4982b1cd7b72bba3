"""The rows of an update: right tokens, right targets, what they share computed once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learn_support import (
    VOCABULARY,
    assert_close,
    batch,
    example,
    gradients,
    group,
    learner,
    plain_logprobs,
    tiny_model,
)
from makers import make_sample
from searches import searching

from sapo.core.config.load import LearnConfig
from sapo.core.errors import UserError
from sapo.learn.collate import Row, collate, common_beginning, select
from sapo.learn.logprobs import shares_prompts
from sapo.learn.update import Learner

KINDS = ["gpt2", "llama", "qwen2", "qwen3"]
completions = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)
prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)


def rows_of(pairs: list[tuple[list[int], list[int]]]) -> list[Row]:
    return [
        Row((*prompt, *completion), (0,) * len(prompt) + (1,) * len(completion), 1.0, False)
        for prompt, completion in pairs
    ]


def trained_logprobs(made: Learner, rows: list[Row], shared: bool, micro_batch: int | None = None) -> list:
    """Log-probabilities per sequence, in the order in which `collate` puts the sequences."""
    result = []
    for chunk in collate(rows, shared=shared, micro_batch=micro_batch):
        values, _ = made.logprobs(chunk)
        result += [row[mask].tolist() for row, mask in zip(values, chunk.mask, strict=True)]
    return result


# -- tokens, masks, padding ------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["shared-prompt", "row-each"])
@pytest.mark.parametrize("kind", KINDS)
@searching(15)
@given(
    data=st.lists(st.tuples(prompts, st.lists(completions, min_size=1, max_size=4)), min_size=1, max_size=4)
)
def test_padded_equals_unpadded(
    kind: str, shared: bool, data: list[tuple[list[int], list[list[int]]]]
) -> None:
    made = learner(model=tiny_model(kind))
    pairs = [(prompt, completion) for prompt, answers in data for completion in answers]
    asked = [prompt for prompt, _ in pairs]
    pairs.sort(key=lambda pair: asked.index(pair[0]) if shared else len(pair[0]) + len(pair[1]))
    for ours, (prompt, completion) in zip(trained_logprobs(made, rows_of(pairs), shared), pairs, strict=True):
        assert ours == pytest.approx(plain_logprobs(made.model, prompt, completion), abs=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_in_a_row_do_not_touch_each_other(kind: str) -> None:
    made = learner(model=tiny_model(kind))
    one, two = rows_of([([3, 4], [5, 6, 7]), ([3, 4], [8, 9])])
    other = rows_of([([3, 4], [10, 11])])[0]
    with_two = trained_logprobs(made, [one, two], shared=True)[0]
    with_other = trained_logprobs(made, [one, other], shared=True)[0]
    assert with_two == pytest.approx(with_other, abs=1e-6)


def test_masks_come_from_lengths() -> None:
    # Id 0 is what rows are padded with; as a trained token it counts like any other.
    made = learner()
    rows = rows_of([([3, 0], [0, 5, 0]), ([3, 4, 0, 0, 6], [0, 0, 7, 0])])
    for shared in (False, True):
        for ours, row in zip(trained_logprobs(made, rows, shared), rows, strict=True):
            prompt, completion = row.token_ids[: row.start], row.token_ids[row.start :]
            assert ours == pytest.approx(plain_logprobs(made.model, prompt, completion), abs=2e-4)


def test_each_target_is_predicted_from_the_token_before_it() -> None:
    chunk = collate(rows_of([([3, 4], [5, 6])]))[0]
    assert chunk.input_ids.tolist() == [[3, 4, 5]]
    assert chunk.keep == 2
    assert chunk.places.tolist() == [0, 1]
    assert chunk.targets.tolist() == [5, 6]


def test_behaviour_logprobs_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one per trained token"):
        make_sample(0, (3, 4), (5, 6), behaviour_logprobs=(-1.0,))


def test_untrained_tokens_inside_a_completion_are_context_only() -> None:
    made = learner()
    row = Row((3, 4, 5, 6, 7), (0, 0, 1, 0, 1), 1.0, False)
    whole = plain_logprobs(made.model, (3, 4), (5, 6, 7))
    for shared in (False, True):
        assert trained_logprobs(made, [row], shared)[0] == pytest.approx([whole[0], whole[2]], abs=2e-4)


def test_a_shared_prompt_is_computed_once_and_equal_completions_once() -> None:
    rows = rows_of([([3, 4, 5], [6, 7, 1]), ([3, 4, 5], [6, 7, 1]), ([3, 4, 5], [8, 1])])
    chunk = collate(rows, shared=True)[0]
    assert chunk.input_ids.tolist() == [[3, 4, 5, 6, 7, 8]]
    assert chunk.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert chunk.index[0].tolist() == chunk.index[1].tolist()


@pytest.mark.parametrize("shared", [True, False], ids=["shared-prompt", "row-each"])
def test_longer_foreign_sequences_make_smaller_micro_batches(shared: bool) -> None:
    own = rows_of([([1], [2, 3, k]) for k in range(4)])
    foreign = [replace(row, external=True) for row in rows_of([([1], [4] * 9 + [k]) for k in range(4)])]
    chunks = collate([*own, *foreign], shared=shared, micro_batch=4)
    assert max(int(chunk.mask.sum()) + len(chunk.mask) for chunk in chunks) <= 4 * 4
    assert sum(len(chunk.mask) for chunk in chunks) == 8


def test_a_prompt_s_completions_stay_in_one_micro_batch_where_they_fit() -> None:
    prompts_of = [[3, 4], [5, 6], [7, 8], [9, 10]]
    sizes = [3, 2, 1, 5]
    pairs = [(p, [11 + k, 1]) for p, n in zip(prompts_of, sizes, strict=True) for k in range(n)]
    chunks = collate(rows_of(pairs), shared=True, micro_batch=4)
    # 3 + 1, 2 + the one that 5 has over, 4: eleven sequences, and only the fourth prompt is computed twice.
    assert [len(chunk.mask) for chunk in chunks] == [4, 3, 4]
    firsts = [token for chunk in chunks for token in chunk.input_ids.flatten().tolist()]
    assert [firsts.count(prompt[0]) for prompt in prompts_of] == [1, 1, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_prompts_begin_with_is_computed_once_to_the_same_gradient(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = (3, 4, 5, 6)
    asked = batch(
        group((*begins, 7), [(8, 1), (9, 10, 1), (8, 1)], [1.0, 0.0, 1.0]),
        group((*begins, 11, 7), [(12, 1), (13, 1)], [0.0, 1.0], source="external", producer="n1", position=1),
        group(begins, [(14, 2, 1), (15,)], [0.0, 1.0], position=2),
    )
    found = {}
    for least in (2, 100):
        monkeypatch.setattr("sapo.learn.collate.LEAST_BEGINNING", least)
        learn = LearnConfig(foreign="as_if_own", micro_batch=3, grad_clip=1e9)
        made = learner(learn, tiny_model(kind))
        result = made.step(asked)
        found[least] = (gradients(made), result.metrics)
    monkeypatch.setattr("sapo.learn.collate.LEAST_BEGINNING", 2)
    # One token less than the shortest prompt: its last one predicts.
    assert common_beginning(select(asked, learn).rows) == (3, 4, 5)
    assert_close(found[2][0], found[100][0])
    assert found[2][1] == pytest.approx(found[100][1], rel=1e-4, abs=1e-6)


def test_sharing_is_left_out_where_attention_is_not_plainly_causal() -> None:
    model: Any = tiny_model("qwen2")
    assert shares_prompts(model)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert not shares_prompts(model)
    assert not shares_prompts(torch.nn.Linear(2, 2))
    unknown: Any = tiny_model("llama")
    unknown.config.model_type = "mamba"
    assert not shares_prompts(unknown)


def test_logprobs_are_taken_at_the_sampling_temperature() -> None:
    made = learner(temperature=0.5)
    ours = trained_logprobs(made, rows_of([([3, 4], [5, 6])]), shared=True)[0]
    assert ours == pytest.approx(plain_logprobs(made.model, (3, 4), (5, 6), temperature=0.5), abs=2e-4)


def test_a_batch_of_another_temperature_is_refused() -> None:
    with pytest.raises(UserError, match=r"batch\.temperature = 0\.5"):
        learner().step(batch(*example().groups, temperature=0.5))


def test_logprobs_are_float32_whatever_the_model_computes_in() -> None:
    made = learner(model=tiny_model(dtype=torch.bfloat16))
    values, entropy = made.logprobs(collate(rows_of([([3], [4])]), shared=True, dtype=torch.bfloat16)[0])
    assert values.dtype == entropy.dtype == torch.float32
