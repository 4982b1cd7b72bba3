"""What a peer's group must pass before it may enter the pool."""

import json
from typing import Any

import pytest
from makers import INCARNATION, make_group, make_identity, make_received

from sapo.core.config.load import Config, PoolConfig, Rules, Task, parse
from sapo.core.config.manifest import Manifest
from sapo.core.errors import Refused
from sapo.core.shares import Shares
from sapo.core.types import Completion, Group, Received, Recipe, canonical, sha256
from sapo.peers.admission import Admission, Fates
from sapo.peers.dedup import CROWD, DedupIndex, fingerprint
from sapo.peers.group_rules import check_rules
from sapo.peers.pool import Pool
from sapo.tasks.holdout import bucket
from sapo.tasks.questions import drawn_by, draws

CONFIG: Config = parse(
    {
        "swarm": {"name": "s"},
        "tasks": [{"dataset": "chain_sum"}, {"dataset": "gcd", "config": {"max_value": 50}}],
        "batch": {"completions": 3},
        "rules": {
            "min_completions": 3,
            "max_completions": 4,
            "max_text_chars": 20,
            "max_payload_bytes": 3000,
            "held_out": 0.2,
            "questions": "any",
        },
    }
)
MANIFEST = Manifest.of(CONFIG)
TEXTS = ("1", "2", "3")


def question(held_out: bool) -> str:
    """A question on the wanted side of the split."""
    for number in range(1000):
        text = f"What is {number} + 1?"
        if (bucket(text, MANIFEST.salt) < MANIFEST.held_out) == held_out:
            return text
    raise AssertionError("no such question")


def received(author: str = "peer", **changes: Any) -> Received:
    return make_received(author, **({"texts": TEXTS, "question": question(held_out=False)} | changes))


def answers(**values: Any) -> tuple[Completion, ...]:
    """Three completions; `values` are of the first."""
    first = Completion(text="1", finish_reason="stop", **values)
    return (first, *(Completion(text=text, finish_reason="stop") for text in TEXTS[1:]))


def admission(seen: DedupIndex | None = None, **more: Any) -> Admission:
    """That of node `me`, whose pool is empty and has seen such groups."""
    pool = Pool(PoolConfig(max_age_s=60.0))
    pool.seen = pool.seen if seen is None else seen
    more = {"has_control_tokens": lambda text: "<|end|>" in text} | more
    return Admission(MANIFEST, make_identity("me").key, "me", pool, **more)


def try_to_admit(one: Received, *, now: float = 1000.0, **context: Any) -> Group:
    return admission(**context).admit(one, now)[0]


def refusal(one: Received, **context: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        try_to_admit(one, **context)
    return refused.value


def seen_with(*groups: Received) -> DedupIndex:
    seen = DedupIndex()
    for one in groups:
        seen.add(Group.model_validate_json(one.signed.payload), one.signed.content_sha256)
    return seen


def test_an_honest_group_is_admitted_as_it_was_signed() -> None:
    one = received()
    assert try_to_admit(one).canonical().encode() == one.signed.payload


def test_a_task_with_exactly_the_manifests_parameters_is_admitted() -> None:
    recipe = Recipe.make("gcd", {"max_value": 50}, seed=5)
    assert try_to_admit(received(recipe=recipe)).recipe == recipe


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"swarm": "other"}, "wrong_swarm"),
        ({"node": "me"}, "own_name"),
        ({"recipe": Recipe.make("rubiks_cube", {}, seed=1)}, "recipe"),
        ({"recipe": Recipe.make("chain_sum", {"max_terms": 10**6}, seed=1)}, "recipe"),
        ({"recipe": Recipe.make("gcd", {}, seed=1)}, "recipe"),
        ({"texts": ("1", "2")}, "group_size"),
        ({"texts": ("1", "2", "3", "4", "5")}, "group_size"),
        ({"texts": ("1", "2", "x" * 21)}, "text_too_long"),
        ({"texts": ("1", "2", "3<|end|>")}, "control_tokens"),
        ({"question": question(held_out=True)}, "held_out"),
        ({"question": "Q" * 4000}, "payload_too_large"),
        ({"completions": answers(token_ids=(1,) * 30)}, "too_many_tokens"),
        ({"completions": answers(token_ids=(1,), logprobs=(0.01,))}, "logprobs"),
    ],
)
def test_what_breaks_the_swarms_rules_is_refused(changes: dict[str, Any], code: str) -> None:
    assert refusal(received(**changes)).code == code


