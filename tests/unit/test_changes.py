"""Settings laid over recorded ones: which may be changed, what that makes of a batch, why others may not."""

import json
import re

import pytest
from history_samples import batch

from sapo.core.config.load import Config, parse
from sapo.core.config.schema import LearnConfig
from sapo.core.errors import UserError
from sapo.core.types import canonical
from sapo.learn.advantage import group_advantages
from sapo.provenance.whatif_settings import Changes, Recorded, authors_named, with_advantages

LEARN = canonical(LearnConfig(lr=1e-4).model_dump(mode="json"))
PEER = ("n1", "ab" * 32)


def recorded(learn: str = LEARN, authors: dict[tuple[str, str], int] | None = None) -> Recorded:
    return Recorded(learn, "{}", authors or {})


def changes(*sets: str, node: str = "n0", config: Config | None = None) -> Changes:
    return Changes(config or Config(), node, sets)


def learn(**values: object) -> str:
    return canonical(LearnConfig.model_validate({"lr": 1e-4, **values}).model_dump(mode="json"))


def test_changes_are_laid_over_what_each_round_was_recorded_under() -> None:
    own = changes("learn.loss=cispo")
    first = own.over(learn(lr=1e-4), "{}")
    second = own.over(learn(lr=5e-5, epochs=2), canonical({"min_entropy": 0.25}))
    assert (first.learn.loss, first.learn.lr, first.learn.epochs) == ("cispo", 1e-4, 1)
    assert (second.learn.loss, second.learn.lr, second.learn.epochs) == ("cispo", 5e-5, 2)
    assert second.guard.min_entropy == 0.25


def test_what_only_the_config_may_name_is_named_by_a_change() -> None:
    assert changes("learn.loss=dapo", "learn.epochs=40", "learn.lr=1e-5").named == {"dapo", 40}


def test_the_nodes_present_settings_do_not_shine_through() -> None:
    present = parse({"learn": {"epochs": 7}, "guard": {"max_truncated": 0.5}})
    old = changes("learn.loss=cispo", config=present).over(canonical({"lr": 1e-4}), "{}")
    assert (old.learn.epochs, old.guard.max_truncated) == (1, 1.0)


def test_changes_are_named_as_they_are_typed_and_those_that_change_nothing_are_known() -> None:
    settled = changes("learn.lr=0.0001", "learn.loss=cispo", "guard.min_entropy=0.5").settle([recorded()])
    assert settled.label == "learn.lr=0.0001 learn.loss=cispo guard.min_entropy=0.5"
    assert settled.unchanged == ("learn.lr",)


def test_a_nodes_own_form_is_its_own_and_that_of_another_is_refused() -> None:
    settled = changes("node.1.learn.lr=1e-5", node="n1").settle([recorded()])
    assert settled.values == {"learn.lr": "1e-05"}
    with pytest.raises(UserError, match=r"node\.0\.learn\.lr = '1e-5': is of another node than n1"):
        changes("node.0.learn.lr=1e-5", node="n1")


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("generate.temperature=0.5", "shapes no update"),
        ("model=starter:numbers", "shapes no update"),
        ("checkpoint.keep=3", "shapes no update; change learn"),
        ("guard.action=rollback", "neither probes, pauses nor rolls back"),
        ("guard.falling_probes=1", "neither probes, pauses nor rolls back"),
        ("learn={lr=1e-5}", "is no single setting"),
        ("lern.lr=1", "unknown key; did you mean 'learn.lr' or"),
        ("learn.lr", "not of the form key=value"),
    ],
)
def test_what_shapes_no_update_is_refused_with_the_reason(flag: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        changes(flag)


def test_nothing_to_change_is_no_what_if() -> None:
    with pytest.raises(UserError, match="nothing is to be changed"):
        changes()


@pytest.mark.parametrize("wanted", ["behaviour", "f_tis"])
@pytest.mark.parametrize("ran", ["behaviour", "f_tis"])
def test_a_ratio_needs_log_probabilities_that_only_rounds_with_one_record(wanted: str, ran: str) -> None:
    own = changes(f"learn.foreign={wanted}", 'learn.trusted_peers=["n1", "n2"]')
    told = learn(foreign=ran, trusted_peers=[PEER[1]])
    own.settle([recorded(told, {PEER: 0})])
    own.settle([recorded(told, {PEER: 0}), recorded(LEARN, {("n3", "cd" * 32): 3})])
    with pytest.raises(
        UserError,
        match=rf"'{wanted}': .*no log-probabilities of n1 in round 4: .*; choose positive, as_if_own",
    ):
        own.settle([recorded(told, {PEER: 0}), recorded(LEARN, {PEER: 4})])
    with pytest.raises(UserError, match="no log-probabilities of n2 in round 0"):
        own.settle([recorded(told, {("n2", "cd" * 32): 0})])


def test_advantages_are_worked_out_again_only_where_a_change_shapes_them() -> None:
    # these advantages are none that their scores would give
    one = batch(0).model_copy(update={"learn": LEARN})
    assert changes("learn.lr=1e-5", "learn.loss=grpo").batch(one).groups == one.groups
    again = changes("learn.advantage=mean_std").batch(one)
    mode = LearnConfig(lr=1e-4, advantage="mean_std")
    for before, after in zip(one.groups, again.groups, strict=True):
        scores = [sample.score for sample in before.samples]
        expected = group_advantages(scores, [sample.finish_reason for sample in before.samples], mode)
        assert [sample.advantage for sample in after.samples] == expected
        assert after == with_advantages(before, mode)


def test_a_changed_batch_says_under_which_settings_it_is_trained() -> None:
    one = batch(0).model_copy(update={"learn": LEARN})
    made = changes("learn.loss=grpo", "guard.max_truncated=0.5").batch(one)
    assert json.loads(made.learn) == json.loads(LEARN) | {"loss": "grpo"}
    assert json.loads(made.guard)["max_truncated"] == 0.5
    assert made.model_copy(update={"learn": one.learn, "guard": one.guard}) == one


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("n1", {"ab" * 32: "n1"}),
        ("ABAB", {"ab" * 32: "n1"}),
        ("cd" * 32, {"cd" * 32: "n2"}),  # another's name does not keep its owner from being meant
        ("cd", "means 2 authors; name one by its key: cd (01"),
        ("n2", "means 2 authors; name one by its key: n2 (cd"),
        ("n9", "taught the node nothing in these rounds; those who did are cd"),
        ("", "taught the node nothing in these rounds"),
    ],
)
def test_an_author_is_meant_by_key_beginning_of_it_or_name(wanted: str, found: dict[str, str] | str) -> None:
    authors = [
        ("n1", "ab" * 32),
        ("n2", "cd" * 32),
        ("n2", "ef" * 32),
        ("cd", "01" * 32),
        ("cd" * 31, "23" * 32),
    ]
    if isinstance(found, dict):
        assert authors_named([wanted], authors) == found
    else:
        with pytest.raises(UserError, match=re.escape(found)):
            authors_named([wanted], authors)
