"""What the programs of benchmarks/round.py share: their work, and one round on request over a pipe.

Standard library only: genrl's program runs in an environment of its own, without sapo.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Scores = Literal["verifier", "half", "all"]
"""Who scores: the verifier, or a stand-in that leaves half of the groups, or all, with an advantage."""


@dataclass(frozen=True)
class Work:
    """What every program does in a round. Lengths are in tokens."""

    model: str
    """Directory of the model and its tokenizer."""
    config: dict[str, Any]
    """The node's resolved config, for ours."""
    rounds: list[list[dict[str, Any]]]
    """The questions of each round: `text`, `dataset`, `config`, `seed`, `index`."""
    incarnation: str
    """Of our node: it fixes those questions."""
    system: str | None
    """Instruction before every question."""
    examples: list[list[str]]
    """Pairs of question and answer, as earlier turns."""
    tagged: bool
    """Whether the answer is what stands between tags, not the whole text."""
    groups: int
    completions: int
    new_tokens: int
    micro_batch: int
    """Sequences per forward pass of the update."""
    dtype: str
    """Of the weights."""
    lora: dict[str, Any] | None
    """Rank, alpha and targets of the adapter that alone is trained, if one is."""
    lr: float
    threads: int
    folder: str
    """Where the program may write."""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """Data sets and their parameters, for programs that draw questions themselves."""
    device: str = "cpu"
    """Where TRL runs; ours has it in its config."""
    vllm_share: float = 0.0
    """Of the GPU's memory that TRL's vLLM may take; 0: it samples with transformers' generate."""

    def conversation(self, question: str) -> list[dict[str, str]]:
        """The messages of one question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [text for pair in self.examples for text in pair] + [question]
        roles = ("user", "assistant")
        return [*system, *({"role": roles[k % 2], "content": text} for k, text in enumerate(asked))]

    def write(self, path: Path) -> None:
        """For a program to `read`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls) -> "Work":
        """What this program is to do: the file that its command line names."""
        return cls(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


def stand_in(scores: Scores, group: int, k: int) -> float:
    """The score of a group's completion k, where no verifier decides: every other completion is right, and of
    `half` every other group has no completion that is."""
    return float(k % 2 == 1 and (scores == "all" or group % 2 == 0))


class Requests:
    """Rounds that the benchmark asks for: a line each way. What libraries print goes to standard error."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def next(self) -> Scores | None:
        """Wait for the next round; who scores it, or None when there is none."""
        line = sys.stdin.readline().strip()
        return line or None  # type: ignore[return-value]

    def answer(
        self,
        seconds: float,
        reward: float,
        trained: bool,
        tokens: float = 0.0,
        stages: dict[str, float] | None = None,
    ) -> None:
        """A round is done: its seconds, the mean score of its completions, whether a step was made, tokens
        that were generated, and seconds by stage."""
        reply = {"seconds": seconds, "reward": reward, "trained": trained, "tokens": tokens}
        self._replies.write(json.dumps(reply | {"stages": stages or {}}) + "\n")
        self._replies.flush()
