"""Loading, hashing and saving any Hugging Face causal language model, with its tokenizer's rules."""

import hashlib
import json
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from sapo.core.config.load import Config
from sapo.core.errors import SapoError, UserError
from sapo.core.install import install_command
from sapo.core.rng import stream
from sapo.core.types import FinishReason, canonical, sha256
from sapo.policy import malloc
from sapo.policy.device import resolve_device
from sapo.policy.hf_import import no_bars, transformers
from sapo.policy.model_source import folder_of, is_starter
from sapo.policy.starter_spec import location

_PROBE = "sapo probe 1729"


@dataclass(frozen=True, eq=False)
class LoadedPolicy:
    """A model with its tokenizer, and everything the swarm must know of both.

    `stop_ids` are all ids that end a completion, `end_id` the one that ends an assistant's turn,
    `max_length` the context in tokens, `fingerprint` a hash of the vocabulary.
    """

    model: torch.nn.Module
    tokenizer: Any
    fingerprint: str
    stop_ids: tuple[int, ...]
    end_id: int
    max_length: int
    vocabulary: int
    """Ids below this are the tokenizer's; the model may have more rows than that."""
    special_ids: frozenset[int]
    """Ids that are not text; a peer may send none of them but a final stop (DESIGN 5)."""
    control: tuple[str, ...]
    """Texts of the special tokens."""
    system: str | None = None
    """Instruction that goes before every question."""
    examples: tuple[tuple[str, str], ...] = ()
    """Questions and answers that go before every question, as earlier turns."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template."""
    lora: bool = False

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    def encode_prompt(self, question: str) -> tuple[int, ...]:
        """Ids of a question under this policy's template, up to where its answer begins."""
        if self.tokenizer.chat_template is None:
            system = f"{self.system}\n" if self.system else ""
            before = "".join(f"{asked}\n{answer}\n\n" for asked, answer in self.examples)
            return tuple(self.tokenizer(f"{system}{before}{question}\n").input_ids)
        ids = self.tokenizer.apply_chat_template(
            self.conversation(question), add_generation_prompt=True, return_dict=False, **self.template
        )
        return tuple(ids)

    def conversation(self, question: str) -> list[dict[str, str]]:
        """The messages of a question, those of the prompt before it."""
        return _conversation(self.tokenizer, [*chain.from_iterable(self.examples), question], self.system)

    def prompt_text(self, question: str) -> str:
        """What `encode_prompt` encodes, as text with all special tokens."""
        return str(self.tokenizer.decode(self.encode_prompt(question), clean_up_tokenization_spaces=False))

    def encode_completion(self, text: str, finish_reason: FinishReason) -> tuple[int, ...]:
        """Ids of an answer alone: no BOS, no special token but `end_id`, which follows iff it stopped.

        A special token's name inside `text` is encoded as plain characters (TRAPS 17, 18, 20).
        """
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return (*ids, self.end_id) if finish_reason == "stop" else tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of completion ids, without the final stop token; other special tokens stay visible."""
        body = ids[:-1] if len(ids) and ids[-1] in self.stop_ids else ids
        return str(
            self.tokenizer.decode(list(body), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def has_control_tokens(self, text: str) -> bool:
        """Whether a text holds the name of one of this tokenizer's special tokens (TRAPS 20)."""
        return any(token in text for token in self.control)

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt leaves room for at least one token; prompts are never truncated (TRAPS 26)."""
        return len(prompt) < self.max_length


def load_policy(spec: str, *, config: Config, cache: Path, threads: int | None = None) -> LoadedPolicy:
    """The policy `spec` names: `starter[:variant]` (prepared before), a directory, or a Hugging Face name.

    The model is put on the config's device. Sets the process's allocator, and torch's CPU threads, to the
    config's where `threads` does not say. Raises `UserError` where there is no such device, no model, no
    tokenizer, or no end token.
    """
    if sys.flags.optimize > 1:
        problem = "leaves out docstrings, which transformers makes its models from"
        raise UserError("PYTHONOPTIMIZE", sys.flags.optimize, problem, "unset it, or set it to 1")
    malloc.settle()
    torch.set_num_threads(threads or config.threads)
    source = _locate(spec, config, cache)
    tokenizer = load_tokenizer(spec, source)
    try:
        with no_bars():
            cls = transformers.AutoModelForCausalLM
            model: Any = cls.from_pretrained(source, dtype=getattr(torch, config.dtype))
    except (OSError, ValueError) as error:
        raise UserError(
            "model", spec, f"cannot be loaded: {_first_line(error)}", "name a causal language model"
        ) from None
    if config.lora is not None:
        model = with_adapter(model, config)
    _check_template(config.prompt.template, tokenizer)
    return wrap(
        spec,
        model.to(resolve_device(config)),
        tokenizer,
        system=config.system,
        examples=config.prompt.examples,
        template=config.prompt.template,
        lora=config.lora is not None,
    )


def wrap(
    spec: str,
    model: Any,
    tokenizer: Any,
    *,
    system: str | None = None,
    examples: Sequence[tuple[str, str]] = (),
    template: Mapping[str, Any] | None = None,
    lora: bool = False,
) -> LoadedPolicy:
    """A policy from a model and a tokenizer in memory, after the self-check of TRAPS 25."""
    marker = _end_marker(spec, tokenizer)
    end_id = marker if marker is not None else tokenizer.eos_token_id
    if end_id is None:
        raise UserError(
            "model", spec, "its tokenizer has no end token", "set eos_token or a template that ends turns"
        )
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        raise UserError(
            "model", spec, "its tokenizer has more tokens than the model", "use the tokenizer it came with"
        )
    policy = LoadedPolicy(
        model=model.eval(),
        tokenizer=tokenizer,
        fingerprint=fingerprint(tokenizer),
        stop_ids=tuple(sorted({end_id, *_stops(model, tokenizer)})),
        end_id=end_id,
        max_length=_context(model, tokenizer),
        vocabulary=len(tokenizer),
        special_ids=frozenset(_special_ids(tokenizer)),
        control=_control(tokenizer),
        system=system,
        examples=tuple(examples),
        template=dict(template or {}),
        lora=lora,
    )
    _self_check(spec, policy)
    return policy


def weights_sha256(model: torch.nn.Module) -> str:
    """Hex SHA-256 over the parameters (name, dtype, shape, bytes) in sorted order.

    Under LoRA only the adapter's are hashed: the base does not change.
    """
    digest = hashlib.sha256()
    for name, parameter in _hashed(model):
        head = canonical([name, str(parameter.dtype), list(parameter.shape)]).encode()
        digest.update(len(head).to_bytes(8, "big") + head)
        digest.update(_bytes_of(parameter))
    return digest.hexdigest()


def tensor_checksums(model: torch.nn.Module) -> tuple[int, ...]:
    """CRC-32 over the bytes of each parameter that `weights_sha256` covers, in its order."""
    return tuple(zlib.crc32(_bytes_of(parameter)) for _, parameter in _hashed(model))


def hashed_names(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the parameters that `weights_sha256` covers, in its order."""
    return tuple(name for name, _ in _hashed(model))


