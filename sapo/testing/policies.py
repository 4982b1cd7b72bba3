"""Tiny random policies of several architectures, with a tokenizer of characters."""

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from sapo.policy.models import LoadedPolicy, wrap

CHARACTERS = "0123456789+-=?. abcdefghijklmnopqrstuvwxyz<>|/_"
CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer(
    *, chat: bool = True, bos: bool = False, eos: str | None = "<|eos|>"
) -> PreTrainedTokenizerFast:
    """A character tokenizer; with `bos` it puts one before every text, as Llama's does."""
    specials = ["<|pad|>", "<|eos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|bos|>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *CHARACTERS])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", vocabulary["<|bos|>"])]
        )
    result = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token=eos,
        bos_token="<|bos|>" if bos else None,
        additional_special_tokens=[token for token in specials[2:] if token != "<|bos|>" or not bos],
    )
    if chat:
        result.chat_template = CHAT
    return result


def model(family: str = "qwen2", *, seed: int = 0, context: int = 256, size: int = 64) -> Any:
    """A random model whose outputs are far from uniform, so that differences show."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"vocab_size": size, "max_position_embeddings": context, "initializer_range": 0.3}
    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=2, n_head=2, eos_token_id=1, bos_token_id=None, **shape)
        )
    common: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if family == "llama":
        return LlamaForCausalLM(
            LlamaConfig(**common, num_key_value_heads=1, **shape, eos_token_id=1, bos_token_id=None)
        )
    return Qwen2ForCausalLM(
        Qwen2Config(**common, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1, **shape)
    )


def policy(family: str = "qwen2", **arguments: Any) -> LoadedPolicy:
    """A policy of a family with the character tokenizer."""
    return wrap(family, model(family, **arguments), tokenizer())
