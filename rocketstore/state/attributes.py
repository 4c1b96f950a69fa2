"""Attributes of topics and groups that RocketMQ 5 added: the type of a topic's messages, and a group's retry delays;
and how long a topic's messages can be read, which is ours (``retention``).

As RocketMQ's tools exchange them, a topic's attributes are texts by name, and a change of them puts ``+`` before the
name of one that is set and ``-`` before one that is removed: ``+message.type=FIFO,-retention``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from dledger.errors import InvalidRequestError
from dledger.values import parse_duration_ms
from rocketstore.message.checks import check_group_name, check_topic
from rocketstore.remoting.groups import CustomizedRetryPolicy, ExponentialRetryPolicy, GroupRetryPolicy
from rocketstore.types import MessageType, RequestMode

MESSAGE_TYPE: Final = "message.type"
RETENTION: Final = "retention"
"""A duration, such as ``90m`` or ``36h``."""
RESERVE_TIME: Final = "reserve.time"
"""RocketMQ's name for it, in whole hours; -1: as long as the log's."""
_RETENTION_MS_MIN: Final = 60_000
RETENTION_MS_MAX: Final = 3650 * 86_400_000
_HOUR_MS: Final = 3_600_000
_HOURS_DIGITS_MAX: Final = 9
_ONLY: Final = {"queue.type": "SimpleCQ", "cleanup.policy": "DELETE"}
"""Attributes of RocketMQ's with the one value that topics have here."""
_KNOWN: Final = (MESSAGE_TYPE, RETENTION, RESERVE_TIME, *_ONLY)
_CHANGES_CHARS_MAX: Final = 4096
DELAYS_MAX: Final = 64
_DELAY_MS_MAX: Final = 40 * 86_400_000
_MULTIPLIER_MAX: Final = 1000
REQUEST_MODES_MAX: Final = 16_384
"""Pairs of topic and group that have one."""
_SHARE_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class FixedRetryDelays:
    """Before the first repetition of a message, before the second, and so on; the last one holds for all later ones."""

    delays_ms: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.delays_ms) <= DELAYS_MAX:
            raise InvalidRequestError(f"a retry policy has 1 to {DELAYS_MAX} delays, not {len(self.delays_ms)}")
        for delay in self.delays_ms:
            _check(delay, "delay of a retry policy, in ms", 0, _DELAY_MS_MAX)

    def delay_ms(self, deliveries: int) -> int:
        """How long a message waits that was delivered so often, at least once."""
        return self.delays_ms[min(deliveries, len(self.delays_ms)) - 1]


@dataclass(frozen=True, slots=True)
class ExponentialRetryDelays:
    """The first delay, and by how much each is longer than the one before, up to the longest."""

    initial_ms: int
    max_ms: int
    multiplier: int

    def __post_init__(self) -> None:
        _check(self.initial_ms, "first delay of a retry policy, in ms", 0, _DELAY_MS_MAX)
        _check(self.max_ms, "longest delay of a retry policy, in ms", self.initial_ms, _DELAY_MS_MAX)
        _check(self.multiplier, "multiplier of a retry policy", 1, _MULTIPLIER_MAX)

    def delay_ms(self, deliveries: int) -> int:
        """How long a message waits that was delivered so often, at least once."""
        delay = self.initial_ms
        for _ in range(deliveries - 1):
            if delay >= self.max_ms or self.multiplier == 1 or not delay:
                break
            delay *= self.multiplier
        return min(delay, self.max_ms)


RetryPolicy = FixedRetryDelays | ExponentialRetryDelays


def policy_json(policy: RetryPolicy) -> dict[str, object]:
    """For a state message."""
    if isinstance(policy, FixedRetryDelays):
        return {"delays": list(policy.delays_ms)}
    return {"initial": policy.initial_ms, "max": policy.max_ms, "multiplier": policy.multiplier}


def policy_from_json(value: object) -> RetryPolicy:
    """Raises ``InvalidRequestError``."""
    if isinstance(value, dict) and value.keys() == {"delays"} and isinstance(value["delays"], list):
        return FixedRetryDelays(tuple(value["delays"]))
    if isinstance(value, dict) and value.keys() == {"initial", "max", "multiplier"}:
        return ExponentialRetryDelays(value["initial"], value["max"], value["multiplier"])
    raise InvalidRequestError(f"a retry policy of neither delays nor initial, max and multiplier: {value!r:.200}")


