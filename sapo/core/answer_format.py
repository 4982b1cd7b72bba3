"""Which part of a text is the answer. Loads nothing: the processes that score import it."""

from typing import Literal

AnswerFormat = Literal["text", "tags", "boxed"]
"""The whole text, the last `<answer>` tag's content, or that of the last `\\boxed{}`."""
