"""The table `quarantine`: samples of what nodes and the archive refused, each row once."""

import shutil
from collections.abc import Sequence
from typing import Any

from history_samples import Books, batch, due, sink
from makers import make_group, make_identity, make_signed

from sapo.bus.base import MAX_KEPT_BYTES
from sapo.bus.memory import MemoryBus
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.types import Completion, SignedGroup
from sapo.ops.archiver import SAMPLES, Archiver
from sapo.store.history import query
from sapo.store.history.tables import Store
from sapo.store.journal.rows import RefusalRow
from sapo.tasks.holdout import bucket

MANIFEST = Manifest.of(
    load(
        sets=[
            "swarm.name=s",
            'tasks=[{dataset="chain_sum"}]',
            "rules.held_out=0.5",
            "rules.questions=any",
            "rules.max_payload_bytes=200000",
            "batch.completions=2",
            "rules.max_completions=4",
        ],
        env={},
    )
)


class Refusing(Books):
    """Rounds in each of which a peer's copies and a record that is nothing were refused."""

    def refusals(self, round: int) -> list[RefusalRow]:
        return [
            RefusalRow("copy", "said", 3, 5.0, f"0:{round}", 9, 0.1, "g", "c", "k", "s", b"\x00half"),
            RefusalRow("malformed_record", "nothing", 1, 5.5, "1:7"),
        ]


def kept(store: Store, columns: str) -> list[tuple[Any, ...]]:
    found = query.query(store, f'SELECT {columns} FROM quarantine ORDER BY "round", "offset", reason')
    return [tuple(row.values()) for row in found.to_pylist()]


def question(held_out: bool) -> str:
    texts = (f"What is {number} + 1?" for number in range(1000))
    return next(text for text in texts if (bucket(text, MANIFEST.salt) < MANIFEST.held_out) == held_out)


def archive(store: Store, groups: Sequence[SignedGroup], manifest: Manifest = MANIFEST) -> Archiver:
    bus = MemoryBus()
    bus.publish(groups)
    return Archiver(bus, store, manifest, clock=lambda: 7.0)


def test_what_a_node_refused_is_delivered_once_however_often_it_is_tried(store: Store) -> None:
    books = Refusing(batch(0), batch(1), batch(2, groups=0))
    for owed in ([due(0)], [due(0), due(1)], [due(1), due(2)], [due(2)]):
        sink(store).deliver(owed, books)
    rows = kept(store, 'swarm, node, "round", reason, count, "partition", "offset", end_offset, payload')
    assert rows == [
        row
        for round in range(3)
        for row in (
            ("tiny", "n0", round, "copy", 3, "0", round, round + 1, b"\x00half"),
            ("tiny", "n0", round, "malformed_record", 1, "1", 7, 8, None),
        )
    ]


def test_nodes_do_not_keep_each_others_refusals_out(store: Store) -> None:
    for node in ("n0", "n1"):
        sink(store, node).deliver([due(0)], Refusing(batch(0, node=node)))
    assert sorted(node for (node,) in kept(store, "node")) == ["n0", "n0", "n1", "n1"]


def test_the_archive_takes_nothing_that_no_node_may_take(store: Store) -> None:
    fine: dict[str, Any] = {"question": question(held_out=False)}
    good = make_signed("good", **fine)
    bad = {
        "held_out": make_signed("a", question=question(held_out=True)),
        "group_size": make_signed("b", texts=("1",) * 5, **fine),
        "wrong_swarm": make_signed("c", swarm="other", **fine),
        "payload_too_large": make_signed("d", question="Q" * 200_000),
        "recipe": make_signed("e", recipe=make_group().recipe.model_copy(update={"dataset": "gcd"}), **fine),
        "logprobs": make_signed(
            "f",
            completions=(
                Completion(text="1", finish_reason="stop", token_ids=(1,), logprobs=(0.1,)),
                Completion(text="2", finish_reason="stop"),
            ),
            **fine,
        ),
        "too_many_tokens": make_signed(
            "g", completions=(Completion(text="1", finish_reason="stop", token_ids=(1,) * 50),) * 2, **fine
        ),
    }
    counts = archive(store, [*bad.values(), good]).run()
    assert (counts.groups, counts.refused) == (1, len(bad))
    assert sorted(reason for (reason,) in kept(store, "reason")) == sorted(bad)


def test_the_archive_takes_what_only_some_node_may_take(store: Store) -> None:
    """Control tokens, copies and age are for each node to judge."""
    fine: dict[str, Any] = {"question": question(held_out=False)}
    groups = [make_signed("a", texts=("<|end|>", "2"), **fine), make_signed("thief", **fine)]
    assert archive(store, groups).run().groups == 2


def test_a_flood_of_refused_records_adds_few_rows_that_count_it(store: Store) -> None:
    held_out: dict[str, Any] = {"question": question(held_out=True)}
    flood = [make_signed("loud", position=position, **held_out) for position in range(SAMPLES + 30)]
    victim = make_identity("victim").key
    forged = [signed.model_copy(update={"key": victim}) for signed in flood]
    other = [make_signed("other", texts=("x" * MAX_KEPT_BYTES, "1"), **held_out)]
    assert archive(store, [*flood, *other, *forged]).run().refused == 2 * len(flood) + 1
    columns = "reason, key, sum(count) AS n, count(*) AS rows, max(octet_length(payload)) AS bytes"
    rows = query.query(store, f"SELECT {columns} FROM quarantine GROUP BY ALL").to_pylist()
    rows.sort(key=lambda row: (row["reason"], row["n"]))
    assert [(row["reason"], row["n"], row["rows"]) for row in rows] == [
        ("bad_signature", len(flood), SAMPLES),
        ("held_out", len(flood), SAMPLES),
        ("text_too_long", 1, 1),
    ]
    assert rows[1]["key"] == make_identity("loud").key
    assert rows[2]["bytes"] == MAX_KEPT_BYTES


def test_what_came_after_a_crash_is_counted_though_its_author_has_all_their_rows(store: Store) -> None:
    bus = MemoryBus()
    flood = [make_signed("loud", position=place, question=question(held_out=True)) for place in range(90)]
    for crash, some in ((True, flood[:40]), (False, flood[40:])):
        bus.publish(some)
        Archiver(bus, store, MANIFEST).run()
        if crash:  # after the commit to one table, before that to the other
            shutil.rmtree(store.table_uri("rollouts"))
    assert sum(count for (count,) in kept(store, "count")) == len(flood)
