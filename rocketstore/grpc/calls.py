"""One call of a client, at whichever member it came in: the codes of its answer, and its access control.

An error is in the answer's status: gRPC's own status stays OK, because clients look there.

RocketMQ 5's clients send ``authorization: MQv2-HMAC-SHA1 Credential=…, SignedHeaders=…, Signature=…``. Only the date is
signed: who reads one call can make others in its name for as long as the date is believed. So accounts over gRPC are as
safe as the connection: use TLS.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from dledger.access.addresses import host_of
from dledger.access.guard import Caller, NotAuthenticatedError, SessionsFullError, quota_at
from dledger.access.quota import Quota, TooManyWaitsError
from dledger.errors import AccessDeniedError, InvalidRequestError, PendingFullError, told
from dledger.records import record
from rocketstore.broker.broker import Broker
from rocketstore.broker.permissions import Need, require
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


HEADER_CHARS_MAX: Final = 1024
"""The longest text that is taken from a call's metadata."""
SPARE_S: Final = 0.3
"""An answer must have reached the client before its deadline, or the client sends the request again."""


@record(frozen=True, slots=True)
class CallHeaders:
    """A call's metadata, as far as it matters."""

    client_id: str = ""
    language: str = ""
    client_version: str = ""
    namespace: str = ""
    authorization: str = ""
    date_time: str = ""

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, str | bytes]]) -> CallHeaders:
        """The headers in gRPC's metadata. Raises ``RejectedError`` for one that is too long."""
        found: dict[str, str] = {}
        for name, value in metadata:
            attribute = _NAMES.get(name)
            if attribute is None:
                continue
            if len(value) > HEADER_CHARS_MAX or isinstance(value, bytes):
                code = pb.REQUEST_HEADER_FIELDS_TOO_LARGE
                raise RejectedError(code, f"{name} must be a text of at most {HEADER_CHARS_MAX} characters")
            found[attribute] = value
        return cls(**found)

    @classmethod
    def of_fields(cls, fields: Mapping[str, str]) -> CallHeaders:
        """The headers among a frame's fields, as ``fields`` gave them."""
        return cls(**{attribute: fields[name] for name, attribute in _NAMES.items() if name in fields})

    def fields(self) -> dict[str, str]:
        """For the frame of a call that is passed on."""
        found = {name: str(getattr(self, attribute)) for name, attribute in _NAMES.items()}
        return {name: value for name, value in found.items() if value}


_NAMES: Final = {
    "x-mq-client-id": "client_id",
    "x-mq-language": "language",
    "x-mq-client-version": "client_version",
    "x-mq-namespace": "namespace",
    "authorization": "authorization",
    "x-mq-date-time": "date_time",
}


class Via(NamedTuple):
    """The member that passed on a call: its node id, and whether the client's stream of commands ends there."""

    member: str = ""
    """Empty: nobody passed it on."""
    has_stream: bool = False


NOBODY: Final = Via()


class GatewayCall:
    """One call: who makes it, where from, and until when it must be answered (``deadline``, in the loop's time)."""

    __slots__ = ("caller", "deadline", "headers", "host", "may_be_repeated", "method", "port", "quota", "via")

    def __init__(
        self,
        method: str,
        headers: CallHeaders,
        place: tuple[str, int],
        admitted: tuple[Caller | None, Quota],
        deadline: float,
        via: Via = NOBODY,
    ) -> None:
        self.method = method
        self.headers = headers
        self.host, self.port = place
        """Where the client is."""
        self.caller, self.quota = admitted
        """The caller is None without access control."""
        self.deadline = deadline
        self.via = via
        self.may_be_repeated = False
        """Whether a leader before this one may have carried it out: nobody has heard what became of it there."""

    @property
    def client_id(self) -> str:
        """The client's name for itself, never empty."""
        return self.headers.client_id

    def remaining_s(self) -> float:
        """How long the call may still take, so that its answer arrives in time."""
        return self.deadline - SPARE_S - asyncio.get_running_loop().time()


NO_NEEDS: Final[tuple[Need, ...]] = ()


def name_of(resource: pb.Resource) -> str:
    """The name of a topic or group. Raises ``RejectedError`` for one in a namespace."""
    if resource.resource_namespace:
        raise RejectedError(
            pb.NOT_IMPLEMENTED,
            f"the namespace {resource.resource_namespace[:64]!r}: this broker has none, leave it empty",
        )
    return resource.name


