"""Errors that a person can act on."""

import pickle

import pytest

from sapo.core.errors import Refused, SapoError, Unavailable, UserError


class _Own(UserError):
    def __init__(self, field: str) -> None:
        super().__init__(field, 3, "is odd", "say 4")


@pytest.mark.parametrize(
    "error",
    [
        UserError("a", 1, "is wrong", "say 2"),
        _Own("b"),
        Refused("stale", "3 s old", None, True),
        Unavailable("MLflow is away"),
        SapoError(),
    ],
)
def test_errors_pass_from_process_to_process_whole(error: SapoError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert (str(there), there.args, vars(there)) == (str(error), error.args, vars(error))


def test_what_somebody_else_made_very_long_is_said_by_its_beginning() -> None:
    error = UserError("learn." + "k" * 10**6, "v" * 10**6, "is odd", "say 4")
    assert len(str(error)) < 1_500
    assert str(error).endswith(" ...: is odd; say 4")
    assert str(UserError("home", "/a" * 400, "is odd", "say 4")) == f"home = '{'/a' * 400}': is odd; say 4"
