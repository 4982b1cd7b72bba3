"""The literal reading of texts: the library's scores where nothing can be evaluated.

Run as a program, in a process of its own with PYTHONHASHSEED=0: one JSON object of a recipe and a text a line
comes in, a score or the name of an exception goes out. What a scorer would evaluate is read in another way
than `sapo.tasks.safe_parse` does: `eval` reads what is a literal as it stands; `parse_expr` takes sums,
products and powers of plain numbers and letters, and the stored answer itself; all else is malformed.
"""

import ast
import builtins
import json
import re
import sys
import types
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from library_scores import score
from sympy.parsing.sympy_parser import parse_expr

from sapo.tasks import gym, safe_parse

COIN_FLIP = "reasoning_gym.probability.coin_flip"
OWN_PROBLEM = "bitwise_arithmetic"
"""Evaluates its own problem, never a text."""
EVAL = builtins.eval


class Reading:
    """`parse_expr` for texts that are arithmetic as they stand, or that the puzzle itself holds."""

    def __init__(self) -> None:
        self.known: set[str] = set()

    def __call__(self, text: str, local_dict: dict[str, Any] | None = None) -> Any:
        core = text.split("#")[0].strip()
        plain = re.fullmatch(
            r"(?:[\d\s+\-*/().]|\b(?:[A-Za-z]|nanj?|oo|True|False|0x[\da-f]+|0b[01]+|\d[\d_]*(?:e\d{1,4})?)\b|\*\*\d{1,2}\b){1,9000}",
            core,
        )
        if core in self.known or (plain and not re.search(r"\*\*\s*(?!\d{1,2}\b)", core)):
            now, builtins.eval = builtins.eval, EVAL
            try:
                return parse_expr(core, local_dict=local_dict)
            finally:
                builtins.eval = now
        raise ValueError("not read literally")


def forbid_parsing(reading: Reading) -> None:
    """Put the reading where any module of the library would have sympy evaluate."""
    without = types.ModuleType("sympy")
    without.__dict__.update(vars(sympy), parse_expr=reading)
    for name, module in list(sys.modules.items()):
        if not name.startswith("reasoning_gym"):
            continue
        for key, value in list(vars(module).items()):
            if value is Fraction and name == COIN_FLIP:
                setattr(module, key, safe_parse.fraction)  # as it is, but for powers that take hours
            elif value is parse_expr:
                setattr(module, key, reading)
            elif value is sympy:
                setattr(module, key, without)


def main() -> None:
    """Score what comes in."""
    made, reading, replies = lru_cache(maxsize=256)(gym.entry), Reading(), sys.stdout
    forbid_parsing(reading)
    sys.stdout = sys.stderr
    for line in sys.stdin:
        row = json.loads(line)
        source, entry = made(row["dataset"], json.dumps(row["config"]), row["seed"], 0)
        stored = (entry["answer"], entry["metadata"].get("integrand"))
        reading.known = {text.strip() for text in stored if isinstance(text, str)}
        reader: Any = EVAL if row["dataset"] == OWN_PROBLEM else ast.literal_eval
        builtins.eval = reader
        replies.write(json.dumps(score(source, entry, row["text"])) + "\n")
        builtins.eval = EVAL


if __name__ == "__main__":
    main()
