"""The guard as a function, and its limit on the distance between engine and learner."""

import logging

import pytest
from learn_support import batch, group, parameters, plain_logprobs, same, tiny_model

from sapo.core.config.load import GuardConfig, LearnConfig
from sapo.learn.guard import guard
from sapo.learn.update import Learner
from sapo.node.guard_alarms import GuardAlarms

PROMPT, ANSWERS = (3, 4), [(6, 7, 1), (8, 1)]


@pytest.mark.parametrize(
    ("metrics", "config", "key"),
    [
        ({"learn/engine_gap": 0.3}, GuardConfig(max_engine_gap=0.2), "max_engine_gap"),
        ({"learn/entropy": 0.1}, GuardConfig(min_entropy=0.2), "min_entropy"),
        ({"learn/truncated": 0.3}, GuardConfig(max_truncated=0.2), "max_truncated"),
        ({"learn/unscorable": 0.6}, GuardConfig(), "max_unscorable"),
        ({"learn/logprob_foreign": -9.0}, GuardConfig(min_foreign_logprob=-8.0), "min_foreign_logprob"),
    ],
)
def test_guard_names_the_threshold_passed_and_is_silent_at_it(
    metrics: dict[str, float], config: GuardConfig, key: str
) -> None:
    message = guard(metrics, config)
    assert message is not None
    assert f"guard.{key}" in message
    assert guard({name: getattr(config, key) for name in metrics}, config) is None
    assert guard({}, config) is None


@pytest.mark.parametrize(("off_by", "skipped"), [(0.0, False), (0.5, True)])
def test_no_step_is_made_on_answers_of_another_policy_than_the_engine_should_have_sampled(
    off_by: float, skipped: bool
) -> None:
    model = tiny_model()
    behaviour = [[value - off_by for value in plain_logprobs(model, PROMPT, ids)] for ids in ANSWERS]
    made = Learner(model, LearnConfig(lr=1e-3), temperature=1.0, guard=GuardConfig(max_engine_gap=0.2))
    result = made.step(batch(group(PROMPT, ANSWERS, [1.0, 0.0], behaviour=behaviour)))
    assert result.metrics["learn/engine_gap"] == pytest.approx(off_by, abs=1e-4)
    assert (result.skipped is not None, result.alarm is not None) == (skipped, skipped)


@pytest.mark.parametrize("taught", [True, False], ids=["foreign-teaches", "nothing-teaches"])
def test_a_guard_sees_own_answers_when_none_of_them_teaches(taught: bool) -> None:
    made = Learner(tiny_model(), LearnConfig(), temperature=1.0, guard=GuardConfig(min_entropy=50))
    before = parameters(made.model)
    quiet = group(PROMPT, ANSWERS, [1.0, 1.0])
    teacher = group((5, 6), ANSWERS, [1.0, 0.0], source="external", position=1)
    result = made.step(batch(quiet, teacher) if taught else batch(quiet))
    assert result.alarm is not None
    assert result.alarm.startswith("learn/entropy")
    assert same(parameters(made.model), before)
    assert (result.metrics["learn/tokens"] > 0) == taught


def test_own_completions_that_are_not_trained_do_not_change_the_step() -> None:
    teacher = group((5, 6), ANSWERS, [1.0, 0.0])
    quiet = group(PROMPT, ANSWERS, [1.0, 1.0], position=1)
    alone, beside = (Learner(tiny_model(), LearnConfig(lr=1e-3), temperature=1.0) for _ in range(2))
    alone.step(batch(teacher))
    beside.step(batch(teacher, quiet))
    assert same(parameters(alone.model), parameters(beside.model))


def test_what_a_guard_finds_round_after_round_is_said_once_and_then_by_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alarms, entropy = GuardAlarms("n0"), "learn/entropy = 0.{} is below guard.min_entropy = 0.9"
    found = ["weights beyond 1e+06"] * 12 + [entropy.format(1), entropy.format(2), None, entropy.format(3)]
    with caplog.at_level(logging.WARNING):
        for round, alarm in enumerate(found):
            alarms.hear(round, alarm)
    assert [record.getMessage().removeprefix("n0: round ") for record in caplog.records] == [
        "0: weights beyond 1e+06",
        "9: weights beyond 1e+06 (10 rounds in a row)",
        f"12: {entropy.format(1)}",
        f"15: {entropy.format(3)}",
    ]
