"""What the broker's service needs of the store, of the broker state and of the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dledger.types import ProducerBatch
from rocketstore.commit_log.port import PutDone, SequenceDone
from rocketstore.message.message import Message
from rocketstore.types import BrokerRole, GetResult, PutResult, RecordHead

StateDone = Callable[[PutResult], None]
"""Called once with what became of a change of state, on any thread; must not block."""
QueueKey = tuple[str, int]
"""Topic and queue id."""


class Store(Protocol):
    """``rocketstore.store.message_store.MessageStore``. ``submit`` never waits for a disk or a quorum; reads may."""

    @property
    def role(self) -> BrokerRole:
        """Whether it takes writes."""

    def submit(
        self,
        messages: Sequence[Message],
        done: PutDone,
        *,
        wait: bool = True,
        producer: ProducerBatch | None = None,
    ) -> None:
        """Store messages; ``done`` may be called on any thread, also at once. ``producer`` numbers them."""

    def submit_producer(self, name: str, done: SequenceDone) -> None:
        """The number of a producer's next message."""

    def get(  # noqa: PLR0913 - the store's own signature
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_count: int,
        max_bytes: int = 0,
        matches_tags: Callable[[int], bool] | None = None,
        matches_record: Callable[[bytes], bool] | None = None,
        group: str = "",
    ) -> GetResult:
        """Messages of one queue."""

    def read_record(self, offset: int) -> bytes | None:
        """The record at a physical offset, which may be made up."""

    def query(
        self,
        topic: str,
        key: str,
        max_num: int,
        begin_ms: int,
        end_ms: int,
        *,
        unique: bool = False,
        max_bytes: int = 0,
    ) -> list[bytes]:
        """Records by key."""

    def min_offset(self, topic: str, queue_id: int) -> int:
        """First queue offset; -1 if the queue is unknown."""

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Next queue offset."""

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The queue offset nearest to a store time."""

    def offset_by_position(self, topic: str, queue_id: int, position: int) -> int:
        """The queue offset of the first message whose record begins at or after a place of the log."""

    def queues(self) -> list[tuple[str, int]]:
        """Every queue that ever had a message."""

    @property
    def dispatch_position(self) -> int:
        """Up to where the log is in the queues."""

    def wait_dispatched(self, timeout: float) -> bool:
        """Wait until all that the log holds now is in the queues; at most ``timeout`` seconds."""

    def store_time(self, topic: str, queue_id: int, offset: int, /) -> int:
        """When the message at a queue offset was stored; -1 if unknown."""

    def add_arrival_listener(self, listener: Callable[[Sequence[RecordHead]], None]) -> None:
        """Have every dispatched record told, on the dispatch thread."""


class TopicLike(Protocol):
    """``rocketstore.state.TopicConfig``."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def read_queues(self) -> int:
        """How many queues may be read."""

    @property
    def write_queues(self) -> int:
        """How many queues may be written to."""

    @property
    def permission(self) -> int:
        """4 read, 2 write."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """What a broker knows of its group; a plain broker is alone. Addresses are brokers'."""

    role: str = ""
    term: int = 0
    leader: str = ""
    leader_address: str = ""
    members: dict[str, str] = field(default_factory=dict)
    """Node id to address, as far as known."""
