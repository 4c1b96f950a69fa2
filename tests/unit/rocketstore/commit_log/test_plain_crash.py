"""Crash enumeration: the plain log is cut at every write, sync, rename and unlink, unsynced changes lost in many ways.

For every disk that can result: the log opens, what was acknowledged as flushed is there, in order, with nothing that
was never put, and puts go on behind it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dledger.clock import Clock
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.message.record import decode_record
from rocketstore.types import FlushDiskType, PutMessageStatus
from tests.crash.crash_fs import RecordingFs, crash_states
from tests.unit.dledger.store.support import UnsyncedFs
from tests.unit.rocketstore.commit_log.support import abandon, heads_of, message, open_log, put, small_config


class Recorder:
    """Drives a log and keeps what was put and where flushes were acknowledged."""

    def __init__(self, directory: Path, flush: FlushDiskType, *, buffers: int = 0) -> None:
        self.directory = directory
        self.fs = RecordingFs()
        config = small_config(
            directory,
            flush_disk_type=flush,
            transient_store_pool_enable=buffers > 0,
            transient_store_pool_size=buffers or 1,
            flush_interval_commit_log=3_600_000,  # only when the test says so
            commit_interval_commit_log=3_600_000,
        )
        self.log = PlainCommitLog(config, clock=Clock(), fs=self.fs)
        self.log.load(clean_stop=True)
        self.log.start()
        self.bodies: list[bytes] = []
        self.acks: list[tuple[int, int, int]] = [(0, 0, 0)]
        """(number of changes, of messages, durable offset) at each acknowledged flush."""

    def put(self, *sizes: int) -> None:
        """Put one batch; with SYNC_FLUSH it is acknowledged."""
        bodies = [bytes([len(self.bodies) + number]) * size for number, size in enumerate(sizes, 1)]
        results = put(self.log, *(message(body) for body in bodies))
        assert {one.status for one in results} == {PutMessageStatus.PUT_OK}
        self.bodies += bodies
        if self.log._flusher.group is not None:
            self._acknowledged()

    def flush(self) -> None:
        """Flush, acknowledged."""
        self.log.flush()
        self._acknowledged()

    def _acknowledged(self) -> None:
        self.acks.append((len(self.fs.changes), len(self.bodies), self.log.flushed_offset))


def _synchronous(run: Recorder) -> None:
    run.put(100)
    run.put(300)
    run.put(500)  # next file
    run.put(200, 200, 200)
    run.put(700)
    run.put(800)


def _asynchronous(run: Recorder) -> None:
    run.put(100, 400)
    run.put(200)
    run.flush()
    run.put(600)
    run.put(300, 300, 300)
    run.put(50)
    run.flush()
    run.put(10)
    run.put(20)
    run.put(30)


def _asynchronous_over_many_files(run: Recorder) -> None:
    # More files than a flush ever covered: rolling must flush by itself.
    run.put(600)
    run.put(600)
    run.put(600)
    run.put(600, 600)


def check_crash(run: Recorder, at: int, durable_offset: int, acked: int, target: Path) -> None:
    """Open what a crash left in ``target``, look, put, and open it once more."""
    config = small_config(target)
    log = open_log(config, UnsyncedFs(), clean_stop=False, durable_offset=durable_offset)
    found = _bodies(log)
    assert len(found) >= acked, f"crash before change {at} lost acknowledged messages"
    assert found == run.bodies[: len(found)], f"crash before change {at}"

    # As long as what was lost, so that a record behind it would fit again if its bytes were still there.
    after = b"\xff" * (len(run.bodies[len(found)]) if len(found) < len(run.bodies) else 5)
    assert put(log, message(after))[0].ok
    abandon(log)

    again = open_log(config, UnsyncedFs(), clean_stop=False)
    assert _bodies(again) == [*found, after]
    assert put(again, message(b"x" * 900))[0].ok
    abandon(again)


def _bodies(log: PlainCommitLog) -> list[bytes]:
    return [decode_record(log.read(head.offset, head.size) or b"").body for head in heads_of(log)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "flush", "buffers"),
    [
        (_synchronous, FlushDiskType.SYNC_FLUSH, 0),
        (_asynchronous, FlushDiskType.ASYNC_FLUSH, 0),
        (_asynchronous, FlushDiskType.ASYNC_FLUSH, 5),
        (_asynchronous, FlushDiskType.ASYNC_FLUSH, 1),
        (_asynchronous_over_many_files, FlushDiskType.ASYNC_FLUSH, 0),
    ],
)
def test_every_crash_leaves_what_was_acknowledged(
    tmp_path: Path, scenario: Callable[[Recorder], None], flush: FlushDiskType, buffers: int
) -> None:
    """Whether the durable mark is up to date or old."""
    source, target = tmp_path / "source", tmp_path / "target"
    run = Recorder(source, flush, buffers=buffers)
    scenario(run)
    abandon(run.log)

    checked: set[tuple[bytes, int, int]] = set()
    crashes = 0
    for at in range(len(run.fs.changes) + 1):
        acks = [ack for ack in run.acks if ack[0] <= at]
        _, acked, durable_offset = acks[-1]
        for state in crash_states(run.fs.changes, at):
            for mark in {durable_offset, acks[len(acks) // 2][2], 0}:
                crashes += 1
                if (state.content, mark, acked) in checked:
                    continue  # many crashes leave the same disk: how many depends on what the threads flush together
                checked.add((state.content, mark, acked))
                shutil.rmtree(target, ignore_errors=True)
                state.write_to(source, target)
                check_crash(run, at, mark, acked, target)

    assert crashes > 50
