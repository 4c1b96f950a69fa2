"""How fast a pipelined producer sends; every result is looked at, and not more are kept than it may have pending."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from rocketstore.client.aio.errors import SendStatus

if TYPE_CHECKING:
    from rocketstore.client.aio.errors import SendResult
    from rocketstore.client.blocking import Producer
    from rocketstore.message.message import Message

BLOCK: Final = 1024
"""Messages submitted between two looks at the clock."""
BLOCKS_PENDING: Final = 64
"""A producer's limit of pending messages, with its default options."""
SENT_MAX: Final = 3_000_000
"""The maximum sent in one round: about 3 GiB of log on every broker, of messages of 1 KiB."""


def send_rate(producer: Producer, message: Message, seconds: float) -> float:
    """Messages per second, all of them acknowledged. Raises ``RuntimeError`` for one that is stored less safely."""
    started = time.perf_counter()
    deadline = started + seconds
    pipe = _Pipe(producer, message)
    while time.perf_counter() < deadline and pipe.sent < SENT_MAX:
        pipe.send(BLOCK)
    pipe.finish()
    return pipe.sent / (time.perf_counter() - started)


def send_count(producer: Producer, message: Message, count: int, rate: float = 0) -> float:
    """Send ``count`` messages, at most ``rate`` per second (0: as fast as possible); returns the actual rate."""
    started = time.perf_counter()
    pipe = _Pipe(producer, message)
    while pipe.sent < count:
        pipe.send(min(BLOCK, count - pipe.sent))
        if rate and (ahead := pipe.sent / rate - (time.perf_counter() - started)) > 0:
            time.sleep(ahead)
    pipe.finish()
    return count / (time.perf_counter() - started)


class _Pipe:
    """Blocks of messages under way, the oldest of which is awaited when there are too many."""

    def __init__(self, producer: Producer, message: Message) -> None:
        self._producer = producer
        self._message = message
        self._blocks: deque[Sequence[Future[SendResult]]] = deque()
        self.sent = 0

    def send(self, count: int) -> None:
        submit, message = self._producer.submit, self._message
        self._blocks.append([submit(message) for _ in range(count)])
        self.sent += count
        if len(self._blocks) > BLOCKS_PENDING:
            self._look()

    def finish(self) -> None:
        while self._blocks:
            self._look()

    def _look(self) -> None:
        for one in self._blocks.popleft():
            status = one.result().status
            if status != SendStatus.SEND_OK:
                raise RuntimeError(f"a message was stored less safely than asked for: {status}")