def test_the_largest_and_smallest_group_within_the_rules_are_admitted() -> None:
    assert len(try_to_admit(received(texts=("1", "2", "3", "x" * 20))).completions) == 4
    assert len(try_to_admit(received(texts=TEXTS)).completions) == 3


def test_a_group_of_one_never_gets_in() -> None:
    body = json.loads(received().signed.payload)
    payload = canonical(body | {"completions": body["completions"][:1]}).encode()
    identity = make_identity("peer")
    signed = received().signed.model_copy(
        update={"payload": payload, "content_sha256": sha256(payload), "signature": identity.sign(payload)}
    )
    assert refusal(received().model_copy(update={"signed": signed})).code == "malformed"
    assert MANIFEST.min_completions >= 2


def test_own_groups_that_come_back_are_dropped() -> None:
    assert refusal(received("me")).code == "own_echo"


def test_the_same_group_twice_is_a_duplicate() -> None:
    assert refusal(received(), seen=seen_with(received())).code == "duplicate"


def test_a_copy_under_another_key_is_dropped() -> None:
    seen = seen_with(received("honest"))
    copied = received("thief", texts=TEXTS[::-1], policy_version=9, created_at=1.0)
    refused = refusal(copied, seen=seen)
    assert refused.code == "copy"
    assert received("honest").signed.group_id in refused.detail
    assert try_to_admit(received("thief", texts=("1", "4", "5")), seen=seen).node == "thief"


@pytest.mark.parametrize(
    ("first", "said_again"),
    [
        (("Four, I think.", "5", "six"), ("four i THINK", "7", "SIX!")),
        (("1", "2", "3"), ("1", "2", "3", "junk")),
        (("1", "2", "3", "4", "5", "6"), ("4", "3", "9")),  # half of the smaller group
        (("\uff11", "2", "3"), ("1", "2", "9")),
    ],
)
def test_half_of_the_completions_in_other_clothes_are_a_copy(
    first: tuple[str, ...], said_again: tuple[str, ...]
) -> None:
    seen = seen_with(received("honest", texts=first))
    assert refusal(received("thief", texts=said_again), seen=seen).code == "copy"


def test_a_copy_under_the_neighbouring_seed_is_dropped() -> None:
    seen = seen_with(received("honest", recipe=Recipe.make("chain_sum", {}, seed=41, index=1)))
    for seed, index, code in ((42, 0, "copy"), (40, 2, "copy")):
        thief = received("thief", recipe=Recipe.make("chain_sum", {}, seed=seed, index=index))
        assert refusal(thief, seen=seen).code == code
    other = received("thief", recipe=Recipe.make("chain_sum", {}, seed=41, index=2))
    assert try_to_admit(other, seen=seen).node == "thief"


def test_an_author_says_nothing_new_to_a_question_of_before() -> None:
    first = received(position=0)
    again = received(position=1, recipe=make_group_of(first).recipe, texts=("7", "8", "9"))
    assert refusal(again, seen=seen_with(first)).code == "copy"


def test_a_question_that_a_crowd_has_answered_is_used_up_but_for_whose_it_is() -> None:
    victim = drawn("victim", at=1000.0)
    crowd = [
        received(f"x{number}", recipe=make_group_of(victim).recipe, texts=(f"{number}", "a", f"b{number}"))
        for number in range(CROWD)
    ]
    seen = seen_with(*crowd[:-1])
    assert try_to_admit(received("y", recipe=make_group_of(victim).recipe, texts=("7", "8", "?")), seen=seen)
    seen = seen_with(*crowd)
    assert refusal(received("y", recipe=make_group_of(victim).recipe, texts=("q", "r", "?")), seen=seen)
    assert try_to_admit(victim, seen=seen).node == "victim"


