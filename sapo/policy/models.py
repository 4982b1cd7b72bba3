"""Loading, hashing and saving a causal language model, with its tokenizer's rules."""

import hashlib
import json
import re
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors.torch import load_file

from sapo.core.answer_format import AnswerFormat
from sapo.core.beside import begun
from sapo.core.config.load import Config
from sapo.core.config.prompt import Prompt
from sapo.core.errors import SapoError, UserError
from sapo.core.install import install_command
from sapo.core.rng import stream
from sapo.core.types import FinishReason, canonical, sha256
from sapo.learn.segments import mark_segments
from sapo.learn.unused_ids import mark_unused
from sapo.policy import malloc, release
from sapo.policy.device import resolve_device
from sapo.policy.hf_import import quiet, transformers
from sapo.policy.model_files import read_config, read_model, read_tokenizer, read_weights, said
from sapo.policy.model_positions import by_length, settle_positions
from sapo.policy.model_source import location
from sapo.policy.trial import refuse_unfit

_PROBE = "sapo probe 1729"
CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length", "context_length")
"""Where configs name the context in tokens."""
UNLIMITED = 10**9
"""Tokenizers without a limit name one of 10^30."""
ASSUMED_CONTEXT = 2048
"""In tokens, of a model that names none, as those that know distances only."""
ADAPTER = "adapter_config.json"
NOT_THE_MODEL = frozenset({"optimizer.pt", "checkpoint.json"})
"""Files of a checkpoint."""


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
    """One more than the highest id of the tokenizer; the model may have more rows than that."""
    special_ids: frozenset[int]
    """Ids of special tokens."""
    control: tuple[str, ...]
    """Texts of the special tokens that end an answer or part the turns; a peer may write none."""
    prompt: Prompt = field(default_factory=Prompt)
    """What it reads around every question."""
    lora: bool = False
    unknown_ids: frozenset[int] = frozenset()
    """Ids below `vocabulary` that no token has."""

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    def encode_prompt(self, question: str) -> tuple[int, ...]:
        """Ids of a question under this policy's template, up to where its answer begins."""
        if self.tokenizer.chat_template is None:
            system = f"{self.prompt.system}\n" if self.prompt.system else ""
            before = "".join(f"{asked}\n{answer}\n\n" for asked, answer in self.prompt.examples)
            return self._opened(self.tokenizer(f"{system}{before}{question}\n").input_ids)
        ids = self.tokenizer.apply_chat_template(
            self.conversation(question), add_generation_prompt=True, return_dict=False, **self.prompt.template
        )
        return tuple(ids)

    def _opened(self, ids: Sequence[int]) -> tuple[int, ...]:
        """A plain text's ids without what the tokenizer puts behind a text that is over, and with one BOS."""
        end, start, bos = len(ids), 0, self.tokenizer.bos_token_id
        while end and (ids[end - 1] in self.special_ids or ids[end - 1] in self.stop_ids):
            end -= 1
        while bos is not None and start + 1 < end and ids[start] == ids[start + 1] == bos:
            start += 1
        return tuple(ids[start:end])

    def conversation(self, question: str) -> list[dict[str, str]]:
        """The messages of a question, those of the prompt before it unless the template brings them."""
        bare = [{"role": "user", "content": question}]
        return bare if self.prompt_in_template else self.with_prompt(question)

    @cached_property
    def prompt_in_template(self) -> bool:
        """Whether the chat template brings this prompt itself, as that of an exported folder does."""
        if self.tokenizer.chat_template is None:
            return False
        written = release.opening(self)
        return bool(written) and str(self.tokenizer.get_chat_template()).startswith(written)

    def with_prompt(self, question: str) -> list[dict[str, str]]:
        """The messages of a question, those of the prompt before it."""
        turns = [*chain.from_iterable(self.prompt.examples), question]
        return _conversation(self.tokenizer, turns, self.prompt.system)

    def prompt_text(self, question: str) -> str:
        """What `encode_prompt` encodes, as text with all special tokens."""
        return str(self.tokenizer.decode(self.encode_prompt(question), clean_up_tokenization_spaces=False))

    def encode_completion(self, text: str, finish_reason: FinishReason) -> tuple[int, ...]:
        """Ids of an answer alone: no BOS, no control token but `end_id`, which follows iff it stopped.
        Special tokens in a text that spells a control token are encoded as plain characters."""
        split = self.has_control_tokens(text)
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=split).input_ids
        return (*ids, self.end_id) if finish_reason == "stop" else tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of completion ids, without the final stop token; other special tokens stay visible."""
        body = ids[:-1] if len(ids) and ids[-1] in self.stop_ids else ids
        return str(
            self.tokenizer.decode(list(body), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def has_control_tokens(self, text: str) -> bool:
        """Whether a text spells one of this policy's control tokens."""
        return any(token in text for token in self.control)

    def refused_marks(self) -> tuple[str, ...]:
        """Control tokens that the chat template writes into an answer before its text; peers that have them,
        too, refuse such answers."""
        if self.tokenizer.chat_template is None:
            return ()
        render = partial(self.tokenizer.apply_chat_template, tokenize=False, **self.prompt.template)
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}
        asked, answered = str(render([question], add_generation_prompt=True)), str(render([question, answer]))
        written = answered.removeprefix(asked).partition(_PROBE)[0] if answered.startswith(asked) else ""
        return tuple(mark for mark in self.control if mark in written)

    def knows(self, ids: Iterable[int]) -> bool:
        """Whether there is a token for each id."""
        return all(0 <= token < self.vocabulary and token not in self.unknown_ids for token in ids)

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt leaves room for at least one token; prompts are never truncated."""
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
    read_config(spec, source)  # first: what is wrong with it would be said of the tokenizer
    tokenizer = read_tokenizer(spec, source)
    model = read_model(spec, source, dtype=getattr(torch, config.dtype))
    if config.lora is not None:
        model = with_adapter(model, config)
    _check_template(config.prompt.template, tokenizer)
    model, lora = model.to(resolve_device(config)), config.lora is not None
    return wrap(spec, model, tokenizer, answer=config.rules.answer, prompt=config.full_prompt, lora=lora)


def wrap(spec: str, model: Any, tokenizer: Any, *, answer: AnswerFormat = "text", **how: Any) -> LoadedPolicy:
    """A policy from a model and a tokenizer in memory, after a trial of what a model must be able to do.
    `answer` is the form of what it answers; `how` is as in `describe`."""
    settle_positions(model)
    policy = describe(spec, model, tokenizer, **how)
    _refuse_broken(spec, model)
    mark_unused(model, _ids(tokenizer))
    mark_segments(model, tokenizer.get_vocab(), policy.stop_ids, answer)
    _self_check(spec, policy)
    refuse_unfit(spec, policy)
    return policy


def describe(
    spec: str, model: Any, tokenizer: Any, *, prompt: Prompt | None = None, lora: bool = False
) -> LoadedPolicy:
    """A policy from a model and a tokenizer in memory; the model is not asked anything."""
    marker = _end_marker(spec, tokenizer)
    end_id = marker if marker is not None else tokenizer.eos_token_id
    if end_id is None:
        problem = "its tokenizer has no end token"
        raise UserError("model", spec, problem, "set eos_token or a template that ends turns")
    used = _ids(tokenizer)
    vocabulary = max(used) + 1
    if vocabulary > model.get_input_embeddings().weight.shape[0]:
        problem = "its tokenizer has more tokens than the model"
        raise UserError("model", spec, problem, "use the tokenizer it came with")
    stop_ids = tuple(sorted({end_id, *_stops(model, tokenizer)}))
    return LoadedPolicy(
        model=model.eval(),
        tokenizer=tokenizer,
        fingerprint=fingerprint(tokenizer),
        stop_ids=stop_ids,
        end_id=end_id,
        max_length=_context(model, tokenizer),
        vocabulary=vocabulary,
        unknown_ids=frozenset(range(vocabulary)) - used,
        special_ids=frozenset(_special_ids(tokenizer)),
        control=_control(tokenizer, stop_ids),
        prompt=prompt or Prompt(),
        lora=lora,
    )


def _ids(tokenizer: Any) -> set[int]:
    return {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder}


def weights_sha256(model: torch.nn.Module) -> str:
    """Hex SHA-256 over the parameters (name, dtype, shape, bytes) in sorted order. Under LoRA only the
    adapter's are hashed: the base does not change."""
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


