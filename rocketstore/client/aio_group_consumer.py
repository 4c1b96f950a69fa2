"""``AsyncGroupConsumer``: ``GroupConsumer`` for asyncio. The member is the one for threads; only waiting differs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, ParamSpec, Self, TypeVar, Unpack

from dledger.client.security import ClientSecurity
from dledger.errors import DLedgerError, UnavailableError
from dledger.sending.aio_stream import is_being_cancelled
from rocketstore.client.group_branch import unexpected
from rocketstore.client.group_consumer import WORKERS, GroupConsumer
from rocketstore.client.group_options import GroupOptions, GroupSettings
from rocketstore.client.shares import GroupDelivery, QueueName

_log = logging.getLogger(__name__)
SENDS_BACK_MAX: Final = 4
"""Messages that are sent back at once; further ones wait."""
RECEIVE_S: Final = 1.0
AsyncHandler = Callable[[GroupDelivery], Awaitable[object]]
_P = ParamSpec("_P")
_T = TypeVar("_T")


class AsyncGroupConsumer:
    """As ``GroupConsumer``, whose documentation applies. Used on one loop; ``async with`` closes it."""

    def __init__(
        self,
        addresses: Sequence[str] | str = (),
        *,
        group: str,
        name_servers: Sequence[str] | str = (),
        options: GroupOptions | None = None,
        security: ClientSecurity | None = None,
        **settings: Unpack[GroupSettings],
    ) -> None:
        self._member = GroupConsumer(
            addresses, group=group, name_servers=name_servers, options=options, security=security, **settings
        )
        self._waiting = ThreadPoolExecutor(1, f"rocketstore-receive-{group}")
        self._asking = ThreadPoolExecutor(SENDS_BACK_MAX, f"rocketstore-ask-{group}")
        self._receiving = asyncio.Lock()
        self._workers: list[asyncio.Task[None]] = []
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except DLedgerError as failure:
            if error is None:
                raise
            _log.warning("cannot commit the offsets of group %s: %s", self._member.group, failure)

    def subscribe(self, topic: str, tags: str = "*") -> None:
        """Consume a topic: all messages, or those with one of the tags ``"TagA || TagB"``. Before ``start``."""
        self._member.subscribe(topic, tags)

    async def start(self, handler: AsyncHandler | None = None, workers: int = WORKERS) -> None:
        """Join the group. ``handler`` is awaited for up to ``workers`` messages at once."""
        await self._ask(self._member.start)
        if handler is not None:
            self._workers = [asyncio.create_task(self._work(handler)) for _ in range(workers)]

    async def receive(self, timeout_s: float = RECEIVE_S) -> GroupDelivery | None:
        """The next message; None if none comes in time, or the consumer is closed."""
        async with self._receiving:
            if self._closed:
                return None
            received = asyncio.get_running_loop().run_in_executor(self._waiting, self._member.receive, timeout_s)
            try:
                return await asyncio.shield(received)
            except asyncio.CancelledError:  # the thread may take a message all the same: it must come again
                received.add_done_callback(self._give_back)
                raise

    def _give_back(self, received: asyncio.Future[GroupDelivery | None]) -> None:
        delivery = received.result()
        if delivery is not None:
            self._member.return_unused(delivery)

    async def __aiter__(self) -> AsyncIterator[GroupDelivery]:
        """Every message until the consumer is closed. Each must be acknowledged, or sent back."""
        while not self._closed:
            delivery = await self.receive()
            if delivery is not None:
                yield delivery

    def ack(self, delivery: GroupDelivery) -> None:
        """The message is done."""
        self._member.ack(delivery)

    async def send_back(self, delivery: GroupDelivery, delay_level: int = 0) -> None:
        """The message failed: deliver it again later."""
        await self._ask(self._member.send_back, delivery, delay_level)

    async def commit(self) -> None:
        """Commit what is done now."""
        await self._ask(self._member.commit)

    def lag(self) -> dict[QueueName, int]:
        """For each queue of this member, how many messages follow those handed out; -1: unknown."""
        return self._member.lag()

    @property
    def queues(self) -> list[QueueName]:
        """The queues that this member has now."""
        return self._member.queues

    async def close(self) -> None:
        """Wait for running handlers, commit what is done, and leave the group. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._member.stop_receiving()
        if self._workers:
            await asyncio.wait(self._workers)
        try:
            await self._ask(self._member.close)
        finally:
            self._waiting.shutdown(wait=False)
            self._asking.shutdown(wait=False)

    async def _work(self, handler: AsyncHandler) -> None:
        while not self._closed:
            delivery = await self.receive()
            if delivery is None:
                continue
            try:
                await handler(delivery)
            except BaseException as error:  # also SystemExit: whatever it is, the message comes again
                if isinstance(error, GeneratorExit | KeyboardInterrupt) or is_being_cancelled():  # the program ends
                    self._member.return_unused(delivery)
                    raise
                await self._settle(delivery, error)
            else:
                self.ack(delivery)

    async def _settle(self, delivery: GroupDelivery, error: BaseException) -> None:
        try:
            await self._ask(self._member.failed, delivery, error)
        except Exception as defect:  # noqa: BLE001  # else a worker would end without a word
            unexpected(self._member.group, f"settle {delivery!r}", defect)

    async def _ask(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            asked = asyncio.get_running_loop().run_in_executor(self._asking, lambda: call(*args, **kwargs))
        except RuntimeError as error:  # the threads are gone
            raise UnavailableError("the consumer is closed") from error
        return await asyncio.shield(asked)
