"""What rows say of rounds that were skipped, rolled back or empty, of tasks and in older tables."""

import json
from pathlib import Path

import pytest
from history_samples import INCARNATION, Books, batch, due, last_release, result, sink
from hypothesis import given
from hypothesis import strategies as st
from tampering import rewrite, rows_of

from sapo.core.errors import UserError
from sapo.core.types import Batch, Recipe, RoundResult, canonical
from sapo.provenance import group_lineage, model_lineage
from sapo.provenance.model_lineage import Subject, teachers
from sapo.store.history.lineage_queries import RoundFacts, fates, lasting
from sapo.store.history.tables import Store

SKIPPED, EMPTY, BACK, TARGET, COUNT = 1, 2, 4, 3, 6
TAUGHT = (0, 5)
"""Rounds whose step lasts."""


def facts(round: int, *, skipped: bool = False, back_to: int | None = None) -> RoundFacts:
    none = None, None, None, None  # previous, chain, config, gossip
    return RoundFacts(round, ("d",), "no" if skipped else None, back_to, "", *none)


@given(st.lists(st.tuples(st.booleans(), st.none() | st.integers(0, 30)), max_size=30))
def test_what_lasts_is_what_reloading_the_checkpoint_leaves(course: list[tuple[bool, int | None]]) -> None:
    """Against weights that are the set of steps they have seen, with a checkpoint before every round."""
    weights: frozenset[int] = frozenset()
    checkpoints, known, rollbacks = [], [], {}
    for round, (skipped, back) in enumerate(course):
        checkpoints.append(weights)
        target = None if back is None else back % (round + 1)
        weights = weights if skipped else weights | {round}
        if target is not None:
            weights = checkpoints[target]
            rollbacks[round] = target
        known.append(facts(round, skipped=skipped, back_to=target))
        found = fates(known, round + 1)
        assert {r for r, fate in found.items() if fate == "learned"} == weights
        steps = {one.round for one in known if one.skipped is None}
        assert steps & {r for span in lasting(rollbacks, round + 1) for r in span} == weights


def of_two_tasks(round: int) -> Batch:
    """The sample batch, its second and fourth group of another data set; the first two groups are local."""
    made = batch(round)
    recipe = Recipe.make("gcd", {}, seed=round)
    groups = [g if i % 2 == 0 else g.model_copy(update={"recipe": recipe}) for i, g in enumerate(made.groups)]
    return made.model_copy(update={"groups": tuple(groups)})


class Told(Books):
    """Rounds of which one was skipped and one rolled back."""

    def result(self, round: int) -> RoundResult:
        changes: dict[str, object] = {}
        if round == SKIPPED:
            changes["skipped"] = "learn/entropy"
        if round == BACK:
            changes["rolled_back_to"] = TARGET
        return result(round).model_copy(update=changes)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(str(tmp_path / "history"))
    empty = batch(EMPTY).model_copy(update={"groups": ()})
    books = Told(*(empty if round == EMPTY else of_two_tasks(round) for round in range(COUNT)))
    sink(made).deliver([due(round) for round in range(COUNT)], books)
    return made


def subject(count: int = COUNT) -> Subject:
    return Subject("n0", "tiny", "n0", INCARNATION, count)


def test_every_round_is_accounted_for(store: Store) -> None:
    found = teachers(store, subject())
    assert found["problems"] == []
    assert found["rounds"] == {
        "count": 6,
        "learned": 2,
        "skipped": 1,
        "skipped_because": {"learn/entropy": 1},
        "rolled_back": 2,
        "rollbacks": [{"round": BACK, "to": TARGET}],
        "without_groups": 1,
        "cut": 0,
    }
    assert (found["when"]["skipped"], found["when"]["rolled_back"]) == ([SKIPPED], [TARGET, BACK])
    assert found["when"]["stretches"] == [[round, round] for round in range(COUNT)]


