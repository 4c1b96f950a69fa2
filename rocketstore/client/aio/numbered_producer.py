"""Messages under numbers of the application: a program that goes on after a crash stores none of them twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from dledger.errors import ConfigError
from rocketstore.client.aio.errors import ClientClosedError, NumberOutOfOrderError
from rocketstore.client.aio.futures import begin, settle
from rocketstore.client.aio.outgoing import OutgoingMessage
from rocketstore.client.aio.results import SendResult
from rocketstore.remoting.bodies.queues import MessageQueue

if TYPE_CHECKING:
    from rocketstore.client.aio.named_sends import NamedSends
    from rocketstore.client.aio.pipeline import SendPipeline
    from rocketstore.message.message import Message

TURN_MESSAGES: Final = 128
"""After so many messages, ``submit`` lets the loop send them, which it could not while a program submits on and on."""


class NumberedProducer:
    """A producer whose messages have numbers that the application gives: ``Producer.numbered`` makes it.

    After a crash the program asks for its ``next_number``, makes the messages from there on again, and submits them:
    each is stored once, and all in the order of their numbers, whatever became of earlier attempts. Numbers count from
    0 without a gap, for each name; only one program at a time may use a name. The names of a group of brokers are in
    its log; a plain broker forgets them when it is restarted.

    After a failed message those behind it fail, too: call ``next_number`` and go on from there.
    """

    def __init__(
        self,
        name: str,
        broker: str,
        pipeline: Callable[[], SendPipeline],
        prepare: Callable[[Message, str | None, MessageQueue | int | None], OutgoingMessage],
    ) -> None:
        self.name: Final = name
        self._broker = broker
        self._pipeline = pipeline
        self._prepare = prepare
        self._following: int | None = None  # the only number that may come next; None: any
        self._submitted = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def next_number(self) -> int:
        """The number after those that are stored by now, 0 for a new name; once all that was submitted has an outcome.

        Raises ``RequestNotKnownError`` at brokers that do not number messages, as Apache's.
        """
        number = await self._sends.next_number()
        self._following = None
        return number

    async def submit(
        self, message: Message, number: int, *, key: str | None = None, queue: MessageQueue | int | None = None
    ) -> asyncio.Future[SendResult]:
        """Send a message soon, together with others: see ``Producer.submit``. ``number`` is that of the last call and
        one, or what ``next_number`` returned.

        Of a message that an earlier program has stored, the result may have the offset ``NO_OFFSET``. The future, or
        this call, raises ``NumberOutOfOrderError`` if an earlier message is missing, and ``ProducerForgottenError``.
        """
        prepared = self.prepared(message, number, key, queue)
        pending = self._pipeline().pending
        if pending.is_full:
            await pending.wait_for_room(self._sends.timeout_s)
        self._submitted += 1
        if not self._submitted % TURN_MESSAGES:
            await asyncio.sleep(0)
        future: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
        prepared.future = future
        self._sends.add(prepared)
        return future

    async def flush(self) -> None:
        """Return once every message submitted so far has an outcome."""
        await self._pipeline().pending.flush()

    async def close(self) -> None:
        """Send what was submitted; another one may use the name then. Idempotent."""
        await self._pipeline().close_named(self.name)

    # -- the parts of ``submit``, which the blocking producer takes on two threads -------------------------------------

    def prepared(
        self, message: Message, number: int, key: str | None, queue: MessageQueue | int | None
    ) -> OutgoingMessage:
        """Check a message and its number. On any thread."""
        if self._following not in (None, number) or number < 0:
            following = "numbers count from 0" if self._following is None else f"{self._following} is next"
            raise NumberOutOfOrderError(
                f"message {number} of producer {self.name} is out of order: {following}; after a failed message call "
                "next_number() and go on from there"
            )
        prepared = self._prepare(message, key, queue)
        prepared.number = number
        self._following = number + 1
        return prepared

    def add_all(self, messages: Sequence[OutgoingMessage]) -> None:
        """Send what another thread has prepared; the futures that are not cancelled get their outcomes here."""
        begun = begin(messages)
        try:
            self._sends.add_all(begun)
        except (ClientClosedError, ConfigError) as error:
            settle([one.future for one in begun], [error] * len(begun))

    @property
    def _sends(self) -> NamedSends:
        return self._pipeline().named(self.name, self._broker)
