"""vLLM's own OpenAI server with a model that ships with the package, for members to ask."""

import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sapo.core.child_process import Child, tail
from sapo.ops.services import bind

HEAD = 32
"""The smallest attention head that vLLM's kernels for CPUs have."""
START_S = 400.0
"""Two processes import torch and vLLM, on a machine that does other things beside."""
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or it binds itself to one core, however busy that is
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the executor is a third process that imports all again
}
RUN = """
import runpy
from sapo.core.child_process import watch_parent
watch_parent()
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
"""The command `vllm serve` of the build for CPUs looks for a package of another name."""
FLAGS = ("--enforce-eager", "--dtype=float32", "--max-num-seqs=96", "--distributed-executor-backend=uni")


@contextmanager
def openai_server(model: Path, name: str, folder: Path, *flags: str) -> Iterator[str]:
    """Base URL of a server of its own on a free port, stopped at the end; its log is in `folder`."""
    with bind(None, "port") as bound:
        port = bound.getsockname()[1]
    where = ["--model", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    command = ["-c", RUN, *where, *FLAGS, *flags]
    child = Child.start("vllm", command, log=folder / "vllm.log", env={**os.environ, **SETTINGS})
    try:
        until = time.monotonic() + START_S
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert child.poll() is None, tail(child.log, 60)
            assert time.monotonic() < until, tail(child.log, 60)
            time.sleep(0.5)  # each look is work for the server
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        child.stop(10)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


TEMPLATE = (
    "{% set told = namespace(text='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set told.text = message['content'] + '\n\n' %}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>' + told.text + message['content'] + '<|assistant|>' }}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)
"""The shipped models' own leaves a system prompt out, so `sapo` puts it into the question; so does this."""


def widen_heads(model: Path, folder: Path) -> Path:
    """A copy of a shipped model that computes the same with attention heads of `HEAD` numbers.

    Each half of a head, which positions turn together with the other half, is followed by zeros. The factors
    of `longrope` let what was there turn as fast as before.
    """
    shutil.copytree(model, folder)
    config = json.loads((model / "config.json").read_text())
    heads, old = config["num_attention_heads"], config["head_dim"]
    assert config["num_key_value_heads"] == heads
    tensors = load_file(model / "model.safetensors")
    wide = {name: _widen(name, tensor.float(), heads, old) for name, tensor in tensors.items()}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"head_dim": HEAD, "dtype": "float32", "rope_parameters": _slowed(config, old)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _widen(name: str, tensor: torch.Tensor, heads: int, old: int) -> torch.Tensor:
    """A projection to heads, or from them, with zeros after each half."""
    kind = name.split(".")[-2]
    if kind not in ("q_proj", "k_proj", "v_proj", "o_proj"):
        return tensor
    by_head = (tensor.T if kind == "o_proj" else tensor).reshape(heads, 2, old // 2, -1)
    wide = torch.nn.functional.pad(by_head, (0, 0, 0, (HEAD - old) // 2)).reshape(heads * HEAD, -1)
    if kind == "q_proj":
        wide = wide * (HEAD / old) ** 0.5  # what is divided by the root of the head's size
    return (wide.T if kind == "o_proj" else wide).contiguous()


def _slowed(config: dict[str, Any], old: int) -> dict[str, Any]:
    """Rotation of the first pairs as in a head of `old` numbers; the others hold zeros."""
    theta, most = config["rope_parameters"]["rope_theta"], config["max_position_embeddings"]
    factors = [theta ** (2 * i / old - 2 * i / HEAD) if i < old // 2 else 1.0 for i in range(HEAD // 2)]
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": most,
    }
