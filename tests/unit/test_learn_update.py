"""The update: right gradient, the same bits twice, and no step when something is wrong."""

import math
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from learn_support import (
    VOCABULARY,
    assert_close,
    batch,
    example,
    gradients,
    group,
    learner,
    parameters,
    plain_logprobs,
    same,
    tiny_model,
)

from sapo.core.config.load import GuardConfig, LearnConfig
from sapo.core.errors import UserError
from sapo.core.types import Batch, BatchGroup, FinishReason
from sapo.learn.collate import Chunk, select
from sapo.learn.logprobs import shares_prompts
from sapo.learn.loss import LOSSES
from sapo.learn.update import Learner

PAPER: dict[str, Any] = {"foreign_bound": "none"}
"""Foreign groups weigh what they weigh, as in the paper."""


# -- selection -------------------------------------------------------------------------------------------


def test_foreign_groups_without_advantage_never_reach_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.Tensor] = []
    forward = Learner.logprobs

    def watched(made: Learner, chunk: Chunk, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(chunk.input_ids)
        return forward(made, chunk, *given)

    monkeypatch.setattr(Learner, "logprobs", watched)
    quiet = group((20, 21, 22), [(23, 1), (23, 2)], [1.0, 1.0], position=5, source="external")
    for token_mean in ("informative", "all"):
        result = learner(LearnConfig(token_mean=token_mean, **PAPER)).step(batch(*example().groups, quiet))
        assert result.metrics["learn/groups_zero_advantage"] == 2
    assert not any(torch.isin(ids, torch.tensor([20, 21, 22, 23])).any() for ids in seen)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_token_mean_all_counts_silent_groups_in_the_denominator_only(loss: str) -> None:
    results = {}
    for token_mean in ("informative", "all"):
        made = learner(
            LearnConfig(loss=loss, token_mean=token_mean, foreign="as_if_own", grad_clip=1e9, **PAPER)
        )
        assert made.step(example()).skipped is None
        results[token_mean] = gradients(made)
    # Informative: 11 + 8 tokens in 4 + 3 sequences; the silent group adds 4 tokens in 2 sequences.
    # `dr_grpo` divides by a constant.
    ratio = {"dapo": 19 / 23, "cispo": 19 / 23, "dr_grpo": 1.0}.get(loss, 7 / 9)
    assert_close(results["informative"], results["all"], scale=ratio)


def test_masked_truncations_leave_numerator_and_denominator() -> None:
    learn = LearnConfig(truncated="mask", grad_clip=1e9)
    reasons: list[FinishReason] = ["stop", "length", "stop"]
    with_it = group((3, 4), [(5, 1), (6, 7, 8, 9), (10, 1)], [1.0, 0.5, 0.0], finish_reasons=reasons)
    without = group((3, 4), [(5, 1), (10, 1)], [1.0, 0.0])
    made, other = learner(learn), learner(learn)
    result = made.step(batch(with_it))
    other.step(batch(without))
    assert_close(gradients(made), gradients(other))
    assert result.metrics["learn/excluded_truncated"] == 1
    assert result.metrics["learn/truncated"] == pytest.approx(1 / 3)
    assert result.metrics["learn/tokens"] == 4


def test_unscorable_completions_are_not_trained_on_nor_counted() -> None:
    learn = LearnConfig(grad_clip=1e9)
    made, other = learner(learn), learner(learn)
    made.step(batch(group((3, 4), [(5, 1), (6, 7, 8), (10, 1)], [1.0, None, 0.0])))
    other.step(batch(group((3, 4), [(5, 1), (10, 1)], [1.0, 0.0])))
    assert_close(gradients(made), gradients(other))


def test_positive_trains_on_foreign_completions_above_the_mean_only() -> None:
    chosen = select(example(), LearnConfig(foreign="positive"))
    assert [row.token_ids[-2:] for row in chosen.rows if row.external] == [(16, 1)]
    assert sum(not row.external for row in chosen.rows) == 4
    assert chosen.metrics["learn/excluded_foreign"] == 2


def test_bounded_masks_foreign_tokens_below_the_floor_out_of_both_sides() -> None:
    learn = LearnConfig(foreign="bounded", foreign_floor=-1e-6, grad_clip=1e9)
    made, other = learner(learn), learner(learn)
    result = made.step(example())
    other.step(batch(*example().groups[:2]))
    # Every foreign token is below that floor, so only the local groups teach.
    assert result.metrics["learn/foreign_masked"] == 8
    assert result.metrics["learn/tokens"] == 11
    assert result.metrics["learn/token_share_external"] == 0
    assert_close(gradients(made), gradients(other))


def test_bounded_skips_a_batch_of_which_nothing_remains() -> None:
    made = learner(LearnConfig(foreign="bounded", foreign_floor=-1e-6))
    before = parameters(made.model)
    result = made.step(batch(example().groups[2]))
    assert result.skipped == "no trained token"
    assert result.alarm is None
    assert same(parameters(made.model), before)


@pytest.mark.parametrize("name", ["n1", "key"])
def test_behaviour_uses_the_logprobs_of_trusted_producers_only(name: str) -> None:
    answers = [(13, 14), (16, 1)]
    made = learner()
    claimed = [[value - math.log(2) for value in plain_logprobs(made.model, (5, 6), a)] for a in answers]
    trusted = group((5, 6), answers, [0.0, 1.0], source="external", producer="n1", behaviour=claimed)
    peer = name if name == "n1" else trusted.producer_key
    learn = LearnConfig(foreign="behaviour", trusted_peers=[peer], grad_clip=1e9, **PAPER)
    plain = learner(LearnConfig(grad_clip=1e9, foreign="as_if_own", **PAPER))
    plain.step(batch(trusted))
    weighed = learner(learn)
    weighed.step(batch(trusted))
    assert_close(gradients(plain), gradients(weighed), scale=2.0)
    stranger = learner(LearnConfig(foreign="behaviour", trusted_peers=["n7"], grad_clip=1e9, **PAPER))
    stranger.step(batch(trusted))
    assert_close(gradients(plain), gradients(stranger))


def test_a_trusted_completion_without_logprobs_is_counted() -> None:
    learn = LearnConfig(foreign="behaviour", trusted_peers=["n1"])
    assert learner(learn).step(example()).metrics["learn/behaviour_missing"] == 3


# -- the gradient ----------------------------------------------------------------------------------------


def by_hand(model: torch.nn.Module, loss: str, groups: tuple[BatchGroup, ...]) -> dict[int, torch.Tensor]:
    """The gradient at ratio 1, one unpadded sequence at a time: minus advantage times grad logprob."""
    samples = [s for g in groups if g.informative for s in g.samples]
    lengths = [sum(s.loss_mask) for s in samples]
    denominators = {
        "dapo": lambda n: sum(lengths),
        "cispo": lambda n: sum(lengths),
        "dr_grpo": lambda n: 256 * sum(len(g.samples) for g in groups),
        "grpo": lambda n: n * len(samples),
        "gspo": lambda n: n * len(samples),
    }
    model.zero_grad()
    for entry, length in zip(samples, lengths, strict=True):
        ids = torch.tensor([entry.token_ids])
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
        start = len(entry.token_ids) - length
        gain = sum(logprobs[i - 1, ids[0, i]] for i in range(start, len(entry.token_ids)))
        (-entry.advantage * gain / denominators[loss](length)).backward()
    found = {}
    for i, parameter in enumerate(model.parameters()):
        assert parameter.grad is not None
        found[i] = parameter.grad.clone()
    return found


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_the_gradient_of_a_step_is_the_one_worked_out_by_hand(loss: str, kind: str) -> None:
    made = learner(LearnConfig(loss=loss, grad_clip=1e9, foreign="as_if_own", **PAPER), tiny_model(kind))
    result = made.step(example())
    expected = by_hand(tiny_model(kind), loss, example().groups)
    assert_close(gradients(made), expected)
    norm = math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    assert result.metrics["learn/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    "foreign",
    [
        {"foreign": "as_if_own"},
        {"foreign": "bounded", "foreign_floor": -3.0},
        {"foreign": "as_if_own", "foreign_credit": "floor", "foreign_top_k": 3},
        {"foreign": "as_if_own", "foreign_credit": "useful"},
        {"foreign": "as_if_own", "foreign_credit": "worthwhile"},
        {"foreign": "as_if_own", "foreign_credit": "worthwhile", "credit_own": True},
    ],
    ids=["as-if-own", "bounded", "floor", "useful", "worthwhile", "own-credited"],
)
@pytest.mark.parametrize("shared", [True, False], ids=["shared-prompt", "row-each"])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_one_by_eight_and_eight_by_one_give_the_same_gradient(loss: str, shared: bool, foreign: Any) -> None:
    found = {}
    for micro_batch in (None, 1, 3):
        learn = LearnConfig(loss=loss, micro_batch=micro_batch, grad_clip=1e9, **foreign)
        made = learner(learn)
        made._shared = shared
        result = made.step(example())
        found[micro_batch] = (gradients(made), result.metrics)
    for micro_batch in (1, 3):
        assert_close(found[micro_batch][0], found[None][0])
        assert found[micro_batch][1] == pytest.approx(found[None][1], rel=1e-4, abs=1e-6)


def test_token_and_loss_shares_tell_the_sources_apart() -> None:
    metrics = learner(LearnConfig(lr=1e-3, foreign="as_if_own", **PAPER)).step(example()).metrics
    assert metrics["learn/token_share_external"] == pytest.approx(8 / 19)
    # |advantage| of each token: local ones 0.5; foreign ones 0.5, 0 and 0.5, of lengths 4, 2 and 2.
    local = 0.5 * (2 + 3 + 2 + 4)
    foreign = 0.5 * 4 + 0.0 * 2 + 0.5 * 2
    assert metrics["learn/loss_share_external"] == pytest.approx(foreign / (local + foreign))


def test_the_gradient_is_clipped_to_its_norm() -> None:
    made = learner(LearnConfig(grad_clip=1e-3))
    result = made.step(example())
    assert result.metrics["learn/grad_norm"] > 1e-3
    norm = math.sqrt(sum(float(value.square().sum()) for value in gradients(made).values()))
    assert norm == pytest.approx(1e-3, rel=1e-3)
    assert LearnConfig().grad_clip == 1.0


def test_a_step_makes_good_completions_likelier_and_bad_ones_less_likely() -> None:
    made = learner(LearnConfig(lr=1e-3))
    pair = batch(group((3, 4, 5), [(6, 1), (7, 8, 1)], [1.0, 0.0]))

    def totals() -> tuple[float, float]:
        return (
            sum(plain_logprobs(made.model, (3, 4, 5), (6, 1))),
            sum(plain_logprobs(made.model, (3, 4, 5), (7, 8, 1))),
        )

    good, bad = totals()
    for _ in range(5):
        made.step(pair)
    better, worse = totals()
    assert better > good
    assert worse < bad


def test_metrics_are_means_over_the_right_tokens() -> None:
    made = learner()
    own, foreign = list[float](), list[float]()
    for entry in example().groups:
        for s in entry.samples:
            n = sum(s.loss_mask)
            values = plain_logprobs(made.model, s.token_ids[:-n], s.token_ids[-n:])
            (foreign if entry.source == "external" else own).extend(values)
    metrics = made.step(example()).metrics
    assert metrics["learn/logprob_local"] == pytest.approx(sum(own) / len(own), abs=1e-4)
    assert metrics["learn/logprob_foreign"] == pytest.approx(sum(foreign) / len(foreign), abs=1e-4)
    assert metrics["learn/logprob_foreign_min"] == pytest.approx(min(foreign), abs=1e-4)
    assert 0 < metrics["learn/entropy"] < math.log(VOCABULARY)
    assert metrics["learn/steps"] == 1
    assert metrics["learn/tokens"] == 19
    assert metrics["learn/clip_share"] == 0


def test_the_gap_between_engine_and_trainer_is_measured_and_does_not_change_the_step() -> None:
    made = learner(guard=GuardConfig(max_engine_gap=1.0))
    answers = [(6, 1), (7, 1)]
    engine = [[value - 0.25 for value in plain_logprobs(made.model, (3, 4), a)] for a in answers]
    told = group((3, 4), answers, [1.0, 0.0], behaviour=engine)
    other = learner()
    assert made.step(batch(told)).metrics["learn/engine_gap"] == pytest.approx(0.25, abs=1e-4)
    assert "learn/engine_gap" not in other.step(batch(group((3, 4), answers, [1.0, 0.0]))).metrics
    assert same(parameters(made.model), parameters(other.model))


def test_entropy_of_a_flat_policy_is_the_log_of_the_vocabulary() -> None:
    model: Any = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert learner(model=model).step(example()).metrics["learn/entropy"] == pytest.approx(
        math.log(VOCABULARY), rel=1e-5
    )


# -- several epochs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_old_logprobs_are_those_of_the_update_s_start_so_the_clip_acts_from_the_second_epoch(
    micro_batch: int | None,
) -> None:
    tight: dict[str, Any] = {"lr": 1e-2, "clip_low": 1e-6, "clip_high": 1e-6, "micro_batch": micro_batch}
    once, twice = learner(LearnConfig(**tight)), learner(LearnConfig(**tight, epochs=2))
    assert once.step(example()).metrics["learn/clip_share"] == 0
    result = twice.step(example())
    assert result.metrics["learn/steps"] == 2
    assert result.metrics["learn/clip_share"] > 0.3
    again = learner(LearnConfig(**tight))
    again.step(example())
    # A second update on the same batch starts from ratio 1 again, a second epoch does not.
    assert again.step(example()).metrics["learn/clip_share"] == 0
    assert not same(parameters(again.model), parameters(twice.model))


