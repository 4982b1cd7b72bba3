"""Counted randomness: every stream is a hash of where it is used, so no generator state has to survive."""

import hashlib
import random
from typing import Any


def stream(*path: int | str) -> int:
    """The 63-bit seed of the stream named by `path`, e.g. `stream(seed, incarnation, round, "generate", 3)`.
    Parts are length-prefixed before hashing, so no two different paths are read as the same bytes."""
    digest = hashlib.sha256()
    for part in path:
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "big") + text)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def rng(*path: int | str) -> random.Random:
    """A `random.Random` seeded by `stream(*path)`."""
    return random.Random(stream(*path))


def torch_generator(*path: int | str) -> Any:
    """A CPU `torch.Generator` seeded by `stream(*path)`; torch is imported only here."""
    import torch

    return torch.Generator().manual_seed(stream(*path))
