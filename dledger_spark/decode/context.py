"""The decoder's parameters besides the bytes. Pickled for executors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dledger_spark.decode.typed_bodies import TypedBodyFormat
from dledger_spark.options import PropertiesFormat, SchemaStyle, VerifyCrc
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
