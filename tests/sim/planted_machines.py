"""Bugs to plant in state machines and their snapshots: each breaks one of the rules S1 to S9."""

from __future__ import annotations

from typing import Final
from unittest.mock import patch

from dledger.core.handler import EntryHandler
from dledger.core.messages import PushInstall
from dledger.rpc.peers.exchanges import SnapshotTransfer
from dledger.statemachine.applier import Applier
from dledger.statemachine.commands import CommandBatch, Duplicates, Waiters
from dledger.statemachine.fetching import SnapshotFetcher
from dledger.statemachine.host import MachineHost, QueryDone
from dledger.statemachine.snapshots import SnapshotBuilder, SnapshotMeta
from dledger.store.file_store import FileStore
from dledger.types import NO_INDEX, LogIndex, Term
from tests.sim.plant import Plant


class _AllOfIt:
    """A log of which all is committed."""

    def __init__(self, log: FileStore) -> None:
        self._log = log

    def __getattr__(self, name: str) -> object:
        return self._log.last.index if name == "committed_index" else getattr(self._log, name)


_step = Applier._step


def _apply_what_is_written(self: Applier) -> int | None:
    with patch.object(self, "_log", _AllOfIt(self._log)):
        return _step(self)


_receive = SnapshotFetcher._receive


def _reset_first(
    self: SnapshotFetcher, transfer: SnapshotTransfer, meta: SnapshotMeta, builder: SnapshotBuilder
) -> None:
    _receive(self, transfer, meta, builder)
    self._machine.reset_log(meta.boundary, meta.configuration)  # type: ignore[attr-defined]  # MachineHost's


def _ask_nobody(_self: SnapshotFetcher, _index: LogIndex) -> None:
    pass


_load = Duplicates.load


def _load_no_results(self: Duplicates, content: bytes, time_ms: int) -> object:
    producers = _load(self, content, time_ms)
    for slot in list(self._results):
        self._forget(slot)
    return producers


def _take_whatever_the_term(self: Waiters, at: tuple[LogIndex, Term]) -> CommandBatch | None:
    found = next((one for one in self._waiting if one[0] == at[0]), None)
    return None if found is None else self._waiting.pop(found)


_query = MachineHost.query


def _query_at_once(
    self: MachineHost, request: bytes, _index: LogIndex, wait_ms: int, done: QueryDone, *, even_if_late: bool
) -> None:
    _query(self, request, NO_INDEX, wait_ms, done, even_if_late=even_if_late)


def _everything_may_go(_self: MachineHost, wanted: LogIndex) -> LogIndex:
    return wanted


_install = EntryHandler._install


def _install_without_a_state(self: EntryHandler, push: PushInstall) -> None:
    with patch.object(self._state, "machine", None):
        _install(self, push)


_commit = SnapshotBuilder.commit


def _commit_unsynced(self: SnapshotBuilder, meta: SnapshotMeta) -> None:
    with patch.object(self._fs, "sync", lambda _fd: None):
        _commit(self, meta)


MACHINE_PLANTS: Final[dict[str, tuple[Plant, ...]]] = {
    "applied-before-commit": (Plant(Applier, "_step", _apply_what_is_written),),
    "reset-before-the-snapshot": (Plant(SnapshotFetcher, "_receive", _reset_first),),
    "log-counts-as-state": (Plant(SnapshotFetcher, "want_at_least", _ask_nobody),),
    "results-not-loaded": (Plant(Duplicates, "load", _load_no_results),),
    "results-of-another-term": (Plant(Waiters, "take", _take_whatever_the_term),),
    "queries-at-once": (Plant(MachineHost, "query", _query_at_once),),
    "unsaved-expires": (Plant(MachineHost, "last_removable", _everything_may_go),),
    "installed-without-a-state": (Plant(EntryHandler, "_install", _install_without_a_state),),
    "snapshot-not-synced": (Plant(SnapshotBuilder, "commit", _commit_unsynced),),
}
