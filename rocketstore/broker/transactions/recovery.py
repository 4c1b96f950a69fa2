"""Reads from the log which transactions are open: what a new master must know before it ends one.

A transaction has ended if its op is in the log, or its commit: a master may have died after the commit and before the
op. Ops are in a queue of their own; commits are anywhere in the log, behind the half that they belong to. Memory: one
bit for each half from the oldest open one on, and the open ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dledger.errors import CorruptLogError, InvalidRequestError, ShutdownError
from dledger.records import record as data_record
from rocketstore.broker.transactions.checks import Rounds, decode_rounds
from rocketstore.broker.transactions.halves import Half, OpenHalves, half_of, op_target
from rocketstore.message.columns import RecordColumns, topics_of
from rocketstore.message.message import SYS_FLAG_COMMITTED, SYS_FLAG_TRANSACTION, Message
from rocketstore.message.properties import encode_properties
from rocketstore.message.record import decode_record
from rocketstore.store.message_store import MessageStore
from rocketstore.types import HALF_TOPIC, OP_TOPIC, TRANSACTION_CHECKS_TOPIC, GetMessageStatus, RecordHead

READ_AT_ONCE: Final = 256
SCAN_BYTES: Final = 1024 * 1024
_SCAN_BYTES_MAX: Final = 64 * SCAN_BYTES

_log = logging.getLogger("rocketstore")


class StoppedError(Exception):
    """Raised when nobody wants the result any more."""


@data_record(frozen=True, slots=True)
class Begin:
    """From where to read: queue offsets of halves and ops before which everything has ended."""

    half: int
    op: int


def recover(store: MessageStore, begin: Begin, scanned: int, check: Callable[[], None]) -> tuple[OpenHalves, int]:
    """The open transactions, and the next queue offset of the ops. ``check`` raises ``StoppedError``.

    ``scanned`` is a position before which every commit has its op. Only once everything in the log is dispatched.
    Raises ``CorruptLogError``, ``ShutdownError``.
    """
    first = max(begin.half, store.min_offset(HALF_TOPIC, 0), 0)
    end = store.max_offset(HALF_TOPIC, 0)
    position = store.dispatch_position
    halves = OpenHalves()
    halves.next_offset = min(first, end)
    op_end = store.max_offset(OP_TOPIC, 0)
    if first >= end:
        return halves, op_end
    ended = bytearray((end - first + 7) // 8)
    for found in _messages(store, OP_TOPIC, max(begin.op, store.min_offset(OP_TOPIC, 0), 0), op_end, check):
        if found is None:  # its commit must be found instead
            scanned = 0
            continue
        target = op_target(found) - first
        if 0 <= target < end - first:
            ended[target >> 3] |= 1 << (target & 7)
    for message in _messages(store, HALF_TOPIC, first, end, check):
        if message is None:
            continue
        at = message.queue_offset - first
        if not ended[at >> 3] >> (at & 7) & 1:
            text = encode_properties(message.properties)
            halves.add(half_of(message.queue_offset, message.offset, message.store_timestamp, text))
    halves.next_offset = end
    if len(halves):
        oldest = next(iter(halves)).offset
        for heads in _scanned(store, max(oldest, scanned), position, check):
            for head in commits_in(heads):
                halves.committed(head.prepared_offset, head.offset)
    return halves, op_end


def holds_end(store: MessageStore, half: Half, begin: int, end: int, check: Callable[[], None]) -> bool:
    """Whether the log has a commit of this half, or an op, between these positions, which must be readable."""
    for heads in _scanned(store, begin, end, check):
        if any(one.prepared_offset == half.offset for one in commits_in(heads)):
            return True
        for head in heads if OP_TOPIC in topics_of(heads) else ():
            record = store.read_record(head.offset) if head.topic == OP_TOPIC else None
            message = None if record is None else _decoded(record)
            if message is not None and op_target(message) == half.queue_offset:
                return True
    return False


def read_rounds(store: MessageStore) -> Rounds:
    """The rounds of checks that the last master has stored."""
    end = store.max_offset(TRANSACTION_CHECKS_TOPIC, 0)
    if end:
        for message in _messages(store, TRANSACTION_CHECKS_TOPIC, end - 1, end, lambda: None):
            if message is not None:
                return decode_rounds(message.body)
    return Rounds()


def commits_in(heads: Sequence[RecordHead]) -> list[RecordHead]:
    """The committed transactional messages among these records."""
    if isinstance(heads, RecordColumns):  # ordinary records only
        return []
    return [one for one in heads if one.sys_flag & SYS_FLAG_TRANSACTION == SYS_FLAG_COMMITTED]


def _messages(
    store: MessageStore, topic: str, first: int, end: int, check: Callable[[], None]
) -> Iterator[Message | None]:
    """The messages of a queue; None in the place of those that are damaged for good."""
    while first < end:
        check()
        try:
            found = store.get(topic, 0, first, max_count=min(READ_AT_ONCE, end - first))
        except CorruptLogError as damage:
            if damage.index is not None and store.log.is_repaired:  # it will be repaired
                raise
            _log.error("transactions: %s message %d is passed over: %s", topic, first, damage)
            yield None
            first += 1
            continue
        if found.status is GetMessageStatus.FOUND:
            yield from map(_decoded, found.records)
        elif found.next_offset <= first:
            raise ShutdownError(f"{topic} cannot be read from {first}: {found.status}")
        first = max(found.next_offset, first)


def _decoded(record: bytes) -> Message | None:
    try:
        return decode_record(record)
    except InvalidRequestError as damage:
        _log.error("transactions: a record is passed over: %s", damage)
        return None


def _scanned(store: MessageStore, at: int, end: int, check: Callable[[], None]) -> Iterator[Sequence[RecordHead]]:
    """Read the log between these positions."""
    at = max(at, store.log.min_offset)
    began, told = at, at
    while at < end:
        check()
        scanned = store.log.scan(at, SCAN_BYTES)
        if scanned.next_offset <= at:
            scanned = store.log.scan(at, _SCAN_BYTES_MAX)
        if scanned.next_offset <= at:
            raise ShutdownError(f"the log cannot be read from {at}")
        yield scanned.heads
        at = scanned.next_offset
        if at - told > 1 << 30:
            told = at
            _log.info("transactions: looking for commits: %d of %d MiB", (at - began) >> 20, (end - began) >> 20)
