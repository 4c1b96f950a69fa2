"""Consumers of two groups that pop, one of them ordered: what they are told is held against ``tests.sim_pop.oracle``.

Everything is noted on the loop of the broker that answers, in the turn of the answer, so that nothing comes between.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from dledger.rpc.clients.connections import Leases
from rocketstore.broker.popping.requests import (
    ANY_QUEUE,
    AUTO_RENEW_MS,
    Ack,
    ChangeInvisible,
    DeadLetter,
    PoppedRecord,
    PopResult,
    Receive,
)
from rocketstore.broker.refusal import Refusal
from rocketstore.broker.sending import SendBatch
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.pop.tables import LeaseWindow, PopPlace
from rocketstore.state.changes import GroupConfig, TopicConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.types import GetMessageStatus
from tests.sim_pop.oracle import BrokenRuleError, Oracle, Sent, Told
from tests.sim_store.model import ViolationError, require
from tests.sim_store.serving import REFUSED, ServingBroker, wall_ms

TOPIC: Final = "P"
QUEUES: Final = 2
POP_GROUPS: Final = frozenset({"any", "fifo"})
WANTED: Final = "yes"
"""The tag that consumers want."""
UNKNOWN_LEASES: Final = 1 << 30
"""Nobody counts how often a message was given out to a consumer that was not told."""
LOST_SHARE: Final = 0.1
"""Of answers that do not reach their consumers."""


def is_of_pop(topic: str) -> bool:
    """Whether a topic holds messages of these consumers only."""
    retry, dead = tuple(f"%RETRY%{one}_" for one in POP_GROUPS), tuple(f"%DLQ%{one}" for one in POP_GROUPS)
    return topic == TOPIC or topic.startswith(retry) or topic in dead


def read_all(store: MessageStore, topic: str, queue_id: int, begin: int = 0) -> list[Message]:
    """The messages of a queue."""
    found: list[Message] = []
    at = max(store.min_offset(topic, queue_id), begin, 0)
    while at < store.max_offset(topic, queue_id):
        result = store.get(topic, queue_id, at, max_count=32)
        require(result.next_offset > at, "a queue cannot be read on", topic, queue_id, at, result)
        if result.status is GetMessageStatus.FOUND:
            found += [decode_record(one) for one in result.records]
        at = result.next_offset
    return found


class GroupOracle(Oracle):
    """Of one group in a log: some places of a queue are unknown, and so is who is dead, until the end."""

    def __init__(self, *, ordered: bool, attempts_max: int) -> None:
        super().__init__(ordered=ordered, attempts_max=attempts_max)
        self.overtaken: set[int] = set()
        """Numbers of messages that must be dead letters, or consumers were given others before them."""

    def place(self, sent: Sent, offset: int) -> None:
        """A message's place is known."""
        known = self.by_place.setdefault((sent.place, offset), sent)
        require(known is sent, "two messages have one place", sent.place, offset)
        sent.offset = offset

    def _in_order(self, batch: Sequence[Sent]) -> None:
        offsets = [one.offset for one in batch]
        require(len({one.place for one in batch}) == 1, "a batch has messages of other queues", batch[0].place, offsets)
        require(offsets == sorted(offsets), "a batch is out of order", batch[0].place, offsets)
        for offset in range(offsets[-1]):
            before = self.by_place.get((batch[0].place, offset))
            if before is not None and not (before.is_done or before.may_be_dead or before in batch):
                self.overtaken.add(before.number)


@dataclass(eq=False)
class Consumer:
    """One of a group, and what it remembers."""

    name: str
    batch: int
    invisible_ms: int
    auto_renew: bool
    attempt: int = 0
    ends: int = 0
    """How often it has gone; it always comes back."""
    held: list[tuple[Sent, Told, str]] = field(default_factory=list)


class Subscriber:
    """A group."""

    def __init__(self, name: str, dice: Random, *, ordered: bool, renews: bool) -> None:
        self.name = name
        self.attempts_max = dice.choice((2, 3, 17))
        self.oracle = GroupOracle(ordered=ordered, attempts_max=self.attempts_max)
        self.by_body: dict[bytes, Sent] = {}
        self.told_dead: list[Sent] = []
        """Consumers were told that it is a dead letter."""
        self.consumers = [self._consumer(one, dice, renews=renews) for one in range(dice.randint(1, 3))]

    @property
    def config(self) -> GroupConfig:
        """Its settings."""
        return GroupConfig(self.name, retry_times_max=self.attempts_max - 1, ordered=self.oracle.ordered)

    def _consumer(self, number: int, dice: Random, *, renews: bool) -> Consumer:
        auto = renews and dice.random() < 0.5
        invisible_ms = AUTO_RENEW_MS if auto else dice.choice((1_000, 1_000, 3_000, 8_000))
        return Consumer(f"{self.name}-{number}", dice.choice((1, 2, 5, 32)), invisible_ms, auto)


