"""Exactly-once append: the leader's table of producers, and its representation in the log.

A *producer* is a name with a count of its entries. A batch carries the number of its first entry (its *sequence*); the
leader compares it with the producer's next number in the leader's **whole** log, committed or not:

- equal: all entries are new;
- lower: the first entries are already stored, and only the rest is appended;
- higher: entries are missing in between, so nothing is appended (``OutOfOrderSequenceError``).

The log records it, so that any later leader knows the same:

- a *registration*, the payload of a NOOP, gives a producer a *slot*;
- every entry of a producer carries its slot in the header's ``channel`` field, so that the producer's sequence is the
  count of such entries since the registration;
- a *snapshot*, the payload of another NOOP, holds the whole table, so that no leader has to look further back.

The table is a function of the log, and exists on leaders only: it is rebuilt at every election (``rebuild``), and
nothing is ever undone in it, because a leader never truncates its own log. Followers do nothing for it.

How far back a new leader looks is bounded: a snapshot, or the first registration, is followed by another snapshot at
the latest ``SNAPSHOT_ENTRIES_MAX`` entries or ``SNAPSHOT_BYTES`` later, plus one batch, as long as there are producers;
a new leader writes the one that its predecessor owes first of all. If the bound (or the log's begin) is reached without
one, there were none, and the registrations after that point are all there are.

Time is the leader's monotonic clock; snapshots hold how long each producer was idle, not dates: the clocks of two
members may differ by days, and a client forgotten too early could store entries twice.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from dledger.config import ReplicationConfig, ServerConfig
from dledger.core.noop_payload import (
    EMPTY_SNAPSHOT_BYTES,
    PRODUCER_BYTES,
    RUN_BYTES,
    SLOT_MAX,
    Payload,
    ProducerRecord,
    ProducerSnapshot,
    Registration,
    RunRecord,
    UnreadablePayloadError,
    account_of,
    check_name,
    decode_payload,
    encode_snapshot,
    is_made_up,
    stream_batch,
)
from dledger.core.ports import Log, ProducersAt
from dledger.errors import (
    DLedgerError,
    InvalidRequestError,
    OutOfOrderSequenceError,
    TooManyProducersError,
    UnknownProducerError,
)
from dledger.records import record
from dledger.types import NO_INDEX, NOOP_CHANNEL, LogIndex, ProducerBatch, StoredRun
from dledger.values import MIB

RUNS_KEPT: Final = 32
"""Runs per producer that the leader remembers, to answer where repeated entries are."""
_RUNS_WRITTEN: Final = 16
"""The limit of them in a snapshot: more than a producer of messages has requests in flight (12); a client of the log
may have 32.
"""
_SNAPSHOT_ENTRIES_PER_PRODUCER: Final = 32
SNAPSHOT_ENTRIES_MAX: Final = 131_072
SNAPSHOT_BYTES: Final = 32 * MIB
"""The limit of log bytes, including bodies, between two snapshots: what a new leader reads is in memory."""
SNAPSHOT_REGISTRATIONS: Final = 1024
_SNAPSHOTS_PER_EXPIRY: Final = 16
"""How often to write one while appends come: a change of leader loses at most this fraction of
``producer_expiry_ms`` of idle times.
"""
BATCH_ENTRIES_MAX: Final = 65_536
"""Entries of one batch; more are refused, because the search back must be bounded."""
BATCH_BYTES_MAX: Final = 32 * MIB
"""Bytes of a batch of several entries, for the same reason."""
EVICTION_IDLE_MS: Final = 600_000
"""A producer active within this time keeps its place; no client repeats an append for so long."""
ENDED_BATCH_IDLE_MS: Final = 120_000
"""The same for a task of a stream's ended batch, towards its stream's next ones: a straggler may still send."""
_ACCOUNT_SHARE_PERCENT: Final = 75
"""The share of all producers that one account may have: beyond it, a new one replaces one of its own."""
_WALK_ENTRIES: Final = SNAPSHOT_ENTRIES_MAX + BATCH_ENTRIES_MAX
_WALK_BYTES: Final = SNAPSHOT_BYTES + 3 * BATCH_BYTES_MAX
"""Blanks at the ends of segments can make a batch twice as long in the log."""
_CHUNK_ENTRIES: Final = 8192


@dataclass(slots=True)
class KnownProducer:
    """A producer that the leader knows."""

    name: str
    slot: int
    next_sequence: int
    active_ms: int
    runs: deque[RunRecord]


@record(frozen=True, slots=True)
class Plan:
    """The plan for a batch: the first ``stored`` of its entries are in the log, up to ``stored_index``."""

    producer: KnownProducer | None
    """None: it must be registered first."""
    stored: int
    stored_index: LogIndex
    duplicates: tuple[StoredRun, ...]


class ProducerTable:
    """All producers of one leadership. Under the node's lock."""

    def __init__(self, config: ReplicationConfig, segment_bytes: int = sys.maxsize) -> None:
        self._segment_bytes = segment_bytes
        self._max = config.max_producers
        self._expiry_ms = config.producer_expiry_ms
        self._snapshot_entries = config.producer_snapshot_entries
        self._by_name: dict[str, KnownProducer] = {}  # least recently active first
        self._made_up: dict[str, KnownProducer] = {}  # those with client-generated names, in the same order
        self._by_slot: dict[int, KnownProducer] = {}
        self._of_account: Counter[str] = Counter()
        self._next_slot = 1
        self._bytes = EMPTY_SNAPSHOT_BYTES  # of a snapshot with a single run of each
        self._registrations = 0
        self._due: tuple[int, int, int] | None = None  # entry, position and time of the next snapshot; None: not needed

    def __len__(self) -> int:
        return len(self._by_name)

    # -- what a batch means --------------------------------------------------------------------------------------

    def plan(self, batch: ProducerBatch, count: int) -> Plan | DLedgerError:
        """The part of a batch of ``count`` entries to append, or why there is none. Changes nothing."""
        producer = self._by_name.get(batch.producer)
        sequence = batch.sequence
        if producer is None:
            return self._plan_new(batch)
        expected = producer.next_sequence
        if sequence == expected:
            return Plan(producer, 0, NO_INDEX, ())
        if sequence > expected:
            return OutOfOrderSequenceError(
                f"producer {batch.producer!r} is at sequence {expected}: an append at {sequence} would leave a gap; "
                "send the missing entries first"
            )
        if sequence < 0:
            return InvalidRequestError(f"sequence {sequence} of producer {batch.producer!r} must not be negative")
        stored = min(expected - sequence, count)
        duplicates, last = _stored_runs(producer, sequence, stored)
        return Plan(producer, stored, last, duplicates)

    def _plan_new(self, batch: ProducerBatch) -> Plan | DLedgerError:
        try:
            check_name(batch.producer)
        except InvalidRequestError as error:
            return error
        if batch.sequence < 0:
            return InvalidRequestError(f"sequence {batch.sequence} of producer {batch.producer!r} must not be negative")
        if batch.sequence:
            return UnknownProducerError(
                f"producer {batch.producer!r} is unknown here, or was forgotten: it cannot continue at sequence "
                f"{batch.sequence}; start at 0, under a new name if this one was used before"
            )
        return Plan(None, 0, NO_INDEX, ())

    def at_slot(self, slot: int) -> KnownProducer | None:
        """The producer whose entries carry this slot."""
        return self._by_slot.get(slot)

    def find(self, name: str) -> KnownProducer | None:
        """The producer of this name."""
        return self._by_name.get(name)

    def next_sequence(self, name: str) -> int:
        """The number of the producer's next entry; 0 if it is not known."""
        producer = self._by_name.get(name)
        return 0 if producer is None else producer.next_sequence

    def ask(self, name: str, now_ms: int) -> int:
        """``next_sequence`` for the producer itself, which thereby counts as active."""
        producer = self._by_name.get(name)
        if producer is not None:
            self.touch(producer, now_ms)
        return self.next_sequence(name)

    # -- changes, each written to the log first ------------------------------------------------------------------

    def registration(self, name: str, room: int, now_ms: int) -> Registration | TooManyProducersError:
        """The registration to write for a new producer; ``room``: the limit of a snapshot's bytes."""
        dropped = 0
        account = account_of(name)
        share = max(1, self._max * _ACCOUNT_SHARE_PERCENT // 100)
        if account and self._of_account[account] >= share:
            idle = self._giving_way(name, room - _size_of(name), now_ms, account)
            if idle is None:
                return TooManyProducersError(
                    f"{self._of_account[account]} producers of this account were active in the last "
                    f"{EVICTION_IDLE_MS // 60_000} minutes, the limit per account ({_ACCOUNT_SHARE_PERCENT} % of "
                    f"max_producers, {self._max}): cannot add {name!r}; let clients live longer"
                )
            dropped = idle.slot
        elif len(self) >= self._max or self._bytes + _size_of(name) > room:
            idle = self._giving_way(name, room - _size_of(name), now_ms)
            if idle is None:
                return TooManyProducersError(
                    f"{len(self)} producers were active in the last {EVICTION_IDLE_MS // 60_000} minutes: cannot add "
                    f"{name!r}; raise max_producers ({self._max}) or max_entry_bytes, or let clients live longer"
                )
            dropped = idle.slot
        return Registration(name, self._free_slot(), dropped)

    def _giving_way(self, newcomer: str, room: int, now_ms: int, account: str = "") -> KnownProducer | None:
        """The producer that makes room for a newcomer, so that the others fit ``room`` bytes: the one idle longest.

        With ``account`` one of that account's.

        For a stream's task, first of all one of the stream's earlier batches: a stream that runs for days has a
        producer per task, and so displaces no others. Then a producer with a client-generated name, which is not used
        again; an application, or a task of a Spark job, may come back after any time, and would store its repeats a
        second time. The registration names the one dropped, so every later leader agrees.
        """
        ended = self._ended_before(newcomer, now_ms)
        if ended is not None and self._bytes - _size_of(ended.name) <= room:
            return ended
        for producers in (self._made_up, self._by_name):
            oldest = next((one for one in producers.values() if one.name.startswith(account)), None)
            if (
                oldest is not None
                and now_ms - oldest.active_ms >= EVICTION_IDLE_MS
                and self._bytes - _size_of(oldest.name) <= room
            ):
                return oldest
        return None

    def _ended_before(self, newcomer: str, now_ms: int) -> KnownProducer | None:
        """The longest idle task of an earlier batch of the newcomer's stream, if the newcomer is a stream's task."""
        batch = stream_batch(newcomer)
        if batch is None:
            return None
        for producer in self._by_name.values():
            if now_ms - producer.active_ms < ENDED_BATCH_IDLE_MS:
                break
            if producer.name.startswith(batch.stream):
                earlier = stream_batch(producer.name)
                if earlier is not None and earlier.stream == batch.stream and earlier.number < batch.number:
                    return producer
        return None

    def _free_slot(self) -> int:
        slot = self._next_slot
        while slot in self._by_slot:
            slot = slot % SLOT_MAX + 1
        return slot

    def register(self, registration: Registration, index: LogIndex, position: int, now_ms: int) -> KnownProducer:
        """A registration was written at ``index``; the log ends at ``position``."""
        name, slot = registration.name, registration.slot
        for stale in (self._by_slot.get(registration.dropped), self._by_slot.get(slot), self._by_name.get(name)):
            if stale is not None:
                self._forget(stale)
        producer = self._add(KnownProducer(name, slot, 0, now_ms, deque(maxlen=RUNS_KEPT)))
        self._next_slot = slot % SLOT_MAX + 1
        self._registrations += 1
        if self._due is None:
            self._plan_snapshot(index, position, now_ms)
        return producer

    def note(self, producer: KnownProducer, first_index: int, count: int, now_ms: int) -> None:
        """``count`` entries of a producer were written from ``first_index`` on."""
        _extend(producer, ((first_index, count),))
        self.touch(producer, now_ms)

    def touch(self, producer: KnownProducer, now_ms: int) -> None:
        """A producer is active: it has repeated an append or asked."""
        producer.active_ms = now_ms
        self._by_name[producer.name] = self._by_name.pop(producer.name)
        if producer.name in self._made_up:
            self._made_up[producer.name] = self._made_up.pop(producer.name)

    # -- snapshots -----------------------------------------------------------------------------------------------

    def snapshot(self, room: int, now_ms: int) -> bytes:
        """The snapshot to write so that no leader needs to look further back; empty if there never was a producer.

        Forgets producers idle for too long, and the oldest if not all fit ``room`` bytes.
        """
        for producer in list(self._by_name.values()):
            if now_ms - producer.active_ms < self._expiry_ms and self._bytes <= room:
                break
            self._forget(producer)
        if not self._by_name and self._next_slot == 1:
            return b""
        runs = _RUNS_WRITTEN
        while runs > 1 and self._bytes + (runs - 1) * RUN_BYTES * len(self) > room:
            runs -= 1
        return encode_snapshot(self._next_slot, self._records(now_ms, runs))

    def copy(self, now_ms: int) -> ProducerSnapshot:
        """All producers, as ``load`` takes them."""
        return ProducerSnapshot(self._next_slot, tuple(self._records(now_ms, _RUNS_WRITTEN)))

    def _records(self, now_ms: int, runs: int) -> list[ProducerRecord]:
        return [
            ProducerRecord(
                one.name, one.slot, one.next_sequence, max(0, now_ms - one.active_ms), tuple(one.runs)[-runs:]
            )
            for one in self._by_name.values()
        ]

    def written(self, index: LogIndex, position: int, now_ms: int) -> None:
        """A snapshot was written at ``index``; the log ends at ``position``."""
        self._registrations = 0
        self._due = None
        if self._by_name:
            self._plan_snapshot(index, position, now_ms)

    def owe_snapshot(self, index: LogIndex, now_ms: int) -> None:
        """The table was loaded from outside the log: the next batch follows a snapshot, as nobody else has it."""
        self._due = (index, 0, now_ms) if self._by_name else None

    def _plan_snapshot(self, index: int, position: int, now_ms: int) -> None:
        entries = max(self._snapshot_entries, _SNAPSHOT_ENTRIES_PER_PRODUCER * len(self))
        pause_ms = max(self._expiry_ms // _SNAPSHOTS_PER_EXPIRY, 1)
        # Also with the first batch in a new segment: the segment before may then be all that retention can remove, and
        # a full disk would leave no room for rewriting what it holds.
        next_segment = (position // self._segment_bytes + 1) * self._segment_bytes
        position = min(position + SNAPSHOT_BYTES, next_segment)
        self._due = (index + min(entries, SNAPSHOT_ENTRIES_MAX), position, now_ms + pause_ms)

    def is_due(self, last_index: LogIndex, position: int, now_ms: int) -> bool:
        """Whether to write a snapshot now that the log ends with ``last_index`` at ``position``."""
        due = self._due
        return due is not None and (
            last_index >= due[0]
            or position >= due[1]
            or now_ms >= due[2]
            or self._registrations >= SNAPSHOT_REGISTRATIONS
        )

    # -- reading the log -----------------------------------------------------------------------------------------

    def load(self, snapshot: ProducerSnapshot, now_ms: int) -> None:
        """Replace the table by a snapshot's."""
        self._by_name.clear()
        self._made_up.clear()
        self._by_slot.clear()
        self._of_account.clear()
        self._bytes = EMPTY_SNAPSHOT_BYTES
        self._next_slot = snapshot.next_slot
        for one in sorted(snapshot.producers, key=lambda one: -one.idle_ms):
            runs = deque(one.runs, maxlen=RUNS_KEPT)
            self._add(KnownProducer(one.name, one.slot, one.next_sequence, now_ms - one.idle_ms, runs))

    def replay(self, found: _Found, log: Log, now_ms: int) -> LogIndex | None:
        """Apply what follows the snapshot, in an empty table or the snapshot's; returns the first registration's index.

        Entries of a producer together, up to the next registration: that is several times faster than one by one, and a
        group that has lost its leader waits for it.
        """
        waiting: dict[int, list[tuple[int, int]]] = {}
        first_registration: LogIndex | None = None
        for channel, first, count in found.runs:
            if channel != NOOP_CHANNEL:
                runs = waiting.get(channel)
                if runs is not None:
                    runs.append((first, count))
                elif channel:
                    waiting[channel] = [(first, count)]
                continue
            for index in map(LogIndex, range(first, first + count)):
                payload = found.payloads.get(index)
                if isinstance(payload, Registration):
                    self._settle(waiting, now_ms)
                    position = log.positions(index, index)[0] if self._due is None else 0
                    self.register(payload, index, position, now_ms)
                    first_registration = index if first_registration is None else first_registration
        self._settle(waiting, now_ms)
        return first_registration

    def _settle(self, waiting: dict[int, list[tuple[int, int]]], now_ms: int) -> None:
        """Note runs (first index and count) by slot, ignoring slots that are not known; the last active one last."""
        for slot, runs in sorted(waiting.items(), key=lambda one: one[1][-1]):
            producer = self._by_slot.get(slot)
            if producer is not None:
                _extend(producer, runs)
                self.touch(producer, now_ms)
        waiting.clear()

    def _add(self, producer: KnownProducer) -> KnownProducer:
        self._by_name[producer.name] = self._by_slot[producer.slot] = producer
        if is_made_up(producer.name):
            self._made_up[producer.name] = producer
        account = account_of(producer.name)
        if account:
            self._of_account[account] += 1
        self._bytes += _size_of(producer.name)
        return producer

    def _forget(self, producer: KnownProducer) -> None:
        if self._by_name.get(producer.name) is producer:
            del self._by_name[producer.name]
            self._made_up.pop(producer.name, None)
            del self._by_slot[producer.slot]
            account = account_of(producer.name)
            if account:
                self._of_account[account] -= 1
                if not self._of_account[account]:
                    del self._of_account[account]
            self._bytes -= _size_of(producer.name)


def _extend(producer: KnownProducer, written: Iterable[tuple[int, int]]) -> None:
    """Note entries of a producer by the first index and length of each run of them, oldest first."""
    runs, sequence = producer.runs, producer.next_sequence
    end = runs[-1][1] + runs[-1][2] if runs else -1
    for first_index, count in written:
        if first_index == end:
            first_sequence, first, length = runs[-1]
            runs[-1] = (first_sequence, first, length + count)
        else:
            runs.append((sequence, first_index, count))
        sequence += count
        end = first_index + count
    producer.next_sequence = sequence


def _size_of(name: str) -> int:
    return PRODUCER_BYTES + len(name) + RUN_BYTES


def _stored_runs(producer: KnownProducer, sequence: int, count: int) -> tuple[tuple[StoredRun, ...], LogIndex]:
    """Where the producer's entries ``[sequence, sequence + count)`` are, and the last index that any of them can have.

    Entries older than the remembered runs lie before the first of them.
    """
    found: list[StoredRun] = []
    runs, end = producer.runs, sequence + count
    first_known, oldest, _ = runs[0] if runs else (producer.next_sequence, 1, 0)
    last = oldest - 1
    if sequence < first_known:
        found.append(StoredRun(LogIndex(0), min(end, first_known) - sequence))
    for first_sequence, first_index, length in runs:
        low, high = max(sequence, first_sequence), min(end, first_sequence + length)
        if low < high:
            first = first_index + low - first_sequence
            found.append(StoredRun(LogIndex(first), high - low))
            last = first + high - low - 1
    return tuple(found), LogIndex(last)


# -- from the log --------------------------------------------------------------------------------------------------


@record(frozen=True, slots=True)
class Rebuilt:
    """The table as of some entry, and the first entry needed to make it (None: there are no producers)."""

    table: ProducerTable
    needed_from: LogIndex | None


@record(frozen=True, slots=True)
class _Found:
    """The result of a search back: runs of entries by channel, oldest first, and the NOOPs' payloads."""

    runs: list[tuple[int, int, int]]
    payloads: dict[int, Payload]
    start: int
    """The newest snapshot's index, or that before the first entry examined."""


def rebuild(
    log: Log, config: ServerConfig, last_index: LogIndex, now_ms: int, base: ProducersAt | None = None
) -> Rebuilt:
    """Rebuild the table from the log, as of ``last_index``. Raises ``UnreadablePayloadError``.

    Reads headers, and the bodies of NOOPs, of a bounded part of the log. ``base``: the table that a state machine's
    snapshot holds. A log that was reset to it may lack the table before, so the search ends there.
    """
    if base is not None and not log.begin.index <= base.index <= last_index:
        base = None
    bottom = log.begin.index if base is None else base.index
    found = _look_back(log, last_index, bottom, _WALK_BYTES + 2 * config.store.entry_bytes_limit)
    table = ProducerTable(config.replication, config.store.segment_bytes)
    newest = found.payloads.get(found.start)
    needed: LogIndex | None = None
    if isinstance(newest, ProducerSnapshot):
        needed = LogIndex(found.start)
        table.load(newest, now_ms)
        table.written(needed, log.positions(needed, needed)[0], now_ms)
    elif base is not None and found.start == base.index:
        table.load(base.producers, now_ms)
        table.owe_snapshot(base.index, now_ms)
    registered = table.replay(found, log, now_ms)
    needed = registered if needed is None else needed
    return Rebuilt(table, needed if len(table) else None)


def _look_back(log: Log, last_index: LogIndex, bottom: LogIndex, walk_bytes: int) -> _Found:
    """Search back from ``last_index`` to the newest snapshot, or as far as one could be, above ``bottom``."""
    lowest = max(bottom + 1, last_index - _WALK_ENTRIES + 1)
    stop_position = log.positions(last_index, last_index)[0] - walk_bytes if last_index >= lowest else 0
    chunks: list[list[tuple[int, int, int]]] = []
    payloads: dict[int, Payload] = {}
    high = int(last_index)
    while high >= lowest:
        low = max(lowest, high - _CHUNK_ENTRIES + 1)
        runs = log.channel_runs(LogIndex(low), LogIndex(high))
        for index in _noops_backwards(runs):
            payload = decode_payload(log.read(index).body)
            if payload is not None:
                payloads[index] = payload
            if isinstance(payload, ProducerSnapshot):
                chunks.append(_after(runs, index))
                return _Found([run for chunk in reversed(chunks) for run in chunk], payloads, index)
        chunks.append(runs)
        high = low - 1
        if log.positions(LogIndex(low), LogIndex(low))[0] < stop_position:
            break
    return _Found([run for chunk in reversed(chunks) for run in chunk], payloads, high)


def _noops_backwards(runs: list[tuple[int, int, int]]) -> Iterator[LogIndex]:
    for channel, first, count in reversed(runs):
        if channel == NOOP_CHANNEL:
            for index in range(first + count - 1, first - 1, -1):
                yield LogIndex(index)


def _after(runs: list[tuple[int, int, int]], index: int) -> list[tuple[int, int, int]]:
    """The part of the runs that follows ``index``."""
    cut: list[tuple[int, int, int]] = []
    for channel, first, count in runs:
        low = max(first, index + 1)
        if low < first + count:
            cut.append((channel, low, first + count - low))
    return cut


def needed_from(log: Log, config: ServerConfig) -> LogIndex | None:
    """The first committed entry needed to rebuild the producer table; None: none is needed.

    Retention must keep it: a member that lost it could be elected, and would store repeated entries a second time.
    """
    try:
        return rebuild(log, config, log.committed_index, 0).needed_from
    except UnreadablePayloadError:
        return _newest_payload(log)


def _newest_payload(log: Log) -> LogIndex | None:
    """The newest NOOP with a payload, readable or not."""
    high = int(log.committed_index)
    while high > log.begin.index:
        low = max(log.begin.index + 1, high - _CHUNK_ENTRIES + 1)
        for index in _noops_backwards(log.channel_runs(LogIndex(low), LogIndex(high))):
            try:
                told = decode_payload(log.read(index).body) is not None
            except UnreadablePayloadError:
                told = True
            if told:
                return index
        high = low - 1
    return None
