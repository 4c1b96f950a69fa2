"""Producers, consumers and an administrator: each a thread that asks for one thing after the other."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final, Protocol

from dledger.errors import DiskError, DLedgerError, InvalidRequestError, ShutdownError
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import TopicConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.types import GetMessageStatus, PutResult
from tests.sim_store.model import Model, Place, Sent, ViolationError, require
from tests.sim_store.threads import Event, Group, Scheduler
from tests.sim_store.transactions import Producers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DELETED: Final = "D"
"""This topic is deleted now and then."""
TOPICS: Final = ("A", "B", DELETED)
ANSWER_S: Final = 60.0
"""Of virtual time: every put is answered by then."""


class FurtherClients(Protocol):
    """Those of another kind, which have a model of their own."""

    @property
    def weights(self) -> Mapping[str, int]:
        """What they do, and how often."""

    def do(self, name: str, store: MessageStore) -> None:
        """Do it, as a thread of the process of this store's broker."""


class Clients:
    """What they share: a model, names, and the broker that they talk to."""

    def __init__(
        self,
        scheduler: Scheduler,
        model: Model,
        dice: Random,
        *,
        queues: int,
        retention: bool,
        may_fail: Callable[[], bool],
        alone: bool = True,
        producers: Producers | None = None,
        further: Sequence[FurtherClients] = (),
    ) -> None:
        """``alone``: not in a group, whose members know different ends. ``producers``: of transactions, if any."""
        self._scheduler = scheduler
        self._model = model
        self.dice = dice
        self.queues = queues
        self._retention = retention
        self._may_fail = may_fail
        self.alone = alone
        self.producers = producers
        self.further = {name: one for one in further for name in one.weights}
        self._number = 0
        self._deleting = False
        self._putting_d = 0
        self.operations: Counter[str] = Counter()

    def run(self, group: Group, store: MessageStore, state: BrokerState, stopped: Callable[[], bool]) -> None:
        """One client until it is told to stop."""
        client = _Client(self, group, store, state)
        while not stopped():
            name = self.pick()
            self.operations[name] += 1
            try:
                client.do(name)
            except (ShutdownError, DiskError):
                require(stopped() or self._may_fail(), "a working broker refused", name)
                self._scheduler.sleep_us(50_000)
            if self.dice.random() < 0.7:
                self._scheduler.sleep_us(int(self.dice.random() * self.dice.choice((500, 20_000, 200_000))))

    def pick(self) -> str:
        """What to do next."""
        names = {"put": 30, "batch": 10, "delayed": 8, "pull": 15, "query": 6, "commit": 12, "beyond": 3, "flush": 2}
        if self.alone:
            names |= {"look": 6, "delete": 1, "clean": 3 if self._retention else 0}
        if self.producers is not None:
            names["transact"] = 30
        if self.further:  # the worlds without them have the others
            names = {"put": 6, "delayed": 3, "pull": 3, "commit": 3, "flush": 1}
            names |= {name: one.weights[name] for name, one in self.further.items()}
        return self.dice.choices(list(names), list(names.values()))[0]

    def client(self, group: Group, store: MessageStore, state: BrokerState) -> _Client:
        """One that asks one broker."""
        return _Client(self, group, store, state)

    def body(self) -> bytes:
        """One that nobody used before."""
        self._number += 1
        return str(self._number).encode().ljust(int(self.dice.random() * self.dice.choice((10, 100, 400))) + 8, b".")


