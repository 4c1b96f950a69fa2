"""The codes of answers. An error is in the answer's status: gRPC's own status stays OK, because clients look there."""

from __future__ import annotations

from typing import Final

from dledger.access.guard import NotAuthenticatedError, SessionsFullError
from dledger.access.quota import TooManyWaitsError
from dledger.errors import AccessDeniedError, InvalidRequestError, PendingFullError, told
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.pb import definition_pb2 as pb

_KINDS: Final = {
    RefusalKind.INVALID: pb.BAD_REQUEST,
    RefusalKind.ILLEGAL_MESSAGE: pb.BAD_REQUEST,
    RefusalKind.WRONG_MESSAGE_TYPE: pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
    RefusalKind.WRONG_FILTER: pb.ILLEGAL_FILTER_EXPRESSION,
    RefusalKind.NO_TOPIC: pb.TOPIC_NOT_FOUND,
    RefusalKind.NO_QUEUE: pb.NOT_FOUND,
    RefusalKind.NO_GROUP: pb.CONSUMER_GROUP_NOT_FOUND,
    RefusalKind.NO_MESSAGE: pb.MESSAGE_NOT_FOUND,
    RefusalKind.NO_OFFSET: pb.OFFSET_NOT_FOUND,
    RefusalKind.NO_CLIENT: pb.NOT_FOUND,
    RefusalKind.NOT_PERMITTED: pb.FORBIDDEN,
    RefusalKind.TOO_MANY: pb.TOO_MANY_REQUESTS,
    RefusalKind.BUSY: pb.TOO_MANY_REQUESTS,
    RefusalKind.UNAVAILABLE: pb.HA_NOT_AVAILABLE,
    RefusalKind.TOO_LATE: pb.PRECONDITION_FAILED,
    RefusalKind.FAILED: pb.INTERNAL_SERVER_ERROR,
}
OK: Final = pb.Status(code=pb.OK, message="OK")


class RejectedError(Exception):
    """Raised when a call is not carried out, with the code and the sentence of its answer."""

    def __init__(self, code: pb.Code, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


ANSWERED: Final = (RejectedError, Refusal, AccessDeniedError, InvalidRequestError, PendingFullError, TooManyWaitsError)
"""Errors that an answer's status tells."""


def status_of(error: Exception) -> pb.Status:
    """The status for an error of ``ANSWERED``."""
    return pb.Status(code=_code_of(error), message=told(error))


def _code_of(error: Exception) -> pb.Code:
    match error:
        case RejectedError():
            return error.code
        case Refusal():
            if error.kind is RefusalKind.FAILED and error.outcome == "unknown":
                return pb.SLAVE_PERSISTENCE_TIMEOUT
            return _KINDS[error.kind]
        case NotAuthenticatedError():
            return pb.UNAUTHORIZED
        case AccessDeniedError():
            return pb.FORBIDDEN
        case TooManyWaitsError() | SessionsFullError() | PendingFullError():
            return pb.TOO_MANY_REQUESTS
        case _:
            return pb.BAD_REQUEST


def is_limit(error: Exception) -> bool:
    """Whether a limit is reached, which operators shall know of."""
    return _code_of(error) == pb.TOO_MANY_REQUESTS
