"""What gossiping nodes give each other: slow weights and pseudo-gradients in one safetensors file.

The file is named by its SHA-256. It holds `slow.<name>` and `delta.<name>` in float32 for each trained
tensor, tied ones once, and in its header by whom it was made and when.
"""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sapo.core.atomic_file import whole_file
from sapo.core.errors import SapoError, described
from sapo.core.types import canonical, file_sha256, sha256
from sapo.learn.gossip import Partner
from sapo.policy.kept_files import SUFFIX, KeptFiles
from sapo.policy.models import LoadedPolicy, frozen_sha256

HEADER = 2**20
"""Bytes that a file may have beside its tensors."""
_ABOUT = "sapo"


class Unusable(SapoError):
    """Why a file cannot be averaged with; `code` is counted."""

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        super().__init__(detail)


def trained(policy: LoadedPolicy) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that are trained, tied ones once."""
    return {name: tuple(p.shape) for name, p in policy.model.named_parameters() if p.requires_grad}


def fingerprint(policy: LoadedPolicy) -> str:
    """Hex SHA-256 of what must be equal for weights to be averaged: architecture, trained tensors and their
    type, tokenizer, and under LoRA the weights that stay."""
    types = sorted({str(p.dtype) for p in policy.model.parameters() if p.requires_grad})
    shapes = [[name, list(shape)] for name, shape in trained(policy).items()]
    kind = getattr(policy.model.config, "model_type", "")
    return sha256(canonical([kind, shapes, types, policy.fingerprint, frozen_sha256(policy.model)]))


def size_limit(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes that a file with these tensors has at most."""
    return 2 * 4 * sum(torch.Size(shape).numel() for shape in shapes.values()) + HEADER


def write(folder: Path, about: Mapping[str, str | int], tensors: Iterable[tuple[str, Tensor, Tensor]]) -> str:
    """Write name, slow weights and pseudo-gradient of each tensor to a file; returns its digest, its name."""
    folder.mkdir(parents=True, exist_ok=True)
    named: dict[str, Tensor] = {}
    for name, slow, delta in tensors:
        named |= {f"slow.{name}": slow.contiguous(), f"delta.{name}": delta.contiguous()}
    # one entry: several would be written in any order, and equal content must have one name
    with whole_file(folder / "offered.tmp") as new:
        save_file(named, new, metadata={_ABOUT: canonical(dict(about))})
        digest = file_sha256(new)
    (folder / "offered.tmp").replace(folder / f"{digest}{SUFFIX}")
    return digest


def checked(
    path: Path,
    digest: str,
    shapes: Mapping[str, tuple[int, ...]],
    about: Mapping[str, str | int] | None = None,
) -> Partner:
    """What reads the tensors of a file whose digest, header and tensors are as they must be.

    Raises `Unusable`: `bad_digest`, `bad_shape` (other tensors, types or sizes, or no such file at all),
    `not_its_own` (made by another, or in another round, than `about` says), `not_finite`.
    """
    if file_sha256(path) != digest:
        raise Unusable("bad_digest", "its bytes are not those that were announced")
    try:
        with safe_open(path, framework="pt") as file:
            said = json.loads((file.metadata() or {}).get(_ABOUT, "null"))
            names = {f"{part}.{name}": shape for name, shape in shapes.items() for part in ("slow", "delta")}
            if {*file.keys()} != names.keys():
                raise Unusable("bad_shape", "it holds other tensors")
            for name, shape in names.items():
                part = file.get_slice(name)
                if (part.get_dtype(), tuple(part.get_shape())) != ("F32", shape):
                    raise Unusable("bad_shape", f"{name} is {part.get_dtype()} {part.get_shape()}")
            if about is not None and said != dict(about):
                raise Unusable("not_its_own", "its header names another author or round")
            for name in names:
                if not bool(file.get_tensor(name).isfinite().all()):
                    raise Unusable("not_finite", f"{name} is not finite")
    except (SafetensorError, ValueError, RecursionError) as error:
        raise Unusable("bad_shape", f"it is no such file: {described(error, 200)}") from None
    return partial(_pair, path)


def _pair(path: Path, name: str) -> tuple[Tensor, Tensor]:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(f"slow.{name}"), file.get_tensor(f"delta.{name}")


def averaged_with(kept: KeptFiles, round: int, digest: str, shapes: Mapping[str, tuple[int, ...]]) -> Partner:
    """What reads the file that a node has averaged with in a round. Raises `Unusable` where it is gone or
    changed."""
    path = kept.path(round, digest)
    if not path.exists():
        raise Unusable("absent", f"{path} is gone, with which round {round} was averaged")
    return checked(path, digest, shapes)
