"""Errors of producers, consumers and administrators, one class per distinct reaction.

All are ``DLedgerError`` (so ``outcome`` says whether the request may have taken effect); network errors are that
package's ``UnavailableError`` and ``RequestTimeoutError``, full buffers its ``PendingFullError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import grpc

from dledger.access.signing import REFUSAL
from dledger.client.rpc_failures import rpc_failure
from dledger.errors import (
    AccessDeniedError,
    DLedgerError,
    InvalidRequestError,
    LeaderHint,
    Outcome,
    OutOfOrderSequenceError,
    PendingFullError,
    RequestTimeoutError,
    TooManyProducersError,
    UnavailableError,
    UnknownProducerError,
)
from dledger.types import NodeId
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.receipts import SendReceipt
from rocketstore.types import PutMessageStatus

if TYPE_CHECKING:
    from rocketstore.pb import broker_pb2 as pb


class NotMasterError(DLedgerError):
    """Raised when a broker does not accept writes now (slave, being promoted or stopping); follow ``leader``."""


class BrokerBusyError(PendingFullError):
    """Raised when a broker is overloaded; slow down and retry."""


class MessageRefusedError(InvalidRequestError):
    """Raised when no broker would accept the message: too large, or its topic, queue or properties are not allowed."""


class NotAllowedNowError(InvalidRequestError):
    """Raised when a topic's permission or its number of queues excludes the request: an administrator may change it."""


class StoreFailedError(DLedgerError):
    """Raised when a broker could not store or answer for a reason of its own, for example a disk error."""


class SendOutcomeUnknownError(RequestTimeoutError):
    """Raised when a message may or may not be stored: resending it may duplicate it."""


class NotFoundError(DLedgerError):
    """Raised when a topic, a group, a queue or a message does not exist."""


class OtherIncarnationError(UnavailableError):
    """Raised when offsets are not committed because the broker may have lost messages since they were read; retry."""


class OffsetOutOfRangeError(DLedgerError):
    """Raised when the next message no longer exists and the consumer must not skip it; ``seek`` to continue."""


class PartlySentError(DLedgerError):
    """Raised when only some messages of one call are stored, or may be: ``results`` says which.

    ``results`` has one receipt or error per message, in the order of the call.
    """

    outcome: Outcome = "unknown"

    def __init__(self, message: str, results: Sequence[SendReceipt | DLedgerError]) -> None:
        super().__init__(message)
        self.results = tuple(results)


def receipts_of_all(results: Sequence[SendReceipt | DLedgerError]) -> list[SendReceipt]:
    """The receipts, if there are only such. Raises the first error if nothing was stored, else ``PartlySentError``."""
    errors = [result for result in results if isinstance(result, DLedgerError)]
    if not errors:
        return [result for result in results if isinstance(result, SendReceipt)]
    if len(errors) == len(results) and all(error.outcome == "not_applied" for error in errors):
        raise errors[0]
    stored = len(results) - len(errors)
    unknown = sum(error.outcome == "unknown" for error in errors)
    raise PartlySentError(
        f"{stored} of {len(results)} messages stored, {unknown} of unknown outcome, {len(errors) - unknown} "
        f"not stored: {errors[0]}",
        results,
    )


_RETRIED: Final = (NotMasterError, BrokerBusyError, StoreFailedError, UnavailableError, PendingFullError)


def is_retried(error: BaseException) -> bool:
    """Whether resending, perhaps elsewhere, cannot duplicate the message and may help."""
    return isinstance(error, _RETRIED) and error.outcome == "not_applied"


def is_retried_read(error: BaseException) -> bool:
    """Like ``is_retried``, for requests that are safe to repeat in any case."""
    return isinstance(error, (*_RETRIED, RequestTimeoutError))


def failure_of(error: grpc.RpcError, address: str, *, sent: bool) -> DLedgerError:
    """Translate a gRPC failure. ``sent``: the request may have changed something."""
    code, details = error.code(), error.details() or ""
    told = _trailing(error)
    failure: DLedgerError
    match code:
        case grpc.StatusCode.NOT_FOUND:
            return NotFoundError(details or f"{address} does not know it")
        case grpc.StatusCode.UNIMPLEMENTED:
            return InvalidRequestError(
                f"{address} is not a broker, or of an older version ({details}): is this a peer or client port of "
                "dledger? Producers and consumers connect to the broker's listenPort"
            )
        case grpc.StatusCode.PERMISSION_DENIED if REFUSAL in told:
            return AccessDeniedError(f"{address}: {details}")
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.OUT_OF_RANGE:
            return NotAllowedNowError(details)
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.FAILED_PRECONDITION if told.keys() & {"leader", "outcome"}:
            failure = NotMasterError(details or f"{address} is not the master", leader=hint_of(told.get("leader", "")))
        case grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL | grpc.StatusCode.DATA_LOSS:
            failure = StoreFailedError(f"{address} failed: {details}")
            failure.outcome = "unknown" if sent else "not_applied"
        case _:
            failure = rpc_failure(error, address, sent=sent)
    if told.get("outcome") == "unknown":
        failure.outcome = "unknown"
    elif told.get("outcome") == "not_applied":
        failure.outcome = "not_applied"
    return failure


def _trailing(error: grpc.RpcError) -> dict[str, str]:
    pairs: Any = error.trailing_metadata() or ()  # grpc-stubs declares a single pair
    return {str(key): str(value) for key, value in pairs}


def hint_of(address: str) -> LeaderHint | None:
    """The leader as named by brokers: only an address."""
    return LeaderHint(NodeId(""), address) if address else None


_SENT: Final = frozenset(("PUT_OK", "FLUSH_DISK_TIMEOUT", "FLUSH_SLAVE_TIMEOUT", "SLAVE_NOT_AVAILABLE"))


def send_failure(result: pb.SendResult, address: str) -> DLedgerError | None:
    """Why a message was not stored, or None if it was (RocketMQ's four stored statuses)."""
    status = result.status
    if status in _SENT:
        return None
    reason = f"{address}: {status}: {result.reason}" if result.reason else f"{address}: {status}"
    if status not in PutMessageStatus.__members__ or result.outcome not in ("not_applied", "unknown"):
        return BadAnswerError(f"{reason} (outcome {result.outcome!r}) is not a valid answer to a send")
    if result.outcome == "unknown":
        return SendOutcomeUnknownError(reason, leader=hint_of(result.leader))
    match status:
        case PutMessageStatus.SERVICE_NOT_AVAILABLE:
            return NotMasterError(reason, leader=hint_of(result.leader))
        case PutMessageStatus.OS_PAGECACHE_BUSY:
            return BrokerBusyError(reason)
        case PutMessageStatus.NO_PERMISSION:
            return AccessDeniedError(reason)
        case PutMessageStatus.OUT_OF_ORDER_SEQUENCE:
            return OutOfOrderSequenceError(reason)
        case PutMessageStatus.UNKNOWN_PRODUCER:
            return UnknownProducerError(reason)
        case PutMessageStatus.TOO_MANY_PRODUCERS:
            return TooManyProducersError(reason)
        case PutMessageStatus.MESSAGE_ILLEGAL | PutMessageStatus.PROPERTIES_SIZE_EXCEEDED:
            return MessageRefusedError(reason)
        case _:
            return StoreFailedError(reason, leader=hint_of(result.leader))