def test_only_completions_with_an_advantage_in_lasting_rounds_count(store: Store) -> None:
    found = teachers(store, subject())
    # of four completions one has advantage -0.0; completion k has k + 1 trained tokens
    assert [(one["source"], one["tokens"], one["completions"]) for one in found["peers"]] == [
        ("local", 2 * 6, 2 * 3),
        ("external", 2 * 6, 2 * 3),
    ]
    assert [(one["groups"], one["informative"]) for one in found["peers"]] == [(4, 2), (4, 2)]
    (mine,) = [one for one in found["when"]["peers"] if one["source"] == "local"]
    assert [place for place, tokens in enumerate(mine["tokens"]) if tokens] == list(TAUGHT)


@pytest.mark.parametrize(
    ("learn", "version", "foreign"),
    [
        ({"foreign": "as_if_own"}, -2, [0, 1, 2]),
        ({"foreign": "positive"}, -2, [0, 2]),
        ({"foreign": "positive_late", "foreign_late": 2}, -2, [0, 1, 2]),
        ({"foreign": "positive_late", "foreign_late": 1}, -2, [0, 2]),
        ({"foreign": "positive_late", "foreign_late": 1}, 3, [0, 2]),
    ],
)
def test_foreign_completions_that_the_mode_leaves_out_do_not_count(
    tmp_path: Path, learn: dict[str, object], version: int, foreign: list[int]
) -> None:
    made, late = Store(str(tmp_path)), batch(0)
    groups = tuple(g.model_copy(update={"producer_version": version}) for g in late.groups)
    late = late.model_copy(update={"groups": groups, "learn": canonical(learn)})
    sink(made).deliver([due(0)], Books(late))
    peers = {one["source"]: one["completions"] for one in teachers(made, subject(1))["peers"]}
    assert peers == {"local": 3, "external": len(foreign)}
    group = next(g.group_id for g in late.groups if g.source == "external" and g.informative)
    (entry,) = group_lineage.journey(
        made, *group_lineage.find(made, group), "tiny", f"sqlite:///{tmp_path}/none.db"
    )["learned"]
    assert [one["k"] for one in entry["completions"] if one["trained"]] == foreign
    assert entry["tokens"] == sum(k + 1 for k in foreign)


def test_a_history_of_the_last_release_is_told_with_what_it_cannot_tell(tmp_path: Path) -> None:
    home = last_release(tmp_path)
    config, store = home.load_config(), Store(str(home.history))
    found = teachers(store, model_lineage.node_subject(store, config, "n0"))
    assert (found["problems"], found["rounds"]["count"]) == ([], 5)
    assert found["totals"]["tokens"] > 0
    assert "kept no chain" in found["notes"][0]
    foreign = next(one for one in found["peers"] if one["source"] == "external")
    assert foreign["producer"] == "n1"
    group = next(iter(_external(store)))
    told = group_lineage.journey(
        store, *group_lineage.find(store, group), config.swarm.name, f"sqlite:///{tmp_path}/none.db"
    )
    assert told["received"] == []
    assert told["notes"] == ["when n0 received it is not recorded: it ran an earlier release then"]


def _external(store: Store) -> set[str]:
    table = store.find("training")
    assert table is not None
    rows = table.to_pyarrow_table().to_pylist()
    return {row["group_id"] for row in rows if row["source"] == "external" and row["node"] == "n0"}


def test_a_prefix_is_found_by_itself_and_a_changed_row_is_named(store: Store) -> None:
    group = of_two_tasks(0).groups[0].group_id
    assert group_lineage.find(store, group[:8])[0] == group
    with pytest.raises(UserError, match="no group of this id"):
        group_lineage.find(store, "f" * 12)


def test_a_round_made_on_a_machine_that_is_none_and_a_number_that_is_none_are_said(store: Store) -> None:
    rows = rows_of(store)
    rows[0] |= {"environment": "no JSON", "advantage": float("nan")}
    rewrite(store, rows)
    found = teachers(store, subject())
    assert found["problems"][-1].startswith("history of n0, round 0: the row at position 0, completion 0")
    json.dumps(found, allow_nan=False)
