"""A message as passed to and returned by the store; how long its delay level is; what its compressed body holds.

RocketMQ's producers compress bodies with zlib, and since 5.0 also with LZ4 and Zstandard.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, Self

from dledger.errors import ConfigError
from dledger.values import parse_duration_ms

PROPERTY_KEYS: Final = "KEYS"
PROPERTY_TAGS: Final = "TAGS"
PROPERTY_UNIQUE_KEY: Final = "UNIQ_KEY"
PROPERTY_WAIT: Final = "WAIT"
PROPERTY_DELAY: Final = "DELAY"
PROPERTY_RETRY_TOPIC: Final = "RETRY_TOPIC"
"""The topic that a message was in before a consumer first sent it back."""
PROPERTY_REAL_TOPIC: Final = "REAL_TOPIC"
PROPERTY_REAL_QUEUE_ID: Final = "REAL_QID"
PROPERTY_TRANSACTION: Final = "TRAN_MSG"
PROPERTY_PRODUCER_GROUP: Final = "PGROUP"
PROPERTY_SHARDING_KEY: Final = "__SHARDINGKEY"
"""The group of messages that are consumed in order, all in one queue."""
PROPERTY_PRIORITY: Final = "_SYS_MSG_PRIORITY_"
PROPERTY_TIMER_DELAY_S: Final = "TIMER_DELAY_SEC"
"""RocketMQ 5 delivers a message with one of these three so much later, or at that time."""
PROPERTY_TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
PROPERTY_TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
PROPERTY_TIMER_OUT_MS: Final = "TIMER_OUT_MS"
"""RocketMQ 5's mark of a message that has had its delay: its copies are delivered at once."""
PROPERTY_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
"""Marks a half message; only brokers that can finish a transaction may store one."""

SYS_FLAG_COMPRESSED: Final = 0x1
SYS_FLAG_TRANSACTION: Final = 0xC
SYS_FLAG_PREPARED: Final = 0x4
SYS_FLAG_COMMITTED: Final = 0x8
SYS_FLAG_ROLLED_BACK: Final = 0xC
SYS_FLAG_BORN_HOST_V6: Final = 0x10
SYS_FLAG_STORE_HOST_V6: Final = 0x20


class HostAddress(NamedTuple):
    """An IP address, packed (4 or 16 bytes), and a port."""

    ip: bytes
    port: int


PRIORITY_MAX: Final = 10**9 - 1
DELAY_LEVEL_MAX: Final = 18
"""RocketMQ's highest level. Brokers count those above their own highest as that one."""
LOOPBACK: Final = HostAddress(b"\x7f\0\0\1", 0)


