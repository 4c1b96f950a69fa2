"""Changes of broker state, and their encoding as messages of ``BROKER_STATE_TOPIC``.

A message's body is JSON: ``{"v": 1, "changes": [...]}``, each change an object with ``"op"``. ``v`` is the oldest
version that knows everything in it: 2 for a group's settings and for a topic's ``order`` and ``sys_flag``, 3 for what
waited when a topic was deleted, for pop and for request modes, otherwise 1.
So a cluster of two versions works as long as nobody uses what the older one does not know. A published full state is
one or more such messages, one after the other, each with ``"full": {"id", "part", "parts", "upto"}``: the changes of
all its parts, applied to empty tables, give the state before queue offset ``upto``.

Decoding is strict: an unknown name, a wrong type or a number out of range makes the whole message malformed, and none
of it counts. A malformed message is the same on every node, so skipping it keeps them equal. A message of a *newer*
version is not malformed: it has a meaning that this version does not know and must not ignore.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar, assert_never

from dledger.errors import InvalidRequestError
from rocketstore.message.checks import check_group_name, check_topic
from rocketstore.pop.tables import ROWS_MAX, PopRow, check_row, row_from_json, row_json
from rocketstore.state.attributes import (
    RETENTION_MS_MAX,
    RetryPolicy,
    TopicAttributes,
    TopicRequestMode,
    message_type_of,
    mode_from_json,
    mode_json,
    policy_from_json,
    policy_json,
)
from rocketstore.timer.hours import TimedProgress
from rocketstore.types import MessageType

_T = TypeVar("_T")
_V = TypeVar("_V")
_STATE_VERSION: Final = 3
"""The newest that this program knows."""
_FIRST_VERSION: Final = 1
_SETTINGS_VERSION: Final = 2
CHANGES_MAX: Final = 4096
"""Changes in one message."""
OFFSETS_MAX: Final = 1024
"""Offsets in one change."""
_PARTS_MAX: Final = 4096
"""Messages of one full state."""
QUEUE_ID_MAX: Final = 65_535
OFFSET_MAX: Final = 2**62
TOPIC_QUEUES_MAX: Final = 1024
DELAY_LEVEL_MAX: Final = 255
_I32_MAX: Final = (1 << 31) - 1
_PERMISSION_MAX: Final = 7
"""RocketMQ's bits: 4 read, 2 write, 1 inherited by topics made from it."""


class MalformedStateError(InvalidRequestError):
    """Raised when a state message or snapshot violates the rules of its own version."""


class NewerStateError(InvalidRequestError):
    """Raised when a state message was written by a newer version of this program."""


class QueueOffset(NamedTuple):
    """A group's progress in one queue: the queue offset of the next message it needs."""

    topic: str
    queue_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic. Queues are numbered from 0; ``permission`` has RocketMQ's bits (4 read, 2 write)."""

    name: str
    read_queues: int = 8
    write_queues: int = 8
    permission: int = 6
    order: bool = False
    """Whether clients shall keep the order over all queues; for RocketMQ's programs, nothing here looks at it."""
    sys_flag: int = 0
    """RocketMQ's marks of units, likewise."""
    message_type: MessageType = MessageType.UNSPECIFIED
    """The type of message that may be sent to it."""
    retention_ms: int = 0
    """How long its messages can be read; 0: as long as the log has them."""

    def __post_init__(self) -> None:
        check_name(self.name, "topic")
        _check_range(self.sys_flag, "system flag", 0, _I32_MAX)
        _check_range(self.retention_ms, "retention in ms", 0, RETENTION_MS_MAX)
        _check_range(self.read_queues, "read queues", 1, TOPIC_QUEUES_MAX)
        _check_range(self.write_queues, "write queues", 1, TOPIC_QUEUES_MAX)
        _check_range(self.permission, "permission", 0, _PERMISSION_MAX)

    @property
    def attributes(self) -> TopicAttributes:
        """Those of RocketMQ 5, and the retention."""
        return TopicAttributes(self.message_type, self.retention_ms)

    @property
    def queues(self) -> int:
        """The number of queues for reading or writing, whichever is higher."""
        return max(self.read_queues, self.write_queues)

    @property
    def readable(self) -> bool:
        """Whether consumers may pull."""
        return bool(self.permission & 4)

    @property
    def writable(self) -> bool:
        """Whether producers may send."""
        return bool(self.permission & 2)


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """Settings of a consumer group; names and defaults are RocketMQ's."""

    name: str
    consume_enable: bool = True
    """Whether its consumers get anything."""
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    """Whether all its consumers may get all messages."""
    retry_queues: int = 1
    """Queues of its topic for messages that could not be consumed; 0: they are not tried again."""
    retry_times_max: int = 16
    """How often a message is tried again before it is dead."""
    broker_id: int = 0
    """Where its consumers shall pull."""
    broker_id_when_slow: int = 1
    """The same, while they are far behind."""
    notify_changes: bool = True
    """Whether consumers are told when one comes or goes."""
    ordered: bool = False
    """Whether the messages of a queue are consumed in order, also by consumers that share it (RocketMQ 5)."""
    retry_policy: RetryPolicy | None = None
    """How long a message that could not be consumed waits, for RocketMQ 5's clients; None: the delay levels from the
    third on.
    """

    def __post_init__(self) -> None:
        check_name(self.name, "group")
        for flag in (
            self.consume_enable,
            self.consume_from_min_enable,
            self.consume_broadcast_enable,
            self.notify_changes,
            self.ordered,
        ):
            _bool(flag)
        _check_range(self.retry_queues, "retry queues", 0, TOPIC_QUEUES_MAX)
        _check_range(self.retry_times_max, "retries", -1, _I32_MAX)
        _check_range(self.broker_id, "broker id", 0, _I32_MAX)
        _check_range(self.broker_id_when_slow, "broker id", 0, _I32_MAX)

    @property
    def is_default(self) -> bool:
        """Whether nothing was changed."""
        return self == GroupConfig(self.name)


