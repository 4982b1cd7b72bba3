"""The learning rate by round: what it is, and that the step is made at it."""

import pytest
import torch
from learn_support import example, parameters, tiny_model

from sapo.core.config.load import LearnConfig
from sapo.core.types import Batch
from sapo.learn.optimizer import learning_rate
from sapo.learn.update import Learner


@pytest.mark.parametrize(
    ("decay_from", "round", "share"),
    [(0, 10_000, 1.0), (100, 0, 1.0), (100, 100, 1.0), (100, 400, 0.5), (100, 10_000, 0.1)],
)
def test_it_falls_with_the_square_root_of_the_round(decay_from: int, round: int, share: float) -> None:
    learn = LearnConfig(lr=1e-3, decay_from=decay_from)
    assert learning_rate(learn, round) == pytest.approx(1e-3 * share, rel=1e-12)


def moved(learn: LearnConfig, batch: Batch) -> torch.Tensor:
    """How far one step moves every weight."""
    model = tiny_model()
    before = torch.cat([tensor.flatten().clone() for tensor in parameters(model).values()])
    assert Learner(model, learn, temperature=1.0).step(batch).skipped is None
    return torch.cat([tensor.flatten() for tensor in parameters(model).values()]) - before


def test_a_step_is_made_at_its_rounds_rate_and_the_next_at_its_own() -> None:
    learn = LearnConfig(lr=1e-3, decay_from=100)
    early, late = (example(learn).model_copy(update={"round": round}) for round in (100, 400))
    assert torch.allclose(moved(learn, late), 0.5 * moved(learn, early), rtol=1e-3, atol=1e-8)
    learner = Learner(tiny_model(), learn, temperature=1.0)
    for batch, rate in ((late, 5e-4), (early, 1e-3)):
        learner.step(batch)
        assert learner.state_dict()["optimizer"]["param_groups"][0]["lr"] == pytest.approx(rate)
