"""A small model in a GGUF file, for tests of whoever reads one."""

from pathlib import Path

import gguf
import torch

TOKENS = ["<|endoftext|>", *(chr(code) for code in range(0x21, 0x7F)), "Ġ", "12"]


def written(path: Path) -> Path:
    """A tiny Llama with a tokenizer of bytes, as llama.cpp would have it in one file."""
    torch.manual_seed(0)
    width, inner = 32, 64
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(256)
    out.add_embedding_length(width)
    out.add_block_count(2)
    out.add_feed_forward_length(inner)
    out.add_head_count(2)
    out.add_head_count_kv(2)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(len(TOKENS))
    out.add_tokenizer_model("gpt2")
    out.add_token_list(TOKENS)
    out.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(TOKENS) - 1))
    out.add_token_merges(["1 2"])
    out.add_eos_token_id(0)
    shapes = {"token_embd": (len(TOKENS), width), "output": (len(TOKENS), width), "output_norm": (width,)}
    for block in ("blk.0", "blk.1"):
        shapes |= {f"{block}.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
        shapes |= {f"{block}.ffn_{name}": (inner, width) for name in ("gate", "up")}
        shapes |= {f"{block}.ffn_down": (width, inner)}
        shapes |= {f"{block}.{name}_norm": (width,) for name in ("attn", "ffn")}
    for name, shape in shapes.items():
        out.add_tensor(f"{name}.weight", (0.3 * torch.randn(shape)).numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
