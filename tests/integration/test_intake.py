"""What comes over the bus meets a real node: copies that come first, old groups, false questions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from makers import INCARNATION, make_group, make_identity
from swarms import make_home, open_node, small_config

from sapo.bus.base import Limits, Poll, Positions
from sapo.bus.memory import MemoryBus
from sapo.core.config.home import Home
from sapo.core.types import Completion, Group, Outcome, Received
from sapo.node.round import NodeRuntime
from sapo.node.verify import Baseline, own_standards
from sapo.peers.dedup import DedupIndex
from sapo.peers.pool import Entry, Verdict
from sapo.peers.quotas import CREDIT_S
from sapo.peers.resend_guard import PLACES
from sapo.peers.signing import seal, sealed
from sapo.policy.tokenise import Tokens
from sapo.tasks.holdout import bucket
from sapo.tasks.questions import QuestionStream
from sapo.testing.samples import make_announcement

pytestmark = pytest.mark.core

CONFIG = small_config(["swarm.rounds=9", "pool.newcomer_share=1", "batch.external=1"])
NOW = 1_000_000.0


@dataclass
class Mailbox(MemoryBus):
    """A bus that gives what was put into it, stamped and ordered as a test says."""

    inbox: list[Received] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def poll(self, positions: Positions, limits: Limits, rng: Random) -> Poll:
        came, self.inbox = tuple(self.inbox), []
        return Poll(came, positions)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return make_home(tmp_path_factory.mktemp("intake") / "home", CONFIG)


@pytest.fixture(scope="module")
def bus() -> Mailbox:
    return Mailbox()


@pytest.fixture
def node(home: Home, bus: Mailbox) -> Iterator[NodeRuntime]:
    with open_node(CONFIG, home, bus=bus, deliver=False) as node:
        node.parts.clock = node.parts.intake.clock = lambda: NOW
        yield node


def question_of(node: NodeRuntime, author: str) -> Group:
    """A group by an author, to a question that was theirs to draw."""
    drawn = QuestionStream(
        node.parts.workers,
        CONFIG.tasks,
        ("test", make_identity(author).key, INCARNATION),
        0,
        count=1,
        held_out=CONFIG.rules.held_out,
    ).result()
    completions = tuple(Completion(text=str(number), finish_reason="stop") for number in range(6))
    changes: dict[str, Any] = {"swarm": "test", "completions": completions, "created_at": NOW - 60}
    return make_group(author, recipe=drawn[0].recipe, question=drawn[0].text, **changes)


def stamped(group: Group, at: float, author: str) -> Received:
    return Received(signed=seal(group, make_identity(author)), bus_position="0:0", timestamp=at)


def one_round(node: NodeRuntime, bus: Mailbox, came: Sequence[Received]) -> set[str]:
    """A whole round in which this came; ids in the pool before the draw."""
    bus.inbox = list(came)
    node.generate()
    node.publish()
    node.consume_sample()
    held = {entry.group_id for entry in node.parts.intake.pool.entries()}
    node.verify()
    node.grpo_update()
    return held


def refusals(node: NodeRuntime) -> list[tuple[str, str | None]]:
    """Reasons and keys of the last round's samples."""
    return [(row.reason, row.key) for row in node.journal.refusals(node.round - 1)]


def test_a_copy_that_came_first_leaves_the_pool_when_its_original_comes(
    node: NodeRuntime, bus: Mailbox
) -> None:
    group = question_of(node, "honest")
    thief = group.model_copy(update={"node": "thief", "key": make_identity("thief").key})
    original, copy = stamped(group, NOW - 20, "honest"), stamped(thief, NOW - 10, "thief")
    bus.inbox = [copy]
    node.parts.intake.receive(Random(0))
    assert copy.signed.group_id in node.parts.intake.pool
    bus.inbox = [original]
    node.parts.intake.receive(Random(0))
    assert original.signed.group_id in node.parts.intake.pool
    assert copy.signed.group_id not in node.parts.intake.pool
    assert [(row.reason, row.key) for row in node.parts.intake.refusals.rows()] == [("copy", thief.key)]
    assert node.parts.intake.quotas.metrics()["peers/faults"] == 1.0