class PopWorkload:
    """Producers and consumers of one topic. ``parks``: some messages are invisible for more than a minute."""

    weights: Final[Mapping[str, int]] = {
        "pop-send": 16, "pop": 40, "pop-ack": 36, "pop-change": 9, "pop-dead": 1, "pop-gone": 1,
    }  # fmt: skip

    def __init__(self, happened: Callable[[], None], dice: Random, *, renews: bool, parks: bool) -> None:
        """``happened``: a client was told something, or a message is to be stored again."""
        self.happened = happened
        self._dice = dice
        self._parks = parks
        self.subscribers = [Subscriber("any", dice, ordered=False, renews=renews)]
        self.subscribers.append(Subscriber("fifo", dice, ordered=True, renews=renews))
        self.brokers: dict[MessageStore, ServingBroker] = {}
        self._leaderships: dict[tuple[MessageStore, int], int] = {}
        self._acked: dict[bytes, tuple[int, int]] = {}
        """Queue and offset of the messages whose sending was acknowledged."""
        self.hits: Counter[str] = Counter()
        self.is_over = False

    async def prepare(self, broker: ServingBroker) -> None:
        """Make the topic and the groups."""
        await broker.rules.topics.put([TopicConfig(TOPIC, QUEUES, QUEUES)])
        await broker.rules.groups.put([one.config for one in self.subscribers])

    def do(self, name: str, store: MessageStore) -> None:
        """See ``FurtherClients``."""
        broker = self.brokers[store]
        if broker.served is None or broker.served.rules is None:
            return  # it is starting
        subscriber = self._dice.choice(self.subscribers)
        consumer = self._dice.choice(subscriber.consumers)
        work = {
            "pop-send": lambda: self._send(broker),
            "pop": lambda: self._receive(broker, subscriber, consumer),
            "pop-ack": lambda: self._ack_some(broker, subscriber, consumer),
            "pop-change": lambda: self._change(broker, subscriber, consumer),
            "pop-dead": lambda: self._dead_letter(broker, subscriber, consumer),
            "pop-gone": lambda: self._gone(broker, subscriber, consumer),
        }[name]()
        try:
            broker.run(work)
        except REFUSED as error:
            self.hits[f"{name} refused"] += 1
            if not isinstance(error, Refusal):
                raise
        except BrokenRuleError as error:
            raise ViolationError(f"group {subscriber.name}: {error}") from error

    # -- operations, on the broker's loop ------------------------------------------------------------------------------

    async def _send(self, broker: ServingBroker) -> None:
        dice = self._dice
        messages = []
        for _ in range(dice.choice((1, 1, 2, 6))):
            number = len(self.subscribers[0].by_body)
            body, queue_id, wanted = f"p{number}".encode(), dice.randrange(QUEUES), dice.random() < 0.9
            for one in self.subscribers:
                sent = one.oracle.new(PopPlace(one.name, TOPIC, queue_id), -1 - number, wanted=wanted)
                sent.leases = UNKNOWN_LEASES
                one.by_body[body] = sent
            messages.append(Message(TOPIC, body, queue_id, {"TAGS": WANTED if wanted else "no"}, born_timestamp=1))
        results = await broker.rules.sending.send(None, SendBatch(messages, sum(len(one.body) for one in messages)))
        for message, result in zip(messages, results, strict=True):
            if result.ok and result.outcome == "stored" and result.stored is not None:
                self._acked[message.body] = result.stored.queue_id, result.stored.queue_offset
                for one in self.subscribers:
                    one.oracle.place(one.by_body[message.body], result.stored.queue_offset)

    async def _receive(self, broker: ServingBroker, subscriber: Subscriber, consumer: Consumer) -> None:
        dice, popping, asked, ends = self._dice, broker.rules.popping, consumer.attempt, consumer.ends
        wish = Receive(
            subscriber.name,
            TOPIC,
            ANY_QUEUE if dice.random() < 0.7 or self.is_over else dice.randrange(QUEUES),
            consumer.batch,
            consumer.invisible_ms,
            0 if self.is_over else dice.choice((0, 0, 300)),
            expression=WANTED,
            attempt_id=f"{consumer.name}-{asked}" if self.is_over or dice.random() < 0.8 else "",
            client_id=consumer.name,
            from_first=True,
            auto_renew=consumer.auto_renew,
        )
        with Leases(broker.rules.shares.room, broker.rules.shares.quotas.of("@sim", "sim", "sim")) as leases:
            receiving = popping.receive(wish, leases)
            if not self.is_over and dice.random() < LOST_SHARE:
                try:
                    received = await asyncio.wait_for(receiving, dice.random() * 0.05)
                except TimeoutError:
                    self.hits["receive given up"] += 1
                    return
            else:
                received = await receiving
        if not received.messages:
            self.hits["nothing to pop"] += 1
            return
        self.hits["popped"] += len(received.messages)
        if not self.is_over and dice.random() < LOST_SHARE:
            self.hits["answer lost"] += 1
            if dice.random() < 0.5:
                popping.give_back(subscriber.name, TOPIC, [one.handle for one in received.messages])
            return
        if consumer.attempt == asked:
            consumer.attempt += 1
        self._told(broker, subscriber, consumer, received.messages, is_there=ends == consumer.ends)

    def _told(
        self,
        broker: ServingBroker,
        subscriber: Subscriber,
        consumer: Consumer,
        messages: Sequence[PoppedRecord],
        *,
        is_there: bool,
    ) -> None:
        """An answer has arrived."""
        self.happened()
        leader = self._leader(broker)
        batch: list[tuple[Sent, Told]] = []
        is_kept = consumer.auto_renew and is_there
        for one in messages:
            message = decode_record(one.record)
            sent = subscriber.by_body[message.body]
            if message.topic == TOPIC:
                require(message.queue_id == sent.place.queue_id, "a message is in another queue", message.body)
                subscriber.oracle.place(sent, message.queue_offset)
            told = Told(
                one.handle, leader, consumer.name, one.visible_at_ms, is_kept, consumer.auto_renew, one.attempt,
                kept_until_ms=wall_ms() + 3_600_000,
            )  # fmt: skip
            if sent.deliveries and sent.deliveries[-1].handle == one.handle:
                told = sent.deliveries[-1]
            batch.append((sent, told))
            consumer.held.append((sent, told, one.handle))
        began_ms = min(wall_ms(), *(one.visible_at_ms - consumer.invisible_ms for one in messages))
        subscriber.oracle.batch(began_ms, batch)

    def _leader(self, broker: ServingBroker) -> int:
        key = broker.store, broker.store.incarnation
        return self._leaderships.setdefault(key, len(self._leaderships))

    def _held(self, consumer: Consumer) -> tuple[Sent, Told, str] | None:
        if not consumer.held:
            return None
        at = self._dice.randrange(len(consumer.held)) if self._dice.random() < 0.5 and not self.is_over else -1
        held = consumer.held[at]
        if self.is_over or self._dice.random() < 0.85:
            del consumer.held[at]
        return held

    async def _ack_some(self, broker: ServingBroker, subscriber: Subscriber, consumer: Consumer) -> None:
        count = len(consumer.held) if self.is_over else self._dice.choice((1, 1, 3, 8))
        held = [one for one in (self._held(consumer) for _ in range(count)) if one is not None]
        if not held:
            return
        leader = self._leader(broker)
        for sent, _, _ in held:
            sent.acks_open += 1
        try:
            results = await broker.rules.popping.ack([Ack(subscriber.name, TOPIC, handle) for _, _, handle in held])
        except Refusal as refusal:
            if refusal.outcome == "not_applied":
                for sent, _, _ in held:
                    sent.acks_open -= 1
            raise
        self.happened()
        for (sent, told, handle), result in zip(held, results, strict=True):
            if result is PopResult.OK:
                self.hits["acked"] += 1
                subscriber.oracle.acked(wall_ms(), sent, told, handle, leader)
            else:
                self.hits["ack of an old handle"] += 1
                sent.acks_open -= 1
                subscriber.oracle.refused(sent, told, handle, wall_ms())

    async def _change(self, broker: ServingBroker, subscriber: Subscriber, consumer: Consumer) -> None:
        held = self._held(consumer)
        if held is None:
            return
        (sent, told, handle), leader = held, self._leader(broker)
        duration_ms = self._dice.choice((0, 0, 1_000, 5_000, 90_000 if self._parks else 8_000))
        change = ChangeInvisible(subscriber.name, TOPIC, handle, duration_ms, self._dice.random() < 0.3)
        told.end_ms = min(told.end_ms, wall_ms() + duration_ms)  # as soon as it is asked, it may be so
        told.is_prolonged = False
        told.changes_open += 1
        changed = await broker.rules.popping.change_invisible(change)
        self.happened()
        told.changes_open -= 1
        if changed.result is not PopResult.OK:
            return
        if self._dice.random() < LOST_SHARE:
            told.changes_open += 1  # the consumer does not know that its handle is an old one
            return
        if changed.visible_at_ms <= wall_ms():
            return  # it may have been given out again
        self.hits["changed"] += 1
        subscriber.oracle.changed(wall_ms(), sent, told, handle, leader)
        told.handle, told.leader = changed.handle, leader
        told.end_ms = changed.visible_at_ms if not told.changes_open else wall_ms()
        consumer.held.append((sent, told, changed.handle))

    async def _dead_letter(self, broker: ServingBroker, subscriber: Subscriber, consumer: Consumer) -> None:
        held = self._held(consumer)
        if held is None:
            return
        sent, _, handle = held
        sent.may_be_dead = True
        result = await broker.rules.popping.dead_letter(DeadLetter(subscriber.name, TOPIC, handle))
        if result is PopResult.OK:
            self.hits["given up"] += 1
            subscriber.told_dead.append(sent)

    async def _gone(self, broker: ServingBroker, subscriber: Subscriber, consumer: Consumer) -> None:
        consumer.ends += 1
        broker.rules.popping.client_gone(consumer.name)
        for sent in subscriber.oracle.sent:
            for told in sent.deliveries[-1:]:
                if told.client == consumer.name and told.was_prolonged:
                    told.end_ms, told.is_prolonged = min(told.end_ms, wall_ms()), False

    # -- the end -------------------------------------------------------------------------------------------------------

    def drain(self, broker: ServingBroker) -> bool:
        """Nothing fails any more: consume what there is; whether that is all. As a thread of the master's process."""
        self.is_over = True
        for subscriber in self.subscribers:
            for consumer in subscriber.consumers:
                if consumer.auto_renew:
                    broker.run(self._gone(broker, subscriber, consumer))
                consumer.held, consumer.batch, consumer.invisible_ms, consumer.auto_renew = [], 32, 8_000, False
                try:
                    broker.run(self._receive(broker, subscriber, consumer))
                    broker.run(self._ack_some(broker, subscriber, consumer))
                except REFUSED as refusal:
                    self.hits[f"refused at the end: {refusal}"] += 1
                    return False
                except BrokenRuleError as error:
                    raise ViolationError(f"group {subscriber.name}: {error}") from error
        return all(self._is_consumed(broker, *one) for one in self._queues(broker))

    def _queues(self, broker: ServingBroker) -> list[tuple[PopPlace, int]]:
        """Every queue of every group, and its end."""
        found = []
        for subscriber in self.subscribers:
            topics = {TOPIC: QUEUES, f"%RETRY%{subscriber.name}_{TOPIC}": 1}
            for topic, count in topics.items():
                for queue_id in range(count):
                    end = broker.store.max_offset(topic, queue_id)
                    if end:
                        found.append((PopPlace(subscriber.name, topic, queue_id), end))
        return found

    @staticmethod
    def _is_consumed(broker: ServingBroker, place: PopPlace, end: int) -> bool:
        window = broker.state.pop.pop_window(place)
        return window is not None and window.commit >= end and not window.parked

    def windows(self, broker: ServingBroker) -> list[tuple[PopPlace, int, LeaseWindow | None]]:
        """For a failure, and for comparing members."""
        return [(place, end, broker.state.pop.pop_window(place)) for place, end in self._queues(broker)]

    def check(self, broker: ServingBroker) -> None:
        """When all is consumed: what was sent is there, and every message has come to its end. On any member."""
        stored: dict[bytes, Message] = {}
        for queue_id in range(QUEUES):
            for message in read_all(broker.store, TOPIC, queue_id):
                require(message.body not in stored, "a message is there twice", message.body)
                stored[message.body] = message
        for body, place in self._acked.items():
            found = stored.get(body)
            at = None if found is None else (found.queue_id, found.queue_offset)
            require(at == place, "an acknowledged message is not there", body, place, at)
        for subscriber in self.subscribers:
            try:
                self._check_group(broker, subscriber, stored)
            except BrokenRuleError as error:
                raise ViolationError(f"group {subscriber.name}: {error}") from error

    def _check_group(self, broker: ServingBroker, subscriber: Subscriber, stored: Mapping[bytes, Message]) -> None:
        oracle = subscriber.oracle
        dead: set[bytes] = set()
        for message in read_all(broker.store, f"%DLQ%{subscriber.name}", 0):
            sent = subscriber.by_body[message.body]
            require(message.body not in dead, "a message is a dead letter twice", message.body)
            dead.add(message.body)
            require(not sent.is_acked, "a dead letter was acknowledged", message.body)
            enough = sent.may_be_dead or message.reconsume_times >= subscriber.attempts_max
            require(enough, "a message is dead too early", message.body, message.reconsume_times)
            sent.is_dead = True
        for sent in subscriber.told_dead:
            require(sent.is_dead, "a message is told to be a dead letter, and is none", sent.number)
        for number in sorted(oracle.overtaken):
            require(oracle.sent[number].is_dead, "a message was overtaken", oracle.sent[number].place, number)
        for body, sent in subscriber.by_body.items():
            sent.may_be_gone = body not in stored  # nobody was told that it is
        oracle.at_the_end()
