"""Record batches as a broker returns them: unpacked within bounds, and never believed.

A broker checks little of what a producer packs: kafka-python's own reading would unpack a gigabyte, build a
million headers, and follow a record's word that its offset lies far behind the end of the log.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import lz4.frame
import zstandard
from pydantic import ValidationError

from sapo.bus.base import MAX_RECORD, Found
from sapo.core.types import Received, SignedGroup

MAX_UNPACKED = MAX_RECORD
"""Bytes one batch may unpack to; a peer could make a small one that fills the memory."""
MAX_RECORDS = 4096
"""In one batch; a writer of groups puts some hundreds into it at most."""
MAX_HEADERS = 16
"""Of one record, which has six."""
MAX_WINDOW = 8 * 2**20
"""Bytes that zstd may look back; it takes them as soon as a frame asks for them."""
PLAIN, GZIP, LZ4, ZSTD = 0, 1, 3, 4
CODECS = ("uncompressed", "gzip", "lz4", "zstd")
"""What Kafka calls them in a topic's compression.type."""
CODEC_MASK, APPEND_TIME, CONTROL = 0x07, 0x08, 0x20
PREFIX = struct.Struct(">qi")
"""First offset and length, in any format; the length counts what comes after it."""
HEADER = struct.Struct(">qiibIhiqqqhii")
"""First offset, length, epoch, magic, CRC, attributes, last offset's distance, first and last time stamp,
producer id, epoch and sequence, number of records."""
MAGIC, MAGIC_AT = 2, 16


@dataclass(frozen=True, slots=True)
class _Batch:
    """The header of a batch: the offsets [first, end) it stands for, and how its records are stored."""

    first: int
    end: int
    attributes: int
    stamp_ms: int
    count: int

    @classmethod
    def of(cls, raw: bytes) -> "_Batch":
        first, _, _, _, _, attributes, distance, _, stamp_ms, _, _, _, count = HEADER.unpack_from(raw)
        # one that ends before it begins would be read again and again
        return cls(first, first + max(0, distance) + 1, attributes, stamp_ms, count)


def read(data: bytes, partition: str, position: int) -> Iterator[Found]:
    """What `data` holds at and after `position`. A last batch that was cut off is left out."""
    at = 0
    while at + PREFIX.size <= len(data):
        first, length = PREFIX.unpack_from(data, at)
        end = at + PREFIX.size + length
        if length <= MAGIC_AT - PREFIX.size or end > len(data):
            return  # cut off: where the next batch begins is unknown
        raw, at = data[at:end], end
        if raw[MAGIC_AT] != MAGIC or len(raw) < HEADER.size:
            # of a format that no broker of today writes, only the offset is known
            following, past, count = position, first + 1, 1
        else:
            batch = _Batch.of(raw)
            following, past, count = max(position, batch.first), batch.end, min(batch.count, MAX_RECORDS)
            for found in _records(batch, raw, partition, following):
                following = found.end
                yield found
        if following < past:
            yield Found(following, past, len(raw), None, raw, max(1, min(count, past - following)))
        position = max(position, past)


def _records(batch: _Batch, raw: bytes, partition: str, following: int) -> Iterator[Found]:
    """The records at and after `following`, up to the first that cannot be read."""
    # a control batch holds no records, and an age by the author's clock must not be believed
    if batch.end <= following or batch.attributes & (CONTROL | APPEND_TIME) != APPEND_TIME:
        return
    try:
        if not 0 <= batch.count <= MAX_RECORDS:
            raise Unreadable(f"{batch.count} records")
        body, at, last = _unpacked(batch.attributes & CODEC_MASK, raw[HEADER.size :]), 0, batch.first - 1
        for _ in range(batch.count):
            record, at = _bytes(body, at)
            distance, start = _place(record)
            offset = batch.first + distance
            if not last < offset < batch.end:
                raise Unreadable(f"its offset is said to be {offset}")
            last = offset
            if offset >= following:
                received, value = _received(record, start, f"{partition}:{offset}", batch.stamp_ms / 1000)
                yield Found(offset, offset + 1, len(record), received, value)
    except (IndexError, Unreadable):
        return


class Unreadable(Exception):
    """A batch that is damaged, in an unknown format, or too large unpacked."""


def _place(record: bytes) -> tuple[int, int]:
    """How far a record's offset lies behind its batch's first, and where in the record its key begins."""
    _, at = _number(record, 1)  # its time stamp; the byte before has no meaning yet
    return _number(record, at)


def _received(record: bytes, at: int, position: str, timestamp: float) -> tuple[Received | None, bytes]:
    """The signed group that a record holds from its key on, if it is one, and the record's value. Raises
    `Unreadable` and `IndexError`."""
    key, at = _bytes(record, at)
    payload, at = _bytes(record, at)
    count, at = _number(record, at)
    if not 0 <= count <= MAX_HEADERS:
        raise Unreadable(f"{count} headers")
    headers: dict[bytes, bytes] = {}
    for _ in range(count):
        name, at = _bytes(record, at)
        headers[name], at = _bytes(record, at)
    if at != len(record):
        raise Unreadable("a record is longer than what it holds")
    try:
        signed = SignedGroup(
            group_id=key.decode(),
            content_sha256=headers.get(b"content_sha256", b"").decode(),
            key=headers.get(b"key", b"").decode(),
            signature=headers.get(b"signature", b"").decode(),
            payload=payload,
        )
        return Received(signed=signed, bus_position=position, timestamp=timestamp), payload
    except (ValidationError, UnicodeDecodeError):
        return None, payload


def _number(data: bytes, at: int) -> tuple[int, int]:
    """The zigzag number at a place, and the place after it. Raises `Unreadable` and `IndexError`."""
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
    raise Unreadable("a number of more than 64 bits")


def _bytes(data: bytes, at: int) -> tuple[bytes, int]:
    """The bytes at a place, their number before them, and the place after. What is null is empty. Raises
    `Unreadable` and `IndexError`."""
    size, at = _number(data, at)
    if size > len(data) - at:
        raise Unreadable(f"{size} bytes, where {len(data) - at} are left")
    end = at + max(0, size)
    return data[at:end], end


def _unpacked(codec: int, data: bytes) -> bytes:
    """The records of a batch without compression. Raises `Unreadable`."""
    limit = MAX_UNPACKED + 1
    try:
        if codec == PLAIN:
            found = data
        elif codec == ZSTD:
            unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
            with unpacker.stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
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
    return found