def test_who_answers_first_on_a_partition_that_lags_does_not_throw_out_whose_question_it_is(
    node: NodeRuntime, bus: Mailbox
) -> None:
    group = question_of(node, "asker")
    thief = group.model_copy(update={"node": "thief", "key": make_identity("thief").key})
    own, before = stamped(group, NOW - 10, "asker"), stamped(thief, NOW - 20, "thief")
    for came in (own, before):
        bus.inbox = [came]
        node.parts.intake.receive(Random(0))
    assert own.signed.group_id in node.parts.intake.pool


def test_a_group_in_the_pool_does_not_come_in_again_when_its_id_is_forgotten(
    node: NodeRuntime, bus: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.parts.intake.quotas, "may_verify", lambda key, beside=(): False)
    beyond_the_window = question_of(node, "quiet").model_copy(update={"position": PLACES})
    one = stamped(beyond_the_window, NOW - 20, "quiet")
    for _ in range(2):
        assert one.signed.group_id in one_round(node, bus, [one])
        node.parts.intake.pool.seen = DedupIndex()
    assert one.signed.group_id in node.journal.pool_ids()
    node.parts.intake.pool.remove([one.signed.group_id])
    one_round(node, bus, [])


def test_a_replay_is_refused_also_after_a_restart_and_when_its_id_is_forgotten(
    node: NodeRuntime, bus: Mailbox, home: Home
) -> None:
    group = question_of(node, "victim")
    assert one_round(node, bus, [stamped(group, NOW - 20, "victim")]) >= {group.group_id}
    node.close()
    with open_node(CONFIG, home, bus=bus, deliver=False) as again:
        again.parts.clock = again.parts.intake.clock = lambda: NOW
        again.parts.intake.pool.remove([group.group_id])
        again.parts.intake.pool.seen = DedupIndex()
        again.parts.intake.admission.dropped.clear()
        assert group.group_id not in one_round(again, bus, [stamped(group, NOW - 5, "victim")])
        assert refusals(again) == [("replayed", group.key)]
        assert again.parts.intake.quotas.metrics().get("peers/faults", 0.0) == 0.0


def test_whoever_signed_what_came_pays_for_a_look_at_it(node: NodeRuntime, bus: Mailbox) -> None:
    intake, group = node.parts.intake, question_of(node, "looked-at")
    came = stamped(group, NOW - 20, "looked-at")
    forged = came.model_copy(update={"signed": came.signed.model_copy(update={"signature": "0" * 128})})
    intake.quotas.metrics(), intake.quotas.changed()
    bus.inbox = [forged]
    intake.receive(Random(0))
    assert intake.quotas.metrics()["peers/seconds"] == 0.0
    bus.inbox = [came]
    intake.receive(Random(0))
    assert intake.quotas.metrics()["peers/seconds"] > 0.0
    assert group.key in {row.key for row in intake.quotas.changed()}


def test_a_replay_costs_its_author_nothing_and_proves_its_bytes_once(node: NodeRuntime, bus: Mailbox) -> None:
    intake, group = node.parts.intake, question_of(node, "resent")
    resent = stamped(group, NOW - 20, "resent")
    intake.admission.streams.note(group, NOW - 30)
    intake.refusals.rows(), intake.quotas.metrics()
    for proven in (True, False):
        limits = intake.quotas.limits(intake.pool.seen.holds)
        assert limits.proven(resent.signed) is proven
        bus.inbox = [resent]
        intake.receive(Random(0))
    assert [row.reason for row in intake.refusals.rows()] == ["replayed", "duplicate"]
    assert intake.quotas.metrics()["peers/seconds"] == 0.0