class Digests:
    """`weights_sha256` and `tensor_checksums` of the weights as they are, which stay so until `result`.
    Hashing needs no interpreter: on a machine with a core to spare the first costs the caller nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._sha256 = begun("digests", lambda: weights_sha256(model))

    def result(self) -> tuple[str, tuple[int, ...]]:
        """Both; raises what hashing raised."""
        checksums = tensor_checksums(self._model)
        return self._sha256.result(), checksums


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
    with quiet():
        policy.model.save_pretrained(directory)  # type: ignore[operator]
    policy.tokenizer.save_pretrained(directory)
    for weights in directory.glob("*.safetensors"):  # safetensors writes them for their owner only
        weights.chmod((directory / "tokenizer_config.json").stat().st_mode)


def load_weights(policy: LoadedPolicy, directory: Path) -> None:
    """Put the weights that `save` wrote into the loaded policy. Raises `SapoError` where they don't fit."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise SapoError(f"{directory} holds no weights")
    if policy.lora:
        state: dict[str, torch.Tensor] = {}
        for path in files:
            state.update(load_file(path))
        _load_adapter(policy.model, state, directory)
    else:
        read_weights(policy.model, directory)


def merged(policy: LoadedPolicy) -> LoadedPolicy:
    """The policy with its adapter merged into the weights; itself where it has none."""
    if not policy.lora:
        return policy
    model: Any = policy.model
    return replace(policy, model=model.merge_and_unload(), lora=False)


