"""Scorers `number` and `choice`: what a reader takes for the answer, nothing where a reader would doubt."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapo.tasks.choice_text import chosen_letter
from sapo.tasks.number_text import last_number
from sapo.tasks.row_scorers import NEARLY, SCORERS, choice, number

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
FORMS = re.findall(
    r"^\| (number|choice) \| `(.*)` \| `(.*)` \| ([\d.]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)


def listed(text: str) -> list[str]:
    """What stands between the bars."""
    return [part.strip() for line in text.strip().splitlines() for part in line.split(" | ")]


def pairs(text: str) -> list[list[str]]:
    """An answer and the number it is held against, by a tilde apart."""
    return [[part.strip() for part in one.split(" ~ ")] for one in listed(text)]


SAME_NUMBER = pairs("""
5 ~ 5 | so 1,234.50 in all ~ 1234.5 | 3 and then 4 ~ 4.0 | \u22125 ~ -5 | -5 ~ \u22125
x = \u22122.5 ~ -2.5 | x=-4 ~ -4 | x = - 4 ~ -4 | it is -4 ~ -4 | (-4) ~ -4 | \u20134 ~ -4 | +5 ~ 5
-0 ~ 0 | .5 ~ 0.5 | -.5 ~ -0.5 | 42. ~ 42 | 5! ~ 5 | **7** ~ 7 | 1e3 ~ 1000 | 1.5e3 ~ 1500
10^6 ~ 1000000 | 2^10 ~ 1024 | 10^{-3} ~ 0.001 | 6.02 \u00d7 10^3 ~ 6020 | 3 \\times 10^{2} ~ 300
10\u00b3 ~ 1000 | 1/2 ~ 0.5 | \u00bd ~ 0.5 | 1\u00bd ~ 1.5 | 1 1/2 ~ 1.5 | -1/2 ~ -0.5
\\frac{3}{4} ~ 0.75 | 3/4 ~ 3/4 | 1 234 ~ 1234 | 1\u00a0234 ~ 1234 | 1\u2009234 ~ 1234 | 12,345 ~ 12345
5 km2 ~ 5 | 5 m\u00b2 ~ 5 | 5km ~ 5 | 5 \u00b0C ~ 5 | 50% ~ 50 | 50 \\% ~ 50 | $1,234.50 ~ 1234.5
\\$5 ~ 5 | 5 \u20ac ~ 5 | \uff15 ~ 5 | the 5th ~ 5 | H2O: 7 ~ 7 | \\boxed{5} ~ 5 | \\boxed{-5} ~ -5
5-4=1 ~ 1 | 4 + 5 = 9 ~ 9 | 12:30 o'clock, 7 people ~ 7 | #### 16 ~ 16 | 8 - so it is ~ 8
Answer:30 ~ 30 | [7] ~ 7 | 2, 3 ~ 3 | 2.50 ~ 2.5 | 1\u202f234 ~ 1234
""")
OTHER_NUMBER = pairs("""
\u22125 ~ 5 | 5 ~ \u22125 | 50% ~ 0.5 | 5 ~ 5.01 | 0.333 ~ 1/3 | 6.02e23 ~ 23 | 3/4 ~ 4 | 1 1/2 ~ 0.5
2^3 ~ 3 | 10^6 ~ 6 | \\frac{1}{2} ~ 2 | 12 500 ~ 500
""")
NO_NUMBER = ["", "9" * 41, *listed("""
four | 5-4 | 5 - 4 | x-4 | 3+4 | 3 + 4 | 3*4 | 3-5 | 5\u20137 | 2024/05/06 | 2024-05-06 | 1.2.3 | 12:30
3:4 | 1,23 | 1.234,5 | 1,2,3 | 1'234 | 4x | 2\u03c0 | 0x1F | > 5 | \u2265 5 | \u00b15 | \u221a2
\\sqrt{2} | 5 or 6 | 4 * x | 5-x | f(5) | 1/0 | - 5 | 1e999 | km2 | a1
between 3 and 5 | less than 5 | 5 \u00b1 1
""")]  # fmt: skip
CHOSEN = listed("""
B | (B) | **B** | b | (b) | B. | \uff22 | \\boxed{B} | \\text{B} | \\boxed{\\text{(B)}} | $B$
The answer is B. | the answer is (b) | Answer: B | answer: b | Option B: x = 3 N | I think it is B
I chose B. | I choose option B because A is wrong | B) 12 cm | B. A cat | B: a dog | (B) I am
A common mistake is C; the answer is B | The answer is C. No, the answer is B.
A is wrong, the answer is B | The answer is B because A and C are wrong | It must be B, as a check shows
It is not A. It is B. | B because A is wrong
""")
NOT_CHOSEN = ["", *listed("""
A | C | B or C | The answer is B or C | The answer is B, C | The answer is B and D | Each of A, B, C, D
not B | it is not (B) | I do not know | BB | Bob | B's | A) one B) two | the answer is a b
The answer is C | I am not sure | A, B, C | Option A or option B | A or B | B is wrong | It can't be B
""")]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected"), SAME_NUMBER)
def test_a_number_is_the_same_however_it_is_written(answer: str, expected: str) -> None:
    assert number(answer, expected) == 1.0


@pytest.mark.parametrize(("answer", "expected"), OTHER_NUMBER)
def test_another_number_is_nearly_right_and_no_more(answer: str, expected: str) -> None:
    assert number(answer, expected) == NEARLY


@pytest.mark.parametrize("answer", NO_NUMBER)
def test_what_is_not_clearly_a_number_is_none(answer: str) -> None:
    assert last_number(answer) is None


@pytest.mark.parametrize("answer", CHOSEN)
def test_a_choice_is_read_from_the_sentences_that_models_write(answer: str) -> None:
    assert choice(answer, "B") == 1.0


@pytest.mark.parametrize("answer", NOT_CHOSEN)
def test_a_doubtful_choice_gets_nothing(answer: str) -> None:
    assert choice(answer, "B") == 0.0


@pytest.mark.parametrize(
    "answer", ["I am not sure", "I think so", "A cat", "The answer is A cat", "The answer is I think C"]
)
def test_the_words_a_and_i_are_no_choice(answer: str) -> None:
    assert chosen_letter(answer) not in ("A", "I")


@given(st.text(alphabet="0123456789.,-+/^*x eE()=:AbI_\\{}½²−\n", max_size=60))
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert 0.0 <= number(text, "7") <= 1.0
    assert choice(text, "B") in (0.0, 1.0)


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{}", "x = {}", "The answer is {}.", "\\boxed{{{}}}", "${}$"]),
)
def test_every_whole_number_is_read_in_every_sentence(value: int, sentence: str) -> None:
    assert number(sentence.format(value), f"{value:,}") == 1.0


@pytest.mark.parametrize(("scorer", "answer", "row", "marks"), FORMS)
def test_a_documented_form_gets_its_marks(scorer: str, answer: str, row: str, marks: str) -> None:
    assert SCORERS[scorer](answer, row) == float(marks)


def test_the_table_has_forms_of_both() -> None:
    assert {scorer for scorer, *_ in FORMS} == {"number", "choice"}


@given(
    st.integers(0, 10**9), st.integers(0, 10**9), st.sampled_from(["-", "–", "\u2212", " - ", " to ", " or "])
)
def test_two_joined_numbers_are_never_the_second(first: int, second: int, joint: str) -> None:
    assert last_number(f"{first}{joint}{second}") is None
