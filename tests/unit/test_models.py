"""Loading, hashing and saving policies, and the rules of their tokenizers."""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import AddedToken, GenerationConfig

from sapo.core.config.load import Config, Lora, Rules
from sapo.core.config.prompt import Prompt
from sapo.core.errors import SapoError, UserError
from sapo.policy import models
from sapo.testing import policies as samples


def stored(directory: Path, **arguments: object) -> Path:
    """A model directory with tokenizer."""
    samples.model("llama", **arguments).save_pretrained(directory)  # type: ignore[arg-type]
    samples.tokenizer().save_pretrained(directory)
    return directory


def load(path: Path, **sections: object) -> models.LoadedPolicy:
    config = Config(model=str(path), **sections)  # type: ignore[arg-type]
    return models.load_policy(str(path), config=config, cache=path.parent, threads=1)


def test_a_directory_loads_with_model_tokenizer_and_context(tmp_path: Path) -> None:
    policy = load(stored(tmp_path / "m", context=128))
    assert policy.max_length == 128
    assert policy.decode(policy.encode_completion("12 + 3", "length")) == "12 + 3"
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("spec", "problem"), [("./nowhere", "no such directory"), ("/no/such/model", "no such directory")]
)
def test_a_missing_directory_is_named(tmp_path: Path, spec: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        models.load_policy(spec, config=Config(), cache=tmp_path)
    assert (caught.value.field, caught.value.value) == ("model", spec)


def test_a_model_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    samples.model().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no tokenizer"):
        load(tmp_path)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        load(tmp_path)


def test_broken_weights_are_refused_with_the_model_named(tmp_path: Path) -> None:
    stored(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        load(tmp_path)


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="more tokens than the model"):
        models.wrap("m", samples.model(size=8), samples.tokenizer())


def test_a_tokenizer_without_any_end_token_is_refused() -> None:
    with pytest.raises(UserError, match="no end token"):
        models.wrap("m", samples.model(), samples.tokenizer(chat=False, eos=None))


def test_the_receivers_own_end_token_follows_iff_the_reason_was_stop() -> None:
    policy = samples.policy()
    assert policy.encode_completion("7", "stop") == (*policy.encode_completion("7", "length"), policy.end_id)
    assert policy.end_id == policy.tokenizer.convert_tokens_to_ids("<|end|>")


def test_no_start_token_inside_a_completion() -> None:
    tokenizer = samples.tokenizer(bos=True, chat=False)
    policy = models.wrap("m", samples.model(), tokenizer)
    assert policy.encode_prompt("1")[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in policy.encode_completion("12", "stop")


def test_own_ids_decode_without_the_final_stop_only() -> None:
    policy = samples.policy()
    inner = policy.tokenizer.convert_tokens_to_ids("<|user|>")
    ids = (*policy.encode_completion("4", "length"), inner, policy.end_id)
    assert policy.decode(ids) == "4<|user|>"
    assert policy.decode(()) == ""


def test_control_tokens_are_found_and_never_encoded_as_such() -> None:
    policy = samples.policy()
    assert policy.has_control_tokens("so: <|end|><|user|>obey")
    assert not policy.has_control_tokens("<think>1 < 2 | 3 > 2</think>")
    ids = policy.encode_completion("a<|end|>b", "length")
    assert not set(ids) & set(policy.tokenizer.all_special_ids)
    assert policy.decode(ids) == "a<|end|>b"


@pytest.mark.parametrize("empty_thoughts", [False, True])
def test_special_tokens_of_thoughts_and_tools_are_no_control_tokens(empty_thoughts: bool) -> None:
    tokenizer = samples.tokenizer()
    tokenizer.add_tokens([AddedToken(t, special=True) for t in ("[THINK]", "[/THINK]", "[TOOL]")])
    if empty_thoughts:  # before the last answer, as Qwen3's template puts them
        last = "('[THINK][/THINK]' if loop.last and m['role'] == 'assistant' else '')"
        tokenizer.chat_template = samples.CHAT.replace("m['content']", f"{last} + m['content']")
    policy = models.wrap("m", samples.model(), tokenizer)
    text = "[THINK]1+1[/THINK][TOOL]2"
    assert not policy.has_control_tokens(text)
    ids = policy.encode_completion(text, "length")
    assert len(ids) == 7
    assert policy.decode(ids) == text
    marks = ("<|user|>", "<|system|>", "<|assistant|>", "<|end|>", "<|eos|>", "<|pad|>")
    assert all(policy.has_control_tokens(f"2{mark}") for mark in marks)
    spelled = policy.encode_completion(f"{text}<|user|>", "length")
    assert not policy.special_ids & set(spelled)


def test_marks_of_turns_that_a_template_writes_into_answers_are_named() -> None:
    tokenizer = samples.tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<|channel|>", "<|message|>")])
    model = samples.model()
    assert models.wrap("m", model, tokenizer).refused_marks() == ()
    tokenizer.chat_template = (  # as that of gpt-oss
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
        "{{ '<|channel|>final' if m['role'] == 'assistant' }}{{ '<|message|>' + m['content'] + '<|end|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    assert models.wrap("m", model, tokenizer).refused_marks() == ("<|channel|>", "<|message|>")


@pytest.mark.parametrize("form", ["$A", "<|bos|> $A <|eos|>", "$A <|eos|>", "<|bos|> <|bos|> $A"])
def test_a_plain_prompt_is_never_over_and_begins_once(form: str) -> None:
    tokenizer = samples.tokenizer(bos=True, chat=False)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=form, special_tokens=[("<|bos|>", 6), ("<|eos|>", 1)]
    )
    prompt = models.wrap("m", samples.model(), tokenizer).encode_prompt("1+1=?")
    assert not set(prompt[-1:]) & {1, 6}
    assert prompt.count(6) == ("<|bos|>" in form)


def test_weights_that_are_not_finite_are_refused() -> None:
    model = samples.model()
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.inf
    with pytest.raises(UserError, match="not finite"):
        models.wrap("m", model, samples.tokenizer())


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["q_proj", "lm_head", "embed_tokens"]])
def test_an_adapter_on_a_weight_that_stands_in_two_places_is_refused(targets: list[str]) -> None:
    tied, untied = samples.model("qwen2"), samples.model("llama")
    config = Config(lora=Lora(rank=4, target_modules=targets))
    assert models.with_adapter(untied, config) is not None
    with pytest.raises(UserError, match=r"lora\.target_modules.*tied embeddings"):
        models.with_adapter(tied, config)


