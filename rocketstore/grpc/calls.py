"""One call of a client, at whichever member it came in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from dledger.access.guard import Caller
from dledger.access.quota import Quota
from dledger.records import record
from rocketstore.broker.permissions import Need
from rocketstore.grpc.codes import RejectedError
from rocketstore.pb import definition_pb2 as pb

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
