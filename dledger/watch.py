"""Background maintenance of one node's log: it is verified, compared with the other members' logs, and repaired.

On one thread (``dledger-scrub-<node>``), in this order: repair known damage; every ``COMPARE_INTERVAL_MS`` compare
chain CRCs of committed entries with the peers; verify the next bytes of the log, at ``scrub_bytes_per_s``. It holds no
lock of the node's, and code that finds damage elsewhere (reads, lookups, the core's parts) only reports it.

Comparing finds errors that checksums cannot: two logs that are both intact and differ are two histories. The one that
most voters do not share is fenced. ``open_log`` sets aside a log that cannot be mended, so that peers send it again.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from dledger.clock import Backoff, Clock
from dledger.config import ServerConfig
from dledger.errors import (
    CorruptLogError,
    DiskFullError,
    DLedgerError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    LackingError,
    ShutdownError,
    UnavailableError,
)
from dledger.group_members import had_peers
from dledger.monitoring import ConditionKind, Conditions, Instruments
from dledger.rpc.peers.exchanges import PeerLogClient
from dledger.store.file_store import FileStore
from dledger.store.format import parse_segment_name
from dledger.store.identity import IDENTITY_FILE
from dledger.store.quarantine import set_aside_damaged
from dledger.store.repair import ReadSegment, Repaired, ScrubStep
from dledger.types import BaseLog, LogIndex, NodeId

_log = logging.getLogger("dledger")

COMPARE_INTERVAL_MS: Final = 10_000
FIRST_COMPARE_MS: Final = 2_000
RETRY_MS_MIN: Final = 500
RETRY_MS_MAX: Final = 30_000
STEP_BYTES: Final = 64 * 1024
"""Bytes verified at once: about a millisecond of the interpreter's time."""
_SAMPLES: Final = (0, 4, 8, 12, 16, 20, 24, 28, 32)
"""Peers are asked about the newest committed index rounded down to these powers of two: they may be behind."""


def open_log(
    config: ServerConfig, clock: Clock, instruments: Instruments, continued: BaseLog | None, *, repair: bool
) -> FileStore:
    """Open a member's log. ``repair`` gives up a damaged one, and a fenced one, whose history is not the group's; an
    intact one is kept, because otherwise a forgotten flag could empty it.

    1. All nodes of a group are started with ``repair``, because one of them needed it once.
    2. If every log were set aside, a quorum would be empty, and so take itself for a new group.

    With ``repair`` the whole log is verified: damage older than the last ``recovery_verify_bytes`` is found only by
    a read, which advises ``--repair``; an opening that does not check that part would keep it.
    """
    verified_bytes = sys.maxsize if repair else config.store.recovery_verify_bytes
    store = replace(config.store, recovery_verify_bytes=verified_bytes)
    mend = config.store.auto_repair and had_peers(config) and not repair

    def open_it() -> FileStore:
        return FileStore.open(
            store,
            cluster_id=config.effective_cluster_id,
            group=config.group,
            node_id=config.node_id,
            clock=clock,
            mend=mend,
            instruments=instruments,
            first_position=0 if continued is None else continued.end,
        )

    why: object
    try:
        log = open_it()
        if not (repair and log.hard_state.load().fenced):
            return log
        why = f"fenced: {log.hard_state.load().doubt}"
        log.close()
    except CorruptLogError as error:
        if not (repair or mend) or error.path.name == IDENTITY_FILE:
            raise
        why = error
    aside = set_aside_damaged(config.store, node_id=config.node_id)
    _log.warning("%s: %s. The old log is kept in %s; fetching it again from the peers", config.node_id, why, aside)
    return open_it()


