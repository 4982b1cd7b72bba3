"""Models of a published shape with random weights, and a tokenizer as large: no weights can be downloaded.

The tokenizer is byte-level BPE of Qwen2's rules whose merges are made up, all pairs, triples and quadruples
of letters in order until the vocabulary is full. English text comes to some three letters a token.
"""

import itertools
import string
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Of a Qwen2 model with tied embeddings."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int


HALF_B = Shape(vocabulary=151_936, hidden=896, layers=24, heads=14, kv_heads=2, inner=4864)
"""Qwen2.5-0.5B: 494,032,768 parameters."""
SMALL = Shape(vocabulary=2_000, hidden=64, layers=2, heads=2, kv_heads=1, inner=128)
"""Heads of 32, as vLLM's kernels for a processor want them."""


def make(shape: Shape, directory: Path) -> None:
    """Write model and tokenizer as a Hugging Face directory; the same for the same shape."""
    tokenizer = _tokenizer(shape.vocabulary)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.inner,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        bos_token_id=None,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **ends)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def forget(directory: Path, fresh: Path) -> None:
    """Write a model's shape with fresh random weights, and its tokenizer, to another directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    model.generation_config = GenerationConfig.from_pretrained(directory)
    model.save_pretrained(fresh)
    AutoTokenizer.from_pretrained(directory).save_pretrained(fresh)


def _tokenizer(vocabulary: int) -> Qwen2Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    starts = ["Ġ", *letters]  # the byte-level spelling of a space
    pairs = [(a, b) for a in starts for b in letters]
    triples = [(a + b, c) for a, b in pairs for c in letters]
    quadruples = ((a + b, c + d) for a, b in pairs for c, d in itertools.product(letters, repeat=2))
    room = vocabulary - len(alphabet) - 3
    merges = list(itertools.islice(itertools.chain(pairs, triples, quadruples), room))
    tokens = [*alphabet, *(first + second for first, second in merges), PAD, START, END]
    return Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=merges,  # type: ignore[arg-type]  # pairs are what it takes; the annotation says otherwise
        eos_token=END,
        pad_token=PAD,
        chat_template=TEMPLATE,
        additional_special_tokens=[START],
    )