def test_what_a_draw_finds_out_is_refused_sampled_and_a_fault(node: NodeRuntime, bus: Mailbox) -> None:
    false = (f"What is {number} + 1?" for number in range(99))
    rules = CONFIG.rules
    question = next(text for text in false if bucket(text, rules.salt) >= rules.held_out)
    group = question_of(node, "liar").model_copy(update={"question": question})
    one_round(node, bus, [stamped(group, NOW - 20, "liar")])
    assert ("question_mismatch", group.key) in refusals(node)
    result = node.journal.result(node.round - 1)
    assert result.metrics["pool/refused/question_mismatch"] == 1.0
    assert result.metrics[f"peers/refused/{group.key[:12]}"] == 1.0


def test_a_malformed_record_is_its_signer_s_fault_once_however_often_it_is_sent(
    node: NodeRuntime, bus: Mailbox
) -> None:
    intake, liar = node.parts.intake, make_identity("loose")
    intake.quotas.judged(liar.key, 0.0, True)
    intake.refusals.rows(), intake.quotas.metrics()
    signed = sealed(b'{"round": "first"}', liar, "0" * 64)
    for _ in range(2):
        bus.inbox = [Received(signed=signed, bus_position="0:0", timestamp=NOW)]
        intake.receive(Random(0))
    assert [row.reason for row in intake.refusals.rows()] == ["malformed", "duplicate"]
    assert intake.quotas.metrics()["peers/faults/malformed"] == 1.0


def test_who_signs_another_s_group_does_not_keep_it_out(node: NodeRuntime, bus: Mailbox) -> None:
    intake, group = node.parts.intake, question_of(node, "robbed")
    own = stamped(group, NOW - 10, "robbed")
    thief = sealed(own.signed.payload, make_identity("thief"), group.group_id)
    for signed in (thief, own.signed):
        bus.inbox = [Received(signed=signed, bus_position="0:0", timestamp=NOW)]
        intake.receive(Random(0))
    assert group.group_id in intake.pool


def test_an_announcement_is_refused_and_nobody_blamed_where_there_is_no_gossip(
    node: NodeRuntime, bus: Mailbox
) -> None:
    signed = make_announcement(swarm="test")
    one_round(node, bus, [Received(signed=signed, bus_position="0:0", timestamp=NOW)])
    metrics = node.journal.result(node.round - 1).metrics
    assert (metrics["pool/refused/announcement"], metrics["peers/faults"]) == (1.0, 0.0)
    assert metrics["peers/refused/unproven"] == 1.0
    assert refusals(node) == [("announcement", signed.key)]
    assert not [name for name in metrics if name.startswith(f"peers/refused/{signed.key[:12]}")]


def test_a_group_of_one_text_leaves_at_once_as_uninformative_and_no_worker_is_asked(
    node: NodeRuntime, bus: Mailbox
) -> None:
    same = (Completion(text="7", finish_reason="stop"),) * 2
    group = question_of(node, "parrot").model_copy(update={"completions": same})
    held = one_round(node, bus, [stamped(group, NOW - 20, "parrot")])
    assert not held, "it takes nobody's place"
    metrics = node.journal.result(node.round - 1).metrics
    assert (metrics["pool/useless"], metrics["sampler/verified"]) == (1.0, 0.0)
    events = [move.event for move in node.journal.movements(node.round - 1)]
    assert events == ["received", "uninformative"]


def padded(node: NodeRuntime, author: str) -> Entry:
    """A group of which one answer is right but for what is said after it, and none is better."""
    group = question_of(node, author)
    (right,) = node.parts.workers.answers([group.recipe])
    texts = (f"{right} I am sure", *("no" for _ in range(7)))
    completions = tuple(Completion(text=text, finish_reason="stop") for text in texts)
    group = group.model_copy(update={"completions": completions})
    return Entry(stamped(group, NOW - 20, author), group, NOW)