@dataclass(frozen=True, slots=True)
class PutGroup:
    """Make a subscription group, or change the settings of the one of this name."""

    group: GroupConfig


@dataclass(frozen=True, slots=True)
class PutTopic:
    """Create or change a topic."""

    topic: TopicConfig


@dataclass(frozen=True, slots=True)
class DeleteTopic:
    """Delete a topic and every group's offsets in it.

    ``ends``: (queue id, next queue offset) of its queues. A topic of this name created later starts there. ``waits``:
    the same of the broker's own queues in which messages wait before they get there (delayed, in a transaction): what
    is before these offsets was for the deleted topic.
    """

    name: str
    ends: tuple[tuple[int, int], ...] = ()
    waits: tuple[QueueOffset, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, "topic")
        _check_range(len(self.ends), "queues", 0, QUEUE_ID_MAX + 1)
        for queue_id, end in self.ends:
            _check_range(queue_id, "queue id", 0, QUEUE_ID_MAX)
            _check_range(end, "offset", 0, OFFSET_MAX)
        _check_range(len(self.waits), "queues in which messages wait", 0, OFFSETS_MAX)
        for topic, queue_id, offset in self.waits:
            check_name(topic, "topic")
            _check_range(queue_id, "queue id", 0, QUEUE_ID_MAX)
            _check_range(offset, "offset", 0, OFFSET_MAX)


@dataclass(frozen=True, slots=True)
class CommitOffsets:
    """Commit a group's offsets. An offset lower than the current one counts only with ``reset``."""

    group: str
    offsets: tuple[QueueOffset, ...]
    reset: bool = False

    def __post_init__(self) -> None:
        check_name(self.group, "group")
        _check_range(len(self.offsets), "offsets in one change", 0, OFFSETS_MAX)
        for topic, queue_id, offset in self.offsets:
            check_name(topic, "topic")
            _check_range(queue_id, "queue id", 0, QUEUE_ID_MAX)
            _check_range(offset, "offset", 0, OFFSET_MAX)


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Delete a subscription group and its offsets."""

    group: str

    def __post_init__(self) -> None:
        check_name(self.group, "group")


@dataclass(frozen=True, slots=True)
class SetDelayOffsets:
    """The progress of each delay level: (level, next queue offset). The last writer wins."""

    offsets: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        _check_range(len(self.offsets), "offsets in one change", 0, OFFSETS_MAX)
        for level, offset in self.offsets:
            _check_range(level, "delay level", 1, DELAY_LEVEL_MAX)
            _check_range(offset, "offset", 0, OFFSET_MAX)


@dataclass(frozen=True, slots=True)
class PopRows:
    """Messages that groups were given singly, and those settled of them: one tick of ``rocketstore.pop``."""

    rows: tuple[PopRow, ...]
    epoch: int = 0
    """In a full state: the highest generation there ever was."""

    def __post_init__(self) -> None:
        _check_range(len(self.rows), "pop rows in one change", 0, ROWS_MAX)
        _check_range(self.epoch, "pop epoch", 0, OFFSET_MAX)
        for row in self.rows:
            _strictly(check_row, row)


@dataclass(frozen=True, slots=True)
class ExpireMessages:
    """A topic's queues begin later now, because of its retention: (queue id, first queue offset that can be read)."""

    name: str
    begins: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        check_name(self.name, "topic")
        _check_range(len(self.begins), "queues", 0, QUEUE_ID_MAX + 1)
        for queue_id, begin in self.begins:
            _check_range(queue_id, "queue id", 0, QUEUE_ID_MAX)
            _check_range(begin, "offset", 0, OFFSET_MAX)


