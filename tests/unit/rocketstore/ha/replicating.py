"""Masters and slaves over loopback, for tests of replication."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dledger.clock import Clock
from dledger.monitoring import Conditions
from dledger.rpc.listening import listen
from dledger.rpc.loops import LoopThread
from dledger.store.fs import FileSystem
from rocketstore.commit_log.flush import FlushDone
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.ha.master import HaMaster
from rocketstore.ha.promotion import EpochFile
from rocketstore.ha.protocol import FrameReader, HaIdentity, HaLog, HaPace
from rocketstore.ha.slave import HaSlave
from rocketstore.ha.waits import ReplicaWaits
from rocketstore.message.message import DelayLevels
from tests.support.waiting import wait_until

LEVELS = DelayLevels.parse("1s")
PATIENCE_S = 120.0
PACE = HaPace(heartbeat_s=0.2, silence_s_max=60.0)


class Replication:
    """Masters and slaves on one event loop."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.failures: list[BaseException] = []
        self.loop = LoopThread("test-ha", self.failures.append)
        self.bridge = self.loop.start()
        self._closing: list[Callable[[], None]] = []
        self._conditions: dict[str, Conditions] = {}

    def conditions(self, who: str) -> Conditions:
        """Those of the ``master``, or of the slave whose epoch file has this name."""
        return self._conditions.setdefault(who, Conditions(who))

    def epoch(self, name: str) -> EpochFile:
        """The epoch file of this broker."""
        (self.directory / name).mkdir(exist_ok=True)
        return EpochFile(FileSystem(), self.directory / name)

    def master(
        self,
        log: PlainCommitLog,
        pace: HaPace = PACE,
        waits: ReplicaWaits | None = None,
        *,
        name: str = "b",
        epoch: int = 1,
        begin_offset: int = -1,
        outdated: Callable[[str], None] = lambda _why: None,
        tls: ssl.SSLContext | None = None,
    ) -> tuple[HaMaster, str]:
        """A master, and its address."""
        identity = HaIdentity("c", name, 0, lambda: epoch, lambda: begin_offset)
        accepting = None if tls is None else lambda: tls
        master = HaMaster(log, identity, pace, waits, self.conditions("master"), outdated=outdated, tls=accepting)
        log.listen(master.advanced)
        listening = listen("127.0.0.1", 0, "test's")
        port = listening[0].getsockname()[1]
        self.bridge.run(master.open(listening))
        self._closing.append(lambda: self.bridge.run(master.close()))
        return master, f"127.0.0.1:{port}"

    def slave(
        self,
        log: HaLog,
        address: str | Callable[[], str],
        pace: HaPace = PACE,
        *,
        epoch: str = "slave",
        tls: ssl.SSLContext | None = None,
    ) -> HaSlave:
        """A slave that follows."""
        slave = HaSlave(
            log,
            HaIdentity("c", "b", 1, lambda: 0),
            self.epoch(epoch),
            pace,
            self.conditions(epoch),
            Clock(),
            self.bridge,
            delay_levels=LEVELS,
            master=address if callable(address) else lambda: address,
            tls=None if tls is None else lambda: tls,
        )

        async def start() -> None:
            slave.start(self.failures.append)

        self.bridge.run(start())
        self._closing.append(lambda: self.bridge.run(slave.close()))
        return slave

    def close(self) -> None:
        """End everything."""
        for one in reversed(self._closing):
            one()
        self.loop.stop()
        assert not self.failures


def caught_up(slave: PlainCommitLog, master: PlainCommitLog) -> None:
    """Wait until the slave has all of it, and it may be read: with SYNC_FLUSH that is after the flush."""
    wait_until(lambda: slave.end_offset == slave.max_offset == master.end_offset, "the slave has the master's log")


class HeldLog:
    """A log whose flushes wait until they are let go."""

    def __init__(self, log: PlainCommitLog) -> None:
        self._log = log
        self.held: list[tuple[int, FlushDone]] = []
        self.holds = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # everything else is the log's
        return getattr(self._log, name)

    def when_flushed(self, end: int, done: FlushDone) -> None:
        """Keep it, once it holds."""
        if self.holds:
            self.held.append((end, done))
        else:
            self._log.when_flushed(end, done)


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    """A connection of bare bytes."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as link:
        yield link


def received(link: socket.socket, least: int) -> tuple[int, bytes]:
    """The offset of the first frame, and at least so many bytes of the log."""
    reader, begin, log = FrameReader(), -1, b""
    while len(log) < least:
        data = link.recv(1 << 16)
        assert data, "the master has closed the connection"
        for offset, part in reader.feed(data):
            begin = offset if begin < 0 else begin
            assert not part or offset == begin + len(log)
            log += part
    return begin, log


def is_closed(link: socket.socket) -> bool:
    """Whether the other side ends it soon, whatever signs of life it gives before."""
    deadline = time.monotonic() + PATIENCE_S
    try:
        while link.recv(1 << 16):
            if time.monotonic() > deadline:
                return False
    except ConnectionResetError:
        return True
    return True
