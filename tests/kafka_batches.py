"""Record batches as a hostile producer makes them: in order where a broker looks, and as told elsewhere."""

import struct
import zlib
from collections.abc import Sequence

import lz4.frame
import zstandard
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.memory_records import MemoryRecordsBuilder

from sapo.bus.kafka.producer import headers
from sapo.core.types import SignedGroup

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


def varint(value: int) -> bytes:
    """A zigzag number of any size, as records have them."""
    value, out = (value << 1) if value >= 0 else ((-value << 1) - 1), bytearray()
    while value > 0x7F:
        out.append(0x80 | (value & 0x7F))
        value >>= 7
    out.append(value)
    return bytes(out)


def sized(data: bytes) -> bytes:
    return varint(len(data)) + data


def record(
    group: SignedGroup, distance: int, more: Sequence[tuple[bytes, bytes]] = (), tail: bytes = b""
) -> bytes:
    """A record that says how far it is from its batch's first offset, with more headers than it needs."""
    named = [*more, *((name.encode(), value) for name, value in headers(group))]
    body = b"\0\0" + varint(distance) + sized(group.group_id.encode()) + sized(group.payload)
    return sized(body + varint(len(named)) + b"".join(sized(part) for pair in named for part in pair) + tail)


def zeros(codec: int, megabytes: int) -> bytes:
    """So many megabytes of nothing, packed: a bomb."""
    block = bytes(2**20)
    if codec == 1:
        gzipped = zlib.compressobj(1, wbits=31)
        return b"".join([gzipped.compress(block) for _ in range(megabytes)] + [gzipped.flush()])
    if codec == 3:
        lz4ed = lz4.frame.LZ4FrameCompressor(block_size=lz4.frame.BLOCKSIZE_MAX4MB)
        return b"".join([lz4ed.begin(), *(lz4ed.compress(block) for _ in range(megabytes)), lz4ed.flush()])
    zstded = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return b"".join([zstded.compress(block) for _ in range(megabytes)] + [zstded.flush()])
