"""What a broker was told to keep and what it said that it has; what it must hold because of it.

A message that was acknowledged is there after a crash if its record ended before what the log called durable (or, where
only the process was killed, written). Of what came later a log may lose an end, but no piece in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rocketstore.message.message import Message
from rocketstore.types import SCHEDULE_TOPIC, PutResult
from tests.sim_store.options import LEVEL_MS

Place = tuple[str, int]
Consumer = tuple[str, str, int]


class ViolationError(AssertionError):
    """Raised when a promise is broken."""


def require(condition: object, problem: str, *details: object) -> None:
    """Raises ``ViolationError``."""
    if not condition:
        raise ViolationError(f"{problem}: {', '.join(map(str, details))}")


@dataclass(eq=False)
class Sent:
    """A message that a client sent once."""

    body: bytes
    place: Place
    keys: tuple[str, ...]
    level: int
    properties: Mapping[str, str] = field(default_factory=dict)
    """Those that a consumer needs: keys and tags."""
    outcome: str = "open"
    """``acked``, ``refused``, ``unknown``; ``lost`` with an end of the log that was not durable."""
    stored_at: Place = ("", 0)
    """Its queue; that of its level if it is delayed."""
    queue_offset: int = -1
    position: int = -1
    end: int = -1
    store_ms: int = 0
    delivered: bool = False
    """A delayed one was seen in its queue."""
    least_offset: int = 0
    """In its queue, behind what was acknowledged there before it was sent."""
    untouched: bool = True
    """Durable as a whole: of others a power cut may take sectors, and no sum covers what is behind a record's body."""

    def __str__(self) -> str:
        name = self.body.rstrip(b".").decode()
        return f"{name} {self.outcome} at {self.stored_at}/{self.queue_offset} {self.position}..{self.end}"

    @property
    def first_place(self) -> Place:
        """The queue that it is put into."""
        return (SCHEDULE_TOPIC, self.level - 1) if self.level else self.place


@dataclass(frozen=True, slots=True)
class Commit:
    """A consumer's offset that was acknowledged, and where the log has it."""

    offset: int
    end: int


