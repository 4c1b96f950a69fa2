"""Results of sends and transactions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dledger.errors import DLedgerError
from dledger.records import record
from dledger.remoting.codes import AnswerCode
from rocketstore.message.message import Message


class SendStatus(StrEnum):
    """How safely a message is stored; RocketMQ's names. The message is stored in every case: do not send it again."""

    SEND_OK = "SEND_OK"
    """As safely as the broker is set to store messages."""
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


STORED: Final[Mapping[int, SendStatus]] = {
    AnswerCode.SUCCESS: SendStatus.SEND_OK,
    AnswerCode.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    AnswerCode.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    AnswerCode.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}
"""The answer codes of messages that are stored."""
NO_OFFSET: Final = -1
"""A message's offset if the broker has it, but does not remember where."""


@record(frozen=True, slots=True)
class SendResult:
    """Where a message is stored.

    ``offset`` is its number in the queue (``NO_OFFSET``: not known). ``message_id`` is the id that this producer gave
    it (UNIQ_KEY); ``offset_id`` names the broker's address and the position in its log. For a delayed message and for
    one of a transaction, queue and offset are those of the place where it waits. ``recall_handle``: what
    ``Producer.recall`` needs to have a message with a time of its own not delivered.
    """

    topic: str
    broker: str
    queue: int
    offset: int
    message_id: str
    offset_id: str = ""
    status: SendStatus = SendStatus.SEND_OK
    recall_handle: str = ""


class TransactionState(StrEnum):
    """The outcome of a local transaction."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"
    """Not known yet: the broker asks again later."""


@dataclass(frozen=True, slots=True)
class PreparedMessage:
    """A message that waits for its transaction. ``checks``: how often a member of the group was asked about it.

    ``transaction_id`` is the message's unique key: store it together with what the transaction does, so that a check
    can find it.
    """

    message: Message
    transaction_id: str
    checks: int = 0


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """The end of a transaction. ``half`` is the place where its message waits, or waited.

    ``problem``: the broker was not told of ``state``, and why; a check will settle it.
    """

    transaction_id: str
    state: TransactionState
    half: SendResult
    problem: DLedgerError | None = None