# -- the same bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_two_runs_give_the_same_bits(loss: str) -> None:
    ends = []
    for _ in range(2):
        made = learner(LearnConfig(loss=loss, lr=1e-3, epochs=2))
        results = [made.step(example()) for _ in range(3)]
        ends.append((parameters(made.model), [result.metrics for result in results]))
    assert same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learner_restored_from_its_state_goes_on_with_the_same_bits(dtype: torch.dtype) -> None:
    straight = learner(LearnConfig(lr=1e-4), tiny_model(dtype=dtype))
    for _ in range(2):
        straight.step(example())
    weights = {name: value.clone() for name, value in straight.model.state_dict().items()}
    state = straight.state_dict()
    state = {
        "optimizer": {**state["optimizer"], "state": _copied(state["optimizer"]["state"])},
        "masters": [master.clone() for master in state["masters"]],
    }
    straight.step(example())
    resumed = learner(LearnConfig(lr=1e-4), tiny_model(seed=9, dtype=dtype))
    resumed.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    resumed.step(example())
    assert same(parameters(straight.model), parameters(resumed.model))
    for one, other in zip(straight.state_dict()["masters"], resumed.state_dict()["masters"], strict=True):
        assert torch.equal(one, other)


def _copied(state: dict) -> dict:
    return {k: {name: value.clone() for name, value in entry.items()} for k, entry in state.items()}


