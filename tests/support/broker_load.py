"""A background load on brokers: producers of every kind and consumers of one group, all recorded in a history."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from rocketstore.client import Consumer, DLedgerError, Message, MessageQueue, Producer, SendResult
from tests.support.broker_history import BrokerHistory, SendOp, Session
from tests.support.history import Outcome

TOPIC: Final = "orders"
GROUP: Final = "billing"
KEYS: Final = 7
IN_FLIGHT_MAX: Final = 64
SESSION_S: Final = 1.5
DRAIN_S: Final = 120.0
JOIN_TIMEOUT_S: Final = 120.0


class BrokerLoad:
    """Runs from entry to exit; at the end consumers go on until they have got everything that was acknowledged."""

    def __init__(
        self,
        addresses: Sequence[str],
        history: BrokerHistory,
        *,
        queues: int,
        consumers: int = 2,
        pace_s: float = 0.004,
        timeout_s: float = 5.0,
        numbered: bool = False,
    ) -> None:
        """``numbered``: whether all producers number their messages, and not only one."""
        self._numbered = numbered
        self.history = history
        self._addresses = list(addresses)
        self._pace_s = pace_s
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        self._drained = threading.Event()
        self._failures: list[BaseException] = []
        producers: list[tuple[str, Callable[[str], None]]] = [
            ("any", self._send_singly),
            ("keyed", lambda who: self._send_singly(who, keyed=True)),
            ("many", self._send_many),
            ("pipeline", self._send_pipelined),
            ("ordered", lambda who: self._send_pipelined(who, ordered=True)),
            ("numbered", lambda who: self._send_pipelined(who, ordered=True, numbered=True)),
        ]
        self._producers = [self._thread(who, role) for who, role in producers]
        self._consumers = [
            self._thread(f"consumer-{n}", lambda who, n=n: self._consume(who, range(n, queues, consumers)))  # type: ignore[misc]
            for n in range(consumers)
        ]

    def __enter__(self) -> Self:
        for thread in (*self._producers, *self._consumers):
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._producers:
            thread.join(JOIN_TIMEOUT_S)
        if kind is not None or not self._consumers:
            self._drained.set()
        for thread in self._consumers:
            thread.join(JOIN_TIMEOUT_S)
        alive = [one.name for one in (*self._producers, *self._consumers) if one.is_alive()]
        if kind is None:
            if self._failures:
                raise self._failures[0]
            assert not alive, f"these clients hang: {alive}"

    def _thread(self, who: str, role: Callable[[str], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                role(who)
            except BaseException as error:  # noqa: BLE001 - told when the load ends
                self._failures.append(error)

        return threading.Thread(target=guarded, name=who, daemon=True)

    # -- producers -----------------------------------------------------------------------------------------------

    def _bodies(self, who: str) -> Iterator[tuple[int, bytes]]:
        for number in itertools.count():
            if self._stopping.wait(self._pace_s):
                return
            yield number, f"{who}/{number} ".encode() + b"." * (number % 100)

    def _producer(self, *, numbered: bool = False) -> Producer:
        return Producer(self._addresses, timeout_s=self._timeout_s, enable_idempotence=numbered or self._numbered)

    def _send_singly(self, who: str, *, keyed: bool = False) -> None:
        with self._producer() as producer:
            for number, body in self._bodies(who):
                key = f"key-{number % KEYS}" if keyed else None
                began = time.monotonic()
                try:
                    result = producer.send(_message(body, number), key=key)
                except DLedgerError as error:
                    self._failed(body, began, error)
                else:
                    place = (result.queue, result.offset)
                    self.history.record(SendOp(body, began, time.monotonic(), Outcome.ACKED, *place))

    def _send_many(self, who: str) -> None:
        """Several messages at once, of which those for one queue share a request."""
        with self._producer() as producer:
            bodies = self._bodies(who)
            while batch := list(itertools.islice(bodies, 10)):
                began = time.monotonic()
                futures = [producer.submit(_message(body, number), queue=number % 3) for number, body in batch]
                for (_, body), future in zip(batch, futures, strict=True):
                    self._finish(body, began, future)

    def _send_pipelined(self, who: str, *, ordered: bool = False, numbered: bool = False) -> None:
        in_flight: deque[tuple[int, bytes, float, Future[SendResult]]] = deque()

        def finish_one() -> None:
            number, body, began, future = in_flight.popleft()
            self._finish(body, began, future, stream=who if ordered else "", number=number)

        with self._producer(numbered=numbered) as producer:
            for number, body in self._bodies(who):
                key = f"key-{number % KEYS}" if ordered else None
                began = time.monotonic()
                try:
                    in_flight.append((number, body, began, producer.submit(_message(body, number), key=key)))
                except DLedgerError as error:
                    self._failed(body, began, error)
                while in_flight and (in_flight[0][3].done() or len(in_flight) > IN_FLIGHT_MAX):
                    finish_one()
            while in_flight:
                finish_one()

    def _finish(
        self, body: bytes, began: float, future: Future[SendResult], *, stream: str = "", number: int = -1
    ) -> None:
        try:
            result = future.result()
        except DLedgerError as error:
            self._failed(body, began, error, stream=stream, number=number)
            return
        place = (result.queue, result.offset)
        self.history.record(SendOp(body, began, time.monotonic(), Outcome.ACKED, *place, stream=stream, number=number))

    def _failed(self, body: bytes, began: float, error: DLedgerError, *, stream: str = "", number: int = -1) -> None:
        outcome = Outcome(error.outcome)
        text = f"{type(error).__name__}: {error}"
        self.history.record(SendOp(body, began, time.monotonic(), outcome, stream=stream, number=number, error=text))

    # -- consumers -----------------------------------------------------------------------------------------------

    def _consume(self, who: str, queues: Sequence[int]) -> None:
        """Sessions of a second or two, so that committed offsets matter."""
        give_up_at = float("inf")
        while not self._drained.is_set() and time.monotonic() < give_up_at:
            consumer = Consumer(
                self._addresses,
                group=GROUP,
                topics=TOPIC,
                assign=queues,
                start="first",
                commit_s=None,
                timeout_s=self._timeout_s,
                pull_wait_s=1.0,
            )
            try:
                self._consume_once(who, consumer)
            except DLedgerError:
                continue  # nobody answered; the next session goes on where the last commit was
            finally:
                _close(consumer)
            if self._stopping.is_set() and not any(one.is_alive() for one in self._producers):
                give_up_at = min(give_up_at, time.monotonic() + DRAIN_S)
                self._look_whether_drained()

    def _consume_once(self, who: str, consumer: Consumer) -> None:
        session: Session | None = None
        ends_at = time.monotonic() + SESSION_S
        while time.monotonic() < ends_at and not self._drained.is_set():
            if session is None:
                consumer.start()
                session = self.history.begin_session(who, _by_number(consumer.positions()))
            messages = consumer.poll(100, 0.2)
            self.history.delivered(session, [(one.queue.queue_id, one.queue_offset, one.body) for one in messages])
            if messages:
                places = _by_number(consumer.positions())
                consumer.commit()
                session.committed.update(places)

    def _look_whether_drained(self) -> None:
        acked = {one.body for one in self.history.sends if one.outcome is Outcome.ACKED}
        if acked <= self.history.bodies_delivered:
            self._drained.set()


def _message(body: bytes, number: int) -> Message:
    return Message(TOPIC, body, tags=f"tag-{number % 3}", keys=f"n{number}")


def _by_number(places: Mapping[MessageQueue, int]) -> dict[int, int]:
    return {queue.queue_id: offset for queue, offset in places.items()}


def _close(consumer: Consumer) -> None:
    with suppress(DLedgerError):  # what could not be committed is delivered again
        consumer.close()