def rocketmq_policy(policy: RetryPolicy) -> dict[str, object]:
    """As the field ``groupRetryPolicy`` of RocketMQ's JSON has it."""
    if isinstance(policy, FixedRetryDelays):
        return {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": list(policy.delays_ms)}}
    delays = {"initial": policy.initial_ms, "max": policy.max_ms, "multiplier": policy.multiplier}
    return {"type": "EXPONENTIAL", "exponentialRetryPolicy": delays}


def policy_of_rocketmq(found: object) -> RetryPolicy | None:
    """The same the other way round; None: the broker's own delays. Raises ``InvalidRequestError``."""
    if not isinstance(found, dict):
        if found is None:
            return None
        raise InvalidRequestError(f"groupRetryPolicy: an object, not {found!r:.200}")
    delays: Any  # whatever it holds: its use tells
    match found.get("type", "CUSTOMIZED"):
        case "CUSTOMIZED":
            delays = found.get("customizedRetryPolicy")
            return None if delays is None else policy_from_json({"delays": _member(delays, "next")})
        case "EXPONENTIAL":
            delays = found.get("exponentialRetryPolicy")
            if delays is None:
                return None
            return policy_from_json({name: _member(delays, name) for name in ("initial", "max", "multiplier")})
        case other:
            raise InvalidRequestError(f"groupRetryPolicy: type {other!r:.64}: use CUSTOMIZED or EXPONENTIAL")


def _member(found: object, name: str) -> object:
    return found.get(name) if isinstance(found, dict) else None


def parse_changes(text: str) -> dict[str, str]:
    """Changes of attributes from one text, by name with its sign; raises ``InvalidRequestError``."""
    if len(text) > _CHANGES_CHARS_MAX:
        raise InvalidRequestError(f"attributes: {len(text)} characters, at most {_CHANGES_CHARS_MAX} are allowed")
    found: dict[str, str] = {}
    for one in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in one.partition("="))
        if not (name.startswith("+") and equals and value) and not (name.startswith("-") and not equals):
            raise InvalidRequestError(f"attribute {one!r:.100}: write +name=value to set one, -name to remove one")
        if name in found:
            raise InvalidRequestError(f"attribute {name!r:.100} is named twice")
        found[name] = value
    return found


class TopicAttributes(NamedTuple):
    message_type: MessageType = MessageType.UNSPECIFIED
    retention_ms: int = 0
    """How long its messages can be read; 0: as long as the log has them."""

    def changed(self, changes: Mapping[str, str]) -> Self:
        """After such changes. Raises ``InvalidRequestError`` for attributes that nobody knows, or that ask for what no
        topic has here.
        """
        found = self
        for signed, value in changes.items():
            sign, name = signed[:1], signed[1:]
            if sign not in ("+", "-") or name not in _KNOWN or (sign == "+" and not value):
                raise InvalidRequestError(
                    f"attribute {signed!r:.100}: use +name=value or -name, of {', '.join(_KNOWN)}"
                )
            text = value if sign == "+" else ""
            if name == MESSAGE_TYPE:
                found = found._replace(message_type=message_type_of(text) if text else MessageType.UNSPECIFIED)
            elif name in (RETENTION, RESERVE_TIME):
                found = found._replace(retention_ms=_retention_ms(name, text) if text else 0)
            elif text and text != _ONLY[name]:
                raise InvalidRequestError(f"attribute {name}={text!r:.100} is not supported: use {_ONLY[name]}")
        return found

    def texts(self) -> dict[str, str]:
        """By name, as RocketMQ's tools read them."""
        found = {} if self.message_type is MessageType.UNSPECIFIED else {MESSAGE_TYPE: self.message_type.value}
        return found | {RETENTION: format_retention(self.retention_ms)} if self.retention_ms else found

    @classmethod
    def of_texts(cls, found: Mapping[str, object]) -> Self:
        """The other way round; attributes without meaning here count for nothing. Raises ``InvalidRequestError``."""
        known = (MESSAGE_TYPE, RESERVE_TIME, RETENTION)
        return cls().changed({f"+{name}": str(found[name]) for name in known if found.get(name) is not None})


