"""The interfaces through which replication uses a broker: its log, and its identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dledger.records import record
from rocketstore.commit_log.flush import FlushDone


class HaLog(Protocol):
    """A plain commit log. There are two sides: the store's, and that of tests."""

    @property
    def segment_bytes(self) -> int:
        """The size of each file."""

    @property
    def min_offset(self) -> int:
        """The begin of the first file."""

    @property
    def max_offset(self) -> int:
        """The end of what may be read, and so of what is sent."""

    @property
    def end_offset(self) -> int:
        """The end of everything written."""

    def stretch(self, offset: int, bytes_max: int) -> bytes:
        """See ``PlainCommitLog.stretch``."""

    def append_received(self, offset: int, data: bytes, store_timestamp: int) -> None:
        """See ``PlainCommitLog.append_received``."""

    def when_flushed(self, end: int, done: FlushDone) -> None:
        """See ``PlainCommitLog.when_flushed``."""


@record(frozen=True, slots=True)
class HaIdentity:
    """Which broker this is. ``epoch`` and ``begin_offset``: see ``rocketstore.ha.epoch``."""

    cluster: str
    broker: str
    broker_id: int
    epoch: Callable[[], int]
    begin_offset: Callable[[], int] = lambda: -1
    further_names: frozenset[str] = frozenset()
    """Further DNS names that may stand in the certificates of its masters and slaves."""

    @property
    def certificate_names(self) -> frozenset[str]:
        """With TLS, the other side's certificate must have one of these."""
        return self.further_names | {self.broker}


@record(frozen=True, slots=True)
class HaPace:
    """Times in seconds, sizes in bytes."""

    heartbeat_s: float = 5.0
    """How often both sides give a sign of life."""
    silence_s_max: float = 20.0
    """A connection is given up after so long without one."""
    batch_bytes: int = 32 * 1024
    """The most of the log in one frame to a slave of RocketMQ; ours takes ``CHUNK_BYTES``."""
    slaves_max: int = 16
    introduction_required: bool = False
    """Whether the other side must be one of ours, and say who it is."""
    introduces: bool = True
    """Whether a slave introduces itself."""
    retry_s: float = 1.0
    """When a slave tries again after a connection that failed or ended."""
    refused_retry_s: float = 5.0
    """The same after one that one of the two sides had a reason to end."""

    @property
    def living_ms(self) -> int:
        """A slave that has said something since so long ago is alive: nobody else is that slave."""
        return int(self.silence_s_max * 1000 / 2)
