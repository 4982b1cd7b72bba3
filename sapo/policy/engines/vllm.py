"""The engine that samples with vLLM, in a process of its own, on a copy of the policy's weights.

vLLM is opened on a config alone and gets its weights from the live model through shared memory, so nothing
touches the disk and a policy that exists only in memory will do.
"""

import json
import math
import os
import socket
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from sapo.core.child_process import Child, tail
from sapo.core.determinism import thread_settings
from sapo.core.errors import SapoError, UserError
from sapo.core.rng import stream
from sapo.core.types import Completion, Sampling
from sapo.learn.unused_ids import hide_unused, unused_ids
from sapo.policy.engines.base import NOT_FINITE, refuse_long
from sapo.policy.engines.shared_weights import SharedWeights
from sapo.policy.engines.vllm_messages import Drawn, Load, Loaded, Opened, Opening, Sample, Sampled, unfit
from sapo.policy.engines.whole_weights import whole_weights
from sapo.policy.models import LoadedPolicy

Reply = TypeVar("Reply", Opened, Loaded, Sampled)
PROCESS = "sapo.policy.engines.vllm_process"
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process below its own
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # one runner on every device
    "VLLM_CONFIGURE_LOGGING": "0",  # what matters it raises
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}
"""Environment in which vLLM runs, whatever the user's holds."""
AGREEMENT = 0.5
"""Nats by which a model's own log-probability and vLLM's may differ at most, in bfloat16 too."""


