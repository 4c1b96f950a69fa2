"""The records of a stretch of log: their headers as columns, and whether each is intact. Computed on demand.

``DecodeContext`` has the decoder's parameters besides the bytes, and is pickled for executors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dledger.records import ENTRY_HEADER_BYTES
from dledger.types import NOOP_CHANNEL, Magic
from dledger_spark.decode.layout import ENTRY, ENTRY_MESSAGE, MESSAGE, Bytes, Ints, Mask, gather, slices
from dledger_spark.decode.typed_bodies import TypedBodyFormat
from dledger_spark.options import PropertiesFormat, SchemaStyle, VerifyCrc
from rocketstore.message.columns import PADDING, PropertyTexts
from rocketstore.message.message import SYS_FLAG_BORN_HOST_V6, SYS_FLAG_STORE_HOST_V6
from rocketstore.message.record import HOST_V6_FLAGS, LENGTHS_BYTES, MESSAGE_MAGIC, MESSAGE_MAGIC_V2, Tails, tails_of
from rocketstore.message.scan import Framing

Content = Literal["message", "entry"]
"""The contents of a record: RocketMQ's messages, or arbitrary bytes."""

Chain = tuple[int, int]
"""The chain CRC stored in an entry, and the computed one: they differ if its header is damaged."""
CHAIN_BEGIN: Final[Chain] = (0, 0)
"""The chain before the first entry of a log."""


