"""What a folder of transformers needs beside its weights to answer as its node does.

What a policy reads around a question goes with the tokenizer: the folder's chat template puts it before a
conversation that has no system turn of its own. So whatever renders chat templates, such as transformers,
vLLM or MLflow, asks the model as its node was asked. The generation config names every id that ends an
answer and those that no token has, and decodes greedily: a sampling setting of the base model is not what
was trained. vLLM reads of it what ends an answer, and samples where a request names no temperature.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData

from sapo.core.config.load import Config
from sapo.core.types import canonical
from sapo.policy.hf_import import transformers
from sapo.policy.model_source import source

if TYPE_CHECKING:
    from sapo.policy.models import LoadedPolicy

CARD = "README.md"
MARK = "sapo asks 1729"
HUB = re.compile(r"[\w.-]+/[\w.-]+")
"""How a model of the Hugging Face hub is named."""
CARRIED = (
    "The chat template puts it before a conversation that has no system turn of its own, so `transformers`, "
    "vLLM and MLflow ask under it."
)
NOT_CARRIED = "The chat template cannot carry it: write it before your question."
TURNS = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ '\\n\\n' if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
"""The turns of a base model, as `encode_prompt` writes them."""


def dress(policy: "LoadedPolicy", directory: Path, config: Config) -> None:
    """Write beside the weights the tokenizer with the prompt, how to generate, and a card."""
    tokenizer = policy.tokenizer
    own, tokenizer.chat_template = tokenizer.chat_template, chat_template(policy)
    try:
        message = [{"role": "user", "content": MARK}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        tokenizer.save_pretrained(directory)
    finally:
        tokenizer.chat_template = own
    carried = tuple(ids) == policy.encode_prompt(MARK)
    if not carried:
        (directory / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(directory)
    generation(policy, config).save_pretrained(directory)
    (directory / CARD).write_text(card(policy, config, carried=carried), encoding="utf-8")


def generation(policy: "LoadedPolicy", config: Config) -> Any:
    """The most probable answer, as long as it was in training."""
    pad, tokenizer = policy.tokenizer.pad_token_id, policy.tokenizer
    used = {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder}
    model: Any = policy.model
    rows = len(model.get_input_embeddings().weight)
    return transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=config.generate.max_new_tokens,
        eos_token_id=list(policy.stop_ids),
        pad_token_id=policy.end_id if pad is None else pad,
        bos_token_id=tokenizer.bos_token_id,
        suppress_tokens=sorted({*range(rows)} - used) or None,
    )


def chat_template(policy: "LoadedPolicy") -> str:
    """The tokenizer's chat template with the policy's prompt as what it begins with."""
    if policy.tokenizer.chat_template is None:
        system = [{"role": "system", "content": policy.prompt.system}] if policy.prompt.system else []
        shown = [
            {"role": role, "content": text}
            for example in policy.prompt.examples
            for role, text in zip(("user", "assistant"), example, strict=True)
        ]
        return _before([*system, *shown], "") + _literal_start(policy.tokenizer) + TURNS
    own = str(policy.tokenizer.get_chat_template())
    return own if policy.prompt_in_template else opening(policy) + own


def opening(policy: "LoadedPolicy") -> str:
    """Jinja that, in front of a chat template, brings the policy's prompt."""
    *before, last = policy.with_prompt(MARK)
    lead = last["content"].removesuffix(MARK)
    return _arguments(policy.prompt.template) + _before(before, lead)


def _before(messages: list[dict[str, str]], lead: str) -> str:
    """Jinja that puts messages before a conversation, or `lead` into its first turn."""
    if not messages and not lead:
        return ""
    first = f"{{'role': 'user', 'content': {_quoted(lead)} + messages[0]['content']}}"
    added = f"[{first}] + messages[1:]" if lead else f"{_listed(messages)} + messages"
    own = "messages[0]['role'] != 'system'"
    return f"{{%- if {own} %}}{{%- set messages = {added} %}}{{%- endif %}}{{{{- '' }}}}"


def _arguments(template: Mapping[str, Any]) -> str:
    """Jinja that gives arguments the values that the policy was trained under, where nobody names others."""
    return "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_quoted(value)} %}}{{%- endif %}}{{{{- '' }}}}"
        for name, value in template.items()
    )


def _literal_start(tokenizer: Any) -> str:
    """Jinja that writes the special tokens a tokenizer puts before a text."""
    bare, whole = (tokenizer(MARK, add_special_tokens=added).input_ids for added in (False, True))
    start = whole[: len(whole) - len(bare)] if whole[len(whole) - len(bare) :] == bare else []
    return f"{{{{- {_quoted(tokenizer.decode(start))} }}}}" if start else ""


def _listed(messages: list[dict[str, str]]) -> str:
    turns = (f"{{'role': '{one['role']}', 'content': {_quoted(one['content'])}}}" for one in messages)
    return f"[{', '.join(turns)}]"


def _quoted(value: Any) -> str:
    """A value as Jinja writes it, which reads strings as Python does."""
    return json.dumps(value, ensure_ascii=False)


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
