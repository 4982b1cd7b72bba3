"""Families of models, each as a tiny random one: what works here, and what is refused with which reason.

`tests/unit/test_architectures.py` tries each, and docs/models.md shows them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

BASE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 1, "bos_token_id": None}
HEADS = BASE | {"intermediate_size": 64, "num_attention_heads": 2, "max_position_embeddings": 256}
GROUPED = HEADS | {"num_key_value_heads": 1, "pad_token_id": 0}
WIDE = GROUPED | {"head_dim": 16}
SLIDING = WIDE | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "eos_token_id": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
SMALL_BART = {
    "vocab_size": 64,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 64,
    "eos_token_id": 1,
}
STATE = "keeps a running state"
OTHER = "have other probabilities than read at once"
NO_CACHE = "goes on from a running state, or from nothing"


@dataclass(frozen=True)
class Family:
    """An architecture of transformers; `refused` is of the line that refuses it."""

    name: str
    kind: str
    """Its config's class, without `Config`."""
    shape: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None

    def model(self) -> Any:
        """A random one whose outputs are far from uniform, so that differences show."""
        config = getattr(transformers, f"{self.kind}Config")(**self.shape)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(8.0)
        return model


COMMON = ("Llama", "Qwen3", "Gemma3Text", "Mixtral", "Mamba")
"""Tried in every `make test`, the others in `make test-full`."""
FAMILIES = (
    Family("Llama 2 and 3, SmolLM2", "Llama", GROUPED),
    Family("Llama 4, text", "Llama4Text", WIDE | {"num_local_experts": 2, "intermediate_size_mlp": 64}),
    Family("Qwen2, Qwen2.5", "Qwen2", GROUPED),
    Family("Qwen3", "Qwen3", WIDE),
    Family(
        "Qwen2-MoE", "Qwen2Moe", GROUPED | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}
    ),
    Family("Qwen3-MoE", "Qwen3Moe", WIDE | EXPERTS | {"num_experts": 4}),
    Family("Mistral", "Mistral", WIDE | {"sliding_window": 8}),
    Family("Ministral", "Ministral", SLIDING),
    Family("Mixtral", "Mixtral", GROUPED | {"num_local_experts": 4}),
    Family("Gemma", "Gemma", WIDE),
    Family("Gemma 2", "Gemma2", SLIDING),
    Family("Gemma 3", "Gemma3Text", SLIDING),
    Family("Phi 1 and 2", "Phi", GROUPED),
    Family("Phi-3, Phi-4", "Phi3", GROUPED),
    Family("Phi-3.5-MoE", "Phimoe", GROUPED | {"num_local_experts": 4}),
    Family("DeepSeek-V2", "DeepseekV2", GROUPED | {"num_key_value_heads": 2} | LATENT | EXPERTS),
    Family("DeepSeek-V3, Kimi-K2", "DeepseekV3", GROUPED | {"num_key_value_heads": 2} | LATENT | EXPERTS),
    Family("gpt-oss", "GptOss", SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("GLM-4 (glm)", "Glm", WIDE),
    Family("GLM-4-0414", "Glm4", WIDE),
    Family("GLM-4.5", "Glm4Moe", WIDE | LATENT | EXPERTS),
    Family("OLMo", "Olmo", GROUPED),
    Family("OLMo 2", "Olmo2", GROUPED),
    Family("OLMo 3", "Olmo3", SLIDING),
    Family("OLMoE", "Olmoe", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("SmolLM3", "SmolLM3", GROUPED),
    Family("Granite 3", "Granite", GROUPED),
    Family(
        "Granite 3 MoE",
        "GraniteMoe",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 6.0},
    ),
    Family("Command R", "Cohere", GROUPED),
    Family("Command R7B", "Cohere2", SLIDING),
    Family("StableLM", "StableLm", GROUPED),
    Family("StarCoder 2", "Starcoder2", GROUPED),
    Family("Falcon", "Falcon", HEADS | {"alibi": False}),
    Family("GPT-2", "GPT2", GPT),
    Family(
        "GPT-Neo", "GPTNeo", HEADS | {"num_heads": 2, "num_layers": 2, "attention_types": [[["global"], 2]]}
    ),
    Family("GPT-J", "GPTJ", GPT | {"rotary_dim": 8}),
    Family("GPT-NeoX, Pythia", "GPTNeoX", HEADS),
    Family("StarCoder", "GPTBigCode", GPT),
    Family("OPT", "OPT", HEADS | {"ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 0}),
    Family(
        "BLOOM", "Bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2, "eos_token_id": 1}
    ),
    Family("MPT", "Mpt", {"vocab_size": 64, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 256}),
    Family("EXAONE 4", "Exaone4", SLIDING),
    Family("ERNIE 4.5", "Ernie4_5", WIDE),
    Family("Hunyuan, dense", "HunYuanDenseV1", WIDE),
    Family("Seed-OSS", "SeedOss", WIDE),
    Family("Apertus", "Apertus", WIDE),
    Family("Arcee", "Arcee", WIDE),
    Family("Nemotron 3 and 4", "Nemotron", WIDE),
    Family("Helium", "Helium", WIDE),
    Family("LFM2", "Lfm2", GROUPED | {"layer_types": ["conv", "full_attention"]}, STATE),
    Family("Qwen3-Next", "Qwen3Next", WIDE | LINEAR | EXPERTS | {"num_experts": 4}, STATE),
    Family("Qwen3.5, text", "Qwen3_5Text", WIDE | LINEAR, STATE),
    Family(
        "Jamba",
        "Jamba",
        GROUPED | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
        STATE,
    ),
    Family("Bamba", "Bamba", GROUPED | MAMBA | {"attn_layer_indices": [1], "mamba_n_heads": 4}, STATE),
    Family(
        "Falcon-H1",
        "FalconH1",
        WIDE | MAMBA | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
        STATE,
    ),
    Family(
        "Granite 4, hybrid",
        "GraniteMoeHybrid",
        GROUPED | MAMBA | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4},
        STATE,
    ),
    Family("Mamba", "Mamba", BASE | {"state_size": 8}, NO_CACHE),
    Family(
        "Mamba 2", "Mamba2", BASE | {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1}, NO_CACHE
    ),
    Family("RecurrentGemma", "RecurrentGemma", GROUPED | {"attention_window_size": 8}, OTHER),
    Family("RWKV", "Rwkv", BASE | {"attention_hidden_size": 32, "context_length": 256}, NO_CACHE),
    Family("BERT, an encoder", "Bert", HEADS, OTHER),
    Family("BART, a decoder beside an encoder", "Bart", SMALL_BART, OTHER),
)
