"""From text to trained ids: whose tokens are believed, where masks come from, which reward is which."""

from pathlib import Path
from typing import Any

import pytest
from makers import make_batch, make_group, make_identity, make_signed

from sapo.core.atomic_file import write_first
from sapo.core.config.home import Home
from sapo.core.config.load import LearnConfig, load
from sapo.core.errors import UserError
from sapo.core.types import BatchGroup, Completion, Outcome
from sapo.learn.batch_metrics import reward_metrics, source_metrics
from sapo.node.batch import batch_group, version_seen
from sapo.peers import keyring
from sapo.peers.keyring import keys_of, refuse_strange_names
from sapo.policy.models import LoadedPolicy
from sapo.policy.tokenise import Tokens, false_ids, own_ids
from sapo.testing.policies import policy


@pytest.fixture(scope="module")
def reader() -> LoadedPolicy:
    """The receiving policy: character tokens."""
    return policy()


def completion(reader: LoadedPolicy, text: str, reason: Any = "stop", **changes: Any) -> Completion:
    """A completion with faithful ids and log-probabilities, before `changes`."""
    ids = reader.encode_completion(text, reason)
    values = {"text": text, "finish_reason": reason, "token_ids": ids, "logprobs": (-0.5,) * len(ids)}
    return Completion(**(values | changes))


def external(
    reader: LoadedPolicy,
    completions: tuple[Completion, ...],
    learn: LearnConfig | None = None,
    scores: tuple[float, ...] = (1.0, 0.0),
    believed: bool = False,
    **changes: Any,
) -> BatchGroup:
    """A foreign group as it enters a batch."""
    values = {"completions": completions, "tokenizer": reader.fingerprint} | changes
    return batch_group(
        reader,
        learn or LearnConfig(),
        make_group(**values),
        make_signed(**values),
        [Outcome.scored(score) for score in scores],
        source="external",
        position=0,
        age_s=2.0,
        believed=believed,
        bus_position="0:7",
    )


def test_faithful_ids_of_the_same_vocabulary_are_used_as_sent(reader: LoadedPolicy) -> None:
    sent = completion(reader, "12")
    group = make_group(completions=(sent, sent), tokenizer=reader.fingerprint)
    assert own_ids(reader, group, sent) == (sent.token_ids, False)


def test_ids_of_another_vocabulary_are_never_used(reader: LoadedPolicy) -> None:
    sent = completion(reader, "12")
    group = make_group(completions=(sent, sent), tokenizer="f" * 64)
    assert own_ids(reader, group, sent) == (reader.encode_completion("12", "stop"), True)


def test_ids_made_before_the_scores_give_the_same_group(reader: LoadedPolicy) -> None:
    pair = completion(reader, "12"), completion(reader, "3", token_ids=None, logprobs=None)
    values: dict[str, Any] = {"completions": pair, "tokenizer": reader.fingerprint}
    group, signed = make_group(**values), make_signed(**values)
    scores = [Outcome.scored(1.0), Outcome.scored(0.0)]
    rest: dict[str, Any] = {"source": "local", "position": 0, "age_s": 0.0}
    plain = batch_group(reader, LearnConfig(), group, signed, scores, **rest)
    for prompt in (None, reader.encode_prompt(group.question)):
        tokens = Tokens.of(reader, group, prompt)
        assert batch_group(reader, LearnConfig(), group, signed, scores, tokens=tokens, **rest) == plain


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda r: r.encode_completion("99", "stop"), id="decodes to another text"),
        pytest.param(lambda r: (*r.encode_completion("12", "length"), 10_000, r.end_id), id="outside"),
        pytest.param(lambda r: (r.end_id, *r.encode_completion("12", "stop")), id="stop token inside"),
        pytest.param(lambda r: r.encode_completion("12", "length"), id="no stop token"),
        pytest.param(lambda r: (0, *r.encode_completion("12", "stop")), id="padding inside"),
        pytest.param(lambda r: (), id="nothing"),
    ],
)
def test_ids_that_lie_about_the_text_are_replaced_by_the_text(reader: LoadedPolicy, lie: Any) -> None:
    sent = completion(reader, "12", token_ids=lie(reader), logprobs=None)
    group = make_group(completions=(sent, sent), tokenizer=reader.fingerprint)
    assert own_ids(reader, group, sent) == (reader.encode_completion("12", "stop"), True)


