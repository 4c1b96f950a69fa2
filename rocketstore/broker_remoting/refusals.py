"""The broker's refusals as RocketMQ's response codes."""

from __future__ import annotations

from typing import Final

from dledger.access.quota import TooManyWaitsError
from dledger.errors import DLedgerError
from dledger.errors import Outcome as TheirOutcome
from dledger.remoting.codes import AnswerCode
from dledger.remoting.server import Refused
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.types import Outcome

CODES: Final = {
    RefusalKind.INVALID: AnswerCode.SYSTEM_ERROR,
    RefusalKind.ILLEGAL_MESSAGE: AnswerCode.MESSAGE_ILLEGAL,
    RefusalKind.WRONG_MESSAGE_TYPE: AnswerCode.MESSAGE_ILLEGAL,
    RefusalKind.WRONG_FILTER: AnswerCode.SUBSCRIPTION_PARSE_FAILED,
    RefusalKind.NO_TOPIC: AnswerCode.TOPIC_NOT_EXIST,
    RefusalKind.NO_QUEUE: AnswerCode.SYSTEM_ERROR,
    RefusalKind.NO_GROUP: AnswerCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    RefusalKind.NO_MESSAGE: AnswerCode.SYSTEM_ERROR,
    RefusalKind.NO_OFFSET: AnswerCode.QUERY_NOT_FOUND,
    RefusalKind.NO_CLIENT: AnswerCode.CONSUMER_NOT_ONLINE,
    RefusalKind.NOT_PERMITTED: AnswerCode.NO_PERMISSION,
    RefusalKind.TOO_MANY: AnswerCode.SYSTEM_BUSY,
    RefusalKind.BUSY: AnswerCode.SYSTEM_ERROR,
    RefusalKind.UNAVAILABLE: AnswerCode.SERVICE_NOT_AVAILABLE,
    RefusalKind.TOO_LATE: AnswerCode.SYSTEM_ERROR,
    RefusalKind.FAILED: AnswerCode.SYSTEM_ERROR,
}
"""By kind. Java's clients try another broker for 1, 14, 16 and 17, and none for 2 and 13."""


def told_outcome(outcome: Outcome) -> TheirOutcome:
    """The outcome as callers are told it."""
    return "not_applied" if outcome == "not_applied" else "unknown"


def refusal_of(error: Exception) -> Refused | None:
    """The answer to what the broker refuses; None: it is no refusal."""
    if isinstance(error, Refusal):
        return Refused(CODES[error.kind], told_outcome(error.outcome))
    if isinstance(error, TooManyWaitsError):
        return Refused(AnswerCode.SYSTEM_BUSY, error.outcome)
    return Refused(AnswerCode.SYSTEM_ERROR, error.outcome) if isinstance(error, DLedgerError) else None
