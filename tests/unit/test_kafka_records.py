"""Record batches of others: whatever they hold, reading them neither fails nor fills the memory."""

import gzip
import random
import struct
from collections.abc import Sequence

import lz4.frame
import pytest
import zstandard
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.legacy_records import LegacyRecordBatchBuilder
from kafka.record.memory_records import MemoryRecordsBuilder
from makers import make_signed

from sapo.bus import kafka_records
from sapo.bus.kafka_records import Found, read
from sapo.bus.kafka_send import CODECS, headers
from sapo.records import SignedGroup

STAMP = 1_700_000_000_000
LOG_APPEND_TIME = 0x08
HEADER = DefaultRecordBatch.HEADER_STRUCT.size


def stamped(batch: bytes, base: int = 0, kind: int = LOG_APPEND_TIME) -> bytes:
    """A batch as a broker returns it: at its offset, with the broker's time."""
    data = bytearray(batch)
    struct.pack_into(">q", data, 0, base)
    (attributes,) = struct.unpack_from(">h", data, DefaultRecordBatch.ATTRIBUTES_OFFSET)
    struct.pack_into(">h", data, DefaultRecordBatch.ATTRIBUTES_OFFSET, attributes | kind)
    struct.pack_into(">qq", data, 27, STAMP, STAMP)
    return bytes(data)


def batch_of(groups: Sequence[SignedGroup], codec: int = 0) -> bytes:
    builder = MemoryRecordsBuilder(2, codec, batch_size=2**31 - 1)
    for group in groups:
        builder.append(STAMP, group.group_id.encode(), group.payload, headers(group))
    builder.close()
    return bytes(builder.buffer())


def packed(codec: int, body: bytes, count: int = 3) -> bytes:
    """A batch with any body, said to hold `count` records."""
    values = (0, HEADER - 12 + len(body), 0, 2, 0, codec, count - 1, STAMP, STAMP, -1, -1, -1, count)
    return stamped(DefaultRecordBatch.HEADER_STRUCT.pack(*values) + body)


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
    assert one == Found(0, 4, one.size, None)


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
    monkeypatch.setattr(kafka_records, "MAX_UNPACKED", 2**16)
    good = stamped(batch_of(groups(1)), 3)
    bad, one = found(packed(codec, body) + good)
    assert (bad.offset, bad.end, bad.received) == (0, 3, None)
    assert one.received is not None
    inside = found(packed(codec, body), 1)
    assert [(part.offset, part.end) for part in inside] == [(1, 3)]


def test_messages_of_an_old_format_end_the_reading() -> None:
    builder = LegacyRecordBatchBuilder(magic=1, compression_type=0, batch_size=2**16)
    builder.append(0, STAMP, b"key", b"value")
    assert found(bytes(builder.build())) == []


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
