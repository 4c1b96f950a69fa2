"""Errors of producers, consumers and administrators: one class per distinct reaction.

::

    ClientError                     any of them
    ├── ClientClosedError           the client was closed: make another one
    ├── BrokerUnreachableError      no connection, or no master yet: nothing was sent
    │   └── NoBrokersError          name servers answer, and know no broker yet
    ├── TimedOutError               no answer by the deadline
    ├── ConnectionEndedError        the connection ended before the answer
    ├── SendQueueFullError          too much is waiting to be sent: slow down
    ├── OtherIncarnationError       the broker may have lost messages since: look again
    ├── BadAnswerError              an answer that cannot be understood
    │   └── UnreadableBodyError     a body compressed by a method that is not installed
    ├── OffsetOutOfRangeError       of a consumer that must not skip: the next message is gone
    ├── NumberOutOfOrderError       an earlier number of a numbered producer is missing: ask for the next one
    ├── ProducerForgottenError      the brokers do not know the numbered producer any more: take a new name
    ├── PartlySentError             some messages of one call are stored: ``results`` says which
    └── RefusedError                a broker or name server said no; ``answer_code`` is RocketMQ's number
        ├── NotMasterError          this broker takes no writes now: another one may
        ├── BrokerBusyError         overloaded: slow down, try again
        ├── BrokerFailedError       it failed by itself
        ├── NotFoundError           no such topic, group, queue, message or client
        │   └── NoQueueError        the topic has no such queue, perhaps not any more
        ├── ForbiddenError          the account, or the topic, does not permit it
        ├── MessageRefusedError     no broker would take this message
        └── RequestNotKnownError    the program that was asked does not have this request

``outcome`` of each says whether the request may have taken effect: ``"not_applied"`` is safe to repeat, ``"unknown"``
may have been carried out, or may still be.

With the results of sends and transactions, which some errors carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from dledger.errors import DLedgerError, Outcome
from dledger.records import record
from dledger.remoting.codes import OUTCOME_FIELD, AnswerCode
from rocketstore.message.message import Message

if TYPE_CHECKING:
    from dledger.remoting.frame import Frame


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


OTHER_PROCESS: Final = "this client was made in another process: make one after the fork"
REMARK_CHARS_MAX: Final = 500
"""How much of a server's remark an error repeats: Java's may contain a stack trace."""


class ClientError(DLedgerError):
    """The base class of the errors of this client."""

    def __init__(self, message: str, *, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        if outcome is not None:
            self.outcome = outcome


class ClientClosedError(ClientError):
    """Raised when the client was closed, or made in another process."""


class BrokerUnreachableError(ClientError):
    """Raised when no connection to a server could be made, or no broker is the master: nothing was sent."""


class NoBrokersError(BrokerUnreachableError):
    """Raised when name servers know no broker: none has registered since they were started."""


class TimedOutError(ClientError):
    """Raised when no answer came by the deadline; ``outcome`` says whether the request may have been carried out."""

    outcome: Outcome = "unknown"


class ConnectionEndedError(ClientError):
    """Raised when the connection ended before the answer."""

    outcome: Outcome = "unknown"


class SendQueueFullError(ClientError):
    """Raised when a producer has too many messages, or bytes, that are not sent yet: slow down."""


class OtherIncarnationError(ClientError):
    """Raised when offsets are not committed because the broker may have lost messages since they were read; retry."""


class BadAnswerError(ClientError):
    """Raised when an answer cannot be understood: a body that is no JSON, a field that is no number."""

    outcome: Outcome = "unknown"


class UnreadableBodyError(BadAnswerError):
    """Raised when a body is compressed by a method that this installation cannot read."""


class OffsetOutOfRangeError(ClientError):
    """Raised when the next message of a queue is gone, for a consumer that must not skip any: ``seek``."""


class NumberOutOfOrderError(ClientError):
    """Raised for a message of a ``NumberedProducer`` whose number is not the next one, or behind one that failed."""


class ProducerForgottenError(ClientError):
    """Raised when brokers no longer remember a name's numbers: begin at 0, under a new name."""


class PartlySentError(ClientError):
    """Raised when only some messages of one call are stored, or may be.

    ``results`` has a ``SendResult`` or an error per message, in the order of the call.
    """

    outcome: Outcome = "unknown"

    def __init__(self, message: str, results: Sequence[SendResult | ClientError]) -> None:
        super().__init__(message)
        self.results = tuple(results)


class RefusedError(ClientError):
    """Raised when a server answered with an error; ``answer_code`` is RocketMQ's, 0 if this client refused it."""

    def __init__(
        self, message: str, *, answer_code: int = 0, address: str = "", outcome: Outcome | None = None
    ) -> None:
        super().__init__(message, outcome=outcome)
        self.answer_code = answer_code
        self.address = address


class NotMasterError(RefusedError):
    """Raised when a broker takes no writes now (a slave, starting, stopping, its disk full): another one may."""


class BrokerBusyError(RefusedError):
    """Raised when a broker has too much to do, or this account uses up its share: slow down and try again."""


