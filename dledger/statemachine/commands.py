"""Commands on their way: written as a batch, committed, applied; then their results go to their submitters (S3).

A waiter is registered while the batch is written, under the node's lock, so before it can be committed. It is of an
index *and a term*: entries of another leader that take the place of this one's are not what it waits for.

A repeated command is answered with its first result (S4), from the table of producers and results: a function of the
log, like the state itself: the table of producers is the leader's (``core.producers``), counted here from the same
entries, in the log's time; beside it stand the last results of each. Every member has it, for any may lead next, and it
is a part of every snapshot.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from struct import error as StructError  # noqa: N812  # it is an exception
from typing import Final

from dledger.config import ReplicationConfig
from dledger.core.noop_payload import ProducerSnapshot, Registration, decode_payload, encode_snapshot
from dledger.core.producers import ProducerTable
from dledger.errors import DamagedSnapshotError, DLedgerError, PendingFullError, ResultForgottenError
from dledger.records import record
from dledger.rpc.clients.group_codec import NUMBERED_COMMANDS_MAX
from dledger.types import AppendedBatch, Body, LogIndex, ProducerBatch, Term
from dledger.values import MIB

RESULTS_KEPT: Final = NUMBERED_COMMANDS_MAX
"""Of each producer, so that a repeated request finds all of them."""
PRODUCER_RESULT_BYTES_MAX: Final = 256 * 1024
"""Of each producer's results; the last one is kept whatever its size."""
RESULT_BYTES_MAX: Final = 64 * MIB
"""Of all results; beyond it, those of the producer that has been idle longest are forgotten."""
_LENGTH: Final = Struct(">I")
_RESULTS: Final = Struct(">IH")
_RESULT: Final = Struct(">QI")

_Result = tuple[int, bytes]


@record(frozen=True, slots=True)
class DuplicatesView:
    """The table at one entry, to be written."""

    producers: ProducerSnapshot
    results: tuple[tuple[int, tuple[_Result, ...]], ...]
    """By slot, least recently active first; each producer's by sequence."""

    def encode(self) -> Iterator[bytes]:
        """The content of a snapshot's file ``producers``, in parts."""
        table = encode_snapshot(self.producers.next_slot, self.producers.producers)
        yield _LENGTH.pack(len(table)) + table + _LENGTH.pack(len(self.results))
        for slot, results in self.results:
            parts = [_RESULTS.pack(slot, len(results))]
            for sequence, result in results:
                parts += (_RESULT.pack(sequence, len(result)), result)
            yield b"".join(parts)


