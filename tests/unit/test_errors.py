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