class BrokerFailedError(RefusedError):
    """Raised when a broker failed; RocketMQ's say so also of requests whose outcome they do not know."""


class NotFoundError(RefusedError):
    """Raised when a topic, a group, a queue, a message or a client does not exist."""


class NoQueueError(NotFoundError):
    """Raised when a message was sent to a queue that its topic does not have: it may have had more before."""


class ForbiddenError(RefusedError):
    """Raised when the account lacks the permission, the key is wrong, or the topic may not be written or read."""


class MessageRefusedError(RefusedError):
    """Raised for a message that no broker would take: too large, or its topic, queue or properties are not allowed."""


class RequestNotKnownError(RefusedError):
    """Raised when the program that was asked does not have this request: it is older, or of another kind."""


_KINDS: Final[Mapping[int, type[RefusedError]]] = {
    AnswerCode.SYSTEM_BUSY: BrokerBusyError,
    AnswerCode.FLOW_CONTROL: BrokerBusyError,
    AnswerCode.REQUEST_CODE_NOT_SUPPORTED: RequestNotKnownError,
    AnswerCode.VERSION_NOT_SUPPORTED: RequestNotKnownError,
    AnswerCode.MESSAGE_ILLEGAL: MessageRefusedError,
    AnswerCode.INVALID_PARAMETER: RefusedError,
    AnswerCode.SERVICE_NOT_AVAILABLE: NotMasterError,
    AnswerCode.NO_PERMISSION: ForbiddenError,
    AnswerCode.TOPIC_NOT_EXIST: NotFoundError,
    AnswerCode.QUERY_NOT_FOUND: NotFoundError,
    AnswerCode.SUBSCRIPTION_NOT_EXIST: NotFoundError,
    AnswerCode.SUBSCRIPTION_GROUP_NOT_EXIST: NotFoundError,
    AnswerCode.CONSUMER_NOT_ONLINE: NotFoundError,
    AnswerCode.NO_MESSAGE: NotFoundError,
    AnswerCode.ILLEGAL_OPERATION: NotFoundError,
}
_DENIED: Final = "AclException: "
"""In the remark of RocketMQ's brokers, and ours, whose access control denies a request: code SYSTEM_ERROR in 4.9."""


def refusal_of(answer: Frame, address: str) -> RefusedError:
    """The error for an answer with a code other than SUCCESS.

    A code without a class of its own is a ``BrokerFailedError``, whose outcome is unknown unless the broker is one of
    ours and says more: RocketMQ's also answer SYSTEM_ERROR when something went wrong after they had stored a message.
    """
    kind = ForbiddenError if _DENIED in answer.remark else _KINDS.get(answer.code, BrokerFailedError)
    name = AnswerCode(answer.code).name if answer.code in AnswerCode.__members__.values() else f"code {answer.code}"
    remark = answer.remark.strip()[:REMARK_CHARS_MAX]
    return kind(
        f"{address}: {name}: {remark}" if remark else f"{address}: {name}",
        answer_code=answer.code,
        address=address,
        outcome=_outcome(answer, kind),
    )


def _outcome(answer: Frame, kind: type[RefusedError]) -> Outcome:
    told = answer.fields.get(OUTCOME_FIELD, "")
    if told == "not_applied":
        return "not_applied"
    return "unknown" if told or kind is BrokerFailedError else "not_applied"


_NO_QUEUE: Final = ("there is no queue ", "request queueId[")
"""In the remark of a broker of ours, and of RocketMQ's, to a message for a queue that it does not have."""


def refusal_of_send(answer: Frame, address: str) -> RefusedError:
    """The error for the answer to messages: as ``refusal_of``, and ``NoQueueError``."""
    refusal = refusal_of(answer, address)
    if answer.code == AnswerCode.SYSTEM_ERROR and any(one in answer.remark for one in _NO_QUEUE):
        return NoQueueError(str(refusal), answer_code=answer.code, address=address)
    return refusal


_PASSING: Final = (BrokerUnreachableError, NotMasterError, BrokerBusyError)
_UNCLEAR: Final = (TimedOutError, ConnectionEndedError)
_ELSEWHERE: Final = (NotFoundError, ForbiddenError, BrokerFailedError)


def may_repeat(error: BaseException, *, harmless: bool = False) -> bool:
    """Whether asking the same again, perhaps of a new master, may help and can do no harm.

    ``harmless``: carrying the request out twice is the same as once (reads, settings, offsets). SYSTEM_ERROR is final:
    RocketMQ also answers it for names that do not exist.
    """
    return isinstance(error, (*_PASSING, *_UNCLEAR)) and (harmless or error.outcome == "not_applied")


def may_send_elsewhere(error: BaseException) -> bool:
    """Whether another broker may take the message: RocketMQ's retryable codes, if this one certainly did not."""
    return isinstance(error, (*_PASSING, *_UNCLEAR, *_ELSEWHERE)) and error.outcome == "not_applied"


def may_send_twice(error: BaseException) -> bool:
    """Whether a producer that allows duplicates sends a message again although this one may have stored it."""
    return isinstance(error, (*_PASSING, *_UNCLEAR, BrokerFailedError))