def frozen_sha256(model: torch.nn.Module) -> str:
    """Hex SHA-256 over the parameters that are not trained, in the order of their names; empty if all are."""
    digest = hashlib.sha256()
    frozen = sorted((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    for name, parameter in frozen:
        digest.update(canonical([name, str(parameter.dtype), list(parameter.shape)]).encode())
        digest.update(_bytes_of(parameter))
    return digest.hexdigest() if frozen else ""


def _hashed(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters in the order of their names; of a model with an adapter, the adapter's only."""
    adapter = hasattr(model, "peft_config")
    return [
        (name, parameter)
        for name, parameter in sorted(model.named_parameters())
        if not adapter or "lora_" in name
    ]


def _bytes_of(parameter: torch.nn.Parameter) -> memoryview:
    flat = parameter.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def save(policy: LoadedPolicy, directory: Path) -> None:
    """Write model and tokenizer as a Hugging Face directory; under LoRA the adapter only."""
    directory.mkdir(parents=True, exist_ok=True)
    with no_bars():
        policy.model.save_pretrained(directory)  # type: ignore[operator]
    policy.tokenizer.save_pretrained(directory)
    for weights in directory.glob("*.safetensors"):  # safetensors writes them for their owner only
        weights.chmod((directory / "tokenizer_config.json").stat().st_mode)


def load_weights(policy: LoadedPolicy, directory: Path) -> None:
    """Put the weights that `save` wrote into the loaded policy. Raises `SapoError` where they don't fit."""
    state: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        state.update(load_file(path))
    if not state:
        raise SapoError(f"{directory} holds no weights")
    if policy.lora:
        _load_adapter(policy.model, state, directory)
        return
    try:
        missing, unexpected = policy.model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise SapoError(f"the weights in {directory} do not fit the model: {_first_line(error)}") from None
    tied = set(getattr(policy.model, "all_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise SapoError(f"the weights in {directory} are another model's: {[*missing, *unexpected][:3]}")


def merged(policy: LoadedPolicy) -> LoadedPolicy:
    """The policy with its adapter merged into the weights; itself where it has none."""
    if not policy.lora:
        return policy
    model: Any = policy.model
    return replace(policy, model=model.merge_and_unload(), lora=False)


def fingerprint(tokenizer: Any) -> str:
    """Hex SHA-256 of vocabulary, merges, special tokens and text rules: equal iff ids mean the same."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        parts: dict[str, Any] = {"vocab": tokenizer.get_vocab(), "special": _control(tokenizer)}
    else:
        whole = json.loads(backend.to_str())
        kept = ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")
        parts = {key: whole.get(key) for key in kept}
    return sha256(canonical(parts))


def _locate(spec: str, config: Config, cache: Path) -> str | Path:
    """The directory, or the name on the Hugging Face hub, that `spec` means."""
    if not is_starter(spec):
        return folder_of(spec) or spec
    found = location(config, cache=cache, spec=spec)
    if not found.is_dir():
        raise UserError("model", spec, "has not been prepared", "call sapo.policy.starter.prepare first")
    return found


def load_tokenizer(spec: str, source: str | Path) -> Any:
    """The tokenizer in a directory or of a name on the hub; `spec` names it in errors."""
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
    if isinstance(source, Path) and not any((source / name).is_file() for name in files):
        raise UserError(
            "model", spec, "the directory has no tokenizer", "save it there with tokenizer.save_pretrained"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            "model", spec, f"its tokenizer cannot be loaded: {_first_line(error)}", "name a complete model"
        ) from None
    _check_as_stored(spec, source, tokenizer)
    return tokenizer


def _check_as_stored(spec: str, source: str | Path, tokenizer: Any) -> None:
    """Refuse a tokenizer that AutoTokenizer quietly loads as another.

    transformers 5 builds the architecture's own tokenizer for some model types (qwen2 among them) whatever
    `tokenizer.json` says, if `tokenizer_class` is a general one; the model then reads other ids than it
    was trained on.
    """
    file = Path(source) / "tokenizer.json"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not file.is_file() or backend is None:
        return
    probe = "What is  12 + 345?\n\tIt's <b> 6.7, don't-know."
    stored = Tokenizer.from_file(str(file)).encode(probe, add_special_tokens=False).ids
    if backend.encode(probe, add_special_tokens=False).ids != stored:
        raise UserError(
            "model",
            spec,
            f"its tokenizer.json loads as another tokenizer, {type(tokenizer).__name__}",
            "set tokenizer_class and model_type to what belongs together",
        )


def with_adapter(model: Any, config: Config) -> Any:
    """The model with a fresh adapter, the same for the same swarm seed, as the only trained part."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UserError("lora", "...", "peft is not installed", install_command("lora")) from None
    assert config.lora is not None
    settings = LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]  # a float works; the annotation is narrow
        lora_dropout=config.lora.dropout,
        target_modules=config.lora.target_modules,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(config.swarm.seed, "lora"))
        try:
            return get_peft_model(model, settings)
        except ValueError as error:
            raise UserError(
                "lora.target_modules",
                config.lora.target_modules,
                _first_line(error),
                "name its linear layers",
            ) from None


def _load_adapter(model: Any, state: dict[str, torch.Tensor], directory: Path) -> None:
    from peft import set_peft_model_state_dict

    try:
        result: Any = set_peft_model_state_dict(model, state)
    except RuntimeError as error:
        raise SapoError(f"the adapter in {directory} does not fit: {_first_line(error)}") from None
    missing = [name for name in result.missing_keys if "lora_" in name]
    if missing or result.unexpected_keys:
        raise SapoError(
            f"the adapter in {directory} is another model's: {[*missing, *result.unexpected_keys][:3]}"
        )


def _conversation(tokenizer: Any, turns: Sequence[str], system: str | None) -> list[dict[str, str]]:
    """The messages of a question, the last of `turns`, after examples: questions and answers by turns.

    Templates that refuse a system role, or leave it out, get it in the first user's turn.
    """
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)
    ]
    if system is None:
        return messages
    instructed = [{"role": "system", "content": system}, *messages]
    try:
        rendered = tokenizer.apply_chat_template(instructed, tokenize=False)
    except TemplateError:
        rendered = ""
    if system in rendered:
        return instructed
    return [{"role": "user", "content": f"{system}\n\n{turns[0]}"}, *messages[1:]]


def _check_template(arguments: Mapping[str, Any], tokenizer: Any) -> None:
    """Raise `UserError` for an argument that the model's chat template does not read."""
    text = str(tokenizer.chat_template or "")
    for name, value in arguments.items():
        if not re.search(rf"\b{re.escape(name)}\b", text):
            problem = (
                "the model's chat template does not read it" if text else "the model has no chat template"
            )
            raise UserError(f"prompt.template.{name}", value, problem, "correct or remove it")


def _end_marker(spec: str, tokenizer: Any) -> int | None:
    """The first special token that the chat template puts after an assistant's answer."""
    if tokenizer.chat_template is None:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except TemplateError as error:
        raise UserError(
            "model", spec, f"its chat template fails: {_first_line(error)}", "correct the template"
        ) from None
    special = set(tokenizer.all_special_ids) | _special_ids(tokenizer)
    tail = tokenizer(text.rpartition(_PROBE)[2], add_special_tokens=False).input_ids
    return next((token for token in tail if token in special), None)


def _special_ids(tokenizer: Any) -> set[int]:
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _control(tokenizer: Any) -> tuple[str, ...]:
    names = {str(token) for token in tokenizer.all_special_tokens}
    names |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(name for name in names if name.strip()))


def _stops(model: Any, tokenizer: Any) -> set[int]:
    """End ids named by the tokenizer, the model's config and its generation config (TRAPS 24)."""
    found: set[int] = set()
    for value in (
        tokenizer.eos_token_id,
        model.config.eos_token_id,
        getattr(model.generation_config, "eos_token_id", None),
    ):
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return found


def _context(model: Any, tokenizer: Any) -> int:
    limit = getattr(model.config, "max_position_embeddings", None)
    return int(limit if limit is not None else tokenizer.model_max_length)


def _self_check(spec: str, policy: LoadedPolicy) -> None:
    """Render a prompt and an answer: the answer must be trainable up to a stop token (TRAPS 25)."""
    prompt, answer = policy.encode_prompt("1 + 1 = ?"), policy.encode_completion("2", "stop")
    if not prompt or len(answer) < 2 or answer[-1] not in policy.stop_ids:
        raise UserError(
            "model", spec, "its template leaves no answer to train", "use a model with a chat template"
        )
    bos = policy.tokenizer.bos_token_id
    if bos is not None and bos != policy.end_id and bos in answer:
        raise UserError("model", spec, "puts its start token into answers", "use another tokenizer")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