def test_own_answers_are_trained_as_they_were_sampled_whatever_special_tokens_are_in_them(
    reader: LoadedPolicy,
) -> None:
    for inner in sorted(reader.special_ids - set(reader.stop_ids)):
        ids = (*reader.encode_completion("12", "length"), inner, reader.end_id)
        sent = completion(reader, reader.decode(ids), token_ids=ids, logprobs=(-0.5,) * len(ids))
        group = make_group(completions=(sent, sent), tokenizer=reader.fingerprint)
        assert own_ids(reader, group, sent) == (ids, False)


def test_the_first_id_beyond_the_vocabulary_is_not_used_though_it_decodes_to_nothing(
    reader: LoadedPolicy,
) -> None:
    beyond = (*reader.encode_completion("12", "length"), reader.vocabulary)
    assert reader.decode(beyond) == "12"
    sent = completion(reader, "12", "length", token_ids=beyond, logprobs=(-0.5,) * len(beyond))
    group = make_group(completions=(sent, sent), tokenizer=reader.fingerprint)
    assert own_ids(reader, group, sent) == (reader.encode_completion("12", "length"), True)
    assert false_ids(reader, group)


@pytest.mark.parametrize(
    ("ids", "reason", "false"),
    [
        pytest.param(lambda r: None, "stop", False, id="none sent"),
        pytest.param(lambda r: r.encode_completion("12", "stop"), "stop", False, id="the text's"),
        pytest.param(lambda r: (*r.encode_completion("12", "length"), 0), "stop", False, id="another end"),
        pytest.param(lambda r: r.encode_completion("99", "stop"), "stop", True, id="another text's"),
        pytest.param(lambda r: (*r.encode_completion("12", "length"), 10_000), "stop", True, id="outside"),
        pytest.param(lambda r: r.encode_completion("129", "length"), "length", True, id="one more, cut"),
    ],
)
def test_ids_are_false_if_no_end_of_another_model_explains_them(
    reader: LoadedPolicy, ids: Any, reason: Any, false: bool
) -> None:
    sent = completion(reader, "12", reason, token_ids=ids(reader), logprobs=None)
    own: dict[str, Any] = {"completions": (completion(reader, "3"), sent)}
    assert false_ids(reader, make_group(**own, tokenizer=reader.fingerprint)) is false
    assert not false_ids(reader, make_group(**own, tokenizer="another's"))


def test_a_shared_text_ends_with_the_receivers_end_token_iff_it_stopped(reader: LoadedPolicy) -> None:
    texts = (Completion(text="12", finish_reason="stop"), Completion(text="12", finish_reason="length"))
    stopped, cut = external(reader, texts, tokenizer=None).samples
    assert stopped.token_ids[-1] == reader.end_id
    assert stopped.token_ids[:-1] == cut.token_ids
    assert stopped.retokenised
    assert cut.retokenised


def test_no_start_token_stands_between_prompt_and_completion() -> None:
    from sapo.policy.models import wrap
    from sapo.testing.policies import model, tokenizer

    starts = wrap("bos", model(), tokenizer(bos=True, chat=False))
    bos = starts.tokenizer.bos_token_id
    texts = (Completion(text="12", finish_reason="stop"), Completion(text="3", finish_reason="stop"))
    for sample in external(starts, texts, tokenizer=None).samples:
        assert sample.token_ids.count(bos) == 1
        assert sample.token_ids[0] == bos


def test_masks_come_from_lengths(reader: LoadedPolicy) -> None:
    group = external(reader, (completion(reader, "12"), completion(reader, "")))
    prompt = reader.encode_prompt("What is 0 + 0?")
    for sample, trained in zip(group.samples, (3, 1), strict=True):
        assert sample.loss_mask == (0,) * len(prompt) + (1,) * trained


def test_a_peers_claimed_score_and_what_it_calls_cut_off_are_not_used(reader: LoadedPolicy) -> None:
    liars = tuple(completion(reader, text, "length", claimed_score=1.0) for text in ("12", "13"))
    group = external(reader, liars, LearnConfig(truncated="zero_reward"), scores=(0.0, 1.0))
    assert [sample.score for sample in group.samples] == [0.0, 1.0]
    assert group.samples[0].advantage < 0 < group.samples[1].advantage