def test_settings_change_in_mid_run() -> None:
    made = learner(LearnConfig(lr=1e-3))
    made.step(example())
    made.set_learn(LearnConfig(lr=1e-9, loss="grpo"), temperature=0.5)
    before = parameters(made.model)
    assert made.step(batch(*example().groups, temperature=0.5)).skipped is None
    changed = max(float((before[n] - p.detach()).abs().max()) for n, p in made.model.named_parameters())
    assert changed < 1e-6


# -- no step ---------------------------------------------------------------------------------------------


def _nan_weights(made: Learner) -> Batch:
    with torch.no_grad():
        next(iter(made.model.parameters())).fill_(math.nan)
    return example()


def _huge_advantage(made: Learner) -> Batch:
    first = example().groups[0]
    samples = tuple(s.model_copy(update={"advantage": s.advantage * 1e300}) for s in first.samples)
    return batch(first.model_copy(update={"samples": samples}))


def _huge_gradient(made: Learner) -> Batch:
    model: Any = made.model
    model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    return example()


def _wild_step(made: Learner) -> Batch:
    made.set_learn(made.learn.model_copy(update={"lr": 1e39}))
    return example()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_wild_step, "weights beyond 1e+06"),
        (_nan_weights, "non-finite log-probabilities"),
        (_huge_advantage, "non-finite loss"),
        (_huge_gradient, "non-finite gradient"),
    ],
)
def test_nothing_changes_when_something_is_not_finite(spoil: Callable[[Learner], Batch], reason: str) -> None:
    made = learner()
    made.step(example())
    bad = spoil(made)
    weights, state = parameters(made.model), _copied(made.state_dict()["optimizer"]["state"])
    result = made.step(bad)
    assert result.skipped == result.alarm == reason
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.metrics["learn/steps"] == 0
    for name, parameter in made.model.named_parameters():
        assert torch.equal(parameter.nan_to_num(7.0), weights[name].nan_to_num(7.0))
        assert parameter.grad is None
    after = made.state_dict()["optimizer"]["state"]
    assert all(torch.equal(after[k][name], state[k][name]) for k in state for name in state[k])