def export(
    checkpoint: Path, destination: Path, *, config: Config, cache: Path, adapter: bool = False
) -> LoadedPolicy:
    """Write what `save` wrote as a folder that others load and that answers as the node does; a LoRA adapter
    is merged unless `adapter`.

    Weights that are whole already become links. Returns the policy; that of such weights holds none.
    """
    if (checkpoint / ADAPTER).exists():
        policy = load_policy(config.model, config=config, cache=cache, threads=torch.get_num_threads())
        load_weights(policy, checkpoint)
        policy = policy if adapter else merged(policy)
        save(policy, destination)
    else:
        destination.mkdir(exist_ok=True)
        for path in checkpoint.iterdir():
            if path.suffix == ".safetensors":
                (destination / path.name).symlink_to(path.absolute())
            elif path.is_dir():  # chat templates beside the default one
                shutil.copytree(path, destination / path.name)
            elif path.name not in NOT_THE_MODEL:
                shutil.copyfile(path, destination / path.name)
        policy = _without_weights(destination, config)
    release.dress(policy, destination, config)
    return policy


class _Shell(torch.nn.Module):
    """A model of a directory without its layers; loading those would take memory and time from the rounds."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.config = read_config(str(directory), directory)
        if (directory / "generation_config.json").exists():
            self.generation_config = transformers.GenerationConfig.from_pretrained(directory)
        else:
            self.generation_config = transformers.GenerationConfig.from_model_config(self.config)

    def get_input_embeddings(self) -> torch.nn.Module:
        """Of as many rows as the model's."""
        return torch.nn.Embedding(self.config.get_text_config().vocab_size, 1, device="meta")


def _without_weights(directory: Path, config: Config) -> LoadedPolicy:
    tokenizer = read_tokenizer(config.model, directory)
    return describe(config.model, _Shell(directory), tokenizer, prompt=config.full_prompt)


def fingerprint(tokenizer: Any) -> str:
    """Hex SHA-256 of vocabulary, merges, special tokens and text rules: equal iff ids mean the same."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        parts: dict[str, Any] = {"vocab": tokenizer.get_vocab(), "special": _special_texts(tokenizer)}
    else:
        whole = json.loads(backend.to_str())
        kept = ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")
        parts = {key: whole.get(key) for key in kept}
    return sha256(canonical(parts))


def _locate(spec: str, config: Config, cache: Path) -> str | Path:
    found = location(config, cache=cache, spec=spec)
    if found is not None and not found.is_dir():
        raise UserError("model", spec, "has not been prepared", "call sapo.policy.initial.prepare first")
    return found or spec


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
            adapted = get_peft_model(model, settings)
        except ValueError as error:
            remedy = "name its linear layers"
            raise UserError("lora.target_modules", config.lora.target_modules, said(error), remedy) from None
    _refuse_half_tied(adapted, config.lora.target_modules)
    _refuse_fused_experts(adapted, config.lora.target_modules)
    return adapted


def _refuse_fused_experts(model: torch.nn.Module, targets: object) -> None:
    """Raise `UserError` for an adapter on experts whose weights are one tensor: no engine here merges it."""
    for name, module in model.named_modules():
        inner = getattr(module, "base_layer", None)
        if inner is not None and not isinstance(getattr(inner, "weight", None), torch.Tensor):
            problem = f"{name} holds experts in one tensor"
            remedy = 'name layers of the attention, such as ["q_proj", "v_proj"]'
            raise UserError("lora.target_modules", targets, problem, remedy)


def _refuse_half_tied(model: torch.nn.Module, targets: object) -> None:
    """Raise `UserError` for an adapter on a weight that stands in two places, as embedding and head of many
    models do: merged, it would change both, and only one of them was trained."""
    modules = dict(model.named_modules())
    owners = Counter(id(p) for module in modules.values() for p in module.parameters(recurse=False))
    for name, module in modules.items():
        base = getattr(module, "base_layer", None)
        if base is not None and any(owners[id(p)] > 1 for p in base.parameters(recurse=False)):
            problem = f"{name.rpartition('.')[2]} shares its weight with another layer (tied embeddings)"
            raise UserError("lora.target_modules", targets, problem, 'leave it out, or say "all-linear"')


def _load_adapter(model: Any, state: dict[str, torch.Tensor], directory: Path) -> None:
    from peft import set_peft_model_state_dict

    try:
        result: Any = set_peft_model_state_dict(model, state)
    except RuntimeError as error:
        raise SapoError(f"the adapter in {directory} does not fit: {said(error)}") from None
    missing = [name for name in result.missing_keys if "lora_" in name]
    if missing or result.unexpected_keys:
        raise SapoError(
            f"the adapter in {directory} is another model's: {[*missing, *result.unexpected_keys][:3]}"
        )


def _conversation(tokenizer: Any, turns: Sequence[str], system: str | None) -> list[dict[str, str]]:
    """The messages of a question, the last of `turns`, after examples: questions and answers by turns.
    Templates that refuse a system role, or leave it out, get it in the first user's turn."""
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)
    ]
    if system is None:
        return messages
    probed = [{"role": "system", "content": _PROBE}, *messages]
    try:
        rendered = tokenizer.apply_chat_template(probed, tokenize=False)
    except TemplateError:
        rendered = ""
    if _PROBE in rendered:  # not the text itself, which a template may trim, or read a switch in
        return [{"role": "system", "content": system}, *messages]
    return [{"role": "user", "content": f"{system}\n\n{turns[0]}"}, *messages[1:]]


