"""The broker's errors, and their gRPC statuses.

A failed call ends with a gRPC status. For possible writes, the trailing metadata contains the ``outcome``, and the
``leader``'s address, as far as known.
"""

from __future__ import annotations

from typing import Final, NoReturn

import grpc

from dledger.access.guard import AccessGuard
from dledger.errors import CorruptLogError, DLedgerError, InvalidRequestError, told
from dledger.rpc.clients import access_gate
from rocketstore.broker.long_polling import TooManyPullsError
from rocketstore.index.service import IndexDamagedError
from rocketstore.types import PutMessageStatus, PutResult

Context = grpc.aio.ServicerContext[bytes, bytes]


class NotFoundRefusalError(Exception):
    """Raised when a topic does not exist, or a client may not know that it does."""


class NotPermittedError(Exception):
    """Raised when a topic or the broker does not permit a request."""


class OutOfRangeError(Exception):
    """Raised when a queue does not exist."""


class NotStoredError(Exception):
    """Raised when a change of the broker's state was not stored, or may not have been."""

    def __init__(self, result: PutResult, leader: str) -> None:
        super().__init__(result.reason or str(result.status))
        self.result = result
        self.leader = result.leader or leader


class CallTooLongError(Exception):
    """Raised when a call has no response after ``call_ms_max``."""


REFUSALS: Final = (
    CallTooLongError,
    InvalidRequestError,
    NotFoundRefusalError,
    NotPermittedError,
    OutOfRangeError,
    TooManyPullsError,
    NotStoredError,
    DLedgerError,
)
"""The errors that handlers may raise and ``abort`` converts."""
_CODES: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFoundRefusalError, grpc.StatusCode.NOT_FOUND),
    (NotPermittedError, grpc.StatusCode.PERMISSION_DENIED),
    (OutOfRangeError, grpc.StatusCode.OUT_OF_RANGE),
    (TooManyPullsError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (CallTooLongError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (CorruptLogError, grpc.StatusCode.DATA_LOSS),
    (IndexDamagedError, grpc.StatusCode.UNAVAILABLE),
)
_STORED_CODES: Final = {
    PutMessageStatus.SERVICE_NOT_AVAILABLE: grpc.StatusCode.UNAVAILABLE,
    PutMessageStatus.OS_PAGECACHE_BUSY: grpc.StatusCode.UNAVAILABLE,
    PutMessageStatus.MESSAGE_ILLEGAL: grpc.StatusCode.INVALID_ARGUMENT,
    PutMessageStatus.PROPERTIES_SIZE_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
}


def code_of(error: Exception) -> grpc.StatusCode:
    """The gRPC status of an error of ``REFUSALS``."""
    if isinstance(error, NotStoredError):
        return _STORED_CODES.get(error.result.status, grpc.StatusCode.INTERNAL)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


async def abort(context: Context, error: Exception, guard: AccessGuard | None = None) -> NoReturn:
    """End a call with an error of ``REFUSALS``."""
    if isinstance(error, access_gate.REFUSALS):
        code, metadata = access_gate.refusal_of(guard, error)
        await context.abort(code, told(error), metadata)
    outcome: tuple[tuple[str, str], ...] = ()
    if isinstance(error, NotStoredError):
        outcome = (("outcome", error.result.outcome), ("leader", error.leader))
    await context.abort(code_of(error), told(error), outcome)
    raise error  # never reached: abort raises