class Duplicates:
    """The table, as of the entries given to it. For the applier's thread."""

    def __init__(self, config: ReplicationConfig) -> None:
        self._table = ProducerTable(config)
        self._results: OrderedDict[int, deque[_Result]] = OrderedDict()  # by slot, least recently active first
        self._sizes: dict[int, int] = {}
        self._bytes = 0

    def note_noop(self, body: bytes, index: LogIndex, time_ms: int) -> None:
        """A NOOP may say who the producers are. Raises ``UnreadablePayloadError``."""
        payload = decode_payload(body)
        table = self._table
        if isinstance(payload, Registration):
            known = table.find(payload.name)
            for slot in (payload.dropped, payload.slot, 0 if known is None else known.slot):
                self._forget(slot)
            table.register(payload, index, 0, time_ms)
        elif isinstance(payload, ProducerSnapshot):
            names = {slot: one.name for slot in self._results if (one := table.at_slot(slot)) is not None}
            table.load(payload, time_ms)
            for slot in list(self._results):
                now = table.at_slot(slot)
                if now is None or now.name != names.get(slot):
                    self._forget(slot)

    def note(self, slot: int, index: LogIndex, count: int, time_ms: int) -> tuple[str, int]:
        """Consecutive entries carry a producer's slot: its name, and the first one's number; "" and -1 if not known."""
        producer = self._table.at_slot(slot)
        if producer is None:
            return "", -1
        sequence = producer.next_sequence
        self._table.note(producer, index, count, time_ms)
        return producer.name, sequence

    def store(self, slot: int, sequence: int, results: Sequence[bytes]) -> None:
        """The results of consecutive entries of a producer, from the number ``sequence`` on.

        The same is kept however they are divided: what gives way to those that are not kept would, one by one.
        """
        if len(results) > RESULTS_KEPT and self._bytes + sum(map(len, results)) <= RESULT_BYTES_MAX:
            sequence += len(results) - RESULTS_KEPT
            results = results[-RESULTS_KEPT:]
        for result in results:
            self._store(slot, sequence, result)
            sequence += 1

    def _store(self, slot: int, sequence: int, result: bytes) -> None:
        kept = self._results.get(slot)
        if kept is None:
            kept = self._results[slot] = deque()
            self._sizes[slot] = 0
        kept.append((sequence, result))
        self._add(slot, len(result))
        while len(kept) > RESULTS_KEPT or (len(kept) > 1 and self._sizes[slot] > PRODUCER_RESULT_BYTES_MAX):
            self._add(slot, -len(kept.popleft()[1]))
        self._results.move_to_end(slot)
        while self._bytes > RESULT_BYTES_MAX and len(self._results) > 1:
            self._forget(next(iter(self._results)))

    def find(self, name: str, sequence: int) -> bytes | None:
        """The result of a producer's entry; None if it is not kept (any more)."""
        producer = self._table.find(name)
        if producer is None:
            return None
        return next((result for number, result in self._results.get(producer.slot, ()) if number == sequence), None)

    def _add(self, slot: int, size: int) -> None:
        self._sizes[slot] += size
        self._bytes += size

    def _forget(self, slot: int) -> None:
        if self._results.pop(slot, None) is not None:
            self._bytes -= self._sizes.pop(slot)

    # -- snapshots -----------------------------------------------------------------------------------------------

    def view(self, time_ms: int) -> DuplicatesView:
        """A copy of the present content."""
        results = tuple((slot, tuple(kept)) for slot, kept in self._results.items())
        return DuplicatesView(self._table.copy(time_ms), results)

    def load(self, content: bytes, time_ms: int) -> ProducerSnapshot:
        """Replace it by what a snapshot's file holds; returns its producers. Raises ``DamagedSnapshotError``."""
        try:
            producers, results = _decode(content)
        except (StructError, ValueError) as error:
            raise DamagedSnapshotError(f"the producers of a snapshot are malformed: {error}") from error
        self._results.clear()
        self._sizes.clear()
        self._bytes = 0
        self._table.load(producers, time_ms)
        for slot, kept in results:
            for sequence, result in kept if self._table.at_slot(slot) is not None else ():
                self._store(slot, sequence, result)
        return producers


def _decode(content: bytes) -> tuple[ProducerSnapshot, list[tuple[int, list[_Result]]]]:
    (length,) = _LENGTH.unpack_from(content)
    at = _LENGTH.size + length
    producers = decode_payload(content[_LENGTH.size : at])
    if not isinstance(producers, ProducerSnapshot):
        raise ValueError("no table")  # noqa: TRY004 - what is wrong is the content
    (count,) = _LENGTH.unpack_from(content, at)
    at += _LENGTH.size
    found: list[tuple[int, list[_Result]]] = []
    for _ in range(count):
        slot, results = _RESULTS.unpack_from(content, at)
        at += _RESULTS.size
        kept: list[_Result] = []
        for _ in range(results):
            sequence, size = _RESULT.unpack_from(content, at)
            at += _RESULT.size
            kept.append((sequence, content[at : at + size]))
            at += size
        found.append((slot, kept))
    if at != len(content):
        raise ValueError(f"{at} of {len(content)} bytes")
    return producers, found


CommandDone = Callable[[tuple[bytes, ...] | DLedgerError], None]