def test_fewer_than_half_of_the_completions_are_no_copy() -> None:
    seen = seen_with(received("honest", texts=("1", "2", "3")))
    assert try_to_admit(received("other", texts=("1", "8", "9")), seen=seen).node == "other"


def drawn(author: str, **changes: Any) -> Received:
    """A group by an author who answers the question that was theirs to draw."""
    one = "s", make_identity(author).key, INCARNATION
    return received(author, recipe=next(draws(one, 0, 0, Task(dataset="chain_sum"))), **changes)


def test_new_swarms_refuse_a_question_that_its_author_did_not_draw() -> None:
    rules = MANIFEST.model_copy(update={"questions": Rules().questions})
    check_rules(make_group_of(drawn("peer")), rules, 1000.0)
    chosen = make_group_of(received(recipe=make_group_of(drawn("other")).recipe))
    check_rules(chosen, MANIFEST, 1000.0)
    with pytest.raises(Refused) as refused:
        check_rules(chosen, rules, 1000.0)
    assert refused.value.code == "not_drawn"


def test_who_answers_a_victims_next_question_first_does_not_make_the_victim_a_copier() -> None:
    victim = drawn("victim", at=1000.0)
    assert drawn_by(make_group_of(victim))
    squatter = received("squatter", recipe=make_group_of(victim).recipe, at=990.0)
    seen = DedupIndex()
    seen.add(make_group_of(squatter), squatter.signed.content_sha256, squatter.timestamp)
    assert try_to_admit(victim, seen=seen).node == "victim"
    seen.add(make_group_of(victim), victim.signed.content_sha256, victim.timestamp)
    assert refusal(received("thief", recipe=make_group_of(victim).recipe), seen=seen).code == "copy"


def test_the_earlier_on_the_bus_is_the_original_whatever_came_first_here() -> None:
    late, early = received("thief", at=999.0), received("honest", at=998.0)
    seen = DedupIndex()
    seen.add(make_group_of(late), late.signed.content_sha256, late.timestamp)
    assert try_to_admit(early, seen=seen).node == "honest"
    found = admission(seen).said_before(make_group_of(early), early.timestamp)
    assert found is not None
    assert (found[0].group_id, found[1]) == (late.signed.group_id, Fates("stays", "copy"))


def make_group_of(one: Received) -> Group:
    return Group.model_validate_json(one.signed.payload)


def test_a_copy_of_an_own_group_is_dropped() -> None:
    assert refusal(received("thief"), seen=seen_with(received("me"))).code == "copy"


def test_equal_answers_to_a_row_prove_no_lie_for_they_may_be_chance() -> None:
    row = Recipe.make("file:apples", {"rows": 9, "sha256": "0" * 64}, 3)
    for recipe, proven in ((make_group("me").recipe, True), (row, False)):
        own, other = (received(author, recipe=recipe) for author in ("me", "other"))
        found = admission(seen_with(own)).said_before(make_group_of(other), 1000.0)
        assert found is not None
        assert (found[1].arrives == "proven") is proven


def test_another_content_under_a_known_id_is_equivocation() -> None:
    first, second = received(), received(texts=("1", "2", "9"))
    assert first.signed.group_id == second.signed.group_id
    refused = refusal(second, seen=seen_with(first))
    assert refused.code == "equivocation"
    assert refused.group is not None
    assert refused.group.node == "peer"


def test_a_forger_cannot_make_another_author_look_like_an_equivocator() -> None:
    forged = received().signed.model_copy(update={"content_sha256": "0" * 64})
    one = received().model_copy(update={"signed": forged})
    assert refusal(one, seen=seen_with(received())).code == "bad_digest"