def verdict(node: NodeRuntime, entry: Entry, standards: dict[str, Baseline]) -> Verdict:
    (found,) = node.parts.verifier.verified([entry], standards)
    assert found.verdict is not None
    return found.verdict


def test_half_right_answers_of_a_newcomer_are_not_learned_from_by_who_does_better(node: NodeRuntime) -> None:
    entry = padded(node, "padder")
    better = {"": Baseline(best=1.0, mean=0.3)}
    short = verdict(node, entry, better)
    assert (short.reason, len(short.outcomes)) == ("substandard", 8)
    assert not node.parts.intake.quotas.on_probation(entry.group.key), "nor do they make their author known"
    found = verdict(node, entry, {"": Baseline()})
    assert found.reason is None
    assert node.parts.intake.quotas.on_probation(entry.group.key)


def test_a_newcomer_is_learned_from_only_where_there_is_time_to_spare_once_anybody_is_known(
    node: NodeRuntime,
) -> None:
    entry, quotas = padded(node, "padder"), node.parts.intake.quotas
    quotas.charge(make_identity("another").key, CREDIT_S / 2)
    assert verdict(node, entry, {}).reason is None, "nobody is known"
    for _ in range(CONFIG.pool.newcomer_groups):
        quotas.judged(make_identity("friend").key, 0.0, True)
    assert verdict(node, entry, {}).reason == "substandard"
    assert quotas.on_probation(entry.group.key), "and yet it counts"
    assert verdict(node, padded(node, "friend"), {}).reason is None
    same = entry.group.model_copy(update={"completions": (Completion(text="7", finish_reason="stop"),) * 8})
    assert verdict(node, replace(entry, group=same), {}).reason is None, "this one teaches nothing anyhow"


def test_a_newcomer_s_group_larger_than_any_own_one_counts_for_it_and_is_not_learned_from(
    node: NodeRuntime,
) -> None:
    entry = padded(node, "rambler")
    tokens = sum(len(ids) for ids, _ in Tokens.of(node.parts.policy, entry.group).completions)
    larger, friend = {"": Baseline(tokens=tokens - 1)}, make_identity("friend").key
    assert verdict(node, entry, {"": Baseline(tokens=tokens)}).reason is None
    assert verdict(node, entry, larger).reason == "substandard"
    assert node.parts.intake.quotas.on_probation(entry.group.key)
    for _ in range(CONFIG.pool.newcomer_groups):
        node.parts.intake.quotas.judged(friend, 0.0, True)
    assert verdict(node, padded(node, "friend"), larger).reason is None, "a known author may answer at length"


def test_own_answers_set_a_standard_for_their_data_set_and_one_for_all_others(node: NodeRuntime) -> None:
    rows = [
        [Outcome(outcome="score", score=score) for score in scores] for scores in ((0.0, 1.0), (0.2, 0.4))
    ]
    first = question_of(node, "honest")
    changes = {"dataset": "leg_counting"}
    second = first.model_copy(update={"recipe": first.recipe.model_copy(update=changes)})
    written = [
        group.model_copy(
            update={"completions": (Completion(text="7", finish_reason="stop", token_ids=(7,) * size),) * 2}
        )
        for group, size in ((first, 5), (second, 7))
    ]
    found = own_standards(written, rows)
    about: Any = pytest.approx
    assert found["leg_counting"] == Baseline(best=0.4, mean=about(0.3), tokens=14)
    assert found[""] == Baseline(best=1.0, mean=about(0.4), tokens=14)


@pytest.mark.parametrize(
    ("scores", "short"),
    [((1.0, 0.0, 0.0), False), ((0.9, 0.9, 0.0), True), ((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), True)],
)
def test_a_group_falls_short_in_its_best_answer_or_by_half_in_the_mean(
    scores: tuple[float, ...], short: bool
) -> None:
    assert Baseline(best=1.0, mean=0.5).above(scores, 1e-6) is short
