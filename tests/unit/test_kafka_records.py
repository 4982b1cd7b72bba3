"""Record batches of others: whatever they hold, reading them neither fails nor fills the memory."""

import gzip
import multiprocessing
import random
import resource
import struct

import lz4.frame
import pytest
import zstandard
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.legacy_records import LegacyRecordBatchBuilder
from kafka_batches import (
    HEADER,
    LOG_APPEND_TIME,
    STAMP,
    batch_of,
    packed,
    record,
    sized,
    stamped,
    varint,
    zeros,
)
from makers import make_signed

from sapo.bus.base import Found
from sapo.bus.kafka import record_batch
from sapo.bus.kafka.producer import CODECS
from sapo.bus.kafka.record_batch import MAX_RECORDS, MAX_UNPACKED, read
from sapo.core.types import SignedGroup


def groups(count: int) -> list[SignedGroup]:
    return [make_signed(position=i, texts=("same " * 20, "3")) for i in range(count)]


def found(data: bytes, position: int = 0) -> list[Found]:
    return list(read(data, "p", position))


@pytest.mark.parametrize("codec", [0, *CODECS.values()])
def test_groups_come_back_with_offset_and_the_brokers_time(codec: int) -> None:
    sent = groups(5)
    ones = found(stamped(batch_of(sent[:3], codec), 7) + stamped(batch_of(sent[3:], codec), 10), 8)
    assert [(one.offset, one.end) for one in ones] == [(8, 9), (9, 10), (10, 11), (11, 12)]
    received = [one.received for one in ones]
    assert [one.signed for one in received if one is not None] == sent[1:]
    assert {one.timestamp for one in received if one is not None} == {STAMP / 1000}
    assert [one.bus_position for one in received if one is not None] == ["p:8", "p:9", "p:10", "p:11"]


def test_a_batch_that_was_cut_off_is_left_for_the_next_time() -> None:
    whole = stamped(batch_of(groups(2)))
    data = whole + stamped(batch_of(groups(2)), 2)
    for length in range(len(whole), len(data)):
        assert [one.end for one in found(data[:length])] == [1, 2]
    assert found(whole[:-1]) == []


def test_an_age_by_the_authors_clock_is_not_believed() -> None:
    (one,) = found(stamped(batch_of(groups(4)), kind=0))
    assert one == Found(0, 4, one.size, None, one.raw, 4)


def test_a_batch_of_the_brokers_own_is_passed_over() -> None:
    (one,) = found(stamped(batch_of(groups(1)), 5, kind=LOG_APPEND_TIME | 0x20))
    assert (one.offset, one.end, one.received) == (5, 6, None)


@pytest.mark.parametrize(
    ("codec", "body"),
    [
        (1, gzip.compress(bytes(2**20))),
        (3, lz4.frame.compress(bytes(2**20))),
        (4, zstandard.ZstdCompressor().compress(bytes(2**20))),
        (4, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**20))),
        (2, b"snappy"),
        (7, b"of the future"),
        (4, b"no zstd at all"),
        (3, b"no lz4"),
        (1, b"no gzip"),
        (1, b""),
        (0, b"no records"),
        (0, b"\xff" * 100),
    ],
)
def test_a_batch_nobody_can_read_is_passed_over_whole(
    codec: int, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_batch, "MAX_UNPACKED", 2**16)
    good = stamped(batch_of(groups(1)), 3)
    bad, one = found(packed(codec, body) + good)
    assert (bad.offset, bad.end, bad.received) == (0, 3, None)
    assert one.received is not None
    inside = found(packed(codec, body), 1)
    assert [(part.offset, part.end) for part in inside] == [(1, 3)]


def test_what_is_no_group_comes_with_its_bytes() -> None:
    nobody = groups(1)[0].model_copy(update={"key": "nobody", "payload": b"hello"})
    batch = packed(0, record(nobody, 0) + b"junk" * 9)
    assert [one.raw for one in found(batch)] == [b"hello", batch]


@pytest.mark.parametrize(
    ("position", "said", "counts"),
    [(0, 3, [1, 2]), (1, 3, [2]), (2, 3, [1]), (0, -7, [1]), (0, 2**31 - 1, [3])],
)
def test_what_cannot_be_read_of_a_batch_counts_as_the_header_says_and_no_more_than_fits(
    position: int, said: int, counts: list[int]
) -> None:
    batch = bytearray(packed(0, record(groups(1)[0], 0) + b"junk" * 9))
    struct.pack_into(">i", batch, HEADER - 4, said)
    assert [one.count for one in found(bytes(batch), position)] == counts


def test_no_header_makes_more_records_than_a_batch_may_have() -> None:
    batch = bytearray(packed(0, b"junk"))
    struct.pack_into(">i", batch, 23, 2**31 - 1)  # the last offset's distance
    struct.pack_into(">i", batch, HEADER - 4, 2**31 - 1)
    assert [one.count for one in found(bytes(batch))] == [MAX_RECORDS]


