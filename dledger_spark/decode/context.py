"""What the decoder must know beside the bytes. Pickles, since it travels to executors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dledger_spark.options import PropertiesFormat, SchemaStyle, VerifyCrc
from rocketstore.message.walk import Framing

Content = Literal["message", "entry"]
"""What a record holds: one of RocketMQ's messages, or bytes that only their writer understands."""

Chain = tuple[int, int]
"""The chain checksum that an entry stores, and the one that it should: they differ if its header is damaged."""
CHAIN_BEGIN: Final[Chain] = (0, 0)
"""Before the first entry of all."""


class RowFilter(Protocol):
    """Which rows are wanted, decided by some of their columns before the others are computed."""

    @property
    def columns(self) -> Sequence[str]:
        """What ``keeps`` looks at."""
        ...

    @property
    def keeps_broken(self) -> bool:
        """Whether records stay that are too damaged to be judged (``verifyCrc=column``)."""
        ...

    def keeps(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """For each row whether it is wanted."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeContext:
    """Where the bytes are from, and how to read them."""

    framing: Framing = "entry"
    content: Content = "message"
    base: int = 0
    """The position in the log of the first byte of the data."""
    segment: str = ""
    """The file's name: the column ``segment``, and in errors."""
    segment_base: int = 0
    """The position in the log of the segment's first byte: errors tell offsets in the file."""
    verify_crc: VerifyCrc = "false"
    chain_before: Chain | None = None
    """The chain checksum of the entry before the first one, if it is known; for whoever checks checksums."""
    schema_style: SchemaStyle = "default"
    properties_format: PropertiesFormat = "map"
    filters: tuple[RowFilter, ...] = ()