@dataclass(slots=True)
class _Damage:
    path: Path
    error: CorruptLogError
    due_ms: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(RETRY_MS_MIN, RETRY_MS_MAX))
    nobody_has_it: bool = False


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How much it does."""

    scrub_bytes_per_s: int
    auto_repair: bool


class LogWatch:
    """The thread's work, and the receiver of damage reports."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        name: NodeId,
        log: ScrubbedStore,
        peers: PeerLogClient,
        settings: WatchSettings,
        conditions: Conditions,
        clock: Clock,
        *,
        wake: Callable[[], None],
        on_diverged: Callable[[str], None],
        on_whole: Callable[[], bool],
    ) -> None:
        """``wake`` makes the thread step soon.

        ``on_diverged`` is called whenever it finds that most members hold another history than this one, ``on_whole``
        when no damage is left that a peer may still mend; it returns False to be called again after a pause.
        """
        self._name = name
        self._own = log
        self._peers = peers
        self._settings = settings
        self._conditions = conditions
        self._clock = clock
        self._lock = threading.Lock()  # guards _damaged
        self._damaged: dict[int, _Damage] = {}
        self._compare_due_ms = clock.monotonic_ms() + FIRST_COMPARE_MS
        self._scrub_due_ms = clock.monotonic_ms()
        self._whole_due_ms: int | None = None
        self._stopping = False
        self._pass_began_ms = clock.monotonic_ms()
        self._wake = wake
        self._on_diverged = on_diverged
        self._on_whole = on_whole

    def stop(self) -> None:
        """Abort what is in progress soon."""
        self._stopping = True

    @property
    def is_whole(self) -> bool:
        """Whether no damage is known, or none that any answering member could mend."""
        with self._lock:
            return all(one.nobody_has_it for one in self._damaged.values())

    def note_damage(self, error: CorruptLogError) -> None:
        """Record damage; from any thread, also under the node's lock."""
        base = self._own.base_of(error.path)
        if base is None:
            self._conditions.set(ConditionKind.DAMAGED, _where(error), subject=str(error.path), for_ms=2 * RETRY_MS_MAX)
            return
        with self._lock:
            known = base in self._damaged
            if not known:
                self._damaged[base] = _Damage(error.path, error)
        if not known:
            self._conditions.set(ConditionKind.DAMAGED, _where(error), subject=str(error.path))
            self._wake()

    # -- the thread ------------------------------------------------------------------------------------------------

    def step(self) -> int | None:
        """Do what is due; returns when there is more to do."""
        try:
            due = [self._repair_due(), self._compare(), self._scrub()]
        except ShutdownError:
            return None
        except CorruptLogError as damage:  # found at the end of what can be verified
            self.note_damage(damage)
            return self._clock.monotonic_ms() + RETRY_MS_MIN
        return min((one for one in due if one is not None), default=None)

    def _pause(self) -> None:
        if self._stopping:
            raise ShutdownError("this node is stopping")

    def _scrub(self) -> int | None:
        rate = self._settings.scrub_bytes_per_s
        if not rate:
            return None
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._scrub_due_ms:
            return self._scrub_due_ms
        step = self._own.verify(STEP_BYTES)
        if step.damage is not None:
            self.note_damage(step.damage)
            return now_ms
        if step.finished:
            _log.debug("%s: the whole log was verified in %d s", self._name, (now_ms - self._pass_began_ms) // 1000)
            self._pass_began_ms = now_ms
            self._scrub_due_ms = now_ms + max(1000, STEP_BYTES * 1000 // rate)
        else:
            self._scrub_due_ms = now_ms + max(1, step.read_bytes * 1000 // rate)
        return self._scrub_due_ms

    # -- repair ----------------------------------------------------------------------------------------------------

    def _repair_due(self) -> int | None:
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            damaged = sorted(self._damaged.items())
        if not damaged and self._whole_due_ms is None:
            return None
        for base, one in damaged:
            with self._lock:
                is_left = base in self._damaged  # the repair of the segment before it may have mended it as well
            if is_left and one.due_ms <= now_ms:
                self._repair(base, one)
        with self._lock:
            left = list(self._damaged.values())
        due = [one.due_ms for one in left]
        if all(one.nobody_has_it for one in left):
            due += self._tell_whole(now_ms)
        return min(due, default=None)

    def _tell_whole(self, now_ms: int) -> list[int]:
        """Returns when to tell again. Damage behind the committed part is found whenever that is read, and cannot be
        mended yet: without a pause, it would be read again and again.
        """
        if self._whole_due_ms is None or self._whole_due_ms <= now_ms:
            self._whole_due_ms = None if self._on_whole() else now_ms + RETRY_MS_MIN
        return [] if self._whole_due_ms is None else [self._whole_due_ms]

    def _repair(self, base: int, damage: _Damage) -> None:
        subject = str(damage.path)
        tried: list[str] = []
        lacking = asked = 0
        for peer in self._peers.peers if self._settings.auto_repair else ():
            self._pause()
            self._conditions.set(ConditionKind.REPAIRING, f"fetching it from {peer}", subject=subject)
            try:
                repaired = self._own.repair(base, partial(self._peers.read_log, peer), self._pause)
            except LackingError as error:
                lacking, asked = lacking + 1, asked + 1
                tried.append(f"{peer}: {error}")
            except UnavailableError as error:
                tried.append(str(error))
            except DiskFullError as error:
                tried.append(str(error))
                break
            except ShutdownError:
                raise
            except DLedgerError as error:
                asked += 1
                tried.append(f"{peer}: {error}")
            else:
                self._repaired(base, damage, repaired, peer)
                return
        self._conditions.clear(ConditionKind.REPAIRING, subject)
        self._not_repaired(base, damage, tried, nobody_has_it=bool(asked) and lacking == asked)

    def _repaired(self, base: int, damage: _Damage, repaired: Repaired, peer: NodeId) -> None:
        with self._lock:
            gone = {one: self._damaged.pop(one) for one in (base, *repaired.bases) if one in self._damaged}
        if repaired.bases:
            kept = f"; the old content is kept in {repaired.quarantine}" if repaired.quarantine is not None else ""
            text = "%s: repaired %s with data from %s%s"
            extra = {"event": "repair", "file": str(damage.path), "from": peer}
            _log.warning(text, self._name, damage.path, peer, kept, extra=extra)
        for one in gone.values():
            for kind in (ConditionKind.REPAIRING, ConditionKind.DAMAGED):
                self._conditions.clear(kind, str(one.path))

    def _not_repaired(self, base: int, damage: _Damage, tried: list[str], *, nobody_has_it: bool) -> None:
        """Wait longer each time; drop damage that has disappeared (by retention, or a late report)."""
        found = self._own.find(base, self._pause)
        if found is None:
            self._repaired(base, damage, _NOTHING, self._name)
            return
        damage.nobody_has_it = nobody_has_it
        damage.due_ms = self._clock.monotonic_ms() + round(damage.backoff.pause())
        advice = "; ".join(tried) if tried else "not repaired: no peer to fetch it from"
        self._conditions.set(ConditionKind.DAMAGED, f"{_where(found)}. {advice}", subject=str(damage.path))

    # -- comparing -------------------------------------------------------------------------------------------------

    def _compare(self) -> int | None:
        if not self._peers.peers:
            return None
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._compare_due_ms:
            return self._compare_due_ms
        self._compare_due_ms = now_ms + COMPARE_INTERVAL_MS
        committed = self._own.committed_index
        indexes = sorted({LogIndex(committed >> bits << bits) for bits in _SAMPLES if committed >= 0}, reverse=True)
        if not indexes:
            return self._compare_due_ms
        told: dict[NodeId, Mapping[LogIndex, int]] = {}
        for peer in self._peers.peers:
            self._pause()
            try:
                told[peer] = self._peers.chain_crcs(peer, indexes)
            except DLedgerError:  # down, busy or of an earlier version: next time
                continue
        self._judge(self._own.chain_crcs(indexes), told)
        return self._compare_due_ms

    def _judge(self, own: Mapping[LogIndex, int], told: Mapping[NodeId, Mapping[LogIndex, int]]) -> None:
        against: Counter[tuple[LogIndex, int]] = Counter()
        voters = self._peers.voting_peers
        for peer, theirs in told.items():
            common = [index for index in own if index in theirs]
            differing = [index for index in common if own[index] != theirs[index]]
            if differing:
                text = (
                    f"{peer} holds a different entry {min(differing)}, or a different one before it, and both "
                    "copies pass their checks"
                )
                self._conditions.set(ConditionKind.DIVERGED, text, subject=peer)
                if peer in voters:
                    against.update((index, theirs[index]) for index in differing)
            elif common:
                self._conditions.clear(ConditionKind.DIVERGED, peer)
        for (index, _), count in against.items():
            if count >= self._peers.quorum:
                self._on_diverged(f"{count} members hold a different entry {index}, or a different one before it")
                return


_NOTHING: Final = Repaired((), None)


def _where(error: CorruptLogError) -> str:
    entry = f" (entry {error.index})" if error.index is not None else ""
    return f"damaged at offset {error.offset}{entry}: {error.reason}"


class ScrubbedStore:
    """A file store as ``dledger.watch`` sees it: verified, repaired and compared in the background.

    The node's own log for ``LogWatch``. Used by its thread only, except ``base_of``.
    """

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._scrub = store.scrub()
        self._segment_repair = store.segment_repair()

    def verify(self, max_bytes: int) -> ScrubStep:
        return self._scrub.step(max_bytes)

    def repair(self, base: int, read: ReadSegment, pause: Callable[[], None]) -> Repaired:
        return self._segment_repair.repair(base, read, pause)

    def find(self, base: int, pause: Callable[[], None]) -> CorruptLogError | None:
        return self._segment_repair.find(base, pause)

    def base_of(self, path: Path) -> int | None:
        """The segment that a data file holds; None for any other file."""
        base = parse_segment_name(path.name)
        return base if base is not None and path.parent in self._store.segment_directories else None

    def chain_crcs(self, indexes: Sequence[LogIndex]) -> dict[LogIndex, int]:
        """The chain CRCs of those committed entries that are kept and valid."""
        found: dict[LogIndex, int] = {}
        for index in indexes:
            if self._store.begin.index <= index <= self._store.committed_index:
                try:
                    found[index] = self._store.chain_crc_at(index)
                except (CorruptLogError, IndexBeforeBeginError, IndexOutOfRangeError):  # damage is reported by reads
                    continue
        return found

    @property
    def committed_index(self) -> LogIndex:
        return self._store.committed_index