@dataclass(slots=True, init=False)
class Message:
    """One message: ``Message("orders", b"...", tags="new", keys=["order-17"], delay_level=3)``.

    ``tags`` is what consumers select by. ``keys`` are business keys to find the message by, one text or several;
    blanks separate keys. ``delay_level``: deliver later, 1 and up (by default 1 s, 5 s, 10 s, 30 s, 1 min ...).
    ``deliver_at``: deliver at this time (a datetime, or ms since 1970), ``delay``: so much later (seconds or a
    timedelta, counted when the broker gets it); by default up to 40 days.
    ``message_group``: messages of one group go to one queue, and are consumed in order. ``priority``: in a topic of
    that type, the higher the sooner.
    ``properties`` are the application's own; producers refuse those that mean something to the store, and name the
    argument to use instead. Raises ``TypeError`` for a body that is not bytes and the like, ``ValueError`` for a
    ``delay_level`` that does not exist, for a negative ``priority``, for tags that no subscription can name, and for a
    blank in one of several keys.

    A stored message has all its properties in ``properties``, and the fields from ``store_timestamp`` on are set by
    storing or decoding it. ``body`` is stored unchanged (it may be compressed by the producer, see ``sys_flag``).
    """

    topic: str
    body: bytes
    queue_id: int = 0
    """The queue it is stored in. Producers take the queue as an argument (``send(message, queue_id=3)``)."""
    properties: dict[str, str] = field(default_factory=dict)
    flag: int = 0
    sys_flag: int = 0
    born_timestamp: int = 0
    born_host: HostAddress = LOOPBACK
    store_host: HostAddress = LOOPBACK
    reconsume_times: int = 0
    prepared_offset: int = 0
    store_timestamp: int = 0
    queue_offset: int = 0
    offset: int = 0
    """Physical offset of the record."""
    size: int = 0
    """Length of the record in bytes; 0 before it is stored."""
    body_crc: int = 0
    property_string: bytes = b""
    """The encoded properties, which replace ``properties`` in a message whose producer has already joined them, so that
    they need not be split and joined again.
    """
    checked_properties: bytes | None = field(default=None, repr=False, compare=False)
    """The property string, kept from the check of the message for its encoding, which follows and consumes it."""
    meant: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """Names of properties that mean something to the store and were set by arguments or by a producer."""

    def __init__(  # noqa: PLR0913  # one parameter per field
        self,
        topic: str,
        body: bytes,
        queue_id: int = 0,
        properties: dict[str, str] | None = None,
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp: int = 0,
        born_host: HostAddress = LOOPBACK,
        store_host: HostAddress = LOOPBACK,
        reconsume_times: int = 0,
        prepared_offset: int = 0,
        store_timestamp: int = 0,
        queue_offset: int = 0,
        offset: int = 0,
        size: int = 0,
        body_crc: int = 0,
        property_string: bytes = b"",
        checked_properties: bytes | None = None,
        meant: frozenset[str] = frozenset(),
        *,
        tags: str = "",
        keys: str | Iterable[str] = "",
        delay_level: int = 0,
        priority: int | None = None,
        message_group: str = "",
        deliver_at: datetime | int | None = None,
        delay: timedelta | float | None = None,
    ) -> None:
        self.topic = topic
        self.body = body
        self.queue_id = queue_id
        self.properties = {} if properties is None else properties
        self.flag = flag
        self.sys_flag = sys_flag
        self.born_timestamp = born_timestamp
        self.born_host = born_host
        self.store_host = store_host
        self.reconsume_times = reconsume_times
        self.prepared_offset = prepared_offset
        self.store_timestamp = store_timestamp
        self.queue_offset = queue_offset
        self.offset = offset
        self.size = size
        self.body_crc = body_crc
        self.property_string = property_string
        self.checked_properties = checked_properties
        self.meant = meant
        if body.__class__ is not bytes or topic.__class__ is not str:
            _check_kinds(topic, body)
        if tags or keys or delay_level:
            self._add(tags, keys, delay_level)
        if message_group or priority is not None:
            self._place(message_group, priority)
        if deliver_at is not None or delay is not None:
            self._wait(deliver_at, delay, delay_level)

    def _wait(self, deliver_at: datetime | int | None, delay: timedelta | float | None, delay_level: int) -> None:
        """Until a time, or for a while."""
        if delay_level or (deliver_at is not None and delay is not None):
            raise ValueError("a message has one of deliver_at, delay and delay_level: each says when it is delivered")
        if deliver_at is not None:
            if not isinstance(deliver_at, datetime | int) or isinstance(deliver_at, bool):
                raise TypeError(f"deliver_at is a datetime or milliseconds since 1970, not {deliver_at!r}")
            at_ms = round(deliver_at.timestamp() * 1000) if isinstance(deliver_at, datetime) else deliver_at
            name, ms = PROPERTY_TIMER_DELIVER_MS, at_ms
        else:
            if not isinstance(delay, timedelta | int | float) or isinstance(delay, bool):
                raise TypeError(f"delay is seconds or a timedelta, not {delay!r}")
            name, ms = PROPERTY_TIMER_DELAY_MS, round(_seconds(delay) * 1000)
        if ms < 0:
            raise ValueError(f"a message cannot be delivered before it is sent: {deliver_at or delay!r}")
        self.properties = self.properties | {name: str(ms)}
        self.meant |= {name}

    def _place(self, message_group: str, priority: int | None) -> None:
        """Set the key or the priority that decides its queue."""
        if not isinstance(message_group, str):
            raise TypeError(f"message_group must be a str, not {type(message_group).__name__}: {message_group!r}")
        if priority is not None and (type(priority) is not int or not 0 <= priority <= PRIORITY_MAX):
            raise ValueError(f"invalid priority {priority!r}: use 0 to {PRIORITY_MAX}, the higher the sooner")
        if message_group and priority is not None:
            raise ValueError("a message has a message_group or a priority: each decides by itself in which queue it is")
        name, text = (PROPERTY_SHARDING_KEY, message_group) if priority is None else (PROPERTY_PRIORITY, str(priority))
        self.properties = self.properties | {name: text}
        self.meant |= {name}

    def _add(self, tags: str, keys: str | Iterable[str], delay_level: int) -> None:
        if not isinstance(delay_level, int) or not 0 <= delay_level <= DELAY_LEVEL_MAX:
            raise ValueError(f"invalid delay_level {delay_level!r}: use 1 to {DELAY_LEVEL_MAX}, or 0 for no delay")
        if not isinstance(tags, str):
            raise TypeError(f"tags must be a str, not {type(tags).__name__}: {tags!r}")
        if tags.strip() != tags or "||" in tags or tags == "*":
            raise ValueError(
                f"invalid tags {tags!r}: a message has one tag, which no subscription could name like that"
            )
        if not isinstance(keys, str):
            keys = _texts(keys)
            if broken := [one for one in keys if " " in one]:
                raise ValueError(f"invalid key {broken[0]!r}: blanks separate keys, so only its parts would be found")
        named = {
            PROPERTY_TAGS: tags,
            PROPERTY_KEYS: keys if isinstance(keys, str) else " ".join(keys),
            PROPERTY_DELAY: str(delay_level or ""),
        }
        given = {name: text for name, text in named.items() if text}
        self.properties = self.properties | given  # a new one: the caller may use the other again
        self.meant |= given.keys()

    @property
    def tags(self) -> str:
        """The tag, or the empty string."""
        return self.properties.get(PROPERTY_TAGS, "")

    @property
    def keys(self) -> list[str]:
        """The business keys, separated by blanks."""
        return [one for one in self.properties.get(PROPERTY_KEYS, "").split(" ") if one]

    @property
    def unique_key(self) -> str:
        """The id assigned by the producer, or the empty string."""
        return self.properties.get(PROPERTY_UNIQUE_KEY, "")

    @property
    def delay_level(self) -> int:
        """1 and up (levels above the highest count as the highest), or 0 for a message without delay."""
        return parse_level(self.properties.get(PROPERTY_DELAY, ""))


