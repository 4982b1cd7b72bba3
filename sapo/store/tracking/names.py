"""Names of series and parameters as MLflow takes them: letters, digits and `_-. /:`, a path, 250 characters.

What it does not take is written by its number, as in `train :u28:1:u29:` for `train (1)`. Every other name
stays as it is, and two names never become one.
"""

import hashlib
import re

LONGEST = 250
_ODD = re.compile(r"[^\w\-. /:]|:(?=[uh][0-9a-f]*:)")
"""Characters that are refused, and the colon of what would read as one that was replaced."""
_WRITTEN = re.compile(r":u([0-9a-f]*):")


def encoded(name: str) -> str:
    """The name that stands for `name` in MLflow."""
    parts = [_part(part) for part in _ODD.sub(_number, name).split("/")]
    found = "/".join(parts)
    if found.startswith(".."):
        found = _number(".") + found[1:]
    if len(found) <= LONGEST:
        return found
    mark = f":h{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:32]}:"
    return found[: LONGEST - len(mark)] + mark


def decoded(name: str) -> str:
    """The name that `encoded` was given; of one that was too long, its beginning and a digest."""
    return _WRITTEN.sub(lambda number: chr(int(number[1], 16)) if number[1] else "", name)


def series_name(name: str) -> str:
    """The name under which readers know a series, wherever they find it; its own unless that is too long."""
    return decoded(encoded(name))


def _number(character: "re.Match[str] | str") -> str:
    text = character if isinstance(character, str) else character[0]
    return f":u{ord(text):x}:"


def _part(part: str) -> str:
    """A part of a path: not empty, and neither `.` nor `..`."""
    if part in (".", ".."):
        return "".join(map(_number, part))
    return part or ":u:"
