"""Which settings of the update can't make a difference: what is claimed, against the gradients."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sapo.core.config.load import Config, load
from sapo.core.effects import inert, notes, swarm_notes
from sapo.learn.loss import LOSSES, LossInputs, normaliser


def config(*sets: str) -> Config:
    return load(sets=["swarm.nodes=2", *sets], env={})


def gradient(
    loss: str, *, later: bool, clips: tuple[float, float] = (0.2, 0.28), per_token: bool = False
) -> Tensor:
    """Of the log-probabilities of three unequal answers, in the first step on them or a `later` one."""
    make = torch.Generator().manual_seed(0)
    own = -torch.rand(3, 5, generator=make, dtype=torch.float64) - 0.1
    mask = torch.arange(5) < torch.tensor([[5], [2], [3]])
    old = own + later * 0.3 * torch.randn(3, 5, generator=make, dtype=torch.float64)
    advantages = torch.tensor([-0.5, 1.0, -0.25], dtype=torch.float64)[:, None]
    if per_token:
        advantages = advantages * torch.rand(3, 5, generator=make, dtype=torch.float64)
    own.requires_grad_()
    divisor = normaliser(loss, tokens=10, sequences=3, constant=12)
    LOSSES[loss](LossInputs(own, old, advantages, mask, divisor, *clips)).loss.backward()
    assert own.grad is not None
    return own.grad


def equal(one: str, other: str, *, later: bool, per_token: bool = False) -> bool:
    first, second = (gradient(loss, later=later, per_token=per_token) for loss in (one, other))
    return torch.allclose(first, second, rtol=1e-12, atol=0)


@pytest.mark.parametrize("one", LOSSES)
@pytest.mark.parametrize("other", LOSSES)
def test_losses_are_one_update_just_where_it_is_said(one: str, other: str) -> None:
    for later, epochs in ((False, 1), (True, 2)):
        said = [
            note
            for note in notes(
                config(f"learn.loss={one}", f"learn.epochs={epochs}"), config(f"learn.loss={other}")
            )
            if note.startswith("learn.loss")
        ]
        assert (one != other and equal(one, other, later=later)) == bool(said)


def test_gspo_is_grpo_in_one_step_whatever_advantages_single_tokens_have() -> None:
    assert equal("gspo", "grpo", later=False, per_token=True)
    assert not equal("gspo", "grpo", later=True, per_token=True)


def test_dapo_and_cispo_are_one_update_to_the_bit() -> None:
    assert torch.equal(gradient("dapo", later=False), gradient("cispo", later=False))


@pytest.mark.parametrize("loss", LOSSES)
def test_clips_act_from_the_second_step_on_and_not_before(loss: str) -> None:
    for later, epochs in ((False, 1), (True, 2)):
        plain = gradient(loss, later=later)
        acts = [
            not torch.equal(plain, gradient(loss, later=later, clips=clips))
            for clips in ((0.01, 0.28), (0.2, 0.01))
        ]
        names = ("gspo_clip_low", "gspo_clip_high") if loss == "gspo" else ("clip_low", "clip_high")
        without = inert(config(f"learn.loss={loss}", f"learn.epochs={epochs}"))
        assert [name not in without for name in names] == acts


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (["learn.clip_high=0.4"], "learn.clip_high = 0.4 makes no difference: with learn.epochs = 1"),
        (["learn.gspo_clip_low=0.1", "learn.epochs=2"], "only gspo clips by it"),
        (["learn.clip_low=0.1", "learn.epochs=2", "learn.loss=gspo"], "gspo clips by learn.gspo_clip_low"),
        (["learn.loss=cispo"], "learn.loss = cispo makes the updates of dapo"),
        (["learn.dr_grpo_length=16"], 'it belongs to learn.loss = "dr_grpo"'),
        (["learn.foreign_floor=-3", "learn.foreign=positive"], 'it belongs to learn.foreign = "bounded"'),
        (["learn.foreign_tis_kl=5"], 'it belongs to learn.foreign = "f_tis"'),
        (["learn.foreign_top_k=9"], 'it belongs to learn.foreign_credit = "floor"'),
        (["learn.credit_own=true", "learn.foreign_credit=all"], "there is no credit"),
        (["learn.foreign_weight=0.5", "batch.external=0"], "nothing foreign in a batch"),
        (["learn.foreign_credit=useful", "batch.external=0"], "nothing foreign in a batch"),
        (["learn.epochs=3", "learn.lr=0"], "the policy stays as it is"),
        (["node.1.learn.std_floor=0.1"], 'it belongs to learn.advantage = "mean_std"'),
    ],
)
def test_a_setting_to_no_effect_is_named_once_with_the_reason(sets: Sequence[str], told: str) -> None:
    (note,) = swarm_notes(config(*sets))
    assert told in note


def test_credit_acts_in_a_silo_where_own_answers_have_it() -> None:
    silo = config("learn.foreign_credit=useful", "learn.credit_own=true", "batch.external=0")
    assert not {"foreign_credit", "credit_own"} & inert(silo).keys()
