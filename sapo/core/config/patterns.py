"""The patterns that settings keep to, and what is wrong with a value, in words."""

from collections.abc import Mapping
from typing import Any

OWN_CODE = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"
PACKAGE = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?$"
VERSION = r"^[A-Za-z0-9]([A-Za-z0-9.+!_-]{0,98}[A-Za-z0-9])?$"

PATTERNS: Mapping[str, str] = {
    r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$": "letters a to z, digits, - and _ only, a letter or digit first, "
    "63 characters at most",
    r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:.+|prefect:[a-z0-9-]+)$": "env:NAME, file:PATH or prefect:BLOCK",
    r"^[a-z]([a-z0-9-]{0,30}[a-z-])?$": "small letters a to z, digits and - only, a letter first and no "
    "digit last, 32 characters at most",
    r"^[0-9a-f]{64}$": "64 hex digits",
    PACKAGE: "the name of a package",
    VERSION: "the version of a package",
    OWN_CODE: "module:function of an installed package",
    r"^[a-z0-9-]+$": "small letters a to z, digits and - only",
    r"^[A-Za-z0-9._-]{1,249}$": "letters a to z, digits, dots, - and _ only, 249 characters at most",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters a to z, digits, dots, - and _ only, a letter or digit first",
    r"^(auto|cpu|cuda(:[0-9]+)?)$": "auto, cpu, cuda or cuda:NUMBER",
    r"^[A-Za-z0-9][A-Za-z0-9_-]{0,40}$": "letters a to z, digits, - and _ only, a letter or digit first, "
    "41 characters at most",
}
"""The patterns of settings, of names in grids among them, in words."""


def in_words(error: Mapping[str, Any]) -> str:
    """What is wrong with a value, from one of pydantic's errors; a pattern is said in words."""
    if error["type"] == "string_pattern_mismatch":
        return "must be " + PATTERNS[error["ctx"]["pattern"]]
    return str(error["msg"]).removeprefix("Value error, ")
