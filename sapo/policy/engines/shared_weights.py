"""A model's weights in memory that two processes see, without a name that anybody has to remove."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch

ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies: `start` counts bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """Of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SharedWeights:
    """Tensors over an open file `descriptor`: another process that holds it too sees the same values."""

    def __init__(self, descriptor: int, slots: Iterable[Slot]) -> None:
        self.descriptor, self.slots = descriptor, tuple(slots)
        size = max(slot.start + slot.bytes for slot in self.slots)
        os.ftruncate(descriptor, size)
        whole = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
        self.tensors = {
            slot.name: whole[slot.start : slot.start + slot.bytes].view(slot.dtype).view(slot.shape)
            for slot in self.slots
        }

    @classmethod
    def like(cls, weights: Iterable[tuple[str, torch.Tensor]]) -> Self:
        """Room for tensors of these names, types and shapes, in memory that ends with its last holder."""
        slots, end = list[Slot](), 0
        for name, value in weights:
            slots.append(Slot(name, value.dtype, tuple(value.shape), end))
            end += -(-slots[-1].bytes // ALIGNED) * ALIGNED
        return cls(os.memfd_create("sapo-weights"), slots)

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy values in, from whatever device they are on."""
        with torch.no_grad():
            for name, value in weights:
                self.tensors[name].copy_(value)

    def close(self) -> None:
        """Let go of the memory."""
        self.tensors = {}
        os.close(self.descriptor)
