"""Digests of a model's weights, made beside what else there is to do after an update."""

import torch

from sapo.core.beside import begun
from sapo.policy.models import tensor_checksums, weights_sha256


class Digests:
    """`weights_sha256` and `tensor_checksums` of the weights as they are, which stay so until `result`.
    Hashing needs no interpreter: on a machine with a core to spare the first costs the caller nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._sha256 = begun("digests", lambda: weights_sha256(model))

    def result(self) -> tuple[str, tuple[int, ...]]:
        """Both; raises what hashing raised."""
        checksums = tensor_checksums(self._model)
        return self._sha256.result(), checksums