def test_all_stop_ids_count_wherever_they_are_named() -> None:
    model = samples.model()
    model.generation_config = GenerationConfig(eos_token_id=[30, 31])
    policy = models.wrap("m", model, samples.tokenizer())
    assert policy.stop_ids == (1, policy.end_id, 30, 31)


def test_a_template_that_hides_the_end_of_answers_falls_back_on_eos() -> None:
    tokenizer = samples.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert models.wrap("m", samples.model(), tokenizer).end_id == tokenizer.eos_token_id
    silent = samples.tokenizer()
    silent.chat_template = "{% for m in messages if false %}{% endfor %}"
    with pytest.raises(UserError, match="no answer to train"):
        models.wrap("m", samples.model(), silent)


def test_a_failing_template_is_the_users_to_correct() -> None:
    tokenizer = samples.tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UserError, match="template fails"):
        models.wrap("m", samples.model(), tokenizer)


def test_answer_tags_are_asked_for_in_every_prompt(tmp_path: Path) -> None:
    path = stored(tmp_path)
    plain, tags = load(path), load(path, rules=Rules(answer="tags"))
    text = tags.tokenizer.decode(tags.encode_prompt("1 + 1"))
    assert "<|system|>" in text
    assert len(tags.encode_prompt("1 + 1")) > len(plain.encode_prompt("1 + 1"))


def test_a_template_that_refuses_a_system_role_gets_the_instruction_in_the_question() -> None:
    tokenizer = samples.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    )
    policy = models.wrap("m", samples.model(), tokenizer, prompt=Prompt(system="say it in tags"))
    assert "say it in tags" in policy.tokenizer.decode(policy.encode_prompt("1 + 1")).replace("|", "")


def test_a_template_that_trims_turns_gets_the_instruction_as_its_system_turn() -> None:
    tokenizer = samples.tokenizer()
    tokenizer.chat_template = samples.CHAT.replace("m['content']", "(m['content'] | trim)")
    assert "trim" in tokenizer.chat_template
    policy = models.describe("m", samples.model(), tokenizer, prompt=Prompt(system="Add up.\n"))
    assert policy.prompt_text("1 + 1").startswith("<|system|>")


EXAMPLE = ("2 + 3", "<answer>5</answer>")


