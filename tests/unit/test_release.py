"""A policy's folder for others: transformers alone asks it what its node asks, and stops as it does."""

import stat
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from sapo.core.config.load import Config, GenerateConfig, Lora
from sapo.core.config.prompt import Prompt
from sapo.policy import models
from sapo.testing import policies as samples

NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] }}{% if think %}{{ 'think' }}{% endif %}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SILENT = NO_SYSTEM.replace("{{ raise_exception('no system') }}", "{% continue %}")
"""Leaves a system turn out."""
ODD = 'a "b" \\n {% c %} {{ d }} \n e'
EXAMPLES = (("1 + 2", "3"), ("2 + 2", ODD))
PROMPTS = [Prompt(), Prompt(system="add"), Prompt(system=ODD, examples=EXAMPLES), Prompt(examples=EXAMPLES)]


def kept(directory: Path, template: str | None, bos: bool = False) -> Path:
    """What a node's checkpoint holds of a model."""
    tokenizer = samples.tokenizer(bos=bos)
    tokenizer.chat_template = template
    models.save(models.wrap("m", samples.model("llama"), tokenizer), directory)
    (directory / "optimizer.pt").touch()
    return directory


def as_trained(policy: models.LoadedPolicy, bos: bool) -> str:
    """The text of a question as the policy's own tokenizer writes it."""
    if policy.tokenizer.chat_template is None:
        examples = "".join(f"{asked}\n{answer}\n\n" for asked, answer in policy.prompt.examples)
        return (
            ("<|bos|>" if bos else "")
            + (policy.prompt.system or "")
            + "\n" * bool(policy.prompt.system)
            + examples
            + "1 + 1\n"
        )
    messages = policy.conversation("1 + 1")
    return str(policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    ("template", "bos"), [(samples.CHAT, True), (NO_SYSTEM, False), (None, False), (None, True)]
)
def test_the_folder_asks_under_the_prompt_and_a_system_turn_of_ones_own_replaces_it(
    tmp_path: Path, template: str | None, bos: bool, prompt: Prompt
) -> None:
    config = Config(prompt=prompt, generate=GenerateConfig(max_new_tokens=7))
    source = kept(tmp_path / "kept", template, bos)
    policy = models.export(source, tmp_path / "out", config=config, cache=tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = [{"role": "user", "content": "1 + 1"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert tuple(ids) == policy.encode_prompt("1 + 1")
    wanted = as_trained(policy, bos)
    assert tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False) == wanted
    further = [*asked, {"role": "assistant", "content": "2"}, *asked]
    assert tokenizer.apply_chat_template(further, tokenize=False).startswith(
        wanted.removesuffix("<|assistant|>")
    )
    if template == samples.CHAT:
        told = tokenizer.apply_chat_template(
            [{"role": "system", "content": "x"}, *asked], add_generation_prompt=True, tokenize=False
        )
        assert told == "<|system|>x<|end|><|user|>1 + 1<|end|><|assistant|>"
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.max_new_tokens, generation.do_sample) == (7, False)
    assert set(generation.eos_token_id) == set(policy.stop_ids)
    assert not (tmp_path / "out" / "optimizer.pt").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "What it began as: starter, taught the swarm's tasks by sapo." in card
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {
        stat.S_IMODE((tmp_path / "out" / "config.json").stat().st_mode)
    }


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        *product((samples.CHAT, NO_SYSTEM, SILENT, None), PROMPTS),
        *product((NO_SYSTEM, SILENT), [Prompt(template={"think": True}, system="add")]),
    ],
)
def test_a_node_that_goes_on_from_the_folder_is_asked_as_the_one_that_it_was(
    tmp_path: Path, template: str | None, prompt: Prompt
) -> None:
    config = Config(prompt=prompt)
    policy = models.export(kept(tmp_path / "kept", template), tmp_path / "out", config=config, cache=tmp_path)
    config = config.model_copy(update={"model": str(tmp_path / "out")})
    again = models.load_policy(config.model, config=config, cache=tmp_path)
    assert again.prompt_text("1 + 1") == policy.prompt_text("1 + 1")
    models.export(tmp_path / "out", tmp_path / "further", config=config, cache=tmp_path)
    written = [(tmp_path / name / "chat_template.jinja").read_text() for name in ("out", "further")]
    assert written[0] == written[1]