@pytest.mark.parametrize("magic", [0, 1])
def test_messages_of_an_old_format_are_passed_over(magic: int) -> None:
    builder = LegacyRecordBatchBuilder(magic=magic, compression_type=0, batch_size=2**16)
    for offset in range(2):
        builder.append(offset, STAMP, b"key", b"value")
    old, following = bytes(builder.build()), stamped(batch_of(groups(1)), 2)
    ones = found(old + following)
    assert [(one.offset, one.end, one.received is None) for one in ones] == [
        (0, 1, True),
        (1, 2, True),
        (2, 3, False),
    ]


def test_records_made_here_are_as_kafkas() -> None:
    made = packed(0, b"".join(record(one, i) for i, one in enumerate(groups(3))))
    assert [one.received for one in found(made)] == [
        one.received for one in found(stamped(batch_of(groups(3))))
    ]


@pytest.mark.parametrize("distances", [[0, 10**9, 1], [0, 2**62, 1], [0, 3, 4], [0, -1, 1], [0, 0, 1]])
def test_a_record_that_lies_about_its_offset_moves_nobody_past_the_end(distances: list[int]) -> None:
    """A broker does not look at these; a position behind the end would stop the reader for good."""
    body = b"".join(record(one, at) for one, at in zip(groups(3), distances, strict=True))
    good, rest = found(packed(0, body))
    assert (good.offset, good.end) == (0, 1)
    assert good.received is not None
    assert (rest.offset, rest.end, rest.received) == (1, 3, None)


@pytest.mark.parametrize(
    "bad",
    [
        record(groups(1)[0], 1, more=[(b"", b"")] * 11),
        record(groups(1)[0], 1, more=[(b"", b"")] * 100_000),
        record(groups(1)[0], 1, tail=b"more"),
        varint(2**31) + b"x",
        varint(2**70) + b"x",
        varint(-5) + b"x",
        sized(b""),
        sized(b"\0" + b"\xff" * 9),
        sized(b"\0" + b"\xff" * 20),
        sized(b"\0\0" + varint(1) + varint(2**40)),
        sized(b"\0\0" + varint(1) + sized(b"") * 2 + varint(2**31)),
        sized(b"\0\0" + varint(1) + sized(b"") * 2 + varint(-3)),
    ],
)
def test_a_record_that_lies_about_its_sizes_ends_its_batch_and_no_other(bad: bytes) -> None:
    body = record(groups(1)[0], 0) + bad + record(groups(3)[2], 2)
    ones = found(packed(0, body) + stamped(batch_of(groups(1)), 3))
    assert [(one.offset, one.end, one.received is None) for one in ones] == [
        (0, 1, False),
        (1, 3, True),
        (3, 4, False),
    ]


@pytest.mark.parametrize("count", [-1, MAX_RECORDS + 1, 2**31 - 1])
def test_a_batch_of_too_many_records_is_not_even_unpacked(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_batch, "_unpacked", lambda *_: pytest.fail("was unpacked"))
    values = (0, HEADER - 12, 0, 2, 0, 4, 2, STAMP, STAMP, -1, -1, -1, count)
    (one,) = found(stamped(DefaultRecordBatch.HEADER_STRUCT.pack(*values)))
    assert (one.offset, one.end, one.received) == (0, 3, None)


def test_a_batch_that_ends_before_it_begins_is_not_read_again() -> None:
    values = (0, HEADER - 12, 0, 2, 0, 0, -1, STAMP, STAMP, -1, -1, -1, 0)
    (one,) = found(stamped(DefaultRecordBatch.HEADER_STRUCT.pack(*values), 7), 7)
    assert (one.offset, one.end) == (7, 8)


@pytest.mark.parametrize("codec", [1, 3, 4])
def test_a_bomb_of_any_codec_costs_a_bounded_memory_and_blocks_nothing(codec: int) -> None:
    """In a process of its own, whose greatest size the kernel knows."""
    bomb = packed(codec, zeros(codec, 512), count=2)
    data = b"".join(stamped(bomb, base) for base in (0, 2, 4)) + stamped(batch_of(groups(1)), 6)
    assert len(data) < 8 * 2**20
    child = multiprocessing.get_context("spawn").Pool(1)
    with child:
        ends, grown = child.apply(measured, (data,))
    assert ends == [(2, False), (4, False), (6, False), (7, True)]
    assert grown < 8 * MAX_UNPACKED


def measured(data: bytes) -> tuple[list[tuple[int, bool]], int]:
    """What reading finds, and by how many bytes the process's greatest size grew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends = [(one.end, one.received is not None) for one in read(data, "p", 0)]
    return ends, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_a_frame_that_asks_for_a_large_memory_is_not_given_it() -> None:
    window = b"\x28\xb5\x2f\xfd" + bytes([0x00, 17 << 3])  # 128 MB to look back
    (one,) = found(packed(4, window + b"\x01\x00\x00"))
    assert one.received is None


@pytest.mark.parametrize("codec", [0, *CODECS.values()])
def test_no_damage_makes_reading_fail(codec: int) -> None:
    """Bits flipped, pieces cut out and put in: what comes back is a group or is counted, never an error."""
    whole = stamped(batch_of(groups(4), codec))
    noise = random.Random(codec)
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(noise.randint(1, 4)):
            at = noise.randrange(8, len(data))
            data[at : at + noise.randint(0, 3)] = noise.randbytes(noise.randint(1, 3))
        for one in found(bytes(data) + whole):
            assert one.end > one.offset or one.received is None
