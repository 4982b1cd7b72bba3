"""Digests of a model's weights, made beside what else there is to do after an update."""

import threading

import torch

from sapo.policy.models import tensor_checksums, weights_sha256


class Digests:
    """`weights_sha256` and `tensor_checksums` of the weights as they are, which stay so until `result`.

    Hashing needs no interpreter: on a machine with a core to spare the first costs the caller nothing.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._sha256 = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="digests", daemon=True)
        self._thread.start()

    def result(self) -> tuple[str, tuple[int, ...]]:
        """Both; raises what hashing raised."""
        checksums = tensor_checksums(self._model)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._sha256, checksums

    def _work(self) -> None:
        try:
            self._sha256 = weights_sha256(self._model)
        except BaseException as error:
            self._error = error
