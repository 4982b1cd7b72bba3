"""Scorers that only compare: found by what their code can name, so that a new release's are judged anew."""

import builtins
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import reasoning_gym

utils = reasoning_gym.utils
_BUILTINS = frozenset(
    {"abs", "all", "any", "bool", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min"}
    | {"range", "set", "sorted", "str", "sum", "zip"}
)
_METHODS = frozenset(
    {"endswith", "items", "join", "lower", "replace", "split", "startswith", "strip", "upper"}
)
_DECIMALS = frozenset({"utils", "compute_decimal_reward"})


def only_compares(score_answer: Callable[..., Any]) -> bool:
    """Whether a scorer does no more with a text than take it apart, read numbers and compare.

    Its code may name some builtins, methods of text, and the library's comparison of decimal numbers; no
    other function, attribute or module. Such a scorer leaves nothing behind that a later text could meet.
    """
    function = getattr(score_answer, "__func__", score_answer)
    return isinstance(function, types.FunctionType) and _only_compares(function)


@lru_cache(maxsize=1024)
def _only_compares(function: types.FunctionType) -> bool:
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    known = _BUILTINS | _METHODS | _DECIMALS | {name for name in names if _is_exception(name)}
    replaced = {name for name in names & function.__globals__.keys() if name not in _METHODS}
    same = all(function.__globals__[name] is utils for name in replaced)
    return names <= known and same and function.__closure__ is None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes(part)


def _is_exception(name: str) -> bool:
    value = getattr(builtins, name, None)
    return isinstance(value, type) and issubclass(value, Exception)
