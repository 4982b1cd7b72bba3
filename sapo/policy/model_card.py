"""The card of a policy that leaves the swarm: what it is, what it was trained on, and under which prompt."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCardData

from sapo.core.config.load import Config
from sapo.core.types import canonical
from sapo.policy.model_source import source

if TYPE_CHECKING:
    from sapo.policy.models import LoadedPolicy

HUB = re.compile(r"[\w.-]+/[\w.-]+")
"""How a model of the Hugging Face hub is named."""
CARRIED = (
    "The chat template puts it before a conversation that has no system turn of its own, so `transformers`, "
    "vLLM and MLflow ask under it."
)
NOT_CARRIED = "The chat template cannot carry it: write it before your question."


def card(policy: "LoadedPolicy", config: Config, *, carried: bool) -> str:
    """The card as Markdown; `carried` says whether the chat template holds the prompt."""
    adapter = policy.lora
    hub = HUB.fullmatch(config.model) is not None and not Path(config.model).exists()
    data = ModelCardData(
        base_model=config.model if hub else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["sapo", "grpo", "reinforcement-learning"],
    )
    base = config.model if hub else Path(config.model).name
    kind = "A LoRA adapter of" if adapter else "A language model that began as"
    learn, batch = config.learn, config.batch
    tasks = "".join(f"- `{task.dataset}` `{canonical(task.config)}`\n" for task in config.tasks)
    return f"""---
{data.to_yaml()}
---

# {config.swarm.name}

{kind} `{base}`, trained by reinforcement learning (GRPO) as a node of the swarm {config.swarm.name}:
{learn.loss}, learning rate {learn.lr:g}, {batch.local} own and {batch.external} foreign groups a round,
{batch.completions} completions each. What it began as: {source(config.model)}.

## Tasks

{tasks}
## Prompt

{_fenced(policy.prompt_text("{question}"))}

{CARRIED if carried else NOT_CARRIED} An answer has at most {config.generate.max_new_tokens} tokens.
"""


def _fenced(text: str) -> str:
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{fence}text\n{text}\n{fence}"