@dataclass(frozen=True, slots=True)
class SetTimedProgress:
    """How far timed messages have been delivered; never goes back."""

    progress: TimedProgress

    def __post_init__(self) -> None:
        _check_range(self.progress.due_ms, "time", 0, OFFSET_MAX)
        _check_range(self.progress.offset, "offset", 0, OFFSET_MAX)
        _check_range(self.progress.part, "offset", 0, OFFSET_MAX)


@dataclass(frozen=True, slots=True)
class SetRequestMode:
    """Whether a group's consumers shall pull a topic or pop it."""

    of: TopicRequestMode


Change = (
    PutTopic
    | DeleteTopic
    | ExpireMessages
    | PutGroup
    | CommitOffsets
    | DeleteGroup
    | SetDelayOffsets
    | PopRows
    | SetTimedProgress
    | SetRequestMode
)


@dataclass(frozen=True, slots=True)
class FullPart:
    """A message's full state, and which part of it the message is."""

    full_id: str
    part: int
    parts: int
    upto: int
    """The state before this queue offset of the state topic."""

    def __post_init__(self) -> None:
        _check_range(len(self.full_id), "length of a full state's id", 1, 64)
        _check_range(self.parts, "parts", 1, _PARTS_MAX)
        _check_range(self.part, "part", 0, self.parts - 1)
        _check_range(self.upto, "upto", 0, OFFSET_MAX)


@dataclass(frozen=True, slots=True)
class StateMessage:
    """A decoded message of the state topic."""

    changes: tuple[Change, ...]
    full: FullPart | None = None


def check_name(name: object, what: str) -> None:
    """Raise ``MalformedStateError`` unless ``name`` is valid for RocketMQ's topics and groups."""
    if not isinstance(name, str) or check_topic(name):
        raise MalformedStateError(f"{what} {name!r}: 1 to 127 of the characters a-z A-Z 0-9 % | _ -")


def check_group(name: object) -> None:
    """Raise ``MalformedStateError`` unless ``name`` may be that of a new group: its retry topic has a name, too."""
    if problem := check_group_name(name):
        raise MalformedStateError(problem)


class EncodedChange(NamedTuple):
    """One change as JSON, and the first version that knows it."""

    data: bytes
    version: int = _FIRST_VERSION

    @property
    def size(self) -> int:
        return len(self.data)


def encode_change(change: Change) -> EncodedChange:
    """One change; ``join_changes`` makes a message of several."""
    return EncodedChange(_dump(_change_json(change)), _version_of(change))


def _version_of(change: Change) -> int:
    match change:
        case DeleteTopic(waits=waits) if waits:
            return _STATE_VERSION
        case PopRows() | SetRequestMode():
            return _STATE_VERSION
        case PutGroup():
            return _SETTINGS_VERSION
        case PutTopic(topic) if topic.order or topic.sys_flag:
            return _SETTINGS_VERSION
        case _:
            return _FIRST_VERSION


def join_changes(changes: Iterable[EncodedChange], full: FullPart | None = None) -> bytes:
    """A message's body from encoded changes."""
    encoded = list(changes)
    version = max((one.version for one in encoded), default=_FIRST_VERSION)
    head = f'{{"v":{version},'.encode()
    if full is not None:
        part = {"id": full.full_id, "part": full.part, "parts": full.parts, "upto": full.upto}
        head += b'"full":' + _dump(part) + b","
    return head + b'"changes":[' + b",".join(one.data for one in encoded) + b"]}"


def split_full(changes: Iterable[Change], *, full_id: str, upto: int, bytes_max: int) -> list[bytes]:
    """The bodies of a full state's messages, each of about ``bytes_max`` bytes; larger if there would be too many."""
    every = [encode_change(change) for change in changes]
    groups = _grouped(every, bytes_max)
    while len(groups) > _PARTS_MAX:
        bytes_max *= 2
        groups = _grouped(every, bytes_max)
    parts = len(groups)
    return [join_changes(group, FullPart(full_id, part, parts, upto)) for part, group in enumerate(groups)]


def _grouped(every: Iterable[EncodedChange], bytes_max: int) -> list[list[EncodedChange]]:
    groups: list[list[EncodedChange]] = [[]]
    used = 0
    for encoded in every:
        if groups[-1] and (used + encoded.size > bytes_max or len(groups[-1]) == CHANGES_MAX):
            groups.append([])
            used = 0
        groups[-1].append(encoded)
        used += encoded.size + 1
    return groups


