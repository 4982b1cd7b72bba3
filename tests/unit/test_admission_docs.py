"""docs/admission.md names every code that a refusal may have, and no other, with what it proves."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"not_regenerable", "question_mismatch", "slow", "too_costly", "too_long"}
"""Codes of `sapo.tasks.workers.Verification` and `sapo.peers.quotas.beyond`, which are values there."""


def documented() -> dict[str, str]:
    """The column `proven` by code."""
    text = (ROOT / "docs" / "admission.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| .* \| ?(.*?) ?\|$", text, re.MULTILINE)
    return {code: proven for codes, proven in rows for code in re.findall(r"`(\w+)`", codes)}


def texts(node: ast.AST) -> Iterator[str]:
    """The texts an expression may be: itself, or either side of a choice."""
    if isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def in_source() -> set[str]:
    """Codes that the package refuses with; `grammar` has an exception of the same name for texts."""
    found = set(ELSEWHERE)
    for path in (ROOT / "sapo").rglob("*.py"):
        if path.name == "safe_parse.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                named = [one.value for one in node.keywords if one.arg == "reason"]
                if isinstance(node.func, ast.Name) and node.func.id in ("Refused", "RefusalRow"):
                    found |= {text for value in (*node.args[:1], *named) for text in texts(value)}
                elif isinstance(node.func, ast.Attribute) and node.func.attr == "_bad":
                    found |= set(texts(node.args[-1]))
            elif path.name == "membership.py" and isinstance(node, ast.Tuple):
                found |= {text for text in texts(node.elts[0]) if "_" in text}
    return found


def test_every_code_is_documented_and_every_documented_code_exists() -> None:
    assert set(documented()) == in_source()


def test_the_workers_give_no_other_reasons() -> None:
    text = (ROOT / "sapo" / "tasks" / "workers.py").read_text(encoding="utf-8")
    assert {code for code in ELSEWHERE if f'"{code}"' in text} == ELSEWHERE
