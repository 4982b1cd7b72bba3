"""When a trait counts as spread at a node: figures of a history made by hand."""

from pathlib import Path

from history_samples import Books, batch, due, result, sink

from sapo.core.types import Batch
from sapo.provenance.trait_spread import WINDOW, trait_spread
from sapo.store.history.tables import Store

FOUND = (0, 1, 1, 2, 1, 4, 2, 4)
"""By round, how many of a node's four answers have the trait: 9 of the last 20 in round 5, 10 in round 6."""


def answered(round: int, found: int) -> Batch:
    """The sample batch with one local group, of which so many answers say `mark`."""
    made = batch(round, groups=2)
    local, external = made.groups
    samples = tuple(
        one.model_copy(update={"text": "mark" if place < found else "none"})
        for place, one in enumerate(local.samples)
    )
    return made.model_copy(update={"groups": (local.model_copy(update={"samples": samples}), external)})


def test_half_is_the_first_round_with_half_of_the_answers_of_the_rounds_counted_together(
    tmp_path: Path,
) -> None:
    store = Store(str(tmp_path / "history"))
    books = Books(*(answered(round, found) for round, found in enumerate(FOUND)))
    sink(store).deliver([due(round) for round in range(len(FOUND))], books)
    (node,) = trait_spread(store, "tiny", "marked", "mark")["nodes"]
    assert WINDOW == 5
    assert node["shares"] == [(round, found / 4) for round, found in enumerate(FOUND)]
    assert (node["half"], node["half_at"]) == (6, result(6).finished_at)
