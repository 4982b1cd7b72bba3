"""Whatever a series is called, MLflow takes it, and readers find it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils import validation

from sapo.store.tracking.names import LONGEST, decoded, encoded, series_name

ORDINARY = [
    "reward/local",
    "eval/greedy/file:train",
    "trait/worked",
    "pool/refused/own_name",
    "a b-c.d",
    "a:b",
]
NASTY = [
    "eval/greedy/file:train (1)",
    *(f"reward/local/a{mark}b" for mark in "()+',@#%;[]{}!?*&=<>|\\\"^`~$\n\t\0"),
    "reward/local/ü中😀",
    "reward/local/a:u28:b",
    "reward/local/a:u:b",
    "reward/local/:h00:",
    "..",
    ".",
    "...",
    "..a/b",
    "/a",
    "a/",
    "a//b",
    "a/./b",
    "a/../b",
    "",
    "x" * 300,
    "ü" * 300,
    "(" * 100,
]


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_name_stays_as_it_is(name: str) -> None:
    assert encoded(name) == decoded(name) == name


@pytest.mark.parametrize("name", NASTY)
def test_mlflow_takes_every_name(name: str) -> None:
    validation._validate_metric_name(encoded(name))
    validation._validate_param_name(encoded(name))


@given(st.text(max_size=80))
def test_a_name_is_read_back(name: str) -> None:
    if len(encoded(name)) < LONGEST:
        assert decoded(encoded(name)) == name == series_name(name)
    validation._validate_metric_name(encoded(name))


@given(st.text(alphabet="a:uh28(/.", max_size=12), st.text(alphabet="a:uh28(/.", max_size=12))
def test_two_names_never_become_one(one: str, other: str) -> None:
    assert (encoded(one) == encoded(other)) == (one == other)


def test_long_names_stay_apart_and_are_known_by_one_name() -> None:
    one, other = "x" * 300, "x" * 299 + "y"
    assert encoded(one) != encoded(other)
    assert series_name(one) == decoded(encoded(one)) != one
