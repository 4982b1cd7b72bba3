"""The schema version before and the next: their groups are taken and kept byte for byte; others are not."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from makers import make_group, make_identity, make_manifest, make_received

from sapo.bus.memory import MemoryBus
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.errors import Refused
from sapo.core.types import Completion, Group, Received, SchemaVersion, SignedGroup, canonical, sha256
from sapo.ops.archiver import Archiver
from sapo.peers.admission import Admission
from sapo.peers.pool import Entry, Pool
from sapo.peers.signing import unseal
from sapo.store.history import query
from sapo.store.history.rollout_rows import group_of, rollout_rows
from sapo.store.history.tables import PARTITIONS, ROLLOUTS, VERSION_KEY, Store, commit

NEWER: dict[str, Any] = {"mood": "calm", "tags": ["a", "é", {"deep": [1, 2.5, None, 10**30]}], "empty": None}
NAMES = [
    "text",
    "seed",
    "k",
    "extra",
    "bus_position",
    "canonical",
    "group_id",
    "model_config",
    "__class__",
    "self",
    "weird key",
    "",
]


def sealed(payload: str, author: str = "peer") -> SignedGroup:
    """What a peer of any release would send: this payload, signed."""
    body = json.loads(payload)
    identity = make_identity(author)
    return SignedGroup(
        group_id=make_group(author, body["round"], body["position"]).group_id,
        content_sha256=sha256(payload),
        key=identity.key,
        signature=identity.sign(payload.encode()),
        payload=payload.encode(),
    )


def newer(version: int = 4, each: Mapping[str, Any] | None = None, **fields: Any) -> SignedGroup:
    """A group of a newer schema version, with fields this release does not know; `each` per completion."""
    body = json.loads(make_group().canonical()) | {"schema_version": version} | fields
    body["completions"] = [{**completion, **(each or {})} for completion in body["completions"]]
    return sealed(canonical(body))


def older(**fields: Any) -> SignedGroup:
    """A group as the release of schema version 2 signed it."""
    body = json.loads(make_group().canonical())
    del body["author"]
    return sealed(canonical(body | {"schema_version": 2} | fields))


def code(signed: SignedGroup) -> str:
    with pytest.raises(Refused) as refused:
        unseal(signed)
    return refused.value.code


def outcome(signed: SignedGroup) -> str:
    try:
        return "taken" if unseal(signed).canonical().encode() == signed.payload else "changed"
    except Refused as refused:
        return refused.code


def archive(store: Store, *groups: SignedGroup, bus: MemoryBus | None = None) -> list[dict[str, Any]]:
    """All rows of `rollouts` after these groups were archived."""
    bus = bus or MemoryBus()
    bus.publish(list(groups))
    Archiver(bus, store, make_manifest("s")).run()
    return query.query(store, "SELECT * FROM rollouts ORDER BY round, k DESC").to_pylist()


@pytest.mark.parametrize("each", [{}, {"words": 3}])
@pytest.mark.parametrize("fields", [{}, NEWER, {"mood": -0.0}, *({name: name} for name in NAMES)])
def test_a_group_of_the_next_version_is_taken_whole(fields: dict[str, Any], each: dict[str, Any]) -> None:
    signed = newer(each=each, **fields)
    group = unseal(signed)
    assert group.schema_version == 4
    assert group.canonical().encode() == signed.payload
    assert (group.model_extra or {}) == fields
    assert [completion.model_extra or {} for completion in group.completions] == [each, each]
    received = Received(signed=signed, bus_position="0:0", timestamp=1.0)
    entry = Entry(received=received, group=group, received_at=1.0)
    assert Entry.from_row(entry.to_row()).group == group


def test_a_group_of_the_version_before_is_the_same_group_byte_for_byte(store: Store) -> None:
    signed = older()
    group = unseal(signed)
    assert (group.schema_version, group.kind) == (2, "policy")
    assert group.canonical().encode() == signed.payload
    rows = archive(store, signed)
    assert [row["extra"] for row in rows] == [None, canonical({"group": {"invitation": None}})]
    assert group_of(rows).canonical().encode() == signed.payload


@pytest.mark.parametrize("signed", [older(), newer(each={"words": 3}, **NEWER)])
def test_a_group_of_another_version_may_enter_the_pool(signed: SignedGroup) -> None:
    config = load(sets=["swarm.name=s", "rules.held_out=1e-9", "rules.questions=any"], env={})
    pool = Pool(config.pool)
    admission = Admission(Manifest.of(config), "ff" * 32, "n0", pool, has_control_tokens=lambda text: False)
    group, _ = admission.admit(Received(signed=signed, bus_position="0:0", timestamp=1.0), 2.0)
    assert group.group_id == signed.group_id


@pytest.mark.parametrize(
    "text",
    [
        '{"b":1,"a":2}',
        '{"a":1,"a":1}',
        "1e2",
        "1.50",
        '"\\u0041"',
        "NaN",
        "1e999",
        "[1, 2]",
        "-0",
        '"\\ud800"',
    ],
)
def test_unknown_fields_have_one_form_too(text: str) -> None:
    payload = newer(mood="MARK").payload.decode().replace('"MARK"', text)
    assert code(sealed(payload)) in ("not_canonical", "malformed")


def test_unknown_fields_nested_without_end_are_refused() -> None:
    payload = newer(mood="MARK").payload.decode()
    for depth in (150, 1_000, 200_000):
        deep = payload.replace('"MARK"', "[" * depth + "]" * depth)
        identity = make_identity("peer")
        signed = newer().model_copy(
            update={
                "payload": deep.encode(),
                "content_sha256": sha256(deep),
                "signature": identity.sign(deep.encode()),
            }
        )
        assert outcome(signed) in ("taken", "malformed", "not_canonical")


def test_the_archive_keeps_what_it_does_not_know(store: Store) -> None:
    signed = newer(each={"words": 3}, **NEWER)
    rows = archive(store, signed)
    assert group_of(rows).canonical().encode() == signed.payload
    assert [json.loads(row["extra"]) for row in rows] == [
        {"completion": {"words": 3}},
        {"completion": {"words": 3}, "group": {**NEWER, "invitation": None, "author": None}},
    ]
    assert {row["schema_version"] for row in rows} == {4}


def table_without(store: Store, *columns: str) -> None:
    """A `rollouts` of a release that had no such columns, with one group in it."""
    fields = [column for column in ROLLOUTS if column.name not in columns]
    DeltaTable.create(
        store.table_uri("rollouts"),
        schema=pa.schema(fields),
        partition_by=PARTITIONS["rollouts"],
        configuration={VERSION_KEY: "1"},
        raise_if_key_not_exists=False,
    )
    received = make_received(round=7)
    rows = pa.Table.from_pylist(rollout_rows(received, make_group(round=7)), schema=ROLLOUTS)
    table = store.find("rollouts")
    assert table is not None
    assert commit(table, rows.drop_columns(list(columns)), {"archive:s:old": 1})


def test_a_table_of_an_earlier_release_is_read_and_then_written(store: Store) -> None:
    table_without(store, "extra")
    [before] = {row["round"]: row for row in query.rollouts(store).to_pylist()}.values()
    assert before["text"]
    rows = archive(store, newer(mood="calm"))
    old = [row for row in rows if row["round"] == 7]
    assert {row["extra"] for row in old} == {None}
    assert group_of(old) == make_group(round=7)
    assert group_of([row for row in rows if row["round"] == 0]).model_extra == {"mood": "calm"}


class NextCompletion(Completion):
    """A completion as the release after this one might have it."""

    ADDED: ClassVar[Mapping[str, int]] = {"words": 4}
    words: int = 0


class NextGroup(Group):
    """A group as the release after this one might have it."""

    ADDED: ClassVar[Mapping[str, int]] = {**Group.ADDED, "mood": 4}
    schema_version: SchemaVersion = 4
    completions: tuple[NextCompletion, ...]
    mood: str | None = None


def test_the_next_release_reads_this_ones_groups_as_they_were_signed() -> None:
    payload = make_group().canonical()
    group = NextGroup.model_validate_json(payload)
    assert group.canonical() == payload
    assert group.group_id == make_group().group_id
    assert rollout_rows(make_received(), group) == rollout_rows(make_received(), make_group())
    own = NextGroup.model_validate_json(newer(each={"words": 2}, mood="calm").payload)
    assert (own.mood, own.completions[0].words) == ("calm", 2)
    assert group_of(rollout_rows(make_received(), own)) == unseal(newer(each={"words": 2}, mood="calm"))
    assert own.canonical().encode() == newer(each={"words": 2}, mood="calm").payload
