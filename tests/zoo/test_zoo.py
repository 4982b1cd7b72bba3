"""Every animal of the zoo against the same two real nodes: they go on, nothing invalid is learned from, the
refusal is named, and whom it was aimed at loses nothing."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
from animals import ZOO
from animals.answers import INJECTIONS
from animals.crowd import crowd
from reserve import MARKED, WARM, Passage, Reserve, marked, opened

from sapo.core.types import Group, Question

pytestmark = pytest.mark.core

ROUNDS = 3
MORE = {"padder": 9}
"""Rounds until groups of a newcomer that answers below the standard are drawn for want of others."""
ANIMALS = ZOO | {"two thousand identities": partial(crowd, arriving=700)}


@dataclass(frozen=True)
class Fate:
    """What becomes of an animal: the codes its records are refused with, under its key and without proof of
    any, and whether some of what it publishes may be learned from, as it is sound."""

    refused: frozenset[str] = frozenset()
    unproven: frozenset[str] = frozenset()
    rejected: frozenset[str] = frozenset()
    """Reasons that only judging finds."""
    sound: bool = False


def fate(*refused: str, unproven: str = "", rejected: str = "", sound: bool = False) -> Fate:
    return Fate(frozenset(refused), frozenset(unproven.split()), frozenset(rejected.split()), sound)


FATES = {
    "garbage": fate("malformed", "not_canonical", "schema_version", unproven="bad_signature bad_digest"),
    "giant": fate("text_too_long", "group_size", unproven="payload_too_large"),
    "liar": fate(rejected="question_mismatch", sound=True),
    "copier": fate("copy"),
    "near copier": fate("copy"),
    "masked copier": fate("copy", "own_name"),
    "spammer": fate(unproven="no_room"),
    "replayer": fate(unproven="duplicate"),
    "forger": fate("wrong_key", "own_name", unproven="bad_signature", sound=True),
    "squatter": fate(unproven="wrong_id bad_signature bad_digest"),
    "equivocator": fate("equivocation", sound=True),
    "recipe bomber": fate("recipe", "malformed"),
    "held-out seeder": fate("held_out"),
    "code injector": fate(sound=True),
    "control-token injector": fate("control_tokens"),
    "token-id liar": fate("token_ids"),
    "slow-verification attacker": fate(rejected="slow"),
    "time traveller": fate("malformed", sound=True),
    "padder": fate(sound=True),
    "rambler": fate(sound=True),
    "planter": fate(sound=True),
    "miscounter": fate(sound=True),
    "dawdler": fate(sound=True),
    "chooser": fate("not_drawn"),
    "giant learner": fate(rejected="too_costly too_long"),
    "admission burner": fate("malformed", rejected="too_long"),
    "byte hog": fate(rejected="too_long"),
    "archive amplifier": fate("malformed", rejected="too_long question_mismatch"),
    "small-order signer": fate(unproven="bad_signature"),
    "two thousand identities": fate(unproven="no_room"),
}


@pytest.fixture(scope="module")
def reserves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Reserve]]:
    """Both of them, each opened when first asked for: whether answers have marks, and questions are drawn."""
    with ExitStack() as stack:

        @cache
        def reserve(is_marked: bool) -> Reserve:
            folder = tmp_path_factory.mktemp("zoo")
            made = stack.enter_context(opened(folder, marked() if is_marked else ()))
            made.introduce() if is_marked else made.rounds(WARM)
            return made

        yield reserve


@pytest.fixture(scope="module")
def passages() -> dict[str, Passage]:
    return {}


@pytest.fixture(params=sorted(ZOO))
def animal(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def reserve(animal: str, reserves: Callable[[bool], Reserve]) -> Reserve:
    """Where the animal finds something to do, and is stopped."""
    return reserves(animal in MARKED | {"chooser"})


@pytest.fixture
def passage(animal: str, reserve: Reserve, passages: dict[str, Passage]) -> Passage:
    """The nodes' rounds with one animal; made once for all tests."""
    if animal not in passages:
        peer = reserve.peer(animal)
        passages[animal] = reserve.rounds(MORE.get(animal, ROUNDS), ANIMALS[animal], peer)
    return passages[animal]


def name_of(passage: Passage) -> str:
    return passage.peer.node.removeprefix("x-")


def fate_of(passage: Passage) -> Fate:
    return next(found for name, found in FATES.items() if name.replace(" ", "-") == name_of(passage))


def test_every_animal_has_a_fate() -> None:
    assert FATES.keys() == ZOO.keys()


