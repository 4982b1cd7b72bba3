"""What resume, replay and what-if share: the recorded settings, threads and ways back of each round."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learn_support import example, tiny_model

from sapo.core.config.load import GuardConfig, LearnConfig
from sapo.core.errors import UserError
from sapo.core.types import Batch, canonical
from sapo.learn.update import Learner, StepResult
from sapo.policy.models import weights_sha256
from sapo.provenance.reexecute import Mismatch, Repeater, settings_kept
from sapo.store.history.tables import Damaged


class Watched(Learner):
    """Notes under what each step is made."""

    seen: list[tuple[int, str, float, float]]

    def step(self, batch: Batch) -> StepResult:
        here = (torch.get_num_threads(), self.learn.loss, self.temperature, self.guard.min_entropy)
        self.seen.append(here)
        return super().step(batch)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def learner(dtype: torch.dtype = torch.float32) -> Watched:
    made = Watched(tiny_model(dtype=dtype), LearnConfig(lr=1e-2), temperature=1.0)
    made.seen = []
    return made


def repeater(of: Learner, **options: Any) -> Repeater:
    return Repeater(SimpleNamespace(model=of.model), of, **options)  # type: ignore[arg-type]


def batch(round: int, *, temperature: float = 1.0, min_entropy: float = 0.0, **learn: Any) -> Batch:
    settings = LearnConfig(**{"lr": 1e-2, **learn})
    return example(settings).model_copy(
        update={
            "round": round,
            "temperature": temperature,
            "learn": canonical(settings.model_dump(mode="json")),
            "guard": canonical(GuardConfig(min_entropy=min_entropy).model_dump(mode="json")),
        }
    )


def ends(rolled_back_to: int | None = None) -> Any:
    return SimpleNamespace(skipped=None, rolled_back_to=rolled_back_to, weights_sha256="", gossip=None)


def test_each_round_is_repeated_under_its_own_settings_and_threads() -> None:
    one = learner()
    again = repeater(one)
    with settings_kept(one):
        again.repeat(batch(0), ends(), {"threads": 1})
        again.repeat(batch(1, loss="gspo", temperature=0.5, min_entropy=0.1), ends(), {"threads": 2})
        again.repeat(batch(2), ends(), None)  # an old record does not say: as it was
    assert one.seen == [(1, "dapo", 1.0, 0.0), (2, "gspo", 0.5, 0.1), (2, "dapo", 1.0, 0.0)]


def test_what_was_set_before_is_set_again_after() -> None:
    one = learner()
    torch.set_num_threads(1)
    with settings_kept(one):
        repeater(one).repeat(batch(0, loss="gspo", temperature=0.5, lr=0.5), ends(), {"threads": 2})
    assert (torch.get_num_threads(), one.learn.loss, one.temperature) == (1, "dapo", 1.0)
    assert one._optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rounds_go_back_to_weights_and_moments_kept_on_the_way(dtype: torch.dtype) -> None:
    one = learner(dtype)
    again = repeater(one, back_to={2: 1, 4: 1})
    digests = []
    for round in range(6):
        again.repeat(batch(round), ends(1 if round in (2, 4) else None), None)
        digests.append(weights_sha256(one.model))
    # the same update from the same weights and moments, each time after the way back
    assert digests[2] == digests[4] == digests[0]
    assert digests[3] == digests[5] == digests[1]
    assert len(set(digests)) == 2
    assert not again._kept  # nobody goes back there any more


def test_a_round_without_groups_changes_nothing_on_the_way_back() -> None:
    one = learner()
    again = repeater(one, back_to={5: 3})
    again.repeat(batch(0), ends(), None)
    before = weights_sha256(one.model)
    again.repeat(batch(4), ends(), None)  # rounds 1 to 3 were empty
    again.repeat(batch(5), ends(3), None)
    assert weights_sha256(one.model) == before


def test_weights_that_are_gone_are_named() -> None:
    one = learner()
    with pytest.raises(Mismatch, match="round 7 went back to the weights of round 3, which are gone"):
        repeater(one, back_to={7: 3}, find=lambda round: None).go_back(7, 3)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 9_999, '{"nope":1}', '{"lr":"x"}', '{"lr":NaN}'])
@pytest.mark.parametrize("section", ["learn", "guard"])
def test_a_record_whose_settings_are_none_is_named(section: str, text: str) -> None:
    forged = batch(3).model_copy(update={section: text})
    with pytest.raises(Damaged, match=f"history of n0, round 3: its `{section}` holds no such settings$"):
        repeater(learner()).step(forged, None)


@pytest.mark.parametrize("threads", ["two", 0, 10**9, [1], 1.5])
def test_a_record_that_names_no_number_of_threads_is_named(threads: object) -> None:
    with pytest.raises(Damaged, match=r"round 3: it names .* threads$"):
        repeater(learner()).step(batch(3), {"threads": threads})


def test_a_round_that_was_compiled_is_not_compiled_on_a_cpu() -> None:
    one = learner()
    repeater(one).step(batch(0, compile=True, micro_batch=2), None)
    assert (one.learn.compile, one.learn.micro_batch) == (False, 2)


def test_a_record_does_not_choose_to_take_for_ever() -> None:
    with pytest.raises(UserError, match=r"learn\.epochs = 2000: a record names so many, the config does not"):
        repeater(learner()).step(batch(0, epochs=2000), None)