class CommandBatch:
    """One request's commands. A ``PreparedAppend``, whose methods run under the node's lock.

    ``done`` gets one result for each command, or the error, exactly once, on any thread.
    """

    def __init__(
        self, waiters: Waiters, commands: Sequence[Body], producer: ProducerBatch | None, done: CommandDone
    ) -> None:
        self._waiters = waiters
        self._commands = commands
        self._producer = producer
        self._done = [done]
        self._term = Term(0)
        self._at: tuple[LogIndex, Term] | None = None
        self._stored = 0
        self.results: list[bytes] = []
        """Of its new entries, as far as they are applied."""

    def bodies(self, term: Term, stored: int = 0) -> Sequence[Body]:
        self._term, self._stored = term, stored
        return self._commands[stored:] if stored else self._commands

    def placed(self, batch: AppendedBatch | None) -> None:
        if batch is not None:
            self._at = batch.first_index, self._term
            self._waiters.register(self._at, self)

    @property
    def awaits(self) -> tuple[LogIndex, Term] | None:
        """The entry whose result comes next; None before it is written."""
        if self._at is None:
            return None
        index, term = self._at
        return LogIndex(index + len(self.results)), term

    @property
    def wanted(self) -> int:
        """The number of its new entries."""
        return len(self._commands) - self._stored

    @property
    def count(self) -> int:
        """The number of its commands."""
        return len(self._commands)

    def failed(self, error: DLedgerError) -> None:
        """The append failed, or may have: if it is applied nevertheless, nobody waits for it."""
        if self._at is not None:
            self._waiters.forget(self._at, self)
        self._finish(error)

    def applied(self, duplicates: Duplicates) -> None:
        """All its entries are applied; those stored earlier have their first results. On the applier's thread."""
        first: list[bytes] = []
        if self._producer is not None:
            for number in range(self.count - len(self.results)):
                sequence = self._producer.sequence + number
                result = duplicates.find(self._producer.producer, sequence)
                if result is None:
                    self._finish(
                        ResultForgottenError(
                            f"command {sequence} of producer {self._producer.producer!r} was applied, but its result "
                            "is not kept any more: look at the state, and go on with the next one"
                        )
                    )
                    return
                first.append(result)
        self._finish((*first, *self.results))

    def _finish(self, result: tuple[bytes, ...] | DLedgerError) -> None:
        try:
            done = self._done.pop()
        except IndexError:
            return
        self._waiters.release(self.count)
        done(result)


class Waiters:
    """The batches that wait for their results. Thread-safe; its lock is a leaf."""

    def __init__(self, config: ReplicationConfig) -> None:
        self._max: Final = config.pending_entries_max
        self._lock = threading.Lock()  # guards all below
        self._waiting: dict[tuple[LogIndex, Term], CommandBatch] = {}
        self._entries = 0

    def reserve(self, count: int) -> None:
        """Make room for ``count`` commands, until they are released. Raises ``PendingFullError``."""
        with self._lock:
            if self._entries and self._entries + count > self._max:
                raise PendingFullError(
                    f"{self._entries} commands already wait for their results; the limit is {self._max}: slow down and "
                    "retry (pending_entries_max)"
                )
            self._entries += count

    def release(self, count: int) -> None:
        with self._lock:
            self._entries -= count

    def register(self, at: tuple[LogIndex, Term], batch: CommandBatch) -> None:
        """A batch was written from this entry on."""
        with self._lock:
            self._waiting[at] = batch

    def forget(self, at: tuple[LogIndex, Term], batch: CommandBatch) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            if self._waiting.get(at) is batch:
                del self._waiting[at]

    def take(self, at: tuple[LogIndex, Term]) -> CommandBatch | None:
        """The batch that begins with this entry, which is being applied."""
        with self._lock:
            return self._waiting.pop(at, None)

    def take_all(self) -> list[CommandBatch]:
        """All of them: nothing more will be applied."""
        with self._lock:
            taken, self._waiting = list(self._waiting.values()), {}
            return taken

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return self._entries
