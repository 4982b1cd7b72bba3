"""Members that ask vLLM's own OpenAI server, with a model that ships with the package behind it."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from asks import ask, asks, never
from openai_server import HEAD, widen_heads

from sapo.core.config.load import load
from sapo.core.config.members import OpenAIMember
from sapo.core.errors import UserError
from sapo.node.member.answer_book import AnswerBook
from sapo.node.member.openai import OpenAIBackend
from sapo.policy.model_source import SHIPPED

if TYPE_CHECKING:
    from conftest import Served

pytestmark = pytest.mark.vllm


def backend_for(served: "Served", *sets: str) -> OpenAIBackend:
    member = ["member.type=openai", f"member.url={served.url}", f"member.model={served.model}"]
    config = load(sets=[*member, "generate.max_new_tokens=64", *sets], env={})
    assert isinstance(config.member, OpenAIMember)
    return OpenAIBackend(config.member, config)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_member_is_given_as_many_answers_as_it_asks_for(
    served_starter: "Served", book: AnswerBook, api: str
) -> None:
    backend_for(served_starter, f"member.api={api}").answer(asks(6, wanted=4), book, never)
    found = [book.answers(place) for place in range(6)]
    assert [len(answers) for answers in found] == [4] * 6
    assert len({one.text for answers in found for one in answers}) > 6, "they are drawn, not copied"
    assert not book.given_up()
    assert book.totals()["requests"] == 6
    assert book.totals()["garbage"] == 0


def test_a_model_behind_its_template_answers_as_it_was_taught(
    served_starter: "Served", book: AnswerBook
) -> None:
    backend_for(served_starter).answer([ask(wanted=16, text="What is 3 plus 4?")], book, never)
    answers = book.answers(0)
    tagged = [one for one in answers if one.text.endswith("</answer>") and one.finish_reason == "stop"]
    assert len(tagged) > 8


def test_a_prompt_is_paid_once_for_all_its_answers(served_starter: "Served", book: AnswerBook) -> None:
    question = ask(wanted=8, text="What is 3 plus 4? " * 20)
    backend_for(served_starter, "generate.max_new_tokens=1").answer([question], book, never)
    assert {one.finish_reason for one in book.answers(0)} == {"length"}
    totals = book.totals()
    assert 8 < totals["tokens"] < len(question.question.text) + 2 + 8
    assert totals["requests"] == 1


def test_a_question_too_long_for_the_model_is_given_up_alone(
    served_starter: "Served", book: AnswerBook
) -> None:
    backend_for(served_starter).answer([ask(0, text="What? " * 2_000), ask(1)], book, never)
    assert "400" in book.given_up()[0]
    assert len(book.answers(1)) == 4


def test_a_model_that_is_not_there_is_an_error_of_the_config(
    served_starter: "Served", book: AnswerBook
) -> None:
    with pytest.raises(UserError, match=r"member\.model = 'nobody'.*\(404\).*does not exist"):
        backend_for(served_starter, "member.model=nobody").answer([ask()], book, never)


def test_the_model_that_is_served_computes_what_the_shipped_one_does(tmp_path: Path) -> None:
    shipped, served = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (SHIPPED / "thinker", widen_heads(SHIPPED / "thinker", tmp_path / "thinker"))
    )
    assert served.config.head_dim == HEAD != shipped.config.head_dim
    ids = torch.arange(512)[None]
    with torch.no_grad():
        torch.testing.assert_close(served(ids).logits, shipped(ids).logits, rtol=0, atol=1e-3)
