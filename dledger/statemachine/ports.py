"""The interface between a node and the state machine that an application puts on its log.

A state machine is a deterministic function of the log: members that have applied the same entries hold the same state.
So ``apply`` may use nothing but the entries it is given; the time is ``Applied.time_ms``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from dledger.types import LogIndex, Term


class Applied(NamedTuple):
    """A committed entry, as a state machine gets it. A tuple, because so many of them are made.

    ``time_ms`` (Unix time) is the leader's clock when it last recorded it in the log, at most about 100 ms before the
    entry; it never goes back. ``producer`` and ``sequence`` are those of a numbered command; empty and -1 for others.
    """

    index: LogIndex  # type: ignore[assignment]  # in the place of a tuple's method, which nobody needs here
    term: Term
    time_ms: int
    body: bytes
    producer: str = ""
    sequence: int = -1


class SnapshotWriter(Protocol):
    """Takes the bytes of a snapshot, in order."""

    def write(self, data: bytes) -> None:
        """Append ``data``. Raises ``OSError``, and ``ShutdownError`` when the node stops: pass both on."""


class SnapshotReader(Protocol):
    """Gives the bytes of a snapshot, in order."""

    @property
    def format(self) -> int:
        """The ``StateMachine.format`` of the program that wrote it."""

    def read(self, bytes_max: int) -> bytes:
        """The next bytes, at most ``bytes_max``; none at the end. They are verified already."""


class Snapshot(Protocol):
    """A view of the state at one entry, which later entries do not change."""

    def write(self, writer: SnapshotWriter) -> None:
        """Write all of it; called once, on another thread than the machine's other methods, while they are called.

        The same state must give the same bytes on every member.
        """


class StateMachine(ABC):
    """Implemented by the application. ``apply``, ``save`` and ``load`` are called on one thread.

    An exception in any method but ``query`` stops the node, and every member alike, since all apply the same entries: a
    command that cannot be carried out must be answered with a result that says so.
    """

    format: ClassVar[int] = 1
    """The number of the format that ``save`` writes. A node does not start on a snapshot of a higher one."""

    queries_are_concurrent: ClassVar[bool] = False
    """Whether ``query`` may be called during ``apply`` and other queries; otherwise one call at a time."""

    @abstractmethod
    def apply(self, entries: Sequence[Applied]) -> Sequence[bytes]:
        """Apply entries in order; returns one result for each, of at most 1 MiB, perhaps empty."""

    @abstractmethod
    def query(self, request: bytes) -> bytes:
        """Answer a read, and change nothing. The caller gets the exception that it raises."""

    @abstractmethod
    def save(self) -> Snapshot:
        """A view of the present state, within 20 ms, as appends wait for it: immutable structures, or copy on write."""

    @abstractmethod
    def load(self, reader: SnapshotReader) -> None:
        """Replace the whole state by a snapshot's."""
