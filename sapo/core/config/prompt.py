"""Section `prompt` of a config: what a policy reads around each question."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from sapo.core.answer_format import AnswerFormat
from sapo.core.config.schema import Section

TAGS_PROMPT = "Think first if it helps, then give the final answer between <answer> and </answer>."
"""Instruction for `rules.answer = "tags"`; the scorer reads the content of the last <answer> tag."""
BOXED_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."
"""Instruction for `rules.answer = "boxed"`, in the words that mathematical models were trained with."""
Text = Annotated[str, Field(max_length=16_384)]


def system_prompt(answer: AnswerFormat) -> str | None:
    """What whoever answers is told beside the question; None where the whole text is the answer."""
    return {"text": None, "tags": TAGS_PROMPT, "boxed": BOXED_PROMPT}[answer]


class Prompt(Section):
    """What a policy reads around each question. A node may have its own: `node.0.prompt`. Peers' texts are
    encoded again under the receiver's prompt. A node that has begun keeps its prompt."""

    system: Text | None = None
    """Replaces the instruction of `rules.answer`; `""` is none."""
    examples: Annotated[tuple[tuple[Text, Text], ...], Field(max_length=64)] = ()
    """Pairs of question and answer, given as earlier turns."""
    template: Mapping[str, bool | int | float | str] = Field(default={})
    """Arguments of the chat template, such as `enable_thinking = false`."""
