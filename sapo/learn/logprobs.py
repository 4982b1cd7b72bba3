"""From a micro-batch to log-probabilities: how a model is called in the update, and what of it is kept."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sapo.core.config.load import LearnConfig
from sapo.core.errors import UserError
from sapo.learn.chunked_head import embed, token_logprobs, token_ranks
from sapo.learn.collate import Chunk
from sapo.learn.unused_ids import base_of, hide_unused, unused_ids

SHARING = frozenset({"gpt2", "llama", "qwen2", "qwen3"})
"""Model types known to take a four-dimensional mask and explicit positions as they are given, and to hand
further arguments on to their attention."""


@dataclass(frozen=True, slots=True)
class BackboneAndHead:
    """A model taken apart: what gives its last hidden states, the linear head, the embedding. `embedding` is
    None where the model looks up its ids in another way than plainly."""

    backbone: torch.nn.Module
    head: torch.nn.Linear
    embedding: torch.nn.Embedding | None


class Beginning:
    """Keys and values of what all sequences of an update begin with, read once. Micro-batches attend to them
    as to leaves; `backward` hands on what gradient these have gathered."""

    def __init__(self, cache: Any) -> None:
        self._kind = type(cache)
        self._read = [state for layer in cache.layers for state in (layer.keys, layer.values)]
        self._leaves = [state.detach().requires_grad_(state.requires_grad) for state in self._read]

    def before(self, rows: int) -> Any:
        """A cache, of the kind that the model makes, in which so many rows have read it."""
        states = [leaf.expand(rows, -1, -1, -1) for leaf in self._leaves]
        return self._kind(list(zip(states[::2], states[1::2], strict=True)))

    def backward(self) -> None:
        """The backward pass through it, after those of all micro-batches."""
        pairs = zip(self._read, self._leaves, strict=True)
        gathered = [(state, leaf.grad) for state, leaf in pairs if leaf.grad is not None]
        if gathered:
            torch.autograd.backward([state for state, _ in gathered], [grad for _, grad in gathered])


class Forward:
    """Calls a model for the learner.

    Where the model is a backbone with a plain linear head after it, the head is computed in blocks
    (`sapo.learn.chunked_head`); of any other the logits of the trained columns of one micro-batch are made at
    once.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.parts = split_model(model)
        self._compiled: Callable[..., Any] | None = None
        self._layers = [module for module in model.modules() if _is_layer(module)]
        self._model_takes = _arguments(base_of(model))
        self._backbone_takes = _arguments(self.parts.backbone) if self.parts else frozenset()

    def check(self, learn: LearnConfig) -> None:
        """Raises `UserError` where the model or the machine cannot do what the settings ask for."""
        if learn.activation_checkpointing and not self._layers:
            problem = f"{type(base_of(self.model)).__name__} has no layers that could be computed again"
            remedy = "leave it out and lower learn.micro_batch"
            raise UserError("learn.activation_checkpointing", True, problem, remedy)
        if learn.compile and self.parts is None:
            problem = f"{type(base_of(self.model)).__name__} is no backbone with a plain linear head"
            raise UserError("learn.compile", True, problem, "leave it out")

    def may_begin(self, learn: LearnConfig) -> bool:
        """Whether what all prompts begin with may be left out of the rows, where the model shares prompts.
        Layers that are computed again would add to the cache again."""
        return self.parts is not None and not learn.activation_checkpointing and not learn.compile

    def begin(self, chunks: Sequence[Chunk], learn: LearnConfig) -> Beginning | None:
        """What the micro-batches go on from; None where nothing is left out of them."""
        if self.parts is None or not chunks[0].beginning.numel():
            return None
        with _precision(chunks[0], learn):
            tokens = _tokens(self.parts, chunks[0].beginning)
            return Beginning(self.parts.backbone(**tokens, use_cache=True).past_key_values)

    def __call__(
        self, chunk: Chunk, learn: LearnConfig, temperature: float, beginning: Beginning | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probability [S, W] of every trained token, and entropy in nats without gradient; float32.
        `beginning` is what `begin` gave."""
        again = _computed_again(self._layers) if learn.activation_checkpointing else nullcontext()
        with _precision(chunk, learn), again:
            if self.parts is not None:
                hidden, head = self._hidden(self.parts, chunk, learn, beginning), self.parts.head
                flat, entropy = token_logprobs(
                    hidden,
                    head.weight,
                    head.bias,
                    chunk.rows,
                    chunk.targets,
                    temperature=temperature,
                    unused=unused_ids(self.model),
                )
            else:
                flat, entropy = self._at_once(chunk, temperature)
        entropy = entropy.index_select(0, chunk.rows)
        shape, index = chunk.index.shape, chunk.index.reshape(-1)
        return flat.index_select(0, index).reshape(shape), entropy.index_select(0, index).reshape(shape)

    @torch.no_grad()
    def ranks(self, chunk: Chunk, learn: LearnConfig, beginning: Beginning | None = None) -> Tensor:
        """How many tokens [S, W] are likelier than every trained one."""
        with _precision(chunk, learn):
            if self.parts is not None:
                hidden, head = self._hidden(self.parts, chunk, learn, beginning), self.parts.head
                unused = unused_ids(self.model)
                flat = token_ranks(hidden, head.weight, head.bias, chunk.rows, chunk.targets, unused=unused)
            else:
                scores = self._logits(chunk).float()[chunk.rows]
                flat = (scores > scores.gather(1, chunk.targets[:, None])).sum(1)
        return flat.index_select(0, chunk.index.reshape(-1)).reshape(chunk.index.shape)

    def _hidden(
        self, parts: BackboneAndHead, chunk: Chunk, learn: LearnConfig, beginning: Beginning | None
    ) -> Tensor:
        """Last hidden states [P, H] of the places that predict."""
        context = _context(chunk, self._backbone_takes)
        if beginning is not None:
            context |= {"past_key_values": beginning.before(len(chunk.input_ids)), "use_cache": True}
        tokens = _tokens(parts, chunk.input_ids)
        states = self._backbone(parts, learn)(**tokens, **context).last_hidden_state
        hidden: Tensor = states[:, -chunk.keep :].flatten(0, 1).index_select(0, chunk.places)
        return hidden

    def _at_once(self, chunk: Chunk, temperature: float) -> tuple[Tensor, Tensor]:
        everything = torch.log_softmax(self._logits(chunk).float() / temperature, dim=-1)
        with torch.no_grad():
            entropy = torch.special.entr(everything.exp()).sum(-1)
        return everything[chunk.rows, chunk.targets], entropy

    def _logits(self, chunk: Chunk) -> Tensor:
        """Logits [P, V] of the places that predict."""
        arguments: dict[str, Any] = {"input_ids": chunk.input_ids} | _context(chunk, self._model_takes)
        if "logits_to_keep" in self._model_takes:
            arguments["logits_to_keep"] = chunk.keep
        logits = self.model(**arguments).logits[:, -chunk.keep :]
        wanted = logits.flatten(0, 1).index_select(0, chunk.places)
        return hide_unused(self.model, wanted)

    def _backbone(self, parts: BackboneAndHead, learn: LearnConfig) -> Callable[..., Any]:
        if not learn.compile:
            return parts.backbone
        if self._compiled is None:
            # one graph for all lengths: rounds differ in them, and each graph of its own takes minutes
            self._compiled = torch.compile(parts.backbone, dynamic=True)
        return self._compiled


def split_model(model: torch.nn.Module) -> BackboneAndHead | None:
    """Backbone, head and embedding; None where the logits are not just `head(backbone(ids))`. Tried on two
    tokens: some models scale or bend their logits after the head."""
    base = base_of(model)
    find = getattr(base, "get_output_embeddings", None)
    head = find() if find is not None else None
    backbone = getattr(base, "base_model", base)
    if type(head) is not torch.nn.Linear or backbone is base or not head.weight.is_leaf:
        return None
    looked_up = base.get_input_embeddings()
    embedding = looked_up if _plain(looked_up) else None
    for parts in (BackboneAndHead(backbone, head, embedding), BackboneAndHead(backbone, head, None)):
        if _agree(model, parts):
            return parts
    return None


def shares_prompts(model: torch.nn.Module) -> bool:
    """Whether a prompt may be computed once for all its completions.

    It needs an architecture with plain causal attention that takes the mask as given: sliding windows and
    recurrent layers would see the neighbouring completion.
    """
    config = getattr(model, "config", None)
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    return (
        getattr(config, "model_type", None) in SHARING
        and getattr(config, "_attn_implementation", None) in ("sdpa", "eager")
        and set(layers) == {"full_attention"}
    )


def _arguments(module: torch.nn.Module) -> frozenset[str]:
    named = inspect.signature(module.forward).parameters
    others = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in named.values())
    return frozenset(named) | ({"use_cache"} if others else frozenset())  # some hand it on unnamed


def _context(chunk: Chunk, accepted: frozenset[str]) -> dict[str, Any]:
    """The arguments besides the tokens, as far as the model knows them."""
    arguments = {
        "attention_mask": chunk.attention_mask,
        "position_ids": chunk.position_ids,
        "use_cache": False,
    }
    return {name: value for name, value in arguments.items() if name in accepted}


def _precision(chunk: Chunk, learn: LearnConfig) -> AbstractContextManager[Any]:
    kind = chunk.input_ids.device.type
    return torch.autocast(kind, dtype=torch.bfloat16) if learn.autocast else nullcontext()


def _tokens(parts: BackboneAndHead, ids: Tensor) -> dict[str, Tensor]:
    if parts.embedding is None:
        return {"input_ids": ids}
    return {"inputs_embeds": embed(ids, parts.embedding.weight, parts.embedding.padding_idx)}


def _plain(embedding: torch.nn.Module) -> bool:
    """Whether an embedding does nothing but look rows up."""
    return (
        type(embedding) is torch.nn.Embedding
        and embedding.weight.is_leaf
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
        and not embedding.sparse
    )


def _is_layer(module: torch.nn.Module) -> bool:
    """Whether transformers marks a module as one whose activations may be computed again."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


@torch.no_grad()
def _agree(model: torch.nn.Module, parts: BackboneAndHead) -> bool:
    """Whether the parts, one after the other, give the model's own logits, bit for bit."""
    ids = torch.tensor([[0, min(1, len(parts.head.weight) - 1)]], device=parts.head.weight.device)
    if parts.embedding is not None and "inputs_embeds" not in _arguments(parts.backbone):
        return False
    whole = model(input_ids=ids).logits
    ours = parts.head(parts.backbone(**_tokens(parts, ids)).last_hidden_state)
    return whole.shape == ours.shape and torch.allclose(whole, ours, rtol=0.0, atol=0.0, equal_nan=True)


@contextmanager
def _computed_again(layers: list[torch.nn.Module]) -> Iterator[None]:
    """Layers called in here keep nothing for their backward pass but their inputs. The library's own switch
    acts in training mode only, where dropout would act too."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
