"""The broker's refusals as gRPC statuses.

A failed call ends with a gRPC status. Its trailing metadata contains the ``outcome``, and the ``leader``'s address, as
far as known.
"""

from __future__ import annotations

from typing import Final, NoReturn

import grpc

from dledger.access.guard import AccessGuard
from dledger.errors import CorruptLogError, DLedgerError, InvalidRequestError, told
from dledger.rpc.clients import access_gate
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.index.service import IndexDamagedError

Context = grpc.aio.ServicerContext[bytes, bytes]
REFUSALS: Final = (Refusal, DLedgerError)
"""The errors that handlers may raise and ``abort`` converts."""
_STATUS: Final = {
    RefusalKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalKind.ILLEGAL_MESSAGE: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalKind.NO_TOPIC: grpc.StatusCode.NOT_FOUND,
    RefusalKind.NO_QUEUE: grpc.StatusCode.OUT_OF_RANGE,
    RefusalKind.NO_GROUP: grpc.StatusCode.NOT_FOUND,
    RefusalKind.NO_MESSAGE: grpc.StatusCode.NOT_FOUND,
    RefusalKind.NO_OFFSET: grpc.StatusCode.NOT_FOUND,
    RefusalKind.NO_CLIENT: grpc.StatusCode.NOT_FOUND,
    RefusalKind.NOT_PERMITTED: grpc.StatusCode.PERMISSION_DENIED,
    RefusalKind.TOO_MANY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalKind.BUSY: grpc.StatusCode.UNAVAILABLE,
    RefusalKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    RefusalKind.TOO_LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
    RefusalKind.FAILED: grpc.StatusCode.INTERNAL,
}
_CODES: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (CorruptLogError, grpc.StatusCode.DATA_LOSS),
    (IndexDamagedError, grpc.StatusCode.UNAVAILABLE),
)


def code_of(error: Exception) -> grpc.StatusCode:
    """The gRPC status of an error of ``REFUSALS``."""
    if isinstance(error, Refusal):
        return _STATUS[error.kind]
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


async def abort(context: Context, error: Exception, guard: AccessGuard | None = None) -> NoReturn:
    """End a call with an error of ``REFUSALS``."""
    if isinstance(error, access_gate.REFUSALS):
        code, metadata = access_gate.refusal_of(guard, error)
        await context.abort(code, told(error), metadata)
    outcome: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Refusal):
        outcome = (("outcome", error.outcome), ("leader", error.leader))
    await context.abort(code_of(error), told(error), outcome)
    raise error  # never reached: abort raises