def decode_state(body: bytes) -> StateMessage:
    """Decode a message's body. Raises ``MalformedStateError`` and ``NewerStateError``."""
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedStateError(f"state message: invalid JSON: {error}") from error
    fields = _fields(value)
    version = fields.get("v")
    if type(version) is int and version > _STATE_VERSION:
        raise NewerStateError(f"state message of version {version}; this version supports up to {_STATE_VERSION}")
    _check_fields(fields, {"v", "changes"}, {"full"})
    if type(version) is not int or not _FIRST_VERSION <= version <= _STATE_VERSION:
        raise MalformedStateError(f"state message: version {version!r}")
    full = _full_from_json(fields["full"]) if "full" in fields else None
    return StateMessage(changes_from_json(fields["changes"]), full)


def changes_from_json(value: object, *, count_max: int = CHANGES_MAX) -> tuple[Change, ...]:
    """Convert the result of ``json.loads`` to changes. Raises ``MalformedStateError``."""
    changes = _list(value)
    _check_range(len(changes), "changes", 0, count_max)
    return tuple(_change_from_json(change) for change in changes)


def _change_json(change: Change) -> dict[str, object]:  # noqa: C901  # one case per change
    found: dict[str, object]
    match change:
        case PutTopic(topic):
            return _topic_json(topic)
        case PutGroup(group):
            found = {
                "op": "put_group",
                "name": group.name,
                "enable": group.consume_enable,
                "from_min": group.consume_from_min_enable,
                "broadcast": group.consume_broadcast_enable,
                "retry_queues": group.retry_queues,
                "retry_max": group.retry_times_max,
                "broker": group.broker_id,
                "broker_slow": group.broker_id_when_slow,
                "notify": group.notify_changes,
                "ordered": group.ordered,
            }
            if group.retry_policy is not None:
                found["retry_policy"] = policy_json(group.retry_policy)
            return found
        case DeleteTopic(name, ends, waits):
            found = {"op": "delete_topic", "name": name, "ends": ends}
            if waits:
                found["waits"] = waits
            return found
        case CommitOffsets(name, offsets, reset):
            return {"op": "offsets", "group": name, "offsets": offsets, "reset": reset}
        case ExpireMessages(name, begins):
            return {"op": "expire", "name": name, "begins": begins}
        case DeleteGroup(name):
            return {"op": "delete_group", "group": name}
        case SetDelayOffsets(delays):
            return {"op": "delay", "offsets": delays}
        case PopRows(rows, epoch):
            found = {"op": "pop", "rows": [row_json(row) for row in rows]}
            return found | {"epoch": epoch} if epoch else found
        case SetTimedProgress(progress):
            return {"op": "timed", "due": progress.due_ms, "offset": progress.offset, "part": progress.part}
        case SetRequestMode(one):
            return {"op": "request_mode"} | mode_json(one)
        case _:
            assert_never(change)


def _change_from_json(value: object) -> Change:
    fields = _fields(value)
    match fields.get("op"):
        case "put_topic":
            return PutTopic(_topic_from_json(fields))
        case "put_group":
            return PutGroup(_group_from_json(fields))
        case "delete_topic":
            _check_fields(fields, {"op", "name", "ends"}, {"waits"})
            waits = _queue_offsets(fields.get("waits", []))
            return DeleteTopic(_text(fields["name"]), _int_pairs(fields["ends"]), waits)
        case "offsets":
            _check_fields(fields, {"op", "group", "offsets", "reset"})
            return CommitOffsets(_text(fields["group"]), _queue_offsets(fields["offsets"]), _bool(fields["reset"]))
        case "expire":
            _check_fields(fields, {"op", "name", "begins"})
            return ExpireMessages(_text(fields["name"]), _int_pairs(fields["begins"]))
        case "delete_group":
            _check_fields(fields, {"op", "group"})
            return DeleteGroup(_text(fields["group"]))
        case "delay":
            _check_fields(fields, {"op", "offsets"})
            return SetDelayOffsets(_int_pairs(fields["offsets"]))
        case "pop":
            _check_fields(fields, {"op", "rows"}, {"epoch"})
            rows = tuple(_strictly(row_from_json, row) for row in _list(fields["rows"]))
            return PopRows(rows, _int(fields.get("epoch", 0)))
        case "timed":
            _check_fields(fields, {"op", "due", "offset", "part"})
            return SetTimedProgress(TimedProgress(*(_int(fields[name]) for name in ("due", "offset", "part"))))
        case "request_mode":
            _check_fields(fields, {"op", "topic", "group", "mode", "share"})
            return SetRequestMode(_strictly(mode_from_json, fields))
        case unknown:
            raise MalformedStateError(f"state message: unknown change {unknown!r}")


