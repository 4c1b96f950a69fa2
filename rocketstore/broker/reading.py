"""Reads messages of one queue, those in memory at once, others on a read thread; and filters them for their consumers.

Waiting for messages, and room for the answers that carry them, are the callers' business.

A consumer's subscription is of a kind: ``TAG`` or ``SQL92`` (``rocketstore.message.sql``). No filter means all
messages. Consumers send theirs with every pull, so there is one cache for them. The tags of a subscription are hashed
all at once, with NumPy, which clients do without.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, ParamSpec, Protocol, Self, TypeVar

import numpy as np

from dledger.errors import InvalidRequestError
from dledger.log_output import BoundedLog
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.message.columns import INVERSE_POWERS, POWERS
from rocketstore.message.message import PROPERTY_TAGS
from rocketstore.message.properties import decode_properties, find_property_bytes, java_hash
from rocketstore.message.record import properties_of
from rocketstore.message.sql import NoResultError, SqlCondition
from rocketstore.settings import LiveConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.types import GetResult

_UNITS_PER_STEP: Final = 1 << 16
"""How many code units one vectorised step hashes: ``POWERS`` has no more."""
_FEWEST_FOR_VECTORS: Final = 8


def java_hashes(texts: Sequence[str]) -> list[int]:
    """``java_hash`` of each text; for many texts much faster than one by one."""
    if len(texts) < _FEWEST_FOR_VECTORS:
        return [java_hash(text) for text in texts]
    hashes: list[int] = []
    start = units = 0
    for number, text in enumerate(texts):
        # A character outside the basic plane is two code units; counting every character as two is safe and cheap.
        size = 2 * len(text)
        if units + size > _UNITS_PER_STEP:
            hashes += _hash_step(texts[start:number])
            start, units = number, 0
        units += size
    return hashes + _hash_step(texts[start:])


def _hash_step(texts: Sequence[str]) -> list[int]:
    """Hash texts of together at most ``_UNITS_PER_STEP`` units, unless it is a single text.

    31 is odd and so has an inverse modulo 2**32. With ``s[n]`` the sum of ``c[i] / 31**i`` over the first n units of
    all concatenated texts, the text from unit a to b hashes to ``31**(b-1) * (s[b] - s[a])``.
    """
    if len(texts) == 1:
        return [java_hash(texts[0])]
    joined = "".join(texts)
    units = np.frombuffer(joined.encode("utf-16-le", "surrogatepass"), dtype="<u2").astype(np.uint32)
    lengths = list(map(len, texts))
    if len(units) != len(joined):
        lengths = [len(text.encode("utf-16-le", "surrogatepass")) // 2 for text in texts]
    sums = np.zeros(len(units) + 1, dtype=np.uint32)
    np.cumsum(units * INVERSE_POWERS[: len(units)], dtype=np.uint32, out=sums[1:])
    ends = np.cumsum(np.array(lengths, dtype=np.int64))
    spans = sums[ends]
    spans[1:] -= sums[ends[:-1]]
    # An empty text at the very start has no unit before its end; its span is 0, so any power will do.
    hashes: list[int] = (POWERS[np.maximum(ends - 1, 0)] * spans).view(np.int32).tolist()
    return hashes


_log = BoundedLog(logging.getLogger(__name__))
TAG: Final = "TAG"
SQL92: Final = "SQL92"
FILTERS_MAX: Final = 1024
FILTERS_CHARS_MAX: Final = 1 << 20
SQL_CHARS: Final = 16
"""A compiled condition takes so much more memory than tags of the same length."""
_NAMES_FOUND_MAX: Final = 8
"""Up to so many properties are looked for one by one; otherwise all are decoded."""
_SHOWN_CHARS: Final = 200
TAGS_MAX: Final = 1024
EXPRESSION_CHARS_MAX: Final = 16 * 1024
"""Parsing an expression of this length takes about a millisecond."""
_SHOWN_TAG_CHARS: Final = 64
_TAGS: Final = PROPERTY_TAGS.encode() + b"\x01"


class MessageFilter(Protocol):
    """Which stored messages a consumer wants. Used by any thread."""

    @property
    def codes(self) -> frozenset[int] | None:
        """The tags codes that wanted messages may have, which consume queues hold; None: only records tell."""

    def matches_record(self, record: bytes) -> bool:
        """Whether a stored record is wanted."""


class SqlFilter:
    """Records whose properties fulfil a condition; created with the expression.

    A record for which the condition has no result, because a property is no number where one is needed, is not
    delivered: ``failed`` is called for each, and the first one is logged.
    """

    codes: Final = None

    def __init__(self, expression: str, failed: Callable[[], object] = lambda: None) -> None:
        """Raises ``InvalidRequestError``, which gives the place."""
        self._expression = expression
        self._failed = failed
        self._is_reported = False
        self._condition = SqlCondition(expression)
        names = self._condition.names
        self._wanted = tuple((one, one.encode() + b"\x01") for one in names) if len(names) <= _NAMES_FOUND_MAX else None

    def matches_record(self, record: bytes) -> bool:
        """Whether the condition is true of a stored record's properties. Raises ``CorruptRecordError``."""
        encoded = properties_of(record)
        if self._wanted is None:
            properties = decode_properties(encoded)
        else:
            properties = {}
            for name, key in self._wanted:
                value = find_property_bytes(encoded, key)
                if value is not None:
                    properties[name] = value.decode(errors="replace")
        try:
            return self._condition.delivers(properties)
        except NoResultError:
            self._failed()
            self._report()
            return False

    def _report(self) -> None:
        if not self._is_reported:
            self._is_reported = True
            _log.warning(
                "SQL filter %r: messages are not delivered, because a property is not a number or truth value where "
                "the expression needs one",
                self._expression[:_SHOWN_CHARS],
            )


