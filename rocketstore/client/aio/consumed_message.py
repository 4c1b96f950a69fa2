"""Messages as consumers get them: the stored record, decoded on demand, and the queue that it came from."""

from __future__ import annotations

from dledger.errors import DLedgerError
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.aio.received import ReceivedMessage, split_records
from rocketstore.message.message import PROPERTY_RETRY_TOPIC
from rocketstore.remoting.bodies.queues import MessageQueue


class ConsumedMessage(ReceivedMessage):
    """One message of a queue; read-only."""

    __slots__ = ("queue", "tries_here")

    queue: MessageQueue
    """Where it came from: topic, broker, number. For a message that comes again, that is the retry topic's."""
    tries_here: int
    """How often this consumer has tried it before and kept it."""

    @property
    def topic(self) -> str:
        """The topic that it was sent to, also if it comes again."""
        return self.property(PROPERTY_RETRY_TOPIC) or self.queue.topic

    @property
    def attempts(self) -> int:
        """How often it was delivered before, and sent back or failed."""
        return self.decode().reconsume_times + self.tries_here


def split_pulled(records: bytes, queue: MessageQueue) -> list[ConsumedMessage]:
    """The messages in the answer to a pull. Raises ``BadAnswerError`` for anything but whole, undamaged records."""
    try:
        messages = split_records(records, kind=ConsumedMessage)
    except DLedgerError as error:
        raise BadAnswerError(str(error)) from error
    for one in messages:
        one.queue = queue
        one.tries_here = 0
    return messages