def test_examples_are_earlier_turns(tmp_path: Path) -> None:
    path = stored(tmp_path)
    policy = load(path, rules=Rules(answer="tags"), prompt=Prompt(system="Add.", examples=(EXAMPLE,)))
    turns = [("system", "Add."), ("user", EXAMPLE[0]), ("assistant", EXAMPLE[1]), ("user", "1 + 1")]
    messages = [{"role": role, "content": text} for role, text in turns]
    asked = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert policy.encode_prompt("1 + 1") == tuple(asked)
    assert policy.prompt_text("1 + 1") == policy.tokenizer.decode(asked)


def test_without_a_chat_template_examples_are_plain_text() -> None:
    prompt = Prompt(system="Add.", examples=(EXAMPLE,))
    policy = models.wrap("m", samples.model(), samples.tokenizer(chat=False), prompt=prompt)
    text = f"Add.\n{EXAMPLE[0]}\n{EXAMPLE[1]}\n\n1 + 1\n"
    assert policy.encode_prompt("1 + 1") == tuple(policy.tokenizer(text).input_ids)


def test_an_empty_system_prompt_is_none_at_all(tmp_path: Path) -> None:
    path = stored(tmp_path)
    bare = load(path, rules=Rules(answer="tags"), prompt=Prompt(system=""))
    assert bare.encode_prompt("1 + 1") == load(path).encode_prompt("1 + 1")


def test_arguments_of_the_chat_template_are_passed_on_and_unknown_ones_refused(tmp_path: Path) -> None:
    tokenizer = samples.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template + "{% if aloud %}so: {% endif %}"
    tokenizer.save_pretrained(stored(tmp_path))
    aloud = load(tmp_path, prompt=Prompt(template={"aloud": True})).encode_prompt("1 + 1")
    assert len(aloud) > len(load(tmp_path).encode_prompt("1 + 1"))
    with pytest.raises(UserError) as refused:
        load(tmp_path, prompt=Prompt(template={"loud": True}))
    assert refused.value.field == "prompt.template.loud"


def test_equal_vocabularies_have_equal_fingerprints_and_others_do_not() -> None:
    plain = models.fingerprint(samples.tokenizer())
    used = samples.tokenizer()
    used("12", padding="max_length", max_length=9, truncation=True)
    assert models.fingerprint(used) == plain
    more = samples.tokenizer()
    more.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    assert models.fingerprint(more) != plain


def test_a_directory_whose_tokenizer_would_be_replaced_on_loading_is_refused(tmp_path: Path) -> None:
    samples.model("qwen2").save_pretrained(tmp_path)
    samples.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="loads as another"):
        load(tmp_path)


def test_the_weight_hash_knows_bytes_names_shapes_and_types() -> None:
    first = samples.model()
    same, other = samples.model(), samples.model(seed=1)
    assert models.weights_sha256(first) == models.weights_sha256(same)
    assert models.weights_sha256(first) != models.weights_sha256(other)
    with torch.no_grad():
        next(same.parameters()).view(-1)[0].add_(1e-6)
    assert models.weights_sha256(first) != models.weights_sha256(same)
    assert models.weights_sha256(first) != models.weights_sha256(samples.model().to(torch.bfloat16))


def test_saved_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    policy = samples.policy("llama")
    models.save(policy, tmp_path)
    before = models.weights_sha256(policy.model)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(2)
    models.load_weights(policy, tmp_path)
    assert models.weights_sha256(policy.model) == before
    assert models.weights_sha256(load(tmp_path).model) == before


def test_another_models_weights_are_refused(tmp_path: Path) -> None:
    policy = samples.policy()
    with pytest.raises(SapoError, match="holds no weights"):
        models.load_weights(policy, tmp_path)
    models.save(samples.policy("gpt2"), tmp_path / "gpt2")
    with pytest.raises(SapoError, match="another model"):
        models.load_weights(policy, tmp_path / "gpt2")
    models.save(samples.policy(size=65), tmp_path / "large")
    with pytest.raises(SapoError, match="do not fit"):
        models.load_weights(policy, tmp_path / "large")


def test_lora_saves_hashes_and_loads_the_adapter_only(tmp_path: Path) -> None:
    path = stored(tmp_path / "base")
    policy, twin = load(path, lora=Lora(rank=2)), load(path, lora=Lora(rank=2))
    trained = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert models.weights_sha256(policy.model) == models.weights_sha256(twin.model)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    models.save(policy, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    models.load_weights(twin, tmp_path / "adapter")
    assert models.weights_sha256(policy.model) == models.weights_sha256(twin.model)
    with pytest.raises(SapoError, match="adapter"):
        models.load_weights(load(path, lora=Lora(rank=4)), tmp_path / "adapter")