class VllmEngine:
    """Samples from a copy of a `LoadedPolicy`'s weights; `update_weights` takes them over again.

    `cache_gb` is the memory of the key-value cache in GB. Raises `UserError` where vLLM has no such model, or
    was built for another device. Every call raises `SapoError` once vLLM's process has ended.
    """

    def __init__(self, policy: LoadedPolicy, *, cache_gb: float) -> None:
        self.policy = policy
        self.cache_gb = cache_gb
        self._lock = threading.RLock()
        """Held from a request to its reply: a node samples ahead in another thread than it probes in."""
        self._pushed: tuple[tuple[int, int], ...] | None = None
        self._weights = SharedWeights.like(whole_weights(policy))
        self._log = tempfile.TemporaryFile(prefix="sapo-vllm-")  # noqa: SIM115 - lives as long as the process
        self._line, self._child = _start(policy, self._weights.descriptor, self._log)
        self._end = weakref.finalize(self, _close, self._child, self._line, self._weights, self._log)
        try:
            opened = self._ask(_opening(policy, cache_gb, self._weights), Opened)
            self.context = opened.context
            """Tokens of the longest sequence that the cache holds."""
            self.update_weights()
            self._check()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of vLLM's process."""
        return self._child.pid

    def _ask(self, request: object, kind: type[Reply]) -> Reply:
        with self._lock:
            self._refuse_ended()
            try:
                self._line.send(request)
                reply = self._line.recv()
            except (EOFError, OSError):
                code = self._child.kill()
                told = tail(_path(self._log)).splitlines()[-3:]
                self._end()
                raise SapoError(f"vLLM's process ended with {code}: {' | '.join(told)}") from None
            except BaseException:
                self._end()  # the reply, when it comes, would be taken for the next one's
                raise
        if isinstance(reply, UserError):
            raise reply
        assert isinstance(reply, kind)
        return reply

    def _refuse_ended(self) -> None:
        if not self._end.alive:
            raise SapoError("vLLM's process has ended")

    def _check(self) -> None:
        """Raise `UserError` where vLLM cannot run the model, which some say at the first token only, or
        computes something else: what is left of a config may not mean the same there."""
        prompt = self.policy.encode_prompt("1 + 1 = ?")[: self.context - 1]
        found = self.generate(
            [prompt], completions=0, max_new_tokens=1, sampling=Sampling(), seed=0, greedy=True
        )[0][0]
        assert found.token_ids is not None
        assert found.logprobs is not None
        model: Any = self.policy.model
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt], device=model.device)).logits[0, -1]
            logits = hide_unused(model, logits)
        own = float(torch.log_softmax(logits.float(), dim=-1)[found.token_ids[0]])
        if not abs(own - found.logprobs[0]) < AGREEMENT:
            raise unfit(f"a log-probability is {own:.3f} in the learner and {found.logprobs[0]:.3f} in vLLM")

    def update_weights(self) -> None:
        """Take over the policy's weights as they are now; costs nothing where no tensor was written to."""
        found = tuple((p.data_ptr(), p._version) for p in self.policy.model.parameters())
        if found == self._pushed:
            return
        with self._lock:
            self._refuse_ended()  # its memory has gone with it
            self._weights.write(whole_weights(self.policy))
            missing = self._ask(Load(), Loaded).missing
        if missing:
            raise SapoError(f"vLLM took over no weights for {', '.join(missing[:3])}")
        self._pushed = found

    def close(self) -> None:
        """End vLLM's process, whatever it is at: a thread that waits for a reply gets an error."""
        self._child.kill()
        with self._lock:
            self._end()

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

        Raises `UserError` for a prompt that leaves no room in the model's context or, with its
        completion, in the cache.
        """
        refuse_long(self.policy, prompts)
        if not prompts:
            return []
        most = [min(max_new_tokens, self.policy.max_length - len(prompt)) for prompt in prompts]
        longest = max(len(prompt) + room for prompt, room in zip(prompts, most, strict=True))
        if longest > self.context:
            problem = f"holds {self.context} tokens of a sequence, and one may come to {longest}"
            remedy = "raise it, or lower generate.max_new_tokens"
            raise UserError("generate.vllm_cache_gb", self.cache_gb, problem, remedy)
        request = Sample(
            prompts=tuple(tuple(prompt) for prompt in prompts),
            most=tuple(most),
            completions=completions,
            greedy=greedy,
            seeds=tuple(stream(seed, "draw", i) >> 1 for i in range(len(prompts))),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
        )
        found = self._ask(request, Sampled).groups
        return [[self._completion(one) for one in group] for group in found]

    def _completion(self, drawn: Drawn) -> Completion:
        if not all(map(math.isfinite, drawn.logprobs)):
            raise SapoError(NOT_FINITE)
        return Completion(
            text=self.policy.decode(drawn.token_ids),
            finish_reason="stop" if drawn.stopped else "length",
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
        )


def _start(policy: LoadedPolicy, descriptor: int, log: IO[bytes]) -> tuple[Connection, Child]:
    ours, theirs = socket.socketpair()
    with theirs:
        environment = {**os.environ, **SETTINGS, **thread_settings(torch.get_num_threads())}
        child = Child.start(
            "vllm",
            ["-m", PROCESS, str(theirs.fileno()), str(descriptor)],
            log=_path(log),
            env=environment | one_gpu(policy.device, environment),
            descriptors=[theirs.fileno(), descriptor],
        )
    return Connection(ours.detach()), child


def one_gpu(device: torch.device, environment: Mapping[str, str]) -> dict[str, str]:
    """The one GPU that vLLM is to see, where the policy lives on one: it takes the first."""
    if device.type != "cuda":
        return {}
    place, names = device.index or 0, environment.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": names.split(",")[place] if names else str(place)}


def _path(file: IO[bytes]) -> Path:
    return Path(f"/proc/self/fd/{file.fileno()}")


def _close(child: Child, line: Connection, shared: SharedWeights, log: IO[bytes]) -> None:
    child.kill()
    line.close()
    shared.close()
    log.close()


def _opening(policy: LoadedPolicy, cache_gb: float, shared: SharedWeights) -> Opening:
    model: Any = policy.model
    unused = unused_ids(model)
    shape = model.config.to_diff_dict() | {"model_type": model.config.model_type}
    shape["architectures"] = [type(model.get_base_model() if policy.lora else model).__name__]
    return Opening(
        shape=json.dumps(shape, default=str),
        dtype=str(model.dtype).removeprefix("torch."),
        device=policy.device.type,
        threads=torch.get_num_threads(),
        max_length=policy.max_length,
        cache_bytes=int(cache_gb * 1e9),
        stop_ids=tuple(policy.stop_ids),
        unused_ids=() if unused is None else tuple(unused.tolist()),
        slots=shared.slots,
    )
