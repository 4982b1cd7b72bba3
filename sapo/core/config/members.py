"""Section `member` of a config: who answers at a site whose nodes have no model (docs/members.md)."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sapo.core.config.schema import Address, PositiveFloat, PositiveInt, SecretRef, Section


class OpenAIMember(Section):
    """A model behind any endpoint that speaks OpenAI's API ([members](members.md)). It never learns."""

    type: Literal["openai"] = "openai"
    """A model behind an endpoint."""
    url: Address
    """Base URL, as in `https://api.example.com/v1`."""
    model: str
    """Its name at that endpoint."""
    api_key: SecretRef | None = None
    """`env:NAME`, `file:PATH` or `prefect:BLOCK`; unset sends none."""
    api: Literal["chat", "completions"] = "chat"
    """`chat` sends the question as a user's message, `completions` as plain text and a line break."""
    system: str | None = None
    """System prompt of `chat`, or the text before the question of `completions`."""
    concurrency: PositiveInt = 4
    """Requests at once. Each asks for all answers to one question."""
    timeout_s: PositiveFloat = 120.0
    """For a whole response."""
    max_tokens: PositiveInt | None = None
    """Budget of prompt and answer tokens for the member's whole life. It then pauses."""
    max_cost: PositiveFloat | None = None
    """Budget in money, by `price_in` and `price_out`."""
    price_in: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Per million prompt tokens."""
    price_out: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Per million answer tokens."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_cost is not None and self.price_in == self.price_out == 0:
            raise ValueError("max_cost needs price_in and price_out, in the same money, per million tokens")
        if re.match(r"https?://[^/?#@]+(?=[/?]|$)", self.url) is None:
            raise ValueError(
                "url must begin with http:// or https:// and name a host, without a user before it"
            )
        if re.search(r"[?&][^=]*(key|token|secret|password|sig)[^=]*=", self.url, re.IGNORECASE):
            raise ValueError("url would be logged with the secret in it: name the secret in api_key")
        return self


class CommandMember(Section):
    """A program that reads questions and writes answers, as JSON lines ([members](members.md))."""

    type: Literal["command"] = "command"
    """A program of one's own."""
    run: Annotated[list[str], Field(min_length=1)]
    """The program and its arguments. Started once."""
    timeout_s: PositiveFloat = 120.0
    """For all answers to one question. A slower program is started again."""


class PersonMember(Section):
    """People on a web page of this machine ([members](members.md))."""

    type: Literal["person"] = "person"
    """Whoever opens the page."""
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Local port of the page; default a free one."""