@dataclass
class Model:
    """Everything that was sent and answered."""

    synced: bool = False
    """Whether what is acknowledged is durable (``SYNC_FLUSH``), whatever the log says of itself."""
    sent: dict[bytes, Sent] = field(default_factory=dict)
    queues: dict[Place, dict[int, Sent]] = field(default_factory=dict)
    """Acknowledged messages by their queue offset."""
    commits: dict[Consumer, list[Commit]] = field(default_factory=dict)
    asked: dict[Consumer, int] = field(default_factory=dict)
    """The furthest that a consumer's offset was ever wanted."""
    deleted: dict[str, int] = field(default_factory=dict)
    """Topic to the log's end when it was last deleted: what lies before need not be in a queue any more."""
    passed_over_to: int = 0
    """A master passed over delayed messages that its log no longer had: up to here at most, where it began then."""
    timed_starts: list[int] = field(default_factory=list)
    """When masters began to deliver timed messages (ms, wall clock)."""
    acked: int = 0
    lost: int = 0
    on_acked: Callable[[], None] = lambda: None

    def send(self, sent: Sent) -> None:
        """A client is about to send it."""
        self.sent[sent.body] = sent
        sent.least_offset = self.next_offset(sent.first_place)

    def answered(self, sent: Sent, result: PutResult) -> None:
        """What the broker says of it."""
        if result.ok and result.outcome == "stored" and result.status == "PUT_OK":
            stored = result.stored
            require(stored is not None, "acknowledged without a place", sent)
            if stored is None:
                return
            sent.outcome = "acked"
            sent.stored_at = sent.first_place
            sent.queue_offset, sent.position = stored.queue_offset, stored.offset
            sent.end, sent.store_ms = stored.offset + stored.size, stored.store_timestamp
            self._require_order(sent, sent.queue_offset)
            queue = self.queues.setdefault(sent.stored_at, {})
            other = queue.setdefault(sent.queue_offset, sent)
            require(other is sent, "a queue offset was given out twice", sent, other)
            self.acked += 1
            self.on_acked()
        elif result.outcome == "not_applied":
            sent.outcome = "refused"
        else:
            sent.outcome = "unknown"

    def answered_together(self, batch: Sequence[Sent], results: Sequence[PutResult]) -> None:
        """What the broker says of a batch: in each queue it keeps its order."""
        last: dict[Place, Sent] = {}
        for sent, result in zip(batch, results, strict=True):
            self.answered(sent, result)
            if sent.outcome == "acked":
                before = last.get(sent.stored_at)
                in_order = before is None or before.queue_offset < sent.queue_offset
                require(in_order, "a batch is out of order", before, sent)
                last[sent.stored_at] = sent

    @staticmethod
    def _require_order(sent: Sent, offset: int) -> None:
        require(offset >= sent.least_offset, "before what was acknowledged before it was sent", sent, offset)

    def wanted(self, consumer: Consumer, offset: int) -> None:
        """Somebody is about to commit an offset."""
        self.asked[consumer] = max(offset, self.asked.get(consumer, 0))

    def committed(self, consumer: Consumer, offset: int, result: PutResult) -> None:
        """A consumer's offset was answered."""
        if result.ok and result.outcome == "stored" and result.stored is not None:
            stored = result.stored
            self.commits.setdefault(consumer, []).append(Commit(offset, stored.offset + stored.size))

    def forget_topic(self, topic: str, log_end: int) -> None:
        """Its queues are about to be deleted."""
        self.deleted[topic] = max(log_end, self.deleted.get(topic, 0))  # a log that is closed has no end

    # -- crashes -------------------------------------------------------------------------------------------------

    def crashed(self) -> None:
        """Whatever was under way has no answer any more."""
        for sent in self.sent.values():
            if sent.outcome == "open":
                sent.outcome = "unknown"

    def lose_from(self, log_end: int, durable: int) -> None:
        """The log ends at ``log_end`` after a crash before which all up to ``durable`` was safe."""
        for queue in self.queues.values():
            for offset, sent in list(queue.items()):
                if sent.end > log_end:
                    safe = self.synced or sent.end <= durable
                    require(not safe, "what was acknowledged and durable is lost", sent, log_end, durable)
                    sent.outcome = "lost"
                    self.lost += 1
                    del queue[offset]
                elif sent.end > durable:
                    sent.untouched = False
        for commits in self.commits.values():
            for commit in commits:
                if commit.end > log_end:
                    safe = self.synced or commit.end <= durable
                    require(not safe, "a durable consumer offset is lost", commit, log_end, durable)
            commits[:] = [commit for commit in commits if commit.end <= log_end]

    # -- what a broker holds -------------------------------------------------------------------------------------

    def next_offset(self, place: Place) -> int:
        """The least that a queue's next offset may be."""
        return max(self.queues.get(place, {}), default=-1) + 1

    def committed_offset(self, consumer: Consumer) -> int:
        """The least that a consumer's offset may be; -1: it may be unknown."""
        return max((one.offset for one in self.commits.get(consumer, ())), default=-1)

    def found(self, place: Place, offset: int, message: Message) -> Sent:
        """A broker has this message at this place; checks that it may."""
        sent = self.sent.get(message.body)
        require(sent is not None, "nobody sent this", place, offset, message.body[:40])
        if sent is None:
            raise AssertionError
        require(sent.outcome != "refused", "a refused message is there", sent, place, offset)
        require(sent.outcome != "lost", "a message comes back that the log had lost", sent, place, offset)
        known = self.queues.get(place, {}).get(offset)
        require(
            known is None or known is sent, "another message than was acknowledged there", place, offset, known, sent
        )
        here = (message.topic, message.queue_id)
        require(here == place and message.queue_offset == offset, "a record lies in another place", place, offset, here)
        if place[0] != SCHEDULE_TOPIC and sent.level:
            require(place == sent.place, "delivered to another queue", sent, place)
            early_ms = sent.store_ms + LEVEL_MS[sent.level - 1] - message.store_timestamp
            require(sent.store_ms == 0 or early_ms <= 0, "delivered too early", sent, early_ms)
            sent.delivered = True
            return sent
        require(place == sent.first_place, "in another queue than sent to", sent, place)
        self._require_order(sent, offset)
        if sent.outcome == "acked" and sent.untouched:
            kept = {name: message.properties.get(name) for name in sent.properties}
            require(kept == sent.properties, "a message has other properties", sent, kept, sent.properties)
        if sent.level and not sent.store_ms:
            sent.store_ms = message.store_timestamp  # nobody was told
        return sent

    def check_queue(self, place: Place, begin: int, following: int, found: dict[int, Sent], log_begin: int) -> None:
        """Hold a queue against what was acknowledged in it. ``found`` is all that the broker has of it."""
        least = self.next_offset(place)
        require(following >= least, "a queue's next offset went back", place, following, least)
        hidden_to = self.deleted.get(place[0], 0)
        for offset, sent in self.queues.get(place, {}).items():
            if sent.position < max(log_begin, hidden_to):
                continue
            require(offset >= begin, "a queue begins behind a message that the log has", place, begin, sent)
            require(found.get(offset) is sent, "an acknowledged message is not there", sent, found.get(offset))
        once = [sent for sent in found.values() if not sent.level or place[0] == SCHEDULE_TOPIC]
        require(len(set(once)) == len(once), "a message is there twice", place)

    def expected_by_key(self, topic: str, key: str, log_begin: int) -> list[Sent]:
        """Acknowledged messages that a query must find."""
        return [
            sent
            for sent in self.sent.values()
            if sent.outcome == "acked" and not sent.level and sent.place[0] == topic and key in sent.keys
            and sent.position >= log_begin and sent.untouched
        ]  # fmt: skip

    def undelivered(self, log_begin: int) -> Iterable[Sent]:
        """Delayed messages that nobody has seen in their queue, of those that this log and every master had."""
        begin = max(log_begin, self.passed_over_to)
        return [
            sent
            for sent in self.sent.values()
            if sent.level
            and sent.outcome == "acked"
            and not sent.delivered
            and sent.position >= begin
            and sent.untouched
        ]