def _check_template(arguments: Mapping[str, Any], tokenizer: Any) -> None:
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
        problem = f"its chat template fails: {said(error)}"
        raise UserError("model", spec, problem, "correct the template") from None
    special = set(tokenizer.all_special_ids) | _special_ids(tokenizer)
    tail = tokenizer(text.rpartition(_PROBE)[2], add_special_tokens=False).input_ids
    return next((token for token in tail if token in special), None)


def _special_ids(tokenizer: Any) -> set[int]:
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _special_texts(tokenizer: Any) -> tuple[str, ...]:
    names = {str(token) for token in tokenizer.all_special_tokens}
    names |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(name for name in names if name.strip()))


def _control(tokenizer: Any, stop_ids: Sequence[int]) -> tuple[str, ...]:
    """Texts of the special tokens that end an answer, have a role in the tokenizer, or stand round the turns
    of a conversation. Others, of thoughts and tools, are part of answers."""
    special = _special_texts(tokenizer)
    found = {str(token) for token in tokenizer.convert_ids_to_tokens(list(stop_ids)) if token is not None}
    found |= {str(token) for token in tokenizer.special_tokens_map.values() if isinstance(token, str)}
    written = "" if tokenizer.chat_template is None else _turns(tokenizer)
    return tuple(name for name in special if name in found or name in written)


def _turns(tokenizer: Any) -> str:
    """A conversation that goes on after an answer, where some templates put empty thoughts before the last
    one; of a template that refuses it, one that ends there."""
    for turns in (["?", _PROBE, "?"], ["?", _PROBE]):
        try:
            messages = _conversation(tokenizer, turns, _PROBE)
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateError:
            continue
    return " ".join(_special_texts(tokenizer))


def _stops(model: Any, tokenizer: Any) -> set[int]:
    """End ids named by the tokenizer, the model's config and its generation config."""
    found: set[int] = set()
    for value in (
        tokenizer.eos_token_id,
        getattr(model.config.get_text_config(), "eos_token_id", None),
        getattr(model.generation_config, "eos_token_id", None),
    ):
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return found


def _context(model: Any, tokenizer: Any) -> int:
    """Tokens of a prompt with its answer at most.

    Not more than those up to which positions are computed in one way: some models change them for a whole
    batch as soon as one sequence is longer.
    """
    config = model.config.get_text_config()
    named = [getattr(config, name, None) for name in CONTEXT_NAMES] + [tokenizer.model_max_length]
    limit = next((int(one) for one in named if one and 0 < one < UNLIMITED), ASSUMED_CONTEXT)
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):
        if isinstance(one, dict) and by_length(one):
            original = one.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, int(original or limit))
    return limit


def _refuse_broken(spec: str, model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.numel() or not parameter.is_floating_point():
            continue
        low, high = torch.aminmax(parameter.detach())
        if not bool(low.isfinite() & high.isfinite()):
            problem = f"its weight {name} holds values that are not finite"
            raise UserError("model", spec, problem, "use a sound copy, or a checkpoint from before")


def _self_check(spec: str, policy: LoadedPolicy) -> None:
    """Render a prompt and an answer: the answer must be trainable up to a stop token."""
    prompt, answer = policy.encode_prompt("1 + 1 = ?"), policy.encode_completion("2", "stop")
    if not prompt or len(answer) < 2 or answer[-1] not in policy.stop_ids:
        problem = "its template leaves no answer to train"
        raise UserError("model", spec, problem, "use a model with a chat template")
    bos = policy.tokenizer.bos_token_id
    if bos is not None and bos != policy.end_id and bos in answer:
        raise UserError("model", spec, "puts its start token into answers", "use another tokenizer")
