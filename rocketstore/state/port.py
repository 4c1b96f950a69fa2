"""What broker state and delayed delivery need of the message store. ``MessageStore`` has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rocketstore.commit_log.port import PutDone
from rocketstore.message.message import Message
from rocketstore.types import BrokerRole, GetResult, RecordHead


class QueueNumbering(Protocol):
    """The log, as far as it numbers queues."""

    @property
    def queue_offsets(self) -> dict[tuple[str, int], int]:
        """(topic, queue id) to the next queue offset to be given out; exact on a master."""

    @property
    def is_replicated(self) -> bool:
        """Whether what a crash takes back comes again from others."""

    @property
    def is_repaired(self) -> bool:
        """Whether damaged entries are mended while the log runs, with what other members have."""

    @property
    def flushed_offset(self) -> int:
        """Up to here the log is durable on this node."""

    def flush(self) -> int:
        """Make the log durable; gives ``flushed_offset``. Raises ``DiskError``."""


class StateStore(Protocol):
    """Puts, gets by queue offset, the role, and a call for every record that arrives in a queue."""

    @property
    def role(self) -> BrokerRole:
        """Whether puts are taken."""

    @property
    def log(self) -> QueueNumbering:
        """Where puts go."""

    @property
    def numbers_known(self) -> bool:
        """Whether the next offset of every queue is known: else there may have been queues that are not here."""

    def submit(self, messages: Sequence[Message], done: PutDone, *, wait: bool = True, own: bool = False) -> None:
        """Store the messages in this order; a slave refuses. ``done`` may be called on any thread, also at once.

        ``own``: they are the broker's, not a client's.
        """

    def get(self, topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        """Whole records from queue offset ``offset`` on, at most ``max_count`` and at least one if there is one."""

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The first kept queue offset; -1 if the queue is unknown."""

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The next queue offset; 0 if the queue is unknown."""

    def queues(self) -> Sequence[tuple[str, int]]:
        """(topic, queue id) of every queue there is."""

    def keep_for(self, keeper: Callable[[int], int]) -> None:
        """Keep the log from where ``keeper`` still needs it, at most the offset that it is given."""

    def position_of(self, topic: str, queue_id: int, offset: int) -> int:
        """Where a message's record begins in the log; -1 if it is not there. Raises ``DiskError``."""

    def wait_dispatched(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until all that the log holds is in the queues; whether it is."""

    def add_arrival_listener(self, listener: Callable[[Sequence[RecordHead]], None]) -> None:
        """Call ``listener``, which must be fast, on the dispatch thread once a record is in its queue."""