def _check_kinds(topic: object, body: object) -> None:
    if not isinstance(topic, str):
        raise TypeError(f"topic must be a str, not {type(topic).__name__}: {topic!r}")
    if isinstance(body, str):
        raise TypeError(f"body must be bytes, not str: encode it, for example {body[:20]!r}.encode()")
    if not isinstance(body, bytes | bytearray | memoryview):
        raise TypeError(f"body must be bytes, not {type(body).__name__}")


def _seconds(delay: timedelta | float) -> float:
    return delay.total_seconds() if isinstance(delay, timedelta) else delay


def _texts(keys: Iterable[str]) -> list[str]:
    found = list(keys) if isinstance(keys, Iterable) else [keys]
    if wrong := [one for one in found if not isinstance(one, str)]:
        raise TypeError(f"keys must be a str or several, not {type(wrong[0]).__name__}: {wrong[0]!r}")
    return found


_UNKNOWN_LEVEL_DELAY_MS: Final = 1000
_DELAY_MS_MAX: Final = 10**9 * 86_400_000
_LEVEL_DIGITS_MAX: Final = 9


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """Delays in milliseconds; level 1 is the first. A level's queue in ``SCHEDULE_TOPIC`` is the level less 1."""

    delays_ms: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``"1s 5s 10m 1h 1d"``. Raises ``ConfigError`` with every invalid delay."""
        delays, problems = [], []
        for word in text.split():
            try:
                delays.append(_delay_ms(word))
            except ValueError as error:
                problems.append(f"message_delay_level: {error}")
        if not delays and not problems:
            problems = ["message_delay_level: name at least one delay, such as 1s"]
        if problems:
            raise ConfigError(problems)
        return cls(tuple(delays))

    @property
    def level_max(self) -> int:
        return len(self.delays_ms)

    def cap(self, level: int) -> int:
        """``level``, limited to the highest one; 0 for a message without delay."""
        return max(0, min(level, len(self.delays_ms)))

    def delay_ms(self, level: int) -> int:
        """The level's delay; a second for an unknown level (as in RocketMQ)."""
        return self.delays_ms[level - 1] if 1 <= level <= len(self.delays_ms) else _UNKNOWN_LEVEL_DELAY_MS

    def due_ms(self, level: int, store_timestamp: int) -> int:
        """When a message of ``level`` (capped) stored at ``store_timestamp`` is due."""
        return store_timestamp + self.delay_ms(self.cap(level))