@pytest.mark.parametrize("mode", ["behaviour", "f_tis"])
def test_behaviour_logprobs_are_kept_only_of_trusted_peers_with_equal_ids(
    reader: LoadedPolicy, mode: str
) -> None:
    key = make_identity("peer").key
    trusting = LearnConfig.model_validate({"foreign": mode, "trusted_peers": [key]})
    good = completion(reader, "12")
    lying = completion(reader, "13", token_ids=reader.encode_completion("99", "stop"))
    kept, dropped = external(reader, (good, lying), trusting, believed=True).samples
    assert kept.behaviour_logprobs == (-0.5, -0.5, -0.5)
    assert dropped.behaviour_logprobs is None
    stranger = external(reader, (good, good), trusting, author="stranger").samples[0]
    assert stranger.behaviour_logprobs is None
    other_mode = external(reader, (good, good), believed=True).samples[0]
    assert other_mode.behaviour_logprobs is None


def test_a_trusted_name_is_the_key_of_this_sites_node(tmp_path: Path) -> None:
    """A stranger who takes a trusted name is not believed; a key is, under whatever name."""
    home, far = Home(tmp_path), make_identity("far").key
    home.make_node("n1")
    write_first(home.key("n1"), make_identity("own").to_pem())
    assert keys_of(["n1", far], home) == {far}, "n1 has not run here yet"
    keyring.take(home, "tiny", "n1", 0.0)
    assert keys_of(["n1", far], home) == {make_identity("own").key, far}


def test_a_trusted_name_of_another_site_is_refused_with_what_to_give_instead() -> None:
    config = load("tiny", sets=['learn.foreign="behaviour"', 'learn.trusted_peers=["b0"]'], env={})
    with pytest.raises(
        UserError, match=r"learn.trusted_peers = 'b0': is no node of this site.*sapo keys show"
    ):
        refuse_strange_names(config)


def test_the_three_rewards_are_never_mixed(reader: LoadedPolicy) -> None:
    foreign = external(reader, (completion(reader, "1"), completion(reader, "2")), scores=(1.0, 0.0))
    own = foreign.model_copy(update={"source": "local"})
    silent = own.model_copy(
        update={
            "samples": tuple(
                s.model_copy(update={"score": None, "outcome": "unscorable"}) for s in own.samples
            )
        }
    )
    wrong = own.model_copy(
        update={"samples": tuple(s.model_copy(update={"score": 0.0}) for s in own.samples)}
    )
    metrics = reward_metrics([own, wrong, silent, foreign])
    assert metrics["reward/local"] == pytest.approx(1 / 4)
    assert metrics["reward/external"] == pytest.approx(1 / 2)
    assert metrics["reward/training_set"] == pytest.approx(2 / 6)
    assert metrics["reward/local/chain_sum"] == pytest.approx(1 / 4)


def test_the_batch_says_how_much_of_it_is_foreign_and_how_old(reader: LoadedPolicy) -> None:
    foreign = external(reader, (completion(reader, "1"), completion(reader, "2")), tokenizer=None)
    own = foreign.model_copy(update={"source": "local", "position": 1})
    assert source_metrics(make_batch(groups=(foreign, own))) == {
        "sampler/external": 1.0,
        "share/external": 0.5,
        "staleness/mean_s": 2.0,
        "staleness/max_s": 2.0,
        "share/retokenised": 1.0,
    }


def test_a_foreign_policy_is_no_newer_than_the_own_rounds_that_had_ended_when_the_bus_had_its_group() -> None:
    ends = [10.0, 20.0, 30.0]
    claims = [make_group(policy_version=version) for version in (0, 7, 10)]
    seen = [[version_seen(group, stamp, 8, ends, 2) for stamp in (5.0, 25.0, 35.0)] for group in claims]
    assert seen == [[0, 0, 0], [5, 7, 7], [5, 7, 8]]


def test_a_policy_that_claims_to_be_far_ahead_is_late() -> None:
    learn = LearnConfig(foreign="positive_late", foreign_late=2)
    for claim, learned in ((10, True), (11, False), (2**31 - 1, False)):
        version = version_seen(
            make_group(policy_version=claim), 35.0, 8, [10.0, 20.0, 30.0], learn.foreign_late
        )
        assert learn.admits(-0.5, 8 - version, told=False) is learned
