"""Digests made beside the caller: the same ones, and a failure is told."""

import pytest

from sapo.policy import models
from sapo.policy.models import Digests
from sapo.testing import policies as samples


def test_digests_are_those_of_the_weights() -> None:
    model = samples.model()
    assert Digests(model).result() == (models.weights_sha256(model), models.tensor_checksums(model))


def test_what_hashing_fails_with_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: object) -> str:
        raise MemoryError("no room")

    monkeypatch.setattr(models, "weights_sha256", broken)
    with pytest.raises(MemoryError, match="no room"):
        Digests(samples.model()).result()