def parse_level(text: str) -> int:
    """The level in a DELAY property; 0 (no delay) for anything that is not a positive number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _LEVEL_DIGITS_MAX else 0


def _delay_ms(word: str) -> int:
    delay = parse_duration_ms(word, unit="")
    if not 0 <= delay <= _DELAY_MS_MAX or delay != int(delay):
        raise ValueError(f"invalid delay {word!r}: use whole milliseconds, at most {_DELAY_MS_MAX}")
    return int(delay)


METHOD_FLAGS: Final = 0x700
"""Which of them, in a message's system flag."""
COMPRESSION_FLAGS: Final = SYS_FLAG_COMPRESSED | METHOD_FLAGS
ZLIB: Final = (0, 0x300)
_LZ4: Final = 0x100
_ZSTD: Final = 0x200


class WrongBodyError(ValueError):
    """Raised for a body that is damaged, or too large when it is decompressed."""


class UnknownCompressionError(WrongBodyError):
    """Raised for a body that is compressed by a method that this installation cannot read."""


def decompress(body: bytes, sys_flag: int, bytes_max: int) -> bytes:
    """A compressed body of at most ``bytes_max`` bytes then. Raises ``WrongBodyError``, ``UnknownCompressionError``."""
    method = sys_flag & METHOD_FLAGS
    if method == _LZ4:
        return _lz4(body, bytes_max)
    if method == _ZSTD:
        return _zstd(body, bytes_max)
    if method not in ZLIB:
        raise UnknownCompressionError(f"the body is compressed by an unknown method (sysFlag {sys_flag:#x})")
    inflating = zlib.decompressobj()
    try:
        plain = inflating.decompress(body, max(bytes_max, 1))  # 0 would be no limit
    except zlib.error as error:
        raise _damaged("zlib", error) from None
    if not inflating.eof:
        raise _too_large(bytes_max)
    return plain


def _lz4(body: bytes, bytes_max: int) -> bytes:
    frame = _module("lz4.frame", "LZ4")
    inflating = frame.LZ4FrameDecompressor()
    try:
        plain: bytes = inflating.decompress(body, max(bytes_max, 1))
    except RuntimeError as error:
        raise _damaged("LZ4", error) from None
    if not inflating.eof:
        raise _too_large(bytes_max)
    return plain


def _zstd(body: bytes, bytes_max: int) -> bytes:
    zstandard = _module("zstandard", "Zstandard")
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as stream:
            plain: bytes = stream.read(bytes_max + 1)
        is_bounded = len(plain) <= bytes_max
        whole = zstandard.ZstdDecompressor().decompressobj()  # which knows whether the frame ends, but no limit
        is_whole = is_bounded and len(whole.decompress(body)) == len(plain) and whole.eof
    except zstandard.ZstdError as error:
        raise _damaged("Zstandard", error) from None
    if not is_whole:
        raise _too_large(bytes_max)
    return plain


def _module(name: str, method: str) -> Any:  # noqa: ANN401  # a module that need not be installed
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnknownCompressionError(
            f"the body is compressed with {method}, and {name.partition('.')[0]} is not installed: install dledger "
            "with the extra 'compression'"
        ) from error


def _damaged(method: str, error: Exception) -> WrongBodyError:
    return WrongBodyError(f"the body is marked as compressed with {method}, but cannot be decompressed: {error}")


def _too_large(bytes_max: int) -> WrongBodyError:
    return WrongBodyError(f"the body is truncated, or larger than {bytes_max} bytes")
