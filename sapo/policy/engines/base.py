"""The interface of a generation engine: prompts in, groups of completions out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sapo.core.errors import UserError
from sapo.core.types import Completion, Sampling

if TYPE_CHECKING:
    from sapo.policy.models import LoadedPolicy

NOT_FINITE = "the model's probabilities are not finite, so nothing can be sampled; use an older checkpoint"


class Engine(Protocol):
    """Samples completions from the current policy."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        completions: int,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        greedy: bool = False,
    ) -> list[list[Completion]]:
        """`completions` completions for each prompt (token ids), in the prompts' order.

        The same policy, prompts and `seed` give the same completions. Every completion carries text,
        `finish_reason`, `token_ids` (with the final stop token iff it stopped) and `logprobs` under the
        sampling distribution at `sampling.temperature`. `greedy` puts one of the most probable tokens before
        them, which may then be none: both come from one prefill.
        """

    def update_weights(self) -> None:
        """Take over the policy's weights as they are now; costs nothing where they are the same."""

    def close(self) -> None:
        """Free what the engine holds; it generates no more."""


@runtime_checkable
class CountsAnswers(Protocol):
    """An engine that tells how far a call is, where it is asked to."""

    answered: Callable[[int], None] | None
    """Called, where it is set, with how many completions of the call in hand have ended."""


@contextmanager
def counting(engine: Engine, tell: Callable[[int], None]) -> Iterator[None]:
    """Have an engine count its completions meanwhile, if it can."""
    if not isinstance(engine, CountsAnswers):
        yield
        return
    engine.answered = tell
    try:
        yield
    finally:
        engine.answered = None


def refuse_long(policy: "LoadedPolicy", prompts: Sequence[Sequence[int]]) -> None:
    """Raise `UserError` for a prompt that leaves no room in the model's context."""
    for prompt in prompts:
        if not prompt or not policy.fits(prompt):
            problem = f"the model's context is {policy.max_length} tokens"
            remedy = "leave such questions out: prompts are not truncated"
            raise UserError("prompt", f"{len(prompt)} tokens", problem, remedy)
