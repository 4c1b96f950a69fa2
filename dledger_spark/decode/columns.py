"""One function per column, from records to an Arrow array of exactly the column's type.

``rocketstore.message.columns`` finds the names and values of properties. Hosts become text, ``10.1.2.3:4567`` and
``[fe80::1]:4567``; each distinct one is formatted once per batch.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dledger.errors import InvariantError, invariant
from dledger_spark.decode.layout import MESSAGE, Ints, as_text, interleaved, slices
from dledger_spark.decode.records import Records
from dledger_spark.decode.typed_bodies import decompressed, typed
from dledger_spark.schema import HEADERS, MAP, TIMESTAMP, SchemaColumn
from rocketstore.message.columns import PropertyTexts
from rocketstore.message.record import HEAD_V4, IPV6_BYTES

_PORT: Final = HEAD_V4.part("store_port")


def ipv4_texts(addresses: NDArray[np.void], ports: Ints) -> pa.Array:
    """The texts of 4-byte addresses with their ports."""
    numbers = np.ascontiguousarray(addresses).view(">u4").astype(np.int64)
    encoded = pc.dictionary_encode(pa.array(numbers << 32 | (ports & 0xFFFF_FFFF)))
    return pa.array([_ipv4(key) for key in encoded.dictionary.to_pylist()], pa.string()).take(encoded.indices)


def _ipv4(key: int) -> str:
    port = (key & 0xFFFF_FFFF) - ((key & 0x8000_0000) << 1)
    return f"{key >> 56 & 255}.{key >> 48 & 255}.{key >> 40 & 255}.{key >> 32 & 255}:{port}"


def ipv6_texts(addresses: NDArray[np.void], ports: Ints) -> pa.Array:
    """The texts of 16-byte addresses with their ports."""
    both = np.empty((len(ports), IPV6_BYTES + _PORT.size), np.uint8)
    both[:, :IPV6_BYTES] = np.ascontiguousarray(addresses).view(np.uint8).reshape(len(ports), -1)
    both[:, IPV6_BYTES:] = ports.astype(">i4").view(np.uint8).reshape(len(ports), -1)
    fixed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(both.shape[1]), len(ports), [None, pa.py_buffer(np.ascontiguousarray(both))]
    )
    encoded = pc.dictionary_encode(fixed)
    return pa.array([_ipv6(key) for key in encoded.dictionary.to_pylist()], pa.string()).take(encoded.indices)


def _ipv6(key: bytes) -> str:
    port = _PORT.unpack_from(key, IPV6_BYTES)[0]
    return f"[{ipaddress.IPv6Address(key[:IPV6_BYTES])}]:{port}"


TAGS: Final = b"TAGS\x01"
KEYS: Final = b"KEYS\x01"
_PAIRS_PER_ROW_MAX: Final = 64
"""Limit for the cells per row of the table that finds repeated names."""


def named(texts: PropertyTexts, name: bytes) -> pa.Array:
    """Each record's value of the property ``name``, which ends with 0x01, as binary; null if it is absent."""
    values = texts.named(name)
    found = slices(pa.py_buffer(texts.text), values.begins, values.ends)
    if len(found) in (0, len(texts)):
        return found if len(found) else pa.nulls(len(texts), pa.binary())
    present = np.zeros(len(texts), np.bool_)
    present[values.owners] = True
    _, offsets, data = found.buffers()
    before = np.cumsum(np.append(False, present))
    spread = np.frombuffer(offsets, np.int32)[before]  # an absent value begins where it ends
    bits = pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), len(texts), [bits, pa.py_buffer(spread), data])


def as_maps(texts: PropertyTexts) -> pa.Array:
    """All properties of each record, as ``map<string, string>``."""
    names, name_ends, ends, owners = texts.bounds
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum(np.bincount(owners, minlength=len(texts)), out=offsets[1:])
    if not len(owners):
        empty = pa.array([], pa.string())
        return _maps(offsets, empty, empty)
    every = interleaved(pa.py_buffer(texts.text), int(names[0]), (names, name_ends, name_ends + 1, ends))
    places = np.arange(0, 4 * len(owners), 4, dtype=np.int64)
    keys, values = as_text(every.take(pa.array(places))), as_text(every.take(pa.array(places + 2)))
    maps = _maps(offsets, keys, values)
    return _without_repeats(maps) if _has_repeats(keys, owners, len(texts)) else maps