class Filters:
    """The most recently used filters, limited by count and characters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._filters: OrderedDict[tuple[str, str], MessageFilter | None] = OrderedDict()
        self._chars = 0
        self.errors = 0
        """How often a record was not delivered because its filter had no result."""

    def __len__(self) -> int:
        return len(self._filters)

    def is_known(self, kind: str, expression: str) -> bool:
        """Whether ``of`` need not parse this."""
        return (kind, expression) in self._filters

    def of(self, kind: str, expression: str) -> MessageFilter | None:
        """The filter of a subscription of this kind (empty: tags); None: all messages.

        Raises ``InvalidRequestError``. Parsing the longest condition takes tens of milliseconds, tags one.
        """
        key = kind, expression
        with self._lock:
            if key in self._filters:
                self._filters.move_to_end(key)
                return self._filters[key]
        made = self._parse(kind, expression)
        with self._lock:
            if key not in self._filters:
                self._chars += _weight(*key)
            self._filters[key] = made
            while len(self._filters) > FILTERS_MAX or self._chars > FILTERS_CHARS_MAX:
                self._chars -= _weight(*self._filters.popitem(last=False)[0])
        return made

    def _parse(self, kind: str, expression: str) -> MessageFilter | None:
        if kind in ("", TAG):
            return TagFilter.parse(expression)
        if kind == SQL92:
            return SqlFilter(expression, self._failed)
        raise InvalidRequestError(f"filters of type {kind[:_SHOWN_CHARS]} are not supported: use {TAG} or {SQL92}")

    def _failed(self) -> None:
        with self._lock:
            self.errors += 1


def _weight(kind: str, expression: str) -> int:
    return len(expression) * (SQL_CHARS if kind == SQL92 else 1)


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Tag expressions: ``*`` or empty for all, ``TagA || TagB`` for some. As RocketMQ reads them: empty parts are left
    out, and ``*`` among others is a tag of that name.

    A consume queue stores only a hash of the tags. It excludes most messages without reading them; for the others, the
    tag in the record is compared, because two tags may have the same hash.

    The wanted tags; created by ``parse``.
    """

    codes: frozenset[int]
    tags: frozenset[bytes]

    @classmethod
    def parse(cls, expression: str) -> Self | None:
        """None: all messages. Raises ``InvalidRequestError``."""
        if len(expression) > EXPRESSION_CHARS_MAX:
            raise InvalidRequestError(
                f"the tag expression has {len(expression)} characters; at most {EXPRESSION_CHARS_MAX} are allowed"
            )
        if expression.strip() in ("", "*"):
            return None
        words = [stripped for word in expression.split("||") if (stripped := word.strip())]
        if not words:
            shown = expression if len(expression) <= _SHOWN_TAG_CHARS else f"{expression[:_SHOWN_TAG_CHARS]}..."
            raise InvalidRequestError(f"the tag expression {shown!r} names no tag: use * or TagA || TagB")
        if len(words) > TAGS_MAX:
            raise InvalidRequestError(f"the tag expression has {len(words)} tags; at most {TAGS_MAX} are allowed")
        return cls(frozenset(java_hashes(words)), frozenset(word.encode(errors="replace") for word in words))

    def matches_record(self, record: bytes) -> bool:
        """Whether a stored record matches."""
        return find_property_bytes(properties_of(record), _TAGS) in self.tags


_P = ParamSpec("_P")
_T = TypeVar("_T")
ALL = frozenset({"", "*"})
"""Expressions of tags that mean every message."""