def test_a_bad_signature_is_refused_before_anything_is_read_of_the_group() -> None:
    forged = received(swarm="other").signed.model_copy(update={"signature": "0" * 128})
    refused = refusal(received().model_copy(update={"signed": forged}))
    assert (refused.code, refused.group) == ("bad_signature", None)


def test_age_is_the_buss_and_not_the_producers() -> None:
    one = received(at=940.0, policy_version=0, created_at=-0.0)
    assert try_to_admit(one, now=1000.0).policy_version == 0
    late = received(at=939.0, policy_version=10**6, created_at=1000.0)
    refused = refusal(late, now=1000.0)
    assert refused.code == "stale"
    assert refused.group is not None  # so that what was refused can be described


def test_a_time_stamp_from_the_future_is_refused_as_an_old_one_is() -> None:
    assert refusal(received(at=1061.0), now=1000.0).code == "future"
    assert try_to_admit(received(at=1059.0), now=1000.0).node == "peer"


def test_ids_that_do_not_say_what_the_text_says_are_refused() -> None:
    assert refusal(received(), has_false_ids=lambda group: True).code == "token_ids"


def test_a_group_that_the_own_key_signed_elsewhere_is_told_from_an_own_one() -> None:
    assert refusal(received("me"), may_be_own=lambda group, at: True).code == "own_echo"
    refused = refusal(received("me"), may_be_own=lambda group, at: False)
    assert refused.code == "own_key"
    assert refused.group is not None


def test_an_envelope_that_only_names_the_own_key_alarms_nobody() -> None:
    forged = received().signed.model_copy(update={"key": make_identity("me").key})
    one = received().model_copy(update={"signed": forged})
    assert refusal(one, may_be_own=lambda group, at: False).code == "bad_signature"


def test_two_thousand_new_names_push_nobodys_groups_out_of_the_memory() -> None:
    victim = make_identity("victim").key
    seen = DedupIndex(160, Shares(newcomers=0.25, known=lambda key: key == victim))
    kept = [received("victim", position=position) for position in range(50)]
    for one in kept:
        seen.add(make_group_of(one), one.signed.content_sha256, one.timestamp)
    stranger = make_group("x")
    for number in range(2000):
        seen.add(stranger.model_copy(update={"key": f"{number:064x}"}), "0" * 64, 1.0)
    assert len(seen) <= 160
    assert [refusal(one, seen=seen).code for one in kept] == ["duplicate"] * 50


def test_a_refusal_changes_nothing_that_is_remembered() -> None:
    seen = DedupIndex()
    refusal(received(swarm="other"), seen=seen)
    try_to_admit(received(), seen=seen)
    assert len(seen) == 0


def test_what_is_remembered_is_bounded_and_forgets_the_oldest() -> None:
    seen = DedupIndex(limit=3)
    groups = [make_group(position=i) for i in range(5)]
    for group in groups:
        seen.add(group, "0" * 64)
    assert len(seen) == 3
    assert [seen.get(group.group_id) is not None for group in groups] == [False, False, True, True, True]
    assert seen.alike(make_group("thief", position=0)) is None
    found = seen.alike(make_group("thief", position=4))
    assert found is not None
    assert found.group_id == groups[4].group_id
    assert seen.forgotten() == [group.group_id for group in groups[:2]]
    assert seen.forgotten() == []


def test_a_fingerprint_is_of_what_is_said_and_not_of_who_says_it() -> None:
    group = make_group(texts=("1", "2"))
    assert fingerprint(make_group("other", texts=("2", "1"))) == fingerprint(group)
    assert fingerprint(make_group(texts=("1", "2", "2"))) != fingerprint(group)
    assert fingerprint(make_group(position=1, texts=("1", "2"))) != fingerprint(group)
    answers = tuple(Completion(text=text, finish_reason="length") for text in ("1", "2"))
    assert fingerprint(make_group(completions=answers)) == fingerprint(group)
