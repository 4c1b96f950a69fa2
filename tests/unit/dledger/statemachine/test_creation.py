"""How fast a snapshot is written."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dledger.clock import Clock
from dledger.config import ReplicationConfig, SnapshotConfig
from dledger.core.noop_payload import Registration, encode_registration
from dledger.errors import DiskError, DLedgerError, ShutdownError
from dledger.monitoring import Conditions
from dledger.runtime.threads import Supervisor
from dledger.statemachine import applier
from dledger.statemachine.applier import SnapshotCreation, SnapshotJob
from dledger.statemachine.commands import Duplicates
from dledger.statemachine.snapshots import SnapshotMeta, SnapshotStore
from dledger.store.fs import FileSystem
from dledger.types import Boundary, LogIndex, Position, Term
from dledger.values import MIB
from tests.support.counting import Saved

RATE = MIB
STATE = b"x" * 3_000_000
RESULT = b"y" * 1_000_000


class Time(threading.Event):
    """An event that nobody sets, so that waiting for it takes the time it may; ``during`` is called in each wait."""

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.now_s = 100.0
        self._during = during

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._during()
        if not self.is_set():
            self.now_s += timeout
        return self.is_set()


class PacedFs(FileSystem):
    """Notes what had been written when."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self.written: list[tuple[float, int]] = []

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        super().write(fd, data, offset)
        self.written.append((self._time.now_s, len(data)))

    def sync(self, fd: int) -> None:
        pass

    def sync_dir(self, path: Path) -> None:
        pass


def write(
    directory: Path, time: Time, rate: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[SnapshotCreation, PacedFs, list[DLedgerError | None]]:
    """Write a snapshot of some megabytes, of which one is the producers', on this thread."""
    fs, ended = PacedFs(time), list[DLedgerError | None]()
    monkeypatch.setattr(applier, "monotonic", lambda: time.now_s)
    duplicates = Duplicates(ReplicationConfig())
    duplicates.note_noop(encode_registration(Registration("p", 1, 0)), LogIndex(0), 0)
    duplicates.store(1, 0, [RESULT])
    meta = SnapshotMeta(Boundary(LogIndex(7), Term(1), Position(700), 1), None, 0, 1, {})
    made = SnapshotCreation(
        "n0",
        SnapshotStore(fs, directory),
        SnapshotConfig(snapshot_rate_bytes_max=rate),
        Clock(),
        Supervisor(lambda _error: None),
        Conditions("n0"),
        lambda _job, error: ended.append(error),
    )
    monkeypatch.setattr(made, "_hurry", time)
    made.begin(SnapshotJob(Saved(STATE), duplicates.view(0), meta))
    made._step()
    return made, fs, ended


def test_a_snapshot_is_written_no_faster_than_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S6: appends share the disk; the producers and their results count, too."""
    time = Time()

    _, fs, ended = write(tmp_path, time, RATE, monkeypatch)

    assert ended == [None]
    total = 0
    for when_s, size in fs.written:
        assert total <= (when_s - 100) * RATE + 1, "written before its time"
        total += size
    assert total > len(STATE) + len(RESULT)
    assert time.now_s - 100 == pytest.approx((len(STATE) + len(RESULT)) / RATE, rel=0.05)


@pytest.mark.parametrize("hurries", [False, True], ids=["no limit", "in a hurry"])
def test_nothing_waits_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurries: bool) -> None:
    """With 0 there is none, nor for a node that stops and writes its last snapshot."""
    time = Time()
    if hurries:
        time.set()

    _, _, ended = write(tmp_path, time, RATE if hurries else 0, monkeypatch)

    assert ended == [None]
    assert time.now_s == 100


def test_a_stop_ends_the_wait_and_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being written is given up, and nothing of it is left."""
    made: list[SnapshotCreation] = []
    monkeypatch.setattr(SnapshotCreation, "begin", _noting(made, SnapshotCreation.begin))

    _, _, ended = write(tmp_path, Time(lambda: made[0].stop(0)), RATE, monkeypatch)

    assert [type(one) for one in ended] == [ShutdownError]
    assert SnapshotStore(FileSystem(), tmp_path).newest is None
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_one_that_failed_is_not_tried_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full would be written to without a pause; after one that succeeded there is none."""
    before_ms = Clock().monotonic_ms()
    made, _, ended = write(tmp_path / "good", Time(), 0, monkeypatch)
    assert ended == [None]
    assert made.not_before_ms == 0

    def full(_fs: PacedFs, _fd: int, _data: bytes, _offset: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(PacedFs, "write", full)
    made, _, ended = write(tmp_path / "full", Time(), 0, monkeypatch)
    assert [type(one) for one in ended] == [DiskError]
    assert made.not_before_ms >= before_ms + applier.RETRY_MS


def _noting(
    made: list[SnapshotCreation], begin: Callable[[SnapshotCreation, SnapshotJob], None]
) -> Callable[[SnapshotCreation, SnapshotJob], None]:
    def noted(self: SnapshotCreation, job: SnapshotJob) -> None:
        made.append(self)
        begin(self, job)

    return noted