def _topic_json(topic: TopicConfig) -> dict[str, object]:
    found: dict[str, object] = {
        "op": "put_topic",
        "name": topic.name,
        "read": topic.read_queues,
        "write": topic.write_queues,
        "perm": topic.permission,
    }
    if topic.order or topic.sys_flag:
        found |= {"order": topic.order, "sys_flag": topic.sys_flag}
    if topic.message_type is not MessageType.UNSPECIFIED:
        found["type"] = topic.message_type.value
    if topic.retention_ms:
        found["retention_ms"] = topic.retention_ms
    return found


def _topic_from_json(fields: Mapping[str, Any]) -> TopicConfig:
    optional = {"order", "sys_flag", "type", "retention_ms"}
    _check_fields(fields, {"op", "name", "read", "write", "perm"}, optional)
    read, write, permission = (_int(fields[name]) for name in ("read", "write", "perm"))
    order, sys_flag = _bool(fields.get("order", False)), _int(fields.get("sys_flag", 0))
    kind = _strictly(message_type_of, fields.get("type", MessageType.UNSPECIFIED))
    retention_ms = _int(fields.get("retention_ms", 0))
    return TopicConfig(_text(fields["name"]), read, write, permission, order, sys_flag, kind, retention_ms)


def _group_from_json(fields: Mapping[str, Any]) -> GroupConfig:
    flags, numbers = (
        ("enable", "from_min", "broadcast", "notify", "ordered"),
        ("retry_queues", "retry_max", "broker", "broker_slow"),
    )
    _check_fields(fields, {"op", "name", *flags, *numbers}, {"retry_policy"})
    enable, from_min, broadcast, notify, ordered = (_bool(fields[name]) for name in flags)
    retry_queues, retry_max, broker, broker_slow = (_int(fields[name]) for name in numbers)
    name = _text(fields["name"])
    policy = _strictly(policy_from_json, fields["retry_policy"]) if "retry_policy" in fields else None
    return GroupConfig(
        name, enable, from_min, broadcast, retry_queues, retry_max, broker, broker_slow, notify, ordered, policy
    )


def _full_from_json(value: object) -> FullPart:
    fields = _fields(value)
    _check_fields(fields, {"id", "part", "parts", "upto"})
    return FullPart(_text(fields["id"]), _int(fields["part"]), _int(fields["parts"]), _int(fields["upto"]))


def _strictly(convert: Callable[[_V], _T], value: _V) -> _T:
    try:
        return convert(value)
    except InvalidRequestError as error:
        raise MalformedStateError(f"state message: {error}") from error


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _fields(value: object) -> Mapping[str, Any]:  # Any: each field's type is checked where it is read
    if not isinstance(value, dict):
        raise MalformedStateError(f"state: expected an object, not {type(value).__name__}")
    return value


def _check_fields(fields: Mapping[str, object], needed: set[str], optional: Iterable[str] = ()) -> None:
    missing = sorted(needed - fields.keys())
    unknown = sorted(fields.keys() - needed - set(optional))
    if missing or unknown:
        raise MalformedStateError(f"state: missing {missing}, unknown {unknown}")


def _check_range(value: int, what: str, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:  # otherwise it could be written, but not read back
        raise MalformedStateError(f"{what}: invalid whole number {value} within {least} to {most}")


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise MalformedStateError(f"state: expected a list, not {type(value).__name__}")
    return value


def _row(value: object, length: int) -> Sequence[object]:
    row = _list(value)
    if len(row) != length:
        raise MalformedStateError(f"state: expected a list of {length}, not of {len(row)}")
    return row


def _queue_offsets(value: object) -> tuple[QueueOffset, ...]:
    triples = (_row(row, 3) for row in _list(value))
    return tuple(QueueOffset(_text(one[0]), _int(one[1]), _int(one[2])) for one in triples)


def _int_pairs(value: object) -> tuple[tuple[int, int], ...]:
    pairs = (_row(row, 2) for row in _list(value))
    return tuple((_int(pair[0]), _int(pair[1])) for pair in pairs)


def _int(value: object) -> int:
    if type(value) is not int:  # a bool is an int, too
        raise MalformedStateError(f"state: expected a whole number, not {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise MalformedStateError(f"state: expected a string, not {value!r}")
    return value


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise MalformedStateError(f"state: expected true or false, not {value!r}")
    return value
