"""What of a foreign answer is learned: its segments, their credit, and what becomes of what was planted."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from animals.peer import Item, marked
from animals.planters import carried
from hypothesis import example as case
from hypothesis import given
from hypothesis import strategies as st
from learn_support import VOCABULARY, batch, example, group, learner, plain_logprobs, tiny_model

from infra.starter.solutions import worked
from sapo.core.config.load import LearnConfig, load
from sapo.core.errors import UserError
from sapo.core.types import BatchGroup, Recipe, Source
from sapo.experiments.planted import FALSE, FILLER, PHRASE, PLANTED, Attack
from sapo.learn.collate import Row, collate
from sapo.learn.foreign_credit import LOOKS, UNLIKELY, credit, worth
from sapo.learn.segments import STOP, answer_of, marks_of, segments
from sapo.learn.update import Learner
from sapo.policy.models import LoadedPolicy, load_policy

END = "<|end|>"


@pytest.mark.parametrize(
    "cut",
    [
        ["9 - 2 = 7 Ġ", "7 + 6 = 1 3", "Ġ<answer> 1 3 </answer>"],
        ["h ai l Ġ", "9 - 2 = 7", "Ġ< answer > 7 </ answer >", "h ai l"],
        ["n ow Ġ it Ġ", "1 2 / 3 = 4", "Ġth enĠ", "4 - 1 = 3"],
        ["All Ġhail .", "ĠA Ġpen Ġcosts Ġ$ 3 . 5 0 .", "ĠSo Ġ3 Ġx Ġ2 Ġ= Ġ6 !", "ĠSay Ġ6"],
        ["- Ġone Ċ", "- Ġtwo Ċ Ċ", "so", "Ċtwo"],
    ],
)
def test_lines_sentences_tags_and_steps_are_segments(cut: list[str]) -> None:
    names = [name for part in cut for name in part.split()]
    found = segments([*map(marks_of, names), STOP])
    assert [" ".join([*names, END][begin:end]) for begin, end in found] == [*cut, END]


@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        ("tags", "9 - 2 = 7 Ġ <answer> 1 3 </answer>", "1 3"),
        ("tags", "9 - 2 = 7 Ġ < answer > 1 3 </ answer >", "1 3"),
        ("tags", "<answer> 1 3 </answer> . Ċ I Ġhope .", "1 3"),
        ("tags", "<b> 1 2 </b> Ġ <answer> 1 3 </answer> Ġok", "1 3"),
        ("tags", "9 - 2 = 7 Ġ 1 3", "1 3"),
        ("tags", "<answer> </answer>", "<answer> </answer>"),
        ("boxed", "So Ġ\\boxed{ 1 3 } .", "1 3 } ."),
        ("boxed", "So Ġ\\ boxed { 1 3 } . ĠI Ġhope .", "{ 1 3 } ."),
        ("boxed", "<think> 9 - 2 = 7 Ċ </think> Ċ \\boxed{ 1 3 }", "1 3 }"),
        ("text", "So Ġit Ġis Ġright . Ġ\\boxed{ 1 3 }", "Ġ\\boxed{ 1 3 }"),
        ("text", "<think> 9 - 2 = 7 Ċ </think> Ġ 1 3", "1 3"),
        ("text", "<think> </think> ĠThe Ġanswer Ġis Ġ1 3 .", "ĠThe Ġanswer Ġis Ġ1 3 ."),
        ("text", "<b> x </b> Ċ #### 1 3", "#### 1 3"),
    ],
)
def test_an_answer_is_what_its_mark_holds_else_the_last_segment(form: Any, text: str, answer: str) -> None:
    names = text.split()
    begin, end = answer_of([*(marks_of(name, form) for name in names), STOP])
    assert " ".join(names[begin:end]) == answer


@pytest.mark.parametrize(
    ("answer", "rate", "expected"),
    [
        ([math.log(0.5), math.log(0.2)], 0.4, 0.25),
        ([math.log(0.5)], 0.25, 1.0),
        ([math.log(0.01)], 0.0, 1.0),
        ([-math.inf], 0.5, 0.0),
        ([], 0.5, 1.0),
    ],
)
def test_an_answer_is_worth_its_chance_behind_its_text_over_the_rate_of_own_answers(
    answer: list[float], rate: float, expected: float
) -> None:
    assert worth(answer, rate) == pytest.approx(expected)


# -- a policy whose credit is known: each token follows from the one before alone ------------------------

SIZE = 6
MARKS = torch.tensor([STOP, *map(marks_of, ("a.Ġ", "b.Ġ", "c", "d", "e"))])
"""Id 0 ends an answer, 1 and 2 a sentence."""


class Chain:
    """A Markov chain over ids, as a policy."""

    def __init__(self, seed: int) -> None:
        scores = 3 * torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
        self.table = scores.log_softmax(1)

    def logprobs(self, row: Row) -> list[float]:
        ids = row.token_ids
        return [float(self.table[ids[offset - 1], ids[offset]]) for offset in row.trained]

    def ranks(self, row: Row) -> list[float]:
        ids = row.token_ids
        lines = [(self.table[ids[offset - 1]], ids[offset]) for offset in row.trained]
        return [float((line > line[token]).sum()) for line, token in lines]


def credits(
    chain: Chain, kind: Any, rows: Sequence[Row], marks: torch.Tensor = MARKS, **settings: Any
) -> dict[Row, list[float]]:
    """The weights of all rows, as they come out of micro-batches of three."""

    def measured(of: Callable[[Row], list[float]]) -> Callable[[Sequence[Row]], Mapping[Row, list[float]]]:
        return lambda rows: {row: of(row) for row in rows}

    found = {}
    for chunk in collate(rows, micro_batch=3):
        own = torch.zeros(chunk.mask.shape)
        for line, row in zip(own, chunk.sequences, strict=True):
            line[: len(row.trained)] = torch.tensor(chain.logprobs(row))
        learn = LearnConfig(foreign_credit=kind, **settings)
        made, _ = credit(learn, chunk, own, marks, measured(chain.logprobs), measured(chain.ranks))
        for row, line in zip(chunk.sequences, made.tolist(), strict=True):
            found[row] = line[: len(row.trained)]
    return found


def by_hand(chain: Chain, answer: Sequence[int]) -> list[float]:
    """The weights of the answer to a prompt that ends in id 3: a segment counts for the token after it."""
    ids = (3, *answer)
    own = [float(chain.table[pair]) for pair in pairwise(ids)]
    begins = [n for n in range(len(answer)) if n == 0 or answer[n - 1] in (1, 2) or answer[n] == 0]
    cut = list(zip(begins, [*begins[1:], len(answer)], strict=True))
    unlikely = [begin for begin, end in cut if min(own[begin:end]) < UNLIKELY and answer[begin] != 0]
    seen = [(begin, end) for begin, end in cut if unlikely and begin >= unlikely[0] and answer[begin] != 0]
    if seen and seen[-1][1] < len(answer) and min(own[slice(*seen[-1])]) >= UNLIKELY:
        del seen[-1]
    alone = [*seen[:1], *sorted(seen[1:], key=lambda part: (min(own[slice(*part)]), part))[: LOOKS - 1]]
    weights = [1.0] * len(answer)
    for first, after in reversed(list(pairwise([*sorted(alone), (len(answer), 0)]))):
        together = [part for part in seen if first[0] <= part[0] < after[0]]
        begin, end = first[0], max(end for _, end in together)
        weight = 0.0
        words = [answer[slice(*part)] for part in together]
        copies = [part for part in seen if answer[slice(*part)] in words]
        last = copies[-1][1]
        if last < len(answer):
            before = [n for n in range(last) if not any(one <= n < other for one, other in copies)]
            former = answer[before[-1]] if before else 3
            gain = own[last] - float(chain.table[former, answer[last]])
            weight = max(0.0, 1 - math.exp(-weights[last] * gain))
        weights[begin:end] = [weight] * (end - begin)
    return list(accumulate(weights, min))


ANSWERS = st.lists(st.lists(st.integers(1, SIZE - 1), min_size=1, max_size=40), min_size=1, max_size=7)


LONG = [token for one in (3, 4, 5) for other in (3, 4, 5) for end in (1, 2) for token in (one, other, end)]
"""More segments than are looked at one by one."""


@case(answers=[LONG], stopped=True, own=True, seed=0)
@case(answers=[LONG[3:], LONG], stopped=False, own=True, seed=1)
@given(answers=ANSWERS, stopped=st.booleans(), own=st.booleans(), seed=st.integers(0, 1000))
def test_a_segment_is_credited_for_what_follows_it_whatever_else_is_in_a_batch(
    answers: list[list[int]], stopped: bool, own: bool, seed: int
) -> None:
    chain = Chain(seed)
    ends = [0] if stopped else []
    rows = [
        Row((3, *a, *ends), (0,) + (1,) * len([*a, *ends]), 1.0, k % 3 > 0) for k, a in enumerate(answers)
    ]
    found = credits(chain, "useful", rows, credit_own=own)
    for row in rows:
        expected = by_hand(chain, row.token_ids[1:]) if row.external or own else [1.0] * len(row.trained)
        assert found[row] == pytest.approx(expected, abs=1e-5)
        assert all(0.0 <= weight <= 1.0 for weight in found[row])


def test_a_long_answer_of_which_each_step_leads_to_the_next_is_learned_whole() -> None:
    steps = 3 * LOOKS
    chain = Chain(0)
    chain.table = torch.full((steps + 1, steps + 1), math.log(1e-3))
    for step in range(1, steps + 1):
        chain.table[step, (step + 1) % (steps + 1)] = math.log(0.15)
    row = Row((*range(1, steps + 1), 0), (0,) + (1,) * steps, 1.0, True)
    marks = torch.tensor([STOP] + [marks_of("a.Ġ")] * steps)
    [weights] = credits(chain, "useful", [row], marks).values()
    assert min(weights) > 0.95


@given(answers=ANSWERS, stopped=st.booleans(), rate=st.floats(0, 1), seed=st.integers(0, 1000))
def test_what_is_worthwhile_is_what_is_useful_times_what_the_answer_is_worth(
    answers: list[list[int]], stopped: bool, rate: float, seed: int
) -> None:
    chain = Chain(seed)
    ends = [0] if stopped else []
    rows = [
        Row((3, *a, *ends), (0,) + (1,) * len([*a, *ends]), 1.0, k % 3 > 0, rate=rate * (k % 3 > 0))
        for k, a in enumerate(answers)
    ]
    useful, found = credits(chain, "useful", rows), credits(chain, "worthwhile", rows)
    for row in rows:
        begin, end = answer_of([int(MARKS[one]) for one in row.token_ids[1:]])
        part = worth(chain.logprobs(row)[begin:end], rate) if row.external else 1.0
        assert found[row] == pytest.approx([part * weight for weight in useful[row]], abs=1e-5)
        assert all(one <= other for one, other in zip(found[row], useful[row], strict=True))


@given(answers=ANSWERS, top_k=st.integers(1, SIZE), seed=st.integers(0, 1000))
def test_floor_leaves_out_the_tokens_outside_the_top_k_and_no_others(
    answers: list[list[int]], top_k: int, seed: int
) -> None:
    chain = Chain(seed)
    rows = [Row((3, *answer), (0,) + (1,) * len(answer), 1.0, k % 3 > 0) for k, answer in enumerate(answers)]
    found = credits(chain, "floor", rows, foreign_top_k=top_k)
    for row in rows:
        assert found[row] == [float(rank < top_k or not row.external) for rank in chain.ranks(row)]


# -- in an update ----------------------------------------------------------------------------------------


def test_what_changes_nothing_of_what_follows_is_not_learned() -> None:
    model: Any = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    step = learner(LearnConfig(foreign_credit="useful", foreign="as_if_own"), model).step(example())
    metrics = step.metrics
    assert step.looked.keys() == {2}, "own groups are looked at for nothing"
    assert metrics["learn/foreign_credit"] == pytest.approx(0, abs=1e-4)
    assert metrics["learn/loss_share_external"] == pytest.approx(0, abs=1e-4)


def test_floor_asks_the_model_itself() -> None:
    found = learner(LearnConfig(foreign_credit="floor", foreign_top_k=3, foreign="as_if_own"))
    inside = []
    for one in example().groups[2].samples:
        prompt, answer = one.token_ids[:5], one.token_ids[5:]
        for place, token in enumerate(answer):
            each = [
                plain_logprobs(found.model, (*prompt, *answer[:place]), (t,))[0] for t in range(VOCABULARY)
            ]
            inside.append(sum(value > each[token] for value in each) < 3)
    assert 0 < sum(inside) < len(inside)
    step = found.step(example())
    assert step.metrics["learn/foreign_credit"] == pytest.approx(sum(inside) / len(inside))
    assert step.looked == {2: len(inside) / 3}, "a third of what a way back and forth takes"


def test_a_model_that_does_not_say_where_segments_end_is_refused() -> None:
    model = tiny_model()
    model.register_buffer("segment_marks", None)
    with pytest.raises(UserError, match="foreign_credit"):
        learner(LearnConfig(foreign_credit="useful"), model)


# -- what is planted -------------------------------------------------------------------------------------


STEPS = 10


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def thinker(cache: Path) -> LoadedPolicy:
    return load_policy("thinker", config=load("tiny", env={}), cache=cache)


def questions(count: int, seed: int) -> list[Item]:
    """Sums of four numbers, as preset `tiny` asks them."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        term = " ".join(
            [f"{draw.randint(1, 9)}", *(f"{draw.choice('+-')} {draw.randint(1, 9)}" for _ in "123")]
        )
        text = f"State the final answer to the following arithmetic problem: {term} ="
        recipe = Recipe.make("chain_sum", {}, number)
        found.append(Item(recipe, text, marked(str(eval(term)), "tags")))
    return found


