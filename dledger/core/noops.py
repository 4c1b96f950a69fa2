"""Entries that belong to no application: how a leader writes them, and the payload they can carry.

A term begins with one, and a leader appends more when producer records are due. In a log whose readers take every body
for one of their records, ``Wrap`` makes it such a record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.config import ServerConfig
from dledger.core.membership import decode_configuration, describe_configuration
from dledger.core.noop_payload import UnreadablePayloadError, decode_payload, decode_time, describe_producers
from dledger.core.ports import Log
from dledger.records import ENTRY_HEADER_BYTES
from dledger.types import NOOP_CHANNEL, AppendedBatch, Magic, Term

Wrap = Callable[[bytes], bytes]
"""From a payload (perhaps empty) to the body that carries it. Adds the same number of bytes to any payload."""


class Noops:
    """Writes no-op entries for one member."""

    def __init__(self, config: ServerConfig, wrap: Wrap | None) -> None:
        replication = config.replication
        self._form: Final = (Magic.NORMAL, NOOP_CHANNEL) if replication.noop_compatible else (Magic.NOOP, 0)
        self._body_bytes_max = config.store.entry_bytes_limit - ENTRY_HEADER_BYTES
        self._wrap: Wrap = wrap or (lambda payload: replication.noop_body + payload)

    @property
    def room(self) -> int:
        """The limit of a payload's bytes."""
        return self._body_bytes_max - len(self._wrap(b""))

    def append(self, log: Log, term: Term, payload: bytes) -> AppendedBatch:
        """Append a no-op as leader of ``term``. Raises ``DiskFullError`` and ``EntryTooLargeError``."""
        magic, channel = self._form
        return log.append_as_leader(term, [self._wrap(payload)], magic, channel=channel)


def describe_payload(body: bytes) -> str:
    """The payload in a NOOP's body, for people; empty if there is none."""
    try:
        configuration = decode_configuration(body)
        producers = decode_payload(body)
        time_ms = decode_time(body)
    except UnreadablePayloadError as error:
        return str(error)
    if configuration is not None:
        return describe_configuration(configuration)
    if time_ms is not None:
        return f"time: {time_ms} ms"
    return "" if producers is None else describe_producers(producers)
