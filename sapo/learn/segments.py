"""Where the segments of an answer begin, told from its ids alone: its lines, sentences and steps.

What each id says of that stands in a buffer of the model, as its unused ids do: the learner has no tokenizer.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sapo.core.answer_format import AnswerFormat
from sapo.learn.unused_ids import base_of

BLANK, BEFORE, AFTER, OPENS, CLOSES, TAG, ENDS, EQUALS, DIGIT, ANSWER, STOP = (1 << bit for bit in range(11))
"""Of the text of an id: it is white space; some is before it, some after it; a segment begins with it; one
ends with it; a closing tag begins in it; a tag may end with it; it has an equals sign, a digit; it may close
the tag of the answer, or open its box; it ends an answer."""
_OPENS = re.compile(r"\s*\n\s*\S|\s*<")
_CLOSES = re.compile(r"[.!?]\s*$|\n\s*$")
MARKS: Mapping[str, str] = {"tags": "</", "boxed": "boxed"}
"""What an id has that belongs to the mark of an answer, by `rules.answer`."""
_SPACES = {"Ġ": " ", "▁": " ", "Ċ": "\n", "<0x0A>": "\n"}
"""How vocabularies write white space."""


def mark_segments(
    model: Any, vocabulary: Mapping[str, int], stops: Collection[int], form: AnswerFormat = "text"
) -> None:
    """Note in a model what each id says of segments, by a tokenizer's `vocabulary`, the ids that end an
    answer and the form of answers. Nothing of that is saved with it."""
    base = base_of(model)
    weight = (base.get_output_embeddings() or base.get_input_embeddings()).weight
    marks = [0] * max(len(weight), 1 + max(vocabulary.values(), default=0))
    for name, number in vocabulary.items():
        marks[number] = marks_of(name, form)
    for number in stops:
        marks[number] = STOP
    found = torch.tensor(marks, dtype=torch.int16, device=weight.device)
    base.register_buffer("segment_marks", found, persistent=False)


def segment_marks(model: Any) -> Tensor | None:
    """The marks [V] of a model's ids; None where there are none."""
    found: Tensor | None = getattr(model, "segment_marks", None)
    return found


def marks_of(name: str, form: AnswerFormat = "text") -> int:
    """The marks of an id by its name in a vocabulary, where answers have this form."""
    text = name
    for written, space in _SPACES.items():
        text = text.replace(written, space)
    said = {
        BLANK: not text.strip(),
        BEFORE: text[:1].isspace(),
        AFTER: text[-1:].isspace(),
        OPENS: _OPENS.match(text),
        CLOSES: _CLOSES.search(text),
        TAG: "</" in text,
        ENDS: text.rstrip().endswith(">"),
        EQUALS: "=" in text,
        DIGIT: re.search("[0-9]", text),
        ANSWER: MARKS.get(form, "\0") in text,
    }
    return sum(mark for mark, found in said.items() if found)


@dataclass(slots=True)
class _Word:
    """Tokens from `begin` on up to white space, which is the word's own; the marks of the first, the last
    and all of them."""

    begin: int
    first: int
    last: int
    all: int

    @property
    def step(self) -> bool:
        """Whether it is an equation, as in `9-2=7`, or the end of the answer."""
        return self.all & (EQUALS | DIGIT) == EQUALS | DIGIT or bool(self.all & STOP)

    @property
    def ends(self) -> bool:
        """Whether a sentence, a line or a closing tag ends with it."""
        return bool(self.last & CLOSES or (self.last & ENDS and self.all & TAG))


def segments(marks: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of each segment of a completion, by the marks of its tokens.

    A line, a sentence, a closing tag, a word that is an equation: each ends one. What ends the answer is one.
    White space belongs to the token that holds it; tokens of white space alone to the segment before.
    """
    words: list[_Word] = []
    before = AFTER
    for place, mark in enumerate(marks):
        tag = before & ENDS and words[-1].all & TAG
        gap = tag or before & (AFTER | STOP) or mark & (BEFORE | STOP)
        if not words or (gap and not mark & BLANK):
            words.append(_Word(place, mark, mark, mark))
        else:
            word = words[-1]
            word.all |= mark
            word.last = word.last | mark & CLOSES if mark & BLANK else mark
        before = mark
    begins = [
        word.begin
        for former, word in zip([None, *words], words, strict=False)
        if former is None or former.step or word.step or former.ends or word.first & OPENS
    ]
    return list(zip(begins, [*begins[1:], len(marks)], strict=True))


def answer_of(marks: Sequence[int]) -> tuple[int, int]:
    """Begin and end of the answer itself, by the marks of a completion's tokens: what stands in its last tag
    or box, whatever follows; where there is none, the last segment, without the end."""
    parts = [(begin, end) for begin, end in segments(marks) if not marks[begin] & STOP]
    marked = [part for part in parts if any(marks[place] & ANSWER for place in range(*part))]
    begin, end = next(iter([*marked[-1:], *parts[-1:]]), (0, 0))
    closing = next((place for place in range(begin, end) if marks[place] & TAG), None)
    if closing is not None:
        opening = next((place for place in range(begin, closing) if marks[place] & ENDS), begin - 1)
        return (opening + 1, closing) if opening + 1 < closing else (begin, end)
    box = next((place for place in range(begin, end - 1) if marks[place] & ANSWER), begin - 1)
    return box + 1, end
