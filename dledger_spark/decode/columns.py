"""One function per column, from records to an Arrow array of exactly the column's type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dledger.errors import InvariantError, invariant
from dledger_spark.decode.bodies import decompressed
from dledger_spark.decode.hosts import ipv4_texts, ipv6_texts
from dledger_spark.decode.layout import MESSAGE, Ints
from dledger_spark.decode.properties import KEYS, TAGS, as_maps, named
from dledger_spark.decode.records import Records
from dledger_spark.decode.slices import as_text, slices
from dledger_spark.decode.typed_bodies import typed
from dledger_spark.schema import HEADERS, TIMESTAMP, SchemaColumn

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
        """The columns in bodies, by name. Raises ``BadBodyError``, ``OptionError``."""
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