@pytest.mark.parametrize(
    "empty",
    [batch(), batch(group((3,), [(4, 1), (5, 1)], [1.0, 1.0])), batch(group((3,), [(4,), (5,)], [0.0, 0.0]))],
    ids=["no group", "all right", "all wrong"],
)
def test_an_empty_batch_is_skipped_and_changes_nothing(empty: Batch) -> None:
    made = learner(LearnConfig(lr=1e-3, weight_decay=0.1, token_mean="all"))
    made.step(example())
    weights, steps = parameters(made.model), made.state_dict()["optimizer"]["state"][0]["step"].item()
    result = made.step(empty)
    assert result.skipped == "no informative group"
    assert result.alarm is None
    assert same(parameters(made.model), weights)
    assert made.state_dict()["optimizer"]["state"][0]["step"].item() == steps


def test_a_batch_whose_every_completion_is_masked_is_skipped() -> None:
    learn = LearnConfig(truncated="mask")
    cut = group((3,), [(4,), (5,)], [0.0, 1.0], finish_reasons=["length", "length"])
    result = learner(learn).step(batch(cut))
    assert result.skipped == "no trained token"
    assert result.metrics["learn/truncated"] == 1.0


def test_a_guard_that_is_set_off_stops_the_step_before_it_is_made() -> None:
    for settings_, name in (
        (GuardConfig(min_entropy=10.0), "guard.min_entropy"),
        (GuardConfig(min_foreign_logprob=-1e-9), "guard.min_foreign_logprob"),
    ):
        made = learner(guard=settings_)
        before = parameters(made.model)
        result = made.step(example())
        assert result.skipped is not None
        assert name in result.skipped
        assert result.alarm == result.skipped
        assert same(parameters(made.model), before)
        assert "learn/entropy" in result.metrics