class CallPlace(Enum):
    """Where a call is carried out."""

    HERE = auto()
    LEADER = auto()
    BOTH = auto()
    """Here, and the leader hears of it."""
    PASSED = auto()
    """Here; only other members call it."""


class Method(NamedTuple):
    """One method of the service, besides its stream of commands. ``Any``: each has messages of its own."""

    request: type[Message]
    answer: type[Message]
    """Of which an error is the field ``status``."""
    handle: Callable[[GatewayCall, Any], Awaitable[Any]]
    """Returns an answer; with ``streams`` a sequence of them. Raises ``codes.ANSWERED``."""
    place: CallPlace = CallPlace.LEADER
    needs: Callable[[Any], Sequence[Need]] = lambda _: NO_NEEDS
    streams: bool = False


WINDOW_S: Final = 15 * 60
"""How far a call's date may be from this server's clock."""
_ALGORITHM: Final = "MQv2-HMAC-SHA1"
_AUTHORIZATION: Final = re.compile(
    rf"{_ALGORITHM} +Credential=(?P<key>[^,/\s]{{1,128}})[^,]*, *SignedHeaders=x-mq-date-time, *"
    r"Signature=(?P<signature>[0-9a-fA-F]{40})"
)
_DATE: Final = "%Y%m%dT%H%M%SZ"


class GatewayAccess:
    """On the loop."""

    def __init__(self, broker: Broker) -> None:
        self._guard = broker.shares.guard
        self._quotas = broker.shares.quotas
        self._clock = broker.loop.clock

    def admit(self, method: str, headers: CallHeaders, peers: tuple[str, ...]) -> tuple[Caller | None, Quota]:
        """The caller (None without access control), and its quota.

        ``peers``: gRPC's names of where the call came from, and of the member that passed it on. Raises
        ``RejectedError``, ``NotAuthenticatedError``.
        """
        if not headers.client_id:
            raise RejectedError(pb.CLIENT_ID_REQUIRED, "the metadata x-mq-client-id is missing: every client has an id")
        if headers.namespace:
            raise RejectedError(pb.NOT_IMPLEMENTED, "x-mq-namespace: this broker has no namespaces, leave it empty")
        guard = self._guard
        if guard is None:
            return None, quota_at(_host_of(peers[0]), peers[0], self._quotas)
        key, signature = "", ""
        if headers.authorization:
            found = _AUTHORIZATION.fullmatch(headers.authorization)
            if found is None:
                raise NotAuthenticatedError(f"the metadata authorization must be of the form {_ALGORITHM}")
            key, signature = found["key"], found["signature"].lower()

        def is_genuine(secret: bytes) -> bool:
            made = hmac.new(secret, headers.date_time.encode(), "sha1").hexdigest()
            return hmac.compare_digest(made, signature)

        caller = guard.admit_signed(method, key, peers, is_genuine, self._quotas)
        if caller.signed:
            self._check_date(headers.date_time)
        return caller, caller.quota

    def require(self, caller: Caller | None, method: str, needs: Iterable[Need]) -> None:
        """Raises ``AccessDeniedError`` unless the caller has these permissions."""
        if self._guard is not None and caller is not None:
            for need in needs:
                require(self._guard, caller, method, need)

    def _check_date(self, text: str) -> None:
        """In ISO 8601, of whose forms most clients take the shortest, and that of Rust RFC 3339."""
        try:
            signed = datetime.fromisoformat(text)
            signed_s = signed.timestamp() if signed.tzinfo is not None else math.nan
        except (ValueError, OverflowError):
            signed_s = math.nan
        if math.isnan(signed_s):
            raise NotAuthenticatedError("invalid x-mq-date-time: use the form 20261130T120000Z")
        now_s = self._clock.wall_ms() / 1000
        if abs(now_s - signed_s) > WINDOW_S:
            now = datetime.fromtimestamp(now_s, UTC).strftime(_DATE)
            raise NotAuthenticatedError(
                f"the call was signed at {text}, but this server's clock reads {now}: more than "
                f"{WINDOW_S // 60} minutes apart; synchronize the clocks"
            )


@lru_cache(maxsize=4096)
def _host_of(peer: str) -> str:
    return host_of(peer)