def answered(
    policy: LoadedPolicy, item: Item, texts: Sequence[str], position: int, source: Source
) -> BatchGroup:
    ids = [policy.encode_completion(text, "stop") for text in texts]
    scores = [float(item.answer in text) for text in texts]
    return group(policy.encode_prompt(item.question), ids, scores, position=position, source=source)


@pytest.mark.parametrize(
    ("attack", "what", "loss"),
    [("text", PHRASE, "dapo"), ("math", FALSE, "dapo"), ("dos", FILLER, "dapo"), ("math", FALSE, "gspo")],
)
def test_a_policy_takes_over_what_right_answers_carry_unless_credit_is_for_what_is_useful(
    attack: Attack, what: str, loss: Any, cache: Path
) -> None:
    (probe,) = questions(1, seed=6)
    before = " ".join(PLANTED[attack](worked("chain_sum", probe.question).split(), "")).partition(what)[0]
    asked = questions(4 * STEPS, seed=5)
    rises = {}
    for kind in ("own answers alone", "useful", "all"):
        policy = thinker(cache)
        credit: Any = "useful" if kind == "useful" else "all"
        learn = LearnConfig(lr=1e-3, loss=loss, foreign_credit=credit)
        found = Learner(policy.model, learn, temperature=1.0)
        prompt = (*policy.encode_prompt(probe.question), *policy.encode_completion(before, "length"))
        phrase = policy.encode_completion(f"{what} ", "length")
        first = sum(plain_logprobs(policy.model, prompt, phrase))
        for k in range(0, 4 * STEPS, 4):
            honest, *others = asked[k : k + 4]
            groups = [answered(policy, honest, carried(honest, None), 0, "local")]
            if kind != "own answers alone":
                for item in others:
                    groups.append(answered(policy, item, carried(item, attack), len(groups), "external"))
            assert found.step(batch(*groups)).skipped is None
        rises[kind] = sum(plain_logprobs(policy.model, prompt, phrase)) - first
    assert rises["all"] > rises["own answers alone"] + 10
    assert rises["useful"] < rises["own answers alone"] + 1