class ReadLimits(NamedTuple):
    """How much one read returns at most; of at least one message, whatever its size."""

    messages: int
    size_bytes: int


class QueueReading:
    """On the loop. ``group`` counts for statistics; empty: nobody consumes what is read."""

    def __init__(self, store: MessageStore, readers: ReadThreads) -> None:
        self._store = store
        self._readers = readers

    async def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        wanted: MessageFilter | None,
        limits: ReadLimits,
        group: str = "",
    ) -> GetResult:
        """The messages from ``offset`` on that pass the filter ``wanted`` (None: all). Raises ``CorruptLogError``."""
        found = self.at_once(topic, queue_id, offset, limits, group) if wanted is None else None  # a filter reads much
        if found is not None:
            return found
        return await self._readers.run(
            self._store.get,
            topic,
            queue_id,
            offset,
            max_count=limits.messages,
            max_bytes=limits.size_bytes,
            matches_tags=_matches_code(wanted),
            matches_record=wanted.matches_record if wanted else None,
            group=group,
        )

    def at_once(self, topic: str, queue_id: int, offset: int, limits: ReadLimits, group: str = "") -> GetResult | None:
        """All messages from ``offset`` on, if that takes no read thread; None if ``read`` must decide."""
        count, size = limits
        return self._store.get_at_once(topic, queue_id, offset, max_count=count, max_bytes=size, group=group)

    async def end(self, topic: str, queue_id: int) -> int:
        """The offset after the queue's last message; 0 if there is no such queue."""
        return await self._readers.run(self._store.max_offset, topic, queue_id)

    async def stored_since(self, topic: str, queue_id: int, time_ms: int) -> int:
        """The offset of the first message stored at that time (ms since 1970) or later; the queue's end if there is
        none. Raises ``CorruptLogError``.
        """
        return await self._readers.run(self._store.offset_by_time, topic, queue_id, time_ms)

    def begin_at_once(self, topic: str, queue_id: int) -> int:
        """The offset of the queue's first message, without a change of thread."""
        return max(self._store.min_offset(topic, queue_id), 0)

    def end_at_once(self, topic: str, queue_id: int) -> int:
        """The same, without a change of thread."""
        return self._store.max_offset(topic, queue_id)


def _matches_code(wanted: MessageFilter | None) -> Callable[[int], bool] | None:
    return None if wanted is None or wanted.codes is None else wanted.codes.__contains__


class ReadThreads:
    """Threads for reads that may wait for a disk, which the event loop must not do.

    At most ``count`` threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._under_way = 0
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="rocketstore-read")

    async def run(self, read: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The result of ``read``."""
        self._under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, partial(read, *args, **kwargs))
        finally:
            self._under_way -= 1

    @property
    def waiting(self) -> int:
        """Reads for which no thread is free."""
        return max(0, self._under_way - self._count)

    def close(self) -> None:
        self._executor.shutdown(wait=True)


class RecordReader:
    """Reads messages at places in the log that clients name."""

    def __init__(self, store: MessageStore, threads: ReadThreads) -> None:
        self._store = store
        self._threads = threads

    async def at(self, offset: int) -> bytes | None:
        """The record that begins at this offset; None if none does."""
        return await self._threads.run(self._store.read_record, offset) if offset >= 0 else None


class SubscriptionFilters:
    """Consumers' subscriptions as filters, and which of them this broker serves.

    On the loop.
    """

    def __init__(self, live: LiveConfig, readers: ReadThreads) -> None:
        self._live = live
        self._readers = readers
        self._filters = Filters()

    @property
    def errors(self) -> int:
        """How often a message was not delivered because its filter had no result; may be read on any thread."""
        return self._filters.errors

    async def of(self, kind: str, expression: str) -> MessageFilter | None:
        """The filter of a subscription of this kind; None: all messages.

        A condition that is new is parsed on a read thread. Raises ``Refusal``.
        """
        if kind in ("", TAG) and expression in ALL:
            return None
        self.require_kind(kind)
        try:
            if kind != SQL92 or self._filters.is_known(kind, expression):
                return self._filters.of(kind, expression)
            return await self._readers.run(self._filters.of, kind, expression)
        except InvalidRequestError as error:
            raise Refusal(RefusalKind.WRONG_FILTER, str(error)) from error

    def require_kind(self, kind: str) -> None:
        """Raises ``Refusal``, in RocketMQ's words, for filters that this broker does not have."""
        if kind not in ("", TAG, SQL92) or (kind == SQL92 and not self._live.now.enable_property_filter):
            reason = f"The broker does not support consumer to filter message by {kind[:64]}"
            if kind == SQL92:
                reason += " (enablePropertyFilter)"
            raise Refusal(RefusalKind.INVALID, reason)
