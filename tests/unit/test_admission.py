"""What a peer's group must pass before it may enter the pool."""

import json
from typing import Any

import pytest
from makers import make_group, make_identity, make_received

from sapo.admission import Seen, admit, fingerprint
from sapo.config import Config, parse
from sapo.errors import Refused
from sapo.manifest import Manifest
from sapo.records import Completion, Group, Received, Recipe, canonical, sha256
from sapo.tasks import bucket

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


def try_to_admit(one: Received, *, seen: Seen | None = None, now: float = 1000.0) -> Group:
    return admit(
        one,
        manifest=MANIFEST,
        own_key=make_identity("me").key,
        own_node="me",
        now=now,
        max_age_s=60.0,
        seen=Seen() if seen is None else seen,
        has_control_tokens=lambda text: "<|end|>" in text,
    )


def refusal(one: Received, **context: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        try_to_admit(one, **context)
    return refused.value


def seen_with(*groups: Received) -> Seen:
    seen = Seen()
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
    ],
)
def test_what_breaks_the_swarms_rules_is_refused(changes: dict[str, Any], code: str) -> None:
    assert refusal(received(**changes)).code == code


def test_the_largest_and_smallest_group_within_the_rules_are_admitted() -> None:
    assert len(try_to_admit(received(texts=("1", "2", "3", "x" * 20))).completions) == 4
    assert len(try_to_admit(received(texts=TEXTS)).completions) == 3


def test_trap_13_a_group_of_one_never_gets_in() -> None:
    body = json.loads(received().signed.payload)
    payload = canonical(body | {"completions": body["completions"][:1]}).encode()
    identity = make_identity("peer")
    signed = received().signed.model_copy(
        update={
            "payload": payload,
            "content_sha256": sha256(payload),
            "signature": identity.sign(payload),
        }
    )
    assert refusal(received().model_copy(update={"signed": signed})).code == "malformed"
    assert MANIFEST.min_completions >= 2


def test_trap_35_own_groups_that_come_back_are_dropped() -> None:
    assert refusal(received("me")).code == "own_echo"


def test_trap_35_the_same_group_twice_is_a_duplicate() -> None:
    assert refusal(received(), seen=seen_with(received())).code == "duplicate"


def test_trap_35_a_copy_under_another_key_is_dropped() -> None:
    seen = seen_with(received("honest"))
    copied = received("thief", texts=TEXTS[::-1], policy_version=9, created_at=1.0)
    refused = refusal(copied, seen=seen)
    assert refused.code == "copy"
    assert received("honest").signed.group_id in refused.detail
    assert try_to_admit(received("thief", texts=("1", "4", "5")), seen=seen).node == "thief"


def test_trap_35_a_copy_of_an_own_group_is_dropped() -> None:
    assert refusal(received("thief"), seen=seen_with(received("me"))).code == "copy"


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


def test_trap_9_age_is_the_buss_and_not_the_producers() -> None:
    one = received(at=940.0, policy_version=0, created_at=-0.0)
    assert try_to_admit(one, now=1000.0).policy_version == 0
    late = received(at=939.0, policy_version=10**6, created_at=1000.0)
    refused = refusal(late, now=1000.0)
    assert refused.code == "stale"
    assert refused.group is not None  # so that what was refused can be described (TRAPS 8)


def test_a_refusal_changes_nothing_that_is_remembered() -> None:
    seen = Seen()
    refusal(received(swarm="other"), seen=seen)
    try_to_admit(received(), seen=seen)
    assert len(seen) == 0


def test_what_is_remembered_is_bounded_and_forgets_the_oldest() -> None:
    seen = Seen(limit=3)
    groups = [make_group(position=i) for i in range(5)]
    for group in groups:
        seen.add(group, "0" * 64)
    assert len(seen) == 3
    assert [seen.digest(group.group_id) is not None for group in groups] == [False, False, True, True, True]
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
