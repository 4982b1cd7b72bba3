"""The scorers of rows give what the table of docs/extending.md says, and never more to a text in doubt."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapo.tasks.number_text import last_number
from sapo.tasks.row_scorers import SCORERS

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
FORMS = re.findall(
    r"^\| (number|choice) \| `(.*)` \| `(.*)` \| ([\d.]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)


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


@given(st.text(max_size=60))
def test_any_text_is_read_without_an_error(text: str) -> None:
    last_number(text)
    SCORERS["choice"](text, "B")