def _has_repeats(names: pa.Array, owners: Ints, count: int) -> bool:
    """Whether any of ``count`` records has two properties with the same name."""
    encoded = pc.dictionary_encode(names)
    kinds = len(encoded.dictionary)
    cells = owners * kinds + np.asarray(encoded.indices)
    if kinds > _PAIRS_PER_ROW_MAX:
        return len(np.unique(cells)) < len(cells)
    seen = np.zeros(count * kinds, np.bool_)
    seen[cells] = True
    return int(np.count_nonzero(seen)) < len(cells)


def _maps(offsets: NDArray[np.int32], names: pa.Array, values: pa.Array) -> pa.Array:
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), names, values, type=MAP)


def _without_repeats(maps: pa.Array) -> pa.Array:
    return pa.array([list(dict(pairs).items()) for pairs in maps.to_pylist()], MAP)


_US_PER_MS: Final = 1000
_LOG_APPEND_TIME: Final = 1
"""Kafka's timestamp type LogAppendTime."""


@dataclass(frozen=True)
class Shared:
    """The records from which the columns of one batch are computed."""

    records: Records
    crc_ok: pa.Array | None

    @cached_property
    def typed(self) -> dict[str, pa.Array]:
        """The columns in bodies, by name. Raises ``BadBodyError``, ``BodiesTooLargeError``."""
        records, wanted = self.records, self.records.context.bodies
        if wanted is None:
            raise InvariantError("columns in bodies need the bodies' format")
        flags = records.field("sys_flag") if records.context.content == "message" else None
        return typed(_stored_body(self), flags, records.positions, wanted)


def _long(name: str) -> Callable[[Shared], pa.Array]:
    return lambda shared: _fixed(shared.records.field(name), pa.int64())


def _int(name: str) -> Callable[[Shared], pa.Array]:
    """A 32-bit column; a wider field of the stored message would be truncated, so its column must grow first."""
    bits = 8 * MESSAGE[0][name].itemsize
    invariant(bits <= pa.int32().bit_width, "a field of the record fits Spark's column", field=name)
    return lambda shared: _ints(shared.records.field(name))


def _ints(values: Ints) -> pa.Array:
    return _fixed(values.astype(np.int32), pa.int32())


