"""The letter that an answer to a multiple-choice question chooses; None where a reader would be in doubt.

docs/extending.md shows which forms are read; tests/unit/test_row_scorers.py tries each of them.
"""

import re
import unicodedata

_DECLARED = re.compile(
    r"\b(?:answer|option|choice|choose|chose|picked|pick|selected|select)\b"
    r"(?: (?:is|would be|was|letter|option))*"
    r" ?:? ?(?P<open>[(\[]?)(?P<letter>[A-Za-z])(?P<close>[)\]]?)(?![\w'’])(?P<rest>.*)",
    re.IGNORECASE,
)
"""A letter that a sentence names as the answer: `the answer is B`, `option (b)`."""
_LABEL = re.compile(r"(?:^|\s)\(?([A-Z])[).:](?=\s|$)")
"""A letter before what it stands for: `B) 12 cm`."""
_ALONE = re.compile(r"(?<![\w'’])([A-Z])(?![\w'’])")
_ANOTHER = re.compile(
    r" ?(?:,|/|&|\+|or\b|and\b) ?(?:(?:the )?(?:answer|option|choice) )?[(\[]?[A-Za-z][)\]]?(?![\w'’])",
    re.IGNORECASE,
)
_PROSE = re.compile(r" (?!(?:because|since|as|or|and|nor|but)\b)[a-z]")
"""What follows the words `A` and `I` in a sentence."""

_NOT = re.compile(
    r",? ?\b(?:and |but )?not (?:option |choice )?[(\[]?[A-Za-z][)\]]?(?![\w'’])", re.IGNORECASE
)
"""A letter that is ruled out beside the one that is chosen: `B, not C`."""
_CLAUSE = re.compile(
    r"(?<=[.;!?\n])|(?<=,)(?= (?:so |and |but )?(?:the|my) answer\b)|(?= (?:because|since)\b)", re.IGNORECASE
)
"""Where a clause ends that may rule out a letter without touching the next one."""
_RULED_OUT = re.compile(
    r"\b(?:not|cannot|never|neither|nor|none|except|but for|wrong|incorrect|false|mistaken?|doubt|unlikely|"
    r"rules? out|ruled out|eliminated?|excluded?|instead of)\b|n['’]t\b",
    re.IGNORECASE,
)
"""What makes a clause say which letter is not the answer, or no more than that somebody doubts."""


def chosen_letter(answer: str) -> str | None:
    """The chosen letter as a capital; None if none or more than one is chosen.

    The words `A` and `I` of a sentence are no letters, and a clause that says no chooses none.
    """
    text = _plain(answer)
    alone = re.fullmatch(r"\W*([A-Za-z])\W*", text)
    if alone:
        return alone[1].upper()
    text = _NOT.sub("", text)
    text = "".join(one for one in _CLAUSE.split(text) if not _RULED_OUT.search(one))
    found = _declared(text)
    if not found:
        label = _LABEL.match(text)
        found = {*_LABEL.findall(text)} if label else _standing_alone(text)
    return found.pop() if len(found) == 1 else None


def _plain(answer: str) -> str:
    text = unicodedata.normalize("NFKC", answer)
    boxes = re.findall(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    text = boxes[-1] if boxes else text
    text = re.sub(r"\\(?:text|textbf|mathbf|mathrm)\s*\{([^{}]*)\}", r"\1", text)
    lines = (" ".join(line.split()) for line in re.sub(r"[*_`$]+", "", text).splitlines())
    return "\n".join(line for line in lines if line)


def _declared(text: str) -> set[str]:
    """Letters of the last sentence that names an answer; more than one if it names a choice of several."""
    found: set[str] = set()
    for match in _DECLARED.finditer(re.sub(r"[.;!?]", "\n", text)):
        letter, rest, framed = match["letter"], match["rest"], bool(match["open"] and match["close"])
        if letter.islower() and not framed and rest.strip():
            continue  # `the answer is a cat`
        if letter in "AI" and not framed and _PROSE.match(rest):
            continue
        found = {letter.upper()}
        if _ANOTHER.match(rest):
            found.add("")  # some other letter, too
    return found


def _standing_alone(text: str) -> set[str]:
    found = set()
    for match in _ALONE.finditer(text):
        letter, rest = match[1], text[match.end() :]
        if letter in "AI" and _PROSE.match(rest):
            continue
        found.add(letter)
    return found