# -- what is trained -------------------------------------------------------------------------------------


def test_a_guard_on_shares_acts_even_without_an_informative_group() -> None:
    cut = group((3,), [(4,), (5,)], [0.0, 0.0], finish_reasons=["length", "stop"])
    result = learner(guard=GuardConfig(max_truncated=0.4)).step(batch(cut))
    assert result.alarm == "learn/truncated = 0.5 is above guard.max_truncated = 0.4"
    unscorable = group((3,), [(4,), (5,), (6,)], [None, None, 1.0])
    result = learner().step(batch(unscorable))
    assert result.alarm is not None
    assert "guard.max_unscorable" in result.alarm


def test_under_lora_only_the_adapter_is_trained() -> None:
    adapter = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("qwen2"), adapter)
    assert shares_prompts(model)
    made = learner(LearnConfig(lr=1e-2), model)
    before = parameters(model)
    made.step(example())
    made.step(example())
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    adapters = [name for name in before if "lora_" in name]
    assert len(made.state_dict()["optimizer"]["state"]) == len(adapters)


def test_steps_below_bfloat16_s_precision_are_not_lost() -> None:
    # At lr 1e-5 one step is far less than the distance between neighbouring bfloat16 values.
    model = tiny_model(dtype=torch.bfloat16)
    made = learner(LearnConfig(lr=1e-5), model)
    before = parameters(model)
    made.step(example())
    moved = [
        float((m - before[n].float()).abs().max())
        for m, n in zip(made.state_dict()["masters"], before, strict=True)
    ]
    assert max(moved) == pytest.approx(1e-5, rel=0.1)
    for _ in range(60):
        made.step(example())
    assert not same(parameters(model), before)


def test_dropout_is_off_during_the_update() -> None:
    model = tiny_model("gpt2")
    model.train()
    learner(model=model)
    assert not model.training


def test_code_that_only_a_record_names_is_not_run() -> None:
    with pytest.raises(UserError, match="a record names this code, the config does not"):
        learner().set_learn(LearnConfig(loss="builtins:print"))


def test_more_epochs_than_a_record_may_name_are_run_where_the_config_names_them() -> None:
    made = learner(LearnConfig(epochs=17))
    made.set_learn(LearnConfig(epochs=17))
    made.set_learn(LearnConfig(epochs=16))
    with pytest.raises(UserError, match=r"learn\.epochs = 18"):
        made.set_learn(LearnConfig(epochs=18))


def test_a_batch_without_own_groups_has_no_weight_within_the_bound_and_makes_no_step() -> None:
    made = learner(LearnConfig(foreign_credit="all")).step(batch(example().groups[2]))
    assert made.skipped == "no trained token"