def _fixed(values: NDArray[np.signedinteger[Any]], kind: pa.DataType) -> pa.Array:  # Any: of either width
    """The numbers unchanged; unlike ``pa.array``, without inspecting them first."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _timestamp(name: str) -> Callable[[Shared], pa.Array]:
    return lambda shared: _fixed(shared.records.field(name) * _US_PER_MS, TIMESTAMP)


def _host(which: str) -> Callable[[Shared], pa.Array]:
    def texts(shared: Shared) -> pa.Array:
        parts, places = [], []
        for is_ipv6, rows, addresses, ports in shared.records.hosts(which):
            part = (ipv6_texts if is_ipv6 else ipv4_texts)(addresses, ports)
            if rows is None:
                return part
            parts.append(part)
            places.append(rows)
        return pa.concat_arrays(parts).take(pa.array(np.argsort(np.concatenate(places))))

    return texts


def _topic(shared: Shared) -> pa.Array:
    records = shared.records
    return as_text(slices(records.buffer, records.tails.topic_begins, records.tails.topic_ends))


def _stored_body(shared: Shared) -> pa.Array:
    return slices(shared.records.buffer, shared.records.body_begins, shared.records.body_ends)


def _body(shared: Shared) -> pa.Array:
    records, found = shared.records, _stored_body(shared)
    if not records.context.decompressed or records.context.content != "message":
        return found
    return decompressed(found, records.field("sys_flag"))


def _property_string(shared: Shared) -> pa.Array:
    records = shared.records
    return as_text(slices(records.buffer, records.tails.property_begins, records.ends))


def _raw(shared: Shared) -> pa.Array:
    return slices(shared.records.buffer, shared.records.starts, shared.records.ends)


def _segment(shared: Shared) -> pa.Array:
    return pa.repeat(pa.scalar(shared.records.context.segment, pa.string()), len(shared.records))


def _size(shared: Shared) -> pa.Array:
    records = shared.records
    return _ints(records.sizes if records.context.content == "entry" else records.field("size"))


def _crc_ok(shared: Shared) -> pa.Array:
    return shared.crc_ok


def _headers(shared: Shared) -> pa.Array:
    """Properties as Kafka headers; null if there are none, as in Kafka."""
    maps = as_maps(shared.records.properties)
    pairs = pa.StructArray.from_arrays([maps.keys, maps.items.cast(pa.binary())], fields=list(HEADERS.value_type))
    empty = np.diff(np.asarray(maps.offsets)) == 0
    return pa.ListArray.from_arrays(maps.offsets, pairs, type=HEADERS, mask=pa.array(empty))


ALWAYS: Final[dict[str, Callable[[Shared], pa.Array]]] = {
    "position": lambda shared: _fixed(shared.records.positions, pa.int64()),
    "size": _size,
    "body": _body,
    "bodyLength": lambda shared: _ints(shared.records.body_lengths),
    "crcOk": _crc_ok,
    "segment": _segment,
    "raw": _raw,
    "timestampType": lambda shared: pa.repeat(pa.scalar(_LOG_APPEND_TIME, pa.int32()), len(shared.records)),
}
"""Columns of every record."""
OF_ENTRIES: Final[dict[str, Callable[[Shared], pa.Array]]] = {
    "index": _long("entry_index"),
    "term": _long("entry_term"),
}
"""Columns that a plain commit log lacks."""
OF_MESSAGES: Final[dict[str, Callable[[Shared], pa.Array]]] = {
    "topic": _topic,
    "queueId": _int("queue_id"),
    "flag": _int("flag"),
    "sysFlag": _int("sys_flag"),
    "reconsumeTimes": _int("reconsume_times"),
    "queueOffset": _long("queue_offset"),
    "physicalOffset": _long("physical_offset"),
    "preparedTransactionOffset": _long("prepared_offset"),
    "bornTimestamp": _timestamp("born_timestamp"),
    "storeTimestamp": _timestamp("store_timestamp"),
    "bornHost": _host("born"),
    "storeHost": _host("store"),
    "keys": lambda shared: as_text(named(shared.records.properties, KEYS)),
    "tags": lambda shared: as_text(named(shared.records.properties, TAGS)),
    "tagsCode": lambda shared: _fixed(shared.records.properties.tags_codes(), pa.int64()),
    "properties": lambda shared: as_maps(shared.records.properties),
    "properties string": _property_string,
    "headers": _headers,
    "key": lambda shared: named(shared.records.properties, KEYS),
}
"""Columns that only messages have."""
TAIL: Final = frozenset(("topic", "keys", "tags", "tagsCode", "properties", "properties string", "headers", "key"))
"""Columns after the body: they require checking the whole record."""


def computed_by(column: SchemaColumn) -> str:
    """The name under which a column's function is registered here: that of bodies for what is in them."""
    if column.of_body:
        return "body"
    if column.name in ("key", "headers"):  # their types differ from those of their source columns
        return column.name
    name = column.source or column.name
    return "properties string" if name == "properties" and pa.types.is_string(column.arrow) else name


def array_of(column: SchemaColumn, shared: Shared) -> pa.Array:
    """The array of this column; nulls for records that do not have it."""
    if column.of_body:
        return shared.typed[column.name]
    name, context = computed_by(column), shared.records.context
    compute = ALWAYS.get(name)
    if compute is None and context.framing == "entry":
        compute = OF_ENTRIES.get(name)
    if compute is None and context.content == "message":
        compute = OF_MESSAGES.get(name)
    return pa.nulls(len(shared.records), column.arrow) if compute is None else compute(shared)