def test_honest_nodes_finish_their_rounds_and_lose_nothing_to_it(reserve: Reserve, passage: Passage) -> None:
    assert passage.hostile, "it publishes something"
    assert len(passage.results) == MORE.get(name_of(passage), ROUNDS) * len(reserve.nodes)
    assert not [name for name in passage.metrics if name.startswith("outage/")]
    for node in reserve.nodes:
        assert reserve.others(passage, node) <= passage.entered[node.name]
    spelled = len(passage.honest) * (len(reserve.nodes) - 1) - sum(
        len(reserve.others(passage, node)) for node in reserve.nodes
    )
    assert sum(passage.refused_of(key) for key in reserve.honest) == spelled


def test_what_is_learned_from_is_sound(reserve: Reserve, passage: Passage) -> None:
    strangers = {batch_group.producer_key for batch in passage.batches for batch_group in batch.groups}
    used = passage.trained(strangers - reserve.honest)
    assert bool(used) == fate_of(passage).sound
    manifest, policy = reserve.grounds.manifest, reserve.nodes[0].parts.policy
    for found, question in zip(used, reserve.questions([group.recipe for group in used]), strict=True):
        assert manifest.allows(found.recipe)
        assert isinstance(question, Question)
        assert found.question == question.text
        assert question.bucket >= manifest.held_out
        outcomes = reserve.scores(found.recipe, [sample.text for sample in found.samples])
        assert [sample.score for sample in found.samples] == outcomes
        for sample in found.samples:
            trained = [token for token, one in zip(sample.token_ids, sample.loss_mask, strict=True) if one]
            assert policy.decode(trained) == sample.text
        assert 0.0 <= found.age_s < 3600.0


def test_it_is_refused_by_name_counted_against_it_and_kept_for_inspection(passage: Passage) -> None:
    expected, key = fate_of(passage), passage.peer.key
    for code in expected.refused | expected.unproven | expected.rejected:
        assert passage.refused(code), f"{code} in {passage.metrics}"
    assert expected.refused | expected.unproven | expected.rejected <= passage.quarantined()
    if expected.refused:
        assert passage.refused_of(key)
    if expected.unproven:
        assert passage.metrics["peers/refused/unproven"]


def test_it_gains_no_more_places_than_newcomers_have_together(reserve: Reserve, passage: Passage) -> None:
    strangers = {
        Group.model_validate_json(signed.payload).key
        for signed in passage.hostile
        if name_of(passage) in ("spammer", "two-thousand-identities")
    }
    for node in reserve.nodes:
        pool = node.config.pool
        held = [entry for entry in node.parts.intake.pool.entries() if entry.group.key in strangers]
        assert len(held) <= pool.max_groups * max(pool.newcomer_share, pool.max_peer_share)


@pytest.mark.parametrize("animal", ["code injector"])
def test_injected_code_is_scored_as_the_text_it_is_and_does_nothing(passage: Passage) -> None:
    used = passage.trained({passage.peer.key})
    scores = {sample.text: sample.score for group in used for sample in group.samples}
    mark = f"injected-by-{passage.peer.key[:12]}"
    payloads = scores.keys() & {payload.replace("{mark}", mark) for payload in INJECTIONS}
    assert payloads
    # what chain_sum gives a text in which the right number happens to stand is its literal score
    assert max(scores[text] or 0.0 for text in payloads) < 0.1
    assert not list(Path.cwd().glob("injected-by-*"))


@pytest.mark.parametrize("animal", ["padder"])
def test_a_padded_right_answer_earns_its_literal_score_which_is_less_than_the_bare_ones(
    reserve: Reserve, passage: Passage
) -> None:
    used = passage.trained({passage.peer.key})
    assert used
    for group in used:
        padded = [sample for sample in group.samples if sample.text != "0"]
        (bare,) = reserve.scores(group.recipe, [padded[0].text.split()[0]])
        assert bare == 1.0
        for sample in padded:
            assert sample.score == pytest.approx(len(sample.text.split()[0]) / len(sample.text))


@pytest.mark.parametrize("animal", sorted(MARKED))
def test_right_answers_that_carry_more_than_the_answer_weigh_less(passage: Passage) -> None:
    series = "learn/foreign_weight"
    weights = [result.metrics[series] for result in passage.results if series in result.metrics]
    assert 0 < max(weights) < 0.5


@pytest.mark.parametrize("animal", ["equivocator", "liar", "token-id liar"])
def test_a_lie_that_its_own_signature_proves_makes_nobody_known(reserve: Reserve, passage: Passage) -> None:
    assert passage.metrics["peers/faults"]
    for node in reserve.nodes:
        assert not node.parts.intake.quotas.known(passage.peer.key)
        assert all(
            node.parts.intake.quotas.known(key) for key in reserve.honest - {node.parts.intake.admission.key}
        )
