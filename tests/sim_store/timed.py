"""Producers of timed messages, which recall some: none comes early, or after its recall; all others come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.sending import SendBatch
from rocketstore.message.message import Message
from rocketstore.state.changes import TopicConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.hours import ENTRY, HOUR_MS
from tests.sim_store.model import Model, require
from tests.sim_store.popping import read_all
from tests.sim_store.serving import REFUSED, ServingBroker, wall_ms

TIMED: Final = "T"
QUEUES: Final = 2
FAR_MS: Final = 2_400_000
"""Beyond the end of every world."""
HEALTHY_MS: Final = 10_000
"""In a healthy group a message comes so long after its time at the most, however many were late before."""


@dataclass(eq=False)
class TimedSent:
    """A message; times are the wall clock's, in ms."""

    body: bytes
    due_ms: int
    queue_id: int
    handle: str = ""
    """To recall it; empty as long as its sending is not acknowledged."""
    at_once: bool = False
    """Its time had passed when it was sent, which was acknowledged."""
    recalls: int = 0
    """Those that were asked for, and not refused for good."""
    recalled_ms: int = -1
    """When a recall was asked for that was answered with success."""
    deliveries: dict[int, int] = field(default_factory=dict)
    """When which place of the queue was stored."""

    @property
    def must_come(self) -> bool:
        """Whether it was promised, and nobody may have recalled it."""
        return (bool(self.handle) or self.at_once) and not self.recalls


class TimedWorkload:
    """Of one topic."""

    weights: Final[Mapping[str, int]] = {"timed-send": 14, "timed-recall": 6, "timed-look": 4}

    def __init__(self, happened: Callable[[], None], dice: Random, model: Model) -> None:
        """``happened``: a client was told something."""
        self._happened = happened
        self._dice = dice
        self._model = model
        self.brokers: dict[MessageStore, ServingBroker] = {}
        self.sent: dict[bytes, TimedSent] = {}
        self.hits: Counter[str] = Counter()

    async def prepare(self, broker: ServingBroker) -> None:
        """Make the topic."""
        await broker.rules.topics.put([TopicConfig(TIMED, QUEUES, QUEUES)])

    def do(self, name: str, store: MessageStore) -> None:
        """See ``FurtherClients``."""
        broker = self.brokers[store]
        if broker.served is None or broker.served.rules is None:
            return  # it is starting
        if name == "timed-look":
            self.look(broker)
            return
        try:
            broker.run(self.send(broker) if name == "timed-send" else self._recall(broker))
        except REFUSED as error:
            self.hits[f"{name} refused"] += 1
            if not isinstance(error, Refusal):
                raise

    async def send(self, broker: ServingBroker, due_ms: int = 0) -> TimedSent:
        """Send one that is due then, or at any time."""
        dice, body = self._dice, f"t{len(self.sent)}".encode()
        ahead_ms = int(dice.random() * dice.choice((300, 1500, 4000, 4000))) if dice.random() < 0.9 else FAR_MS
        sent = self.sent[body] = TimedSent(body, due_ms or wall_ms() + ahead_ms, dice.randrange(QUEUES))
        properties = {"TIMER_DELIVER_MS": str(sent.due_ms)}
        if dice.random() < 0.5:
            properties["UNIQ_KEY"] = body.decode()
        message = Message(TIMED, body, sent.queue_id, properties, born_timestamp=1)
        (result,) = await broker.rules.sending.send(None, SendBatch([message], len(body)))
        if result.ok and result.outcome == "stored":
            if result.handle:
                self._happened()
                sent.handle = result.handle
            else:
                require(sent.due_ms <= wall_ms(), "a message that waits has no handle", body)
                sent.at_once = True
                self.hits["due at once"] += 1
        return sent

    async def _recall(self, broker: ServingBroker) -> None:
        dice = self._dice
        known = [one for one in self.sent.values() if one.handle]
        if not known:
            return
        sent = dice.choice(known[-12:])
        first, asked_ms = not sent.recalls, wall_ms()
        sent.recalls += 1
        try:
            await broker.rules.timed.recall(TIMED, sent.handle)
        except Refusal as refusal:
            if refusal.outcome == "not_applied":
                sent.recalls -= 1
            if refusal.kind is RefusalKind.NO_MESSAGE and first:
                require(sent.due_ms <= wall_ms() + 1, "a message that waits cannot be recalled", sent, wall_ms())
            raise
        self._happened()
        self.hits["recalled"] += 1
        if sent.recalled_ms < 0:
            sent.recalled_ms = asked_ms

    def next_due_ms(self) -> int:
        """When the next message is due that must come."""
        now_ms = wall_ms()
        return min((one.due_ms for one in self.sent.values() if one.must_come and one.due_ms > now_ms), default=1 << 62)

    # -- checks --------------------------------------------------------------------------------------------------------

    def look(self, broker: ServingBroker) -> None:
        """Hold everything that was delivered against what was sent. As a thread of the broker's process."""
        for queue_id in range(QUEUES):
            for message in read_all(broker.store, TIMED, queue_id):
                self._delivered(message)

    def _delivered(self, message: Message) -> None:
        sent = self.sent.get(message.body)
        if sent is None:
            require(sent is not None, "a timed message that nobody sent", message.body)
            return
        at_ms = message.store_timestamp
        if message.queue_offset in sent.deliveries:
            return
        require(message.queue_id == sent.queue_id, "a timed message is in another queue", message.body)
        require(at_ms >= sent.due_ms, "a timed message came early", message.body, sent.due_ms - at_ms)
        for before_ms in sent.deliveries.values():
            early, late = sorted((before_ms, at_ms))
            require(self._changed(early, late), "a timed message came twice under one master", message.body, sent)
            self.hits["delivered again"] += 1
        sent.deliveries[message.queue_offset] = at_ms
        if sent.recalled_ms >= 0:
            require(at_ms <= sent.recalled_ms, "a timed message came after its recall", message.body, at_ms, sent)
            require(self._changed(at_ms, sent.recalled_ms), "what was delivered is recalled", message.body, at_ms, sent)

    def _changed(self, begin_ms: int, end_ms: int) -> bool:
        """Whether a master began to deliver in between."""
        return any(begin_ms <= one <= end_ms for one in self._model.timed_starts)

    def late(self) -> list[TimedSent]:
        """What is due and has not been seen."""
        now_ms = wall_ms()
        return [one for one in self.sent.values() if one.must_come and one.due_ms < now_ms and not one.deliveries]

    @staticmethod
    def hours(broker: ServingBroker, begin: int, end: int) -> dict[int, bytes]:
        """The files of a member, as far as they are about records in this part of the log, and of hours that are not
        over: the others may have been removed.
        """
        timers, found = broker.store.timers, {}
        for hour in timers.hours():
            if (hour + 1) * HOUR_MS <= wall_ms():
                continue
            entries = timers.entries(hour)
            whole = (timers.directory / f"{hour:010d}").read_bytes()
            require(len(whole) == len(entries) * ENTRY.size, "an hour's file has more than its entries", hour)
            kept = entries[(entries["position"] >= begin) & (entries["position"] < end)].tobytes()
            if kept:
                found[hour] = kept
        return found