def test_arguments_of_the_template_are_those_of_training_unless_others_are_named(tmp_path: Path) -> None:
    config = Config(prompt=Prompt(template={"think": True}))
    policy = models.export(
        kept(tmp_path / "kept", NO_SYSTEM), tmp_path / "out", config=config, cache=tmp_path
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = [{"role": "user", "content": "1"}]
    said = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert said == policy.prompt_text("1") == "<|user|>1think<|end|><|assistant|>"
    assert "think" not in tokenizer.apply_chat_template(asked, tokenize=False, think=False)


def test_templates_beside_the_default_one_go_with_the_folder(tmp_path: Path) -> None:
    tokenizer = samples.tokenizer()
    tokenizer.chat_template = {"default": samples.CHAT, "tool_use": NO_SYSTEM}
    models.save(models.wrap("m", samples.model("llama"), tokenizer), tmp_path / "kept")
    config = Config(prompt=Prompt(system="add"))
    policy = models.export(tmp_path / "kept", tmp_path / "out", config=config, cache=tmp_path)
    found: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found.chat_template["tool_use"] == NO_SYSTEM
    asked = [{"role": "user", "content": "1 + 1"}]
    ids = found.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert tuple(ids) == policy.encode_prompt("1 + 1")


def test_ids_that_no_token_has_are_left_out_by_whoever_reads_the_generation_config(tmp_path: Path) -> None:
    tokenizer = samples.tokenizer()
    models.save(models.wrap("m", samples.model("llama", size=64), tokenizer), tmp_path / "kept")
    models.export(tmp_path / "kept", tmp_path / "out", config=Config(), cache=tmp_path)
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert {*generation.suppress_tokens} == {*range(64)} - {*tokenizer.get_vocab().values()}


def test_a_base_model_whose_prompt_no_template_can_carry_has_none(tmp_path: Path) -> None:
    vocabulary = {text: number for number, text in enumerate(["<s>", "</s>", "▁", *samples.CHARACTERS, "\n"])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    start = [("<s>", 0)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=start)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    models.save(models.wrap("m", samples.model("llama", size=64), tokenizer), tmp_path / "kept")
    config = Config(prompt=Prompt(system="add"))
    policy = models.export(tmp_path / "kept", tmp_path / "out", config=config, cache=tmp_path)
    assert "The chat template cannot carry it" in (tmp_path / "out" / "README.md").read_text()
    again = models.load_policy(str(tmp_path / "out"), config=config, cache=tmp_path)
    assert again.encode_prompt("1 + 1") == policy.encode_prompt("1 + 1")


@pytest.mark.parametrize("adapter", [False, True])
def test_an_adapter_is_merged_or_left_and_answers_alike(tmp_path: Path, adapter: bool) -> None:
    base = kept(tmp_path / "base", samples.CHAT)
    config = Config(model=str(base), lora=Lora(rank=2), prompt=Prompt(system="add"))
    policy = models.load_policy(str(base), config=config, cache=tmp_path, threads=1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    models.save(policy, tmp_path / "kept")
    models.export(tmp_path / "kept", tmp_path / "out", config=config, cache=tmp_path, adapter=adapter)
    assert (tmp_path / "out" / "adapter_config.json").exists() == adapter
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([policy.encode_prompt("1 + 1")])
    torch.testing.assert_close(
        model(input_ids=ids).logits, policy.model(input_ids=ids).logits, atol=1e-4, rtol=1e-4
    )