class RowFilter(Protocol):
    """Selects rows by some of their columns, before the others are computed."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns used by ``keeps``."""
        ...

    @property
    def keeps_broken(self) -> bool:
        """Whether records too damaged to be evaluated are kept (``verifyCrc=column``)."""
        ...

    def keeps(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Whether each row is kept."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeContext:
    """Where the bytes come from, and how to read them."""

    framing: Framing = "entry"
    content: Content = "message"
    base: int = 0
    """The log position of the data's first byte."""
    segment: str = ""
    """The file's name, for the column ``segment`` and for errors."""
    segment_base: int = 0
    """The log position of the segment's first byte: errors contain offsets in the file."""
    verify_crc: VerifyCrc = "false"
    chain_before: Chain | None = None
    """The chain CRC of the entry before the first one, if known, for verifying checksums."""
    schema_style: SchemaStyle = "default"
    properties_format: PropertiesFormat = "map"
    filters: tuple[RowFilter, ...] = ()
    decompressed: bool = False
    """Whether bodies are given as their producers had them before they compressed them."""
    bodies: TypedBodyFormat | None = None
    """How the columns in bodies are parsed; None if none is read."""


_NORMAL: Final = int(Magic.NORMAL)
_NOOP: Final = int(Magic.NOOP)
_CONFIG_CHANGE: Final = int(Magic.CONFIG_CHANGE)


class Records:
    """Records starting at ``starts`` in a window of the log, without NOOPs (``rows_of``).

    Fields are arrays with one number per record, in native byte order. Fields of broken records (see ``broken``) hold
    arbitrary values.
    """

    def __init__(self, window: Bytes, starts: Ints, context: DecodeContext, head: NDArray[np.void]) -> None:
        self.window = window
        self.starts = starts
        self.context = context
        self._head = head
        self._fields: dict[str, Ints] = {}

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def buffer(self) -> pa.Buffer:
        """The window as an Arrow buffer."""
        return pa.py_buffer(self.window)

    def select(self, wanted: Mask) -> Records:
        """Only the wanted records."""
        if wanted.all():
            return self
        return Records(self.window, self.starts[wanted], self.context, self._head[wanted])

    # -- headers -----------------------------------------------------------------------------------------------------

    @cached_property
    def _groups(self) -> tuple[tuple[int, Ints | None, NDArray[np.void]], ...]:
        """Rows by kind of hosts: the flags, the row numbers (None: all), and their headers in the matching layout."""
        if self.context.content != "message":
            return ((0, None, self._head),)
        kinds = self._head["sys_flag"].astype(np.int64) & HOST_V6_FLAGS
        if not kinds.any():
            return ((0, None, self._head),)
        layouts = ENTRY_MESSAGE if self.context.framing == "entry" else MESSAGE
        groups = []
        for flags in np.unique(kinds).tolist():
            rows = np.flatnonzero(kinds == flags)
            head = self._head[rows] if not flags else gather(self.window, self.starts[rows], layouts[flags])
            groups.append((flags, rows, head))
        return tuple(groups)

    def field(self, name: str) -> Ints:
        """A header field, as 64-bit integers."""
        found = self._fields.get(name)
        if found is None:
            found = self._fields[name] = self._field(name)
        return found

    def _field(self, name: str) -> Ints:
        groups = self._groups
        if groups[0][1] is None:
            plain: Ints = self._head[name].astype(np.int64)
            return plain
        values = np.empty(len(self), np.int64)
        for _, rows, head in groups:
            values[rows] = head[name]
        return values

    def hosts(self, which: str) -> list[tuple[bool, Ints | None, NDArray[np.void], Ints]]:
        """Born or store hosts by kind: whether IPv6, the rows (None: all), addresses, ports."""
        bit = SYS_FLAG_BORN_HOST_V6 if which == "born" else SYS_FLAG_STORE_HOST_V6
        return [
            (bool(flags & bit), rows, head[f"{which}_ip"], head[f"{which}_port"].astype(np.int64))
            for flags, rows, head in self._groups
        ]

    # -- where things are in the window ------------------------------------------------------------------------------

    @cached_property
    def positions(self) -> Ints:
        """The log positions of the records."""
        return self.starts + self.context.base

    @cached_property
    def sizes(self) -> Ints:
        """The sizes of whole records, including the entry's header."""
        return self.field("entry_size" if self.context.framing == "entry" else "size")

    @cached_property
    def ends(self) -> Ints:
        """The ends of the records in the window."""
        return self.starts + self.sizes

    @cached_property
    def message_starts(self) -> Ints:
        """The starts of the messages in the window."""
        return self.starts + ENTRY_HEADER_BYTES if self.context.framing == "entry" else self.starts

    @cached_property
    def body_begins(self) -> Ints:
        """The starts of the bodies in the window: a message's, or the entry's if it holds no message."""
        if self.context.content == "entry":
            return self.starts + ENTRY_HEADER_BYTES
        groups = self._groups
        if groups[0][1] is None:
            return self.message_starts + MESSAGE[0].itemsize
        begins = self.message_starts.copy()
        for flags, rows, _ in groups:
            begins[rows] += MESSAGE[flags].itemsize
        return begins

    @cached_property
    def body_lengths(self) -> Ints:
        return self.field("entry_body_length" if self.context.content == "entry" else "body_length")

    @cached_property
    def body_ends(self) -> Ints:
        return self.body_begins + self.body_lengths

    @cached_property
    def tails(self) -> Tails:
        """The bounds of topics and properties; for records with a broken head, arbitrary places."""
        at = np.clip(self.body_ends, 0, len(self.window) - 1) if self.broken.any() else self.body_ends
        return tails_of(self.window, self.field("magic"), at)

    @cached_property
    def properties(self) -> PropertyTexts:
        """The property strings of intact records, each with the preceding byte, which is replaced by the separator."""
        strings = slices(self.buffer, self.tails.property_begins - 1, self.ends)
        _, offsets, values = strings.buffers()
        bounds = np.frombuffer(offsets, np.int32, len(strings) + 1, strings.offset * 4).astype(np.int64)
        end = int(bounds[-1])
        text = np.empty(end + len(PADDING), np.uint8)
        text[:end] = np.frombuffer(values, np.uint8, end)
        text[end:] = np.frombuffer(PADDING, np.uint8)
        text[bounds[:-1]] = text[end]
        return PropertyTexts(text, bounds[1:])

    # -- whether they are whole --------------------------------------------------------------------------------------

    @cached_property
    def broken(self) -> Mask:
        """Records whose head is inconsistent with itself or its position: only their positions are reliable."""
        broken = self.ends > len(self.window)
        if self.context.framing == "entry":
            broken |= self.field("entry_magic") != _NORMAL
            broken |= self.sizes != self.field("entry_body_length") + ENTRY_HEADER_BYTES
            broken |= self.field("entry_position") != self.positions
            if self.context.content == "entry":
                broken |= self.sizes < ENTRY_HEADER_BYTES
                return broken
            broken |= self.field("size") != self.field("entry_body_length")
        magic = self.field("magic")
        unknown = magic != MESSAGE_MAGIC
        if unknown.any():
            broken |= unknown & (magic != MESSAGE_MAGIC_V2)
        broken |= self.field("physical_offset") != self.message_starts + self.context.base
        broken |= self.body_lengths < 0
        broken |= self.body_ends + LENGTHS_BYTES > self.ends  # so it is no shorter than the smallest message
        return broken

    @cached_property
    def broken_tail(self) -> Mask:
        """Records whose topic and properties do not match the length left by the head."""
        if self.context.content == "entry":
            return np.zeros(len(self), np.bool_)
        return ~self.tails.fill(self.field("magic"), self.ends)

    def problem(self, row: int) -> str:
        """The problem of a broken record, as a clause."""
        if self.context.framing == "entry":
            for name, wanted in (("entry_magic", _NORMAL), ("entry_position", int(self.positions[row]))):
                if int(self.field(name)[row]) != wanted:
                    return f"{name} {int(self.field(name)[row])} where {wanted} was expected"
            size, body = int(self.sizes[row]), int(self.field("entry_body_length")[row])
            if size != body + ENTRY_HEADER_BYTES:
                return f"an entry of {size} bytes claims a body of {body}"
            if self.context.content == "message" and int(self.field("magic")[row]) not in (
                MESSAGE_MAGIC,
                MESSAGE_MAGIC_V2,
            ):
                return "the entry is not a message (recordFormat=entry reads any entry)"
        if int(self.ends[row]) > len(self.window):
            return f"a record of {int(self.sizes[row])} bytes extends beyond the end of its part of the log"
        return "inconsistent lengths and positions in the message"


def rows_of(
    window: Bytes, starts: Ints, context: DecodeContext, suspect: Mask | None = None, told: Ints | None = None
) -> Records:
    """The records at ``starts`` except NOOPs, which never yield rows.

    Entries whose NOOP magic number may be damaged are kept as broken: ``suspect`` ones, those with another magic number
    in the index (``told``), and those that contain a message.
    """
    if context.framing == "plain":
        return Records(window, starts, context, gather(window, starts, MESSAGE[0]))
    head = gather(window, starts, ENTRY if context.content == "entry" else ENTRY_MESSAGE[0])
    magic = head["entry_magic"].astype(np.int32)
    normal = magic == _NORMAL
    noop = normal & (head["entry_channel"].astype(np.int32) == NOOP_CHANNEL)
    if not normal.all():
        others = np.flatnonzero((magic == _NOOP) | (magic == _CONFIG_CHANGE))
        noop[others] = ~_once_normal(head[others], context, None if told is None else told[others])
    if suspect is not None:
        noop &= ~suspect
    if noop.any():
        starts, head = starts[~noop], head[~noop]
    return Records(window, starts, context, head)


def _once_normal(head: NDArray[np.void], context: DecodeContext, told: Ints | None) -> Mask:
    """Which headers with a NOOP's magic number belong to entries that were not written as NOOPs."""
    found = np.zeros(len(head), np.bool_)
    if told is not None:  # Java, which writes no checksums, marks every entry as normal in its index
        found |= (told == _NORMAL) & ((head["entry_chain_crc"] != 0) | (head["entry_body_crc"] != 0))
    if context.content == "message":
        holds_one = (head["magic"] == MESSAGE_MAGIC) | (head["magic"] == MESSAGE_MAGIC_V2)
        holds_one &= head["size"] == head["entry_body_length"]
        found |= holds_one & (head["physical_offset"] == head["entry_position"] + ENTRY_HEADER_BYTES)
    return found