def parse_retention(text: str) -> int:
    """``90m``, ``36h``, ``7d`` in ms. Raises ``InvalidRequestError``."""
    try:
        found = parse_duration_ms(text, unit="")
    except ValueError as error:
        raise InvalidRequestError(f"{RETENTION}: {error}") from error
    return _checked_retention(found)


def format_retention(retention_ms: int) -> str:
    """As ``parse_retention`` reads it."""
    for unit, size in (("d", 86_400_000), ("h", _HOUR_MS), ("m", 60_000), ("s", 1000)):
        if retention_ms % size == 0:
            return f"{retention_ms // size}{unit}"
    return f"{retention_ms}ms"


def _retention_ms(name: str, text: str) -> int:
    if name == RETENTION:
        return parse_retention(text)
    if text == "-1":
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= _HOURS_DIGITS_MAX):
        raise InvalidRequestError(f"{RESERVE_TIME} {text!r:.64}: use a whole number of hours, or -1")
    return _checked_retention(int(text) * _HOUR_MS)


def _checked_retention(found: float) -> int:
    if not _RETENTION_MS_MIN <= found <= RETENTION_MS_MAX:
        raise InvalidRequestError(f"{RETENTION} of {found / 1000:g} s: use {_RETENTION_MS_MIN // 1000} s to 3650 days")
    return int(found)


def message_type_of(value: object) -> MessageType:
    """The type of this name. Raises ``InvalidRequestError``."""
    try:
        return MessageType(str(value))
    except ValueError as error:
        names = ", ".join(MessageType)
        raise InvalidRequestError(f"{MESSAGE_TYPE} {value!r:.100}: use one of {names}") from error


def _check(value: object, what: str, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequestError(f"{what}: invalid value {value!r:.64}: use a whole number from {least} to {most}")


@dataclass(frozen=True, slots=True)
class TopicRequestMode:
    """The mode of one topic for one group.

    ``share_queues`` (RocketMQ's ``popShareQueueNum``): anyone who pops shares its queues with so many of the consumers
    that follow it; 0 and below: everyone pops from all queues.
    """

    topic: str
    group: str
    mode: RequestMode
    share_queues: int = 0

    def __post_init__(self) -> None:
        if problem := check_topic(self.topic) or check_group_name(self.group):
            raise InvalidRequestError(problem)
        if type(self.share_queues) is not int or not -1 <= self.share_queues <= _SHARE_MAX:
            raise InvalidRequestError(f"popShareQueueNum {self.share_queues!r:.64}: a whole number, -1 or more")


def mode_json(one: TopicRequestMode) -> dict[str, object]:
    """Its fields in a state message."""
    return {"topic": one.topic, "group": one.group, "mode": one.mode.name, "share": one.share_queues}


def mode_from_json(fields: Mapping[str, Any]) -> TopicRequestMode:
    """The same the other way round. Raises ``InvalidRequestError``."""
    name = fields["mode"]
    if not isinstance(name, str) or name not in RequestMode.__members__:
        raise InvalidRequestError(f"request mode {name!r:.64}: use PULL or POP")
    return TopicRequestMode(fields["topic"], fields["group"], RequestMode[name], fields["share"])


def policy_of_body(body: GroupRetryPolicy | None) -> RetryPolicy | None:
    """The delays; None: the broker's delay levels. Raises ``InvalidRequestError``."""
    if body is None:
        return None
    if body.type == "EXPONENTIAL":
        found = body.exponential_retry_policy
        return None if found is None else ExponentialRetryDelays(found.initial, found.max, found.multiplier)
    if body.type != "CUSTOMIZED":
        raise InvalidRequestError(f"groupRetryPolicy: type {body.type[:64]!r}: use CUSTOMIZED or EXPONENTIAL")
    return None if body.customized_retry_policy is None else FixedRetryDelays(body.customized_retry_policy.next)


def body_of_policy(policy: RetryPolicy | None) -> GroupRetryPolicy | None:
    """The same the other way round."""
    if policy is None:
        return None
    if isinstance(policy, FixedRetryDelays):
        return GroupRetryPolicy(customized_retry_policy=CustomizedRetryPolicy(policy.delays_ms))
    delays = ExponentialRetryPolicy(policy.initial_ms, policy.max_ms, policy.multiplier)
    return GroupRetryPolicy("EXPONENTIAL", exponential_retry_policy=delays)
