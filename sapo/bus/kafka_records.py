"""Record batches as a broker returns them: unpacked within bounds, and never believed."""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import lz4.frame
import zstandard
from kafka.errors import KafkaError
from kafka.record.default_records import DefaultRecord, DefaultRecordBatch
from kafka.record.memory_records import MemoryRecords
from pydantic import ValidationError

from sapo.records import Received, SignedGroup

MAX_UNPACKED = 32 * 2**20
"""Bytes one batch may unpack to; a peer could make a small one that fills the memory."""
PLAIN, GZIP, LZ4, ZSTD = 0, 1, 3, 4


@dataclass(frozen=True, slots=True)
class Found:
    """What stands at `offset`, of `size` bytes: a signed group, or nothing that is one.

    `end` is the offset after it; a batch that cannot be read is passed over whole.
    """

    offset: int
    end: int
    size: int
    received: Received | None


def read(data: bytes, partition: str, position: int) -> Iterator[Found]:
    """What `data` holds at and after `position`. A last batch that was cut off is left out."""
    batches, at = MemoryRecords(data), 0
    while batches.has_next():
        try:
            batch = batches.next_batch()
        except (KafkaError, struct.error):
            return  # without a header nobody knows where the next batch begins
        if not isinstance(batch, DefaultRecordBatch):
            return  # a format that no broker of today writes
        if batch.next_offset > position:
            yield from _records(batch, data[at : at + batch.size_in_bytes], partition, position)
        at += batch.size_in_bytes


def _records(batch: DefaultRecordBatch, raw: bytes, partition: str, position: int) -> Iterator[Found]:
    following = max(position, batch.base_offset)
    try:
        # a control batch holds no records, and an age by the author's clock must not be believed
        if not batch.is_control_batch and batch.timestamp_type == batch.LOG_APPEND_TIME:
            for record in unpacked(batch, raw):
                if record.offset >= following:
                    following = record.offset + 1
                    yield _found(record, partition)
    except (KafkaError, ValueError, IndexError, OverflowError, struct.error, Unreadable):
        pass
    if following < batch.next_offset:
        yield Found(following, batch.next_offset, len(raw), None)


def _found(record: DefaultRecord, partition: str) -> Found:
    value = record.value or b""
    return Found(record.offset, record.offset + 1, len(value), _received(record, partition))


def _received(record: DefaultRecord, partition: str) -> Received | None:
    headers = dict(record.headers)
    try:
        signed = SignedGroup(
            group_id=_text(record.key),
            content_sha256=_text(headers.get("content_sha256")),
            key=_text(headers.get("key")),
            signature=_text(headers.get("signature")),
            payload=record.value,
        )
        position = f"{partition}:{record.offset}"
        return Received(signed=signed, bus_position=position, timestamp=record.timestamp / 1000)
    except (ValidationError, UnicodeDecodeError):
        return None


def _text(value: bytes | None) -> str:
    return (value or b"").decode()


class Unreadable(Exception):
    """A batch that is damaged, in an unknown format, or too large unpacked."""


def unpacked(batch: DefaultRecordBatch, raw: bytes) -> DefaultRecordBatch:
    """The batch that `raw` holds, without compression. Raises `Unreadable`.

    kafka-python would unpack it too, without bounds.
    """
    codec = batch.compression_type
    if codec == PLAIN:
        return batch
    start, place = batch.HEADER_STRUCT.size, batch.ATTRIBUTES_OFFSET
    header = bytearray(raw[:start])
    struct.pack_into(">h", header, place, batch.attributes & ~batch.CODEC_MASK)
    return DefaultRecordBatch(header + _unpack(codec, raw[start:]))


def _unpack(codec: int, data: bytes) -> bytes:
    limit = MAX_UNPACKED + 1
    try:
        if codec == ZSTD:
            with zstandard.ZstdDecompressor().stream_reader(
                io.BytesIO(data), read_across_frames=True
            ) as reader:
                found = reader.read(limit)
        elif codec == LZ4:
            found = lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=limit)
        elif codec == GZIP:
            found = zlib.decompressobj(wbits=31).decompress(data, limit)
        else:
            raise Unreadable(f"codec {codec}")
    except (zstandard.ZstdError, RuntimeError, zlib.error, EOFError) as error:
        raise Unreadable(str(error)) from error
    if len(found) > MAX_UNPACKED:
        raise Unreadable(f"more than {MAX_UNPACKED} bytes")
    return bytes(found)
