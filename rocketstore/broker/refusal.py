"""How the broker refuses a request: one error for all of them. Each protocol maps its kind to a code of its own."""

from __future__ import annotations

from enum import Enum
from typing import Final

from rocketstore.types import Outcome, PutMessageStatus, PutResult


class RefusalKind(Enum):
    """The reactions of callers that a refusal asks for."""

    INVALID = "invalid"
    """The request is wrong: repeating it does not help."""
    ILLEGAL_MESSAGE = "illegal message"
    """Likewise, because of a message in it."""
    WRONG_MESSAGE_TYPE = "wrong message type"
    """Likewise, because the topic is for messages of another type."""
    WRONG_FILTER = "wrong filter"
    """Likewise, because of a subscription's expression."""
    NO_TOPIC = "no topic"
    NO_QUEUE = "no queue"
    NO_GROUP = "no group"
    NO_MESSAGE = "no message"
    NO_OFFSET = "no offset"
    NO_CLIENT = "no client"
    """No client of the group, or with that id, is connected to this broker."""
    NOT_PERMITTED = "not permitted"
    """By settings of the broker, the topic or the group; access control has an error of its own."""
    TOO_MANY = "too many"
    """A limit of the broker, or of the caller's share of it, is reached: try again later."""
    BUSY = "busy"
    """The store takes nothing at the moment: try again."""
    UNAVAILABLE = "unavailable"
    """Not here, or not yet: ask ``leader`` if it is known, or try again."""
    TOO_LATE = "too late"
    FAILED = "failed"
    """The broker could not do it; ``outcome`` says whether it may have happened."""


_KINDS: Final = {
    PutMessageStatus.SERVICE_NOT_AVAILABLE: RefusalKind.UNAVAILABLE,
    PutMessageStatus.OS_PAGECACHE_BUSY: RefusalKind.BUSY,
    PutMessageStatus.MESSAGE_ILLEGAL: RefusalKind.ILLEGAL_MESSAGE,
    PutMessageStatus.PROPERTIES_SIZE_EXCEEDED: RefusalKind.ILLEGAL_MESSAGE,
    PutMessageStatus.NO_PERMISSION: RefusalKind.NOT_PERMITTED,
    PutMessageStatus.NOT_WRITABLE: RefusalKind.NOT_PERMITTED,
    PutMessageStatus.TOPIC_NOT_FOUND: RefusalKind.NO_TOPIC,
    PutMessageStatus.TOPIC_NOT_CREATED: RefusalKind.NO_TOPIC,
    PutMessageStatus.QUEUE_NOT_FOUND: RefusalKind.NO_QUEUE,
    PutMessageStatus.WRONG_MESSAGE_TYPE: RefusalKind.WRONG_MESSAGE_TYPE,
    PutMessageStatus.FLOW_CONTROL: RefusalKind.TOO_MANY,
}


class Refusal(Exception):  # noqa: N818  # the answer to a request, no fault of the broker
    """Raised when a request is not carried out, or may not have been (``outcome``).

    ``leader``: the address of the broker to ask instead, if this one knows it.
    """

    def __init__(self, kind: RefusalKind, sentence: str, *, outcome: Outcome = "not_applied", leader: str = "") -> None:
        super().__init__(sentence)
        self.kind = kind
        self.outcome = outcome
        self.leader = leader

    @classmethod
    def of(cls, result: PutResult, leader: str = "") -> Refusal:
        """Of a change of the broker's state, or a message, that was not stored."""
        sentence = result.reason or str(result.status)
        return cls(kind_of(result), sentence, outcome=result.outcome, leader=result.leader or leader)


def kind_of(result: PutResult) -> RefusalKind:
    """Why a message was not stored."""
    return _KINDS.get(result.status, RefusalKind.FAILED)
