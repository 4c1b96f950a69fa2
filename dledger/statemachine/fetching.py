"""Fetches a snapshot from another member, when this one's log cannot give the state machine what it lacks (S8 to S10).

In this order: the files become durable, they are checked, the directory counts, the state machine loads it, the log is
reset to its last entry, and the leader compares again. So a crash leaves the old log and a newer snapshot, to which the
next start resets the log, or both new.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

from dledger.clock import Clock
from dledger.core.messages import SnapshotFetch
from dledger.errors import (
    CorruptLogError,
    DamagedSnapshotError,
    DiskError,
    DLedgerError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    ShutdownError,
    SnapshotFormatError,
    UnavailableError,
)
from dledger.monitoring import ConditionKind, Conditions
from dledger.rpc.peers.codec import SnapshotRequest
from dledger.rpc.peers.exchanges import PeerSnapshotClient, SnapshotTransfer
from dledger.runtime.threads import Supervisor, Worker
from dledger.statemachine.snapshots import SnapshotBuilder, SnapshotMeta, SnapshotStore, decode_meta
from dledger.store.file_store import FileStore
from dledger.types import NO_INDEX, LogIndex, NodeId

RETRY_MS: Final = 1000
_SUBJECT: Final = "snapshot"
"""Of the conditions that tell of it."""
_log = logging.getLogger("dledger")


class _Machine(Protocol):
    """The part of ``MachineHost`` that is used here."""

    @property
    def applied_index(self) -> LogIndex: ...

    @property
    def format(self) -> int: ...

    def adopt(self, meta: SnapshotMeta, ended: Callable[[bool], None]) -> None: ...


class SnapshotFetcher:
    """The thread. ``leader``: whom this member has proven to lead, if anyone; ``is_learner``: whether it is one.

    One fetch at a time. ``want`` may come from any thread, and be repeated.
    """

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        name: str,
        machine: _Machine,
        snapshots: SnapshotStore,
        log: FileStore,
        client: PeerSnapshotClient,
        clock: Clock,
        supervisor: Supervisor,
        conditions: Conditions,
        *,
        leader: Callable[[], NodeId | None],
        is_learner: Callable[[], bool],
        fenced: Callable[[], DLedgerError | None],
    ) -> None:
        self._name = name
        self._machine = machine
        self._snapshots = snapshots
        self._log = log
        self._client = client
        self._clock = clock
        self._conditions = conditions
        self._leader = leader
        self._is_learner = is_learner
        self._fenced = fenced
        self._worker = Worker(f"dledger-fetch-{name}", self._step, clock, supervisor)
        self._lock = threading.Lock()  # guards the two below; a leaf
        self._wanted: SnapshotFetch | None = None
        self._adopting = False
        self._not_before_ms = 0
        self._stopping = False
        self._partial: tuple[SnapshotMeta, SnapshotBuilder] | None = None
        self._partial_of: NodeId | None = None
        """From whom some of it came last."""
        self._doubted: dict[NodeId, LogIndex] = {}
        """Pieces that arrived damaged, by sender, which is told with the next request; at most one."""
        self.bytes_received = 0
        """Of pieces, in the life of this process."""

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._worker.start()

    def stop(self, timeout_s: float) -> None:
        """End it; a partly received snapshot is given up."""
        self._stopping = True
        self._client.close()
        if self._worker.stop(timeout_s):
            self._give_up()

    def want(self, fetch: SnapshotFetch) -> None:
        """Fetch a snapshot; does nothing if that is going on. Another leader's wish replaces the former one's."""
        with self._lock:
            known = self._wanted
            if known is not None and known.leader == fetch.leader and known.at_least >= fetch.at_least:
                return
            self._wanted = fetch
        self._worker.wake()

    def want_at_least(self, index: LogIndex) -> None:
        """The log begins with ``index``, after the state machine's next entry; whichever member leads."""
        leader = self._leader()
        if leader is not None or self._client.peers:
            self.want(SnapshotFetch(leader or self._client.peers[0], index))

    # -- the thread ----------------------------------------------------------------------------------------------

    def _step(self) -> int | None:
        with self._lock:
            wanted, adopting = self._wanted, self._adopting
        if wanted is None or adopting or self._stopping or self._fenced() is not None:
            if wanted is None:
                self._give_up()
            return None
        if min(self._machine.applied_index, self._log.committed_index) >= wanted.at_least:
            self._needs_nothing(wanted)
            return None
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._not_before_ms:
            return self._not_before_ms
        newest = self._snapshots.newest
        if newest is not None and newest.index >= wanted.at_least:
            self._give_up()
            self._adopt(newest)
            return None
        try:
            meta = self._fetch(wanted)
        except ShutdownError:
            return None
        except (DLedgerError, OSError) as error:
            self._told(wanted, error)
            self._not_before_ms = self._clock.monotonic_ms() + RETRY_MS
            return self._not_before_ms
        self._conditions.clear(ConditionKind.SNAPSHOT_FAILED, _SUBJECT)
        self._adopt(meta)
        return None

    def _needs_nothing(self, wanted: SnapshotFetch) -> None:
        """The log gave what was lacking: that of another leader reached back further."""
        self._give_up()
        for kind in (ConditionKind.SNAPSHOT_FAILED, ConditionKind.REPAIRING):
            self._conditions.clear(kind, _SUBJECT)
        with self._lock:
            if self._wanted is wanted:
                self._wanted = None
                return
        self._worker.wake()

    def _told(self, wanted: SnapshotFetch, error: Exception) -> None:
        told = (
            f"the state machine needs a snapshot of entry {wanted.at_least} or a later one of another member, and "
            f"cannot get it: {error}; it will be tried again"
        )
        self._conditions.clear(ConditionKind.REPAIRING, _SUBJECT)
        self._conditions.set(ConditionKind.SNAPSHOT_FAILED, told, subject=_SUBJECT)

    def _adopt(self, meta: SnapshotMeta) -> None:
        with self._lock:
            self._adopting = True
        self._machine.adopt(meta, self._adopted)

    def _adopted(self, done: bool) -> None:
        """On the applier's thread; not ``done``: the log could not be reset, and the leader will ask again."""
        self._conditions.clear(ConditionKind.REPAIRING, _SUBJECT)
        with self._lock:
            self._adopting = False
            wanted = self._wanted
            if wanted is not None and (not done or self._machine.applied_index >= wanted.at_least):
                self._wanted = None
        self._worker.wake()

    def _give_up(self) -> None:
        if self._partial is not None:
            _, builder = self._partial
            self._partial = None
            builder.abort()

    # -- one fetch -----------------------------------------------------------------------------------------------

    def _fetch(self, wanted: SnapshotFetch) -> SnapshotMeta:
        """From the first member that gives it. Raises ``UnavailableError``, with what each of them has said.

        A transfer that broke is tried again with the same one before others are asked: they have other snapshots.
        """
        failed: list[str] = []
        for peer in self._sources(wanted.leader):
            before = self.bytes_received
            try:
                return self._fetch_from(peer, wanted)
            except (UnavailableError, DamagedSnapshotError) as error:
                failed.append(str(error))
                if self._partial is not None and self.bytes_received > before:
                    self._partial_of = peer
                    break
        raise UnavailableError("; ".join(failed) or "there is no other member")

    def _sources(self, leader: NodeId) -> list[NodeId]:
        """The leader first, whose snapshots are believed; learners spare it. Before all, who has sent a part of one."""
        others = [one for one in self._client.peers if one != leader]
        sources = [*others, leader] if self._is_learner() else [leader, *others]
        begun = None if self._partial is None else self._partial_of
        return sorted(sources, key=lambda one: one != begun)

    def _fetch_from(self, peer: NodeId, wanted: SnapshotFetch) -> SnapshotMeta:
        begun = NO_INDEX if self._partial is None else self._partial[0].index
        # Told once: the peer reads all of it before it answers, perhaps for longer than this member waits.
        request = SnapshotRequest(wanted.at_least, begun, self._doubted.pop(peer, NO_INDEX))
        with self._client.transfer(peer, request) as transfer:
            meta = decode_meta(transfer.description)
            if meta.index < wanted.at_least:
                raise UnavailableError(f"{peer} sends the snapshot of entry {meta.index}, which is too old")
            if meta.format > self._machine.format:
                raise SnapshotFormatError(
                    f"the snapshot of {peer} has the state machine's format {meta.format}, and this program reads up "
                    f"to {self._machine.format}: run the version that wrote it, or a later one"
                )
            if not self._is_believed(meta, peer, wanted.leader):
                raise UnavailableError(f"the snapshot of {peer} cannot be shown to be of the leader's history")
            told = f"the state machine fetches the snapshot of entry {meta.index} ({meta.size} bytes) from {peer}"
            self._conditions.set(ConditionKind.REPAIRING, told, subject=_SUBJECT)
            builder = self._continued(meta)
            self._receive(transfer, meta, builder)
        self._partial = None
        try:
            builder.commit(meta)
        except DamagedSnapshotError:
            self._doubted = {peer: meta.index}
            raise
        _log.info("%s: fetched the snapshot of entry %d from %s", self._name, meta.index, peer)
        return meta

    def _continued(self, meta: SnapshotMeta) -> SnapshotBuilder:
        """The builder with what has arrived of this snapshot."""
        if self._partial is not None and self._partial[0] == meta:
            return self._partial[1]
        self._give_up()
        builder = self._snapshots.build(meta.index)
        self._partial = meta, builder
        return builder

    def _receive(self, transfer: SnapshotTransfer, meta: SnapshotMeta, builder: SnapshotBuilder) -> None:
        try:
            for name, file in sorted(meta.files.items()):
                builder.write(name, b"")  # an empty one is a file, too
                for data in transfer.pieces(name, builder.length(name), file.length):
                    if self._stopping:
                        raise ShutdownError("the node is stopping")
                    self.bytes_received += len(data)
                    builder.write(name, data)
        except OSError as error:
            self._give_up()
            raise DiskError(f"the snapshot of entry {meta.index} cannot be written: {error}") from error

    def _is_believed(self, meta: SnapshotMeta, peer: NodeId, leader: NodeId) -> bool:
        """Whether a snapshot is of the group's history (S10): its sender leads, or the chain there says so."""
        at, log = meta.boundary, self._log
        if log.begin.index <= at.index <= log.committed_index:
            try:
                return log.chain_crc_at(at.index) == at.chain_crc
            except (CorruptLogError, IndexBeforeBeginError, IndexOutOfRangeError):
                return False
        if leader != self._leader():  # it does not lead any more, or was never proven to
            return False
        return peer == leader or self._client.chain_crc(leader, at.index) == at.chain_crc
