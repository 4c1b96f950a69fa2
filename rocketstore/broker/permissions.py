"""The permissions that each operation requires under access control: one table, whatever protocol a request came by.

RocketMQ 4.9 checks a dozen of its requests and leaves the others open to everybody who has a key. Here an operation
that changes a broker, or shows more than single topics and groups, requires an administrator, and everything else
requires permissions on all topics and groups it names. Adapters say which operation a request is, and what it names; a
request for which they know no operation is denied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Final, NamedTuple

from dledger.access.guard import AccessGuard, Caller, ResourceKind
from dledger.access.rules import DEAD_PREFIX, RETRY_PREFIX, Permission, permission_text
from dledger.errors import AccessDeniedError
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.message.checks import NO_SEND_TOPICS
from rocketstore.message.record import TOPIC_BYTES_MAX
from rocketstore.types import PutMessageStatus, PutResult

SUB, PUB = Permission.SUB, Permission.PUB
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
"""Clients write here what they did with their messages: every key may."""
TOOLS_GROUP: Final = "TOOLS_CONSUMER"
"""A reader without a group pulls in the name of this one, as RocketMQ's tools do: every key may."""
NAME_CHARS_MAX: Final = 255
"""Names are quoted in the audit log, and no topic or group has a longer one."""
_GROUP_TOPICS: Final = (RETRY_PREFIX, DEAD_PREFIX)


class Operation(Enum):
    """The kinds of requests that permissions tell apart."""

    SEND = auto()
    SEND_SEVERAL = auto()
    """To several topics: each message is allowed or refused by itself."""
    END_TRANSACTION = auto()
    ASK_NUMBER = auto()
    """The next number of a producer: names are separate per account."""
    PULL = auto()
    QUEUE = auto()
    """The bounds of a queue, and offsets by time."""
    SEND_BACK = auto()
    JOIN = auto()
    LEAVE = auto()
    MEMBERS = auto()
    """The members of a group, and their state."""
    LOCK = auto()
    OFFSETS = auto()
    """Of a group: to read and to commit them, backwards only as a consumer that seeks does."""
    QUERY = auto()
    """Messages of a topic, by key or by time."""
    VIEW = auto()
    """One message by its id."""
    DESCRIBE = auto()
    """A topic, or a group."""
    LIST = auto()
    """Answers show what the account may use."""
    OBSERVE = auto()
    """For every account: the figures of a broker."""
    READ_ALL = auto()
    CHANGE = auto()


class Rule(NamedTuple):
    """The permissions that an operation requires besides a valid key, on each topic and each group it names."""

    topic: Permission = SUB
    group: Permission = SUB
    message: Permission | None = None
    """On the topic of the message it points to. Otherwise any group could have the messages of other topics sent back
    to itself, and any account could end the transactions of others.
    """
    admin: bool = False
    changes: bool = False
    """Whether it changes the broker: what an administrator may do is recorded then."""


RULES: Final[Mapping[Operation, Rule]] = {
    Operation.SEND: Rule(topic=PUB),
    Operation.SEND_SEVERAL: Rule(topic=PUB),
    Operation.END_TRANSACTION: Rule(message=PUB),
    Operation.ASK_NUMBER: Rule(),
    Operation.PULL: Rule(),
    Operation.QUEUE: Rule(),
    Operation.SEND_BACK: Rule(message=SUB),
    Operation.JOIN: Rule(),
    Operation.LEAVE: Rule(),
    Operation.MEMBERS: Rule(),
    Operation.LOCK: Rule(),
    Operation.OFFSETS: Rule(),
    Operation.QUERY: Rule(),
    Operation.VIEW: Rule(message=SUB),
    Operation.DESCRIBE: Rule(),
    Operation.LIST: Rule(),
    Operation.OBSERVE: Rule(),
    Operation.READ_ALL: Rule(admin=True),
    Operation.CHANGE: Rule(admin=True, changes=True),
}


class Need(NamedTuple):
    """A permission that a request requires."""

    kind: ResourceKind
    name: str
    permission: Permission


def needs(operation: Operation, topics: Iterable[str] = (), groups: Iterable[str] = ()) -> tuple[Need, ...]:
    """The permissions for an operation on these topics and groups. Raises ``Refusal`` for names that are too long."""
    rule = RULES[operation]
    if operation is Operation.SEND:
        topics = (one for one in topics if one != TRACE_TOPIC)
    if operation is Operation.PULL:
        groups = (one for one in groups if one != TOOLS_GROUP)
    found = [Need(ResourceKind.GROUP, checked_name(one), rule.group) for one in groups]
    found += [topic_need(one, rule.topic) for one in topics]
    return tuple(dict.fromkeys(found))


def topic_need(name: str, permission: Permission) -> Need:
    """A group's own topics belong to its members, who also write to them."""
    return Need(ResourceKind.TOPIC, checked_name(name), SUB if name.startswith(_GROUP_TOPICS) else permission)


def checked_name(name: str) -> str:
    """Raises ``Refusal`` if it is too long for any topic or group."""
    if len(name) > NAME_CHARS_MAX:
        why = f"a name of {len(name)} characters: topics have at most {TOPIC_BYTES_MAX}"
        raise Refusal(RefusalKind.INVALID, why)
    return name


def has(caller: Caller, need: Need) -> bool:
    """Whether the caller has this permission."""
    return caller.account.admin or (not _is_internal(need) and caller.may(*need))


def require(guard: AccessGuard, caller: Caller, action: str, need: Need) -> None:
    """Raises ``AccessDeniedError``, which is in the audit log with ``action``."""
    if not has(caller, need):
        if _is_internal(need):
            guard.require_admin(caller, action, f"topic:{need.name}", changes=False)
        guard.require(caller, action, *need)


def require_on_message(guard: AccessGuard, caller: Caller, action: str, operation: Operation, topic: str) -> None:
    """Likewise for the topic of a message that a request points to.

    The audit log names the topic; a caller that may not use it must not learn it.
    """
    permission = RULES[operation].message
    assert permission is not None, operation
    try:
        require(guard, caller, action, topic_need(topic, permission))
    except AccessDeniedError:
        wanted = permission_text(permission)
        raise AccessDeniedError(
            f"{caller.name} is not allowed to do this: {action} needs {wanted} on the topic of that message"
        ) from None


def denied_topics(guard: AccessGuard, caller: Caller, action: str, topics: Iterable[str]) -> dict[str, PutResult]:
    """The topics that the caller may not send to, with the refusals of their messages."""
    found: dict[str, PutResult] = {}
    for name in topics:
        if not has(caller, topic_need(name, RULES[Operation.SEND_SEVERAL].topic)):
            error = guard.denied(caller, action, f"topic:{name}", f"needs PUB on topic {name}")
            found[name] = PutResult(PutMessageStatus.NO_PERMISSION, outcome="not_applied", reason=str(error))
    return found


def _is_internal(need: Need) -> bool:
    """Messages of all topics wait in the broker's own ones."""
    return need.kind is ResourceKind.TOPIC and need.permission is SUB and need.name in NO_SEND_TOPICS