class _Client:
    def __init__(self, shared: Clients, group: Group, store: MessageStore, state: BrokerState) -> None:
        self._shared = shared
        self._group = group
        self._store = store
        self._state = state
        self._model = shared._model
        self.dice = shared.dice
        self._scheduler = shared._scheduler
        self._asked: list[Sent] = []

    def lose(self) -> None:
        """Whatever has no answer yet gets none."""
        for sent in self._asked:
            if sent.outcome == "open":
                sent.outcome = "unknown"

    def do(self, name: str) -> None:
        """Do it."""
        operations: dict[str, Callable[[], None]] = {
            "put": lambda: self._put(1, 0),
            "batch": lambda: self._put(self.dice.randrange(2, 8), 0),
            "delayed": lambda: self._put(1, self.dice.choice((1, 1, 2))),
            "pull": self._pull,
            "query": self._query,
            "commit": self._commit,
            "beyond": self._beyond,
            "look": self._look,
            "flush": self._flush,
            "delete": self._delete,
            "clean": self._store.request_clean,
            "transact": self._transact,
        }
        if name in self._shared.further:
            self._shared.further[name].do(name, self._store)
        else:
            operations[name]()

    def _place(self) -> Place:
        return self.dice.choice(TOPICS), self.dice.randrange(self._shared.queues)

    def _message(self, level: int) -> tuple[Sent, Message]:
        body, place = self._shared.body(), self._place()
        if level and place[0] == DELETED:
            place = ("A", place[1])  # else nobody could tell whether it was delivered
        keys = (f"k{body.rstrip(b'.').decode()}", f"s{self.dice.randrange(6)}")[: self.dice.choice((0, 1, 2, 2))]
        properties = {"TAGS": f"t{self.dice.randrange(3)}"} | ({"KEYS": " ".join(keys)} if keys else {})
        sent = Sent(body, place, keys, level, dict(properties))
        if level:
            properties["DELAY"] = str(level)
        return sent, Message(place[0], body, place[1], properties, born_timestamp=1)

    def _put(self, count: int, level: int) -> None:
        shared = self._shared
        if shared._deleting:
            return
        shared._putting_d += 1
        try:
            made = [self._message(level) for _ in range(count)]
            answered = Event()
            for sent, _ in made:
                self._model.send(sent)
                self._asked.append(sent)

            def done(results: Sequence[PutResult]) -> None:
                if self._group.dead:
                    return
                try:
                    self._model.answered_together([sent for sent, _ in made], results)
                except ViolationError as violation:
                    self._group.failure = self._group.failure or violation
                answered.set()

            self._store.submit([message for _, message in made], done)
            require(answered.wait(ANSWER_S), "a put is not answered", *(sent for sent, _ in made))
        finally:
            shared._putting_d -= 1

    def _transact(self) -> None:
        if self._shared.producers is not None:
            self._shared.producers.transact(self._group, self._store, ANSWER_S)

    def _pull(self) -> None:
        place = self._place()
        begin, end = max(self._store.min_offset(*place), 0), self._store.max_offset(*place)
        if end <= begin:
            return
        at = self.dice.randrange(begin, end)
        result = self._store.get(*place, at, max_count=self.dice.choice((1, 5, 32)))
        if result.status is not GetMessageStatus.FOUND:
            if not self._shared.alone:
                return  # a member that has just become a slave does not know what is committed
            gone = self._store.min_offset(*place) > at or self._store.max_offset(*place) == 0
            require(gone or self._shared._retention, "what a queue has is not given", place, at, end, result)
            return
        messages = [decode_record(record) for record in result.records]
        for message in messages:
            self._model.found(place, message.queue_offset, message)
        if place[0] == DELETED:
            return  # perhaps just now
        for message, following in itertools.pairwise(messages):
            require(message.queue_offset + 1 == following.queue_offset, "a pull leaves a place out", place, at)
        skipped = messages[0].queue_offset - at
        gone = max(self._store.min_offset(*place), self._retained_from(place)) >= messages[0].queue_offset
        require(not skipped or gone, "a pull leaves a place out", place, at, skipped)

    def _retained_from(self, place: Place) -> int:
        """The first place whose message the log still has; a queue's own begin may be behind it for a moment."""
        begin = self._store.log.min_offset
        kept = [one.queue_offset for one in self._model.queues.get(place, {}).values() if one.position >= begin]
        return min(kept, default=1 << 60)

    def _query(self) -> None:
        sent = self.dice.choice(list(self._model.sent.values())) if self._model.sent else None
        if sent is None or not sent.keys:
            return
        key = self.dice.choice(sent.keys)
        try:
            records = self._store.query(sent.place[0], key, 64, 0, 1 << 60)
        except DLedgerError:
            return  # ask again
        for record in records:
            body = decode_record(record).body
            require(body in self._model.sent and key in self._model.sent[body].keys, "a query finds another", key)

    def _change(self, change: Callable[[Callable[[PutResult], None]], None]) -> PutResult | None:
        answered, results = Event(), list[PutResult]()

        def done(result: PutResult) -> None:
            results.append(result)
            answered.set()

        change(done)
        require(answered.wait(ANSWER_S), "a change of broker state is not answered")
        return results[0] if results and not self._group.dead else None

    def _commit(self) -> None:
        """Some at once, in any order: only the furthest counts."""
        topic, queue_id = self.dice.choice(("A", "B")), self.dice.randrange(self._shared.queues)
        group, end = self.dice.choice(("g", "h")), self._store.max_offset(topic, queue_id)
        offsets = [self.dice.randrange(end + 1) for _ in range(self.dice.choice((1, 1, 2, 3)))]
        results: list[tuple[int, PutResult]] = []
        answered = Event()

        def done(offset: int, result: PutResult) -> None:
            results.append((offset, result))
            if len(results) == len(offsets):
                answered.set()

        self._model.wanted((group, topic, queue_id), max(offsets))
        try:
            for offset in offsets:
                self._state.commit_offsets(group, [(topic, queue_id, offset)], done=partial(done, offset))
        except InvalidRequestError:
            require(self._state.topic(topic) is None, "a possible offset is refused", topic, queue_id, offsets, end)
            self._change(
                lambda done: self._state.put_topic(TopicConfig(topic, self._shared.queues, self._shared.queues), done)
            )
            return
        require(answered.wait(ANSWER_S), "commits are not answered")
        if not self._group.dead:
            for offset, result in results:
                self._model.committed((group, topic, queue_id), offset, result)

    def _beyond(self) -> None:
        topic, queue_id = self.dice.choice(("A", "B")), self.dice.randrange(self._shared.queues)
        offset = self._store.max_offset(topic, queue_id) + 1000
        self._model.wanted(("far", topic, queue_id), offset)
        try:
            self._change(lambda done: self._state.commit_offsets("far", [(topic, queue_id, offset)], done=done))
        except InvalidRequestError:
            return
        noted = self._state.offset("far", topic, queue_id)
        require(noted < offset, "an offset beyond a queue's end is taken", topic, queue_id, noted)

    def _look(self) -> None:
        for consumer in list(self._model.commits):
            least = self._model.committed_offset(consumer)
            noted = self._state.offset(*consumer)
            require(noted >= least, "a consumer's offset went back", consumer, noted, least)

    def _flush(self) -> None:
        try:
            self._store.flush()
        except DLedgerError:
            require(self._shared._may_fail(), "a flush failed on a sound disk")

    def _delete(self) -> None:
        """Nobody puts meanwhile, so that it is known what is deleted."""
        shared = self._shared
        if shared._deleting:
            return
        shared._deleting = True
        try:
            while shared._putting_d:
                self._scheduler.sleep_us(1000)
            if self._store.wait_dispatched(ANSWER_S):
                end = self._store.log.end_offset
                self._model.forget_topic(DELETED, end)
                self._store.delete_topic(DELETED)
        except DLedgerError:
            require(shared._may_fail(), "a topic cannot be deleted")
        finally:
            shared._deleting = False
