"""Traces of messages as RocketMQ's clients write them: who sent and who consumed a message, when, and how long it took.

They are messages of ``TRACE_TOPIC``, whose keys are the ids of the messages they are about. A body has one record after
the other, each ended by 0x02, its fields separated by 0x01. Java's clients read them by position, and fall over a last
field that is empty, so empty keys are written as they write them: ``null``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rocketstore.message.message import SYS_FLAG_TRANSACTION, Message
from rocketstore.message.properties import type_of
from rocketstore.types import MessageType

TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
REGION: Final = "DefaultRegion"
_NULL: Final = "null"
_KINDS: Final = {MessageType.TRANSACTION: 1, MessageType.DELAY: 3, MessageType.FIFO: 4}
"""Numbers of RocketMQ's ``MessageType``; 0: normal, 2: the end of a transaction."""
_MARKS: Final = str.maketrans("\x01\x02", "  ")
_FAILED: Final = 4
"""Of RocketMQ's ``ConsumeReturnType``; 0: success."""
_MS_DIGITS_MAX: Final = 18


@dataclass(frozen=True, slots=True)
class SentTrace:
    """A message was sent, or not, at ``time_ms``; that took ``cost_ms``. ``store_host``: the broker's address."""

    message_id: str
    time_ms: int
    cost_ms: int
    ok: bool
    topic: str
    group: str = ""
    tags: str = ""
    keys: str = ""
    store_host: str = ""
    body_bytes: int = 0
    kind: int = 0
    offset_id: str = ""

    def encode(self) -> str:
        """``Pub``."""
        fields = (
            "Pub",
            self.time_ms,
            REGION,
            self.group,
            self.topic,
            self.message_id,
            self.tags or _NULL,
            self.keys or _NULL,
            self.store_host,
            self.body_bytes,
            self.cost_ms,
            self.kind,
            self.offset_id,
            _flag(self.ok),
        )
        return _joined(fields)


@dataclass(frozen=True, slots=True)
class ReceivedTrace:
    """A consumer of ``group`` began with a message; ``request_id`` is also in the trace of the end."""

    message_id: str
    time_ms: int
    request_id: str
    group: str
    retries: int = 0
    keys: str = ""

    def encode(self) -> str:
        """``SubBefore``."""
        group, keys = self.group, self.keys or _NULL
        return _joined(("SubBefore", self.time_ms, REGION, group, self.request_id, self.message_id, self.retries, keys))


@dataclass(frozen=True, slots=True)
class ConsumedTrace:
    """The consumer was done with it, or failed, at ``time_ms``, ``cost_ms`` after it began."""

    message_id: str
    time_ms: int
    cost_ms: int
    ok: bool
    request_id: str
    group: str
    keys: str = ""

    def encode(self) -> str:
        """``SubAfter``."""
        fields = (
            "SubAfter",
            self.request_id,
            self.message_id,
            self.cost_ms,
            _flag(self.ok),
            self.keys or _NULL,
            0 if self.ok else _FAILED,
            self.time_ms,
            self.group,
        )
        return _joined(fields)


@dataclass(frozen=True, slots=True)
class EndedTrace:
    """A transaction was ended: ``state`` is COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW, as RocketMQ spells them."""

    message_id: str
    time_ms: int
    state: str
    topic: str
    group: str = ""
    tags: str = ""
    keys: str = ""
    store_host: str = ""
    transaction_id: str = ""
    from_check: bool = False

    def encode(self) -> str:
        """``EndTransaction``."""
        fields = (
            "EndTransaction",
            self.time_ms,
            REGION,
            self.group,
            self.topic,
            self.message_id,
            self.tags or _NULL,
            self.keys or _NULL,
            self.store_host,
            2,
            self.transaction_id,
            self.state,
            _flag(self.from_check),
        )
        return _joined(fields)


Trace = SentTrace | ReceivedTrace | ConsumedTrace | EndedTrace


def keys_of(trace: Trace) -> Iterator[str]:
    """The keys under which a trace is found: the message's id and its business keys."""
    yield trace.message_id
    yield from filter(None, trace.keys.split(" "))


def kind_number(message: Message) -> int:
    """RocketMQ's number for the type of a message that is sent."""
    return 1 if message.sys_flag & SYS_FLAG_TRANSACTION else _KINDS.get(type_of(message), 0)


def encode_traces(traces: Iterable[Trace]) -> bytes:
    """The body of a message of traces."""
    return "".join([one.encode() for one in traces]).encode(errors="replace")


def decode_traces(body: bytes) -> list[Trace]:
    """The traces in a body; what is none, or of a kind that nobody here knows, is left out."""
    found = (_decoded(record.split("\x01")) for record in body.decode(errors="replace").split("\x02"))
    return [one for one in found if one is not None]


def _decoded(fields: Sequence[str]) -> Trace | None:
    try:
        match fields[0]:
            case "Pub":
                return _sent(fields)
            case "SubBefore":
                _, time, _, group, request_id, message_id, retries, keys, *_ = fields
                return ReceivedTrace(message_id, _number(time), request_id, group, _number(retries), _text(keys))
            case "SubAfter":
                _, request_id, message_id, cost, ok, keys, *rest = fields
                time = rest[1] if len(rest) > 1 else "0"
                group = rest[2] if len(rest) > 2 else ""  # older releases write fewer
                done = ok == "true"
                return ConsumedTrace(message_id, _number(time), _number(cost), done, request_id, group, _text(keys))
            case "EndTransaction":
                _, time, _, group, topic, message_id, tags, keys, host, _, transaction_id, state, check, *_ = fields
                names = _text(tags), _text(keys), host
                return EndedTrace(
                    message_id, _number(time), state, topic, group, *names, transaction_id, check == "true"
                )
            case _:
                return None
    except (ValueError, IndexError):
        return None


def _sent(fields: Sequence[str]) -> SentTrace:
    _, time, _, group, topic, message_id, tags, keys, host, size, cost, kind, *rest = fields
    offset_id, ok = (rest[0], rest[1]) if len(rest) > 1 else ("", rest[0])
    return SentTrace(
        message_id,
        _number(time),
        _number(cost),
        ok == "true",
        topic,
        group,
        _text(tags),
        _text(keys),
        host,
        _number(size),
        _number(kind),
        "" if offset_id == _NULL else offset_id,
    )


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MS_DIGITS_MAX):
        raise ValueError(f"no number: {text!r:.64}")
    return int(text)


def _text(text: str) -> str:
    return "" if text == _NULL else text


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _joined(fields: Iterable[object]) -> str:
    return "\x01".join([str(one).translate(_MARKS) for one in fields]) + "\x02"
