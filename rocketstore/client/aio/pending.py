"""The messages of a producer that have no outcome yet: room for more, waiting for them, and their outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from dledger.client.loop_runner import mind_forks
from dledger.records import record
from rocketstore.client.aio.errors import OTHER_PROCESS, ClientClosedError, ClientError, SendQueueFullError
from rocketstore.client.aio.futures import leave_behind, settle
from rocketstore.client.aio.outgoing import OutgoingMessage
from rocketstore.client.aio.results import SendResult


@record(frozen=True, slots=True)
class PipelineLimits:
    """The limits of a producer's messages that are pending, and of its requests."""

    pending_bytes_max: int = 32 * 1024 * 1024
    pending_messages_max: int = 65_536
    batch_bytes_max: int = 768 * 1024
    batch_messages_max: int = 1024
    requests_max: int = 64
    """In progress, of all queues together."""


def in_another_process() -> ClientClosedError:
    """The error of messages without an outcome in a forked child: the parent may store them yet."""
    return ClientClosedError(OTHER_PROCESS, outcome="unknown")


class SendObserver(Protocol):
    """Hears of outcomes, on the loop: it must neither block nor raise."""

    def settled(self, messages: Sequence[OutgoingMessage], outcomes: Sequence[SendResult | ClientError]) -> None:
        """These have their outcomes."""


class PendingMessages:
    """Use it on one loop; ``is_full`` may be read anywhere."""

    def __init__(
        self, limits: PipelineLimits, on_settled: Callable[[Sequence[OutgoingMessage]], object] = lambda _: None
    ) -> None:
        """``on_settled`` is told of all messages that are not pending any more."""
        self.limits: Final = limits
        self._on_settled = on_settled
        self._messages: set[OutgoingMessage] = set()
        self._waiting: list[asyncio.Future[None]] = []  # for room
        self._flushes: list[tuple[set[OutgoingMessage], asyncio.Future[None]]] = []
        self._is_closing = False
        self.observers: tuple[SendObserver, ...] = ()
        self.bytes = 0
        self.is_full = False
        """Whether callers should wait before they add more."""
        mind_forks(self)

    def leave_behind(self) -> None:
        """See ``LeftBehind``."""
        leave_behind(self._messages, in_another_process())

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, messages: Sequence[OutgoingMessage]) -> None:
        """These have no outcome from now on."""
        self._messages.update(messages)
        self.bytes += sum([one.size for one in messages])
        self._look()

    def keyed(self, topic: str) -> set[OutgoingMessage]:
        """Those of a topic that a sharding key has brought into a queue."""
        return {one for one in self._messages if one.key is not None and one.queue and one.queue.topic == topic}

    async def wait_for_room(self, timeout_s: float) -> None:
        """Return once a message may be added. Raises ``SendQueueFullError``."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_full and not self._is_closing:
                    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.append(waiting)
                    await waiting
        except TimeoutError:
            raise SendQueueFullError(
                f"{len(self)} messages with {self.bytes} bytes are not sent yet, and there was no room for another one "
                f"within {timeout_s:g} s"
            ) from None

    async def flush(self) -> None:
        """Return once every message added so far has an outcome."""
        left = set(self._messages)
        if left:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            flush = (left, done)
            self._flushes.append(flush)
            try:
                await done
            finally:
                self._flushes.remove(flush)

    def let_in(self) -> None:
        """Nobody waits for room from now on: adding says that the producer is closed."""
        self._is_closing = True
        self._wake()

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def settle(self, messages: Sequence[OutgoingMessage], outcomes: Sequence[SendResult | ClientError]) -> None:
        """Give each message its outcome, unless its caller gave up."""
        self.drop(messages)
        for one in self.observers:
            one.settled(messages, outcomes)
        settle([one.future for one in messages], outcomes)

    def fail(self, messages: Sequence[OutgoingMessage], error: ClientError) -> None:
        """They are not stored, or perhaps not: those of which that was in doubt before have their earlier error."""
        self.settle(messages, [one.doubtful or error for one in messages])

    def fail_all(self, error: ClientError) -> None:
        """Fail all that are left."""
        self.fail(tuple(self._messages), error)

    def drop(self, messages: Sequence[OutgoingMessage]) -> None:
        """They are not pending any more."""
        before = len(self._messages)
        self._messages.difference_update(messages)
        if before - len(self._messages) == len(messages):
            self.bytes -= sum([one.size for one in messages])
        else:  # some were dropped before
            self.bytes = sum(one.size for one in self._messages)
        for left, done in self._flushes:
            left.difference_update(messages)
            if not left and not done.done():
                done.set_result(None)
        self._on_settled(messages)
        self._look()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        limits = self.limits
        self.is_full = len(self._messages) >= limits.pending_messages_max or self.bytes >= limits.pending_bytes_max
        if self._waiting and not self.is_full:
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)
