"""A running group's log over the network: what is committed, where entries are, and in which ranges tasks read them.

Clients are created on first use, one per process, and kept, because Spark forks its workers and a worker runs many
tasks, one after the other. A connection made before a fork would be shared with the parent, so clients are keyed by
process id, too.

A stretch of the log is cut into ranges of entries with about as many bytes each, whatever the entry sizes. The result
depends only on the log and the options, so the same stretch is always cut in the same way.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Generic, TypeVar

from dledger.client import DLedgerClient, ReadFrom, ReadMode
from dledger.client.discovery import DISCOVERY_TIMEOUT_S
from dledger.client.shared import is_retried_read
from dledger.errors import DLedgerError, IdentityError, IndexBeforeBeginError
from dledger.rpc.clients.bulk_codec import LocatedEntries
from dledger.rpc.ports import NodeStatus
from dledger.store.format import HEADER, EntryHeader
from dledger.types import LogChunk, Role
from dledger_spark.errors import DataLossError, OptionError
from dledger_spark.options import SPLITS_MAX, ReadOptions, SecurityOptions
from rocketstore.client import Admin, ForbiddenError, NotFoundError


@dataclass(frozen=True, slots=True)
class CommittedRange:
    """A node's committed entries from ``begin_index`` up to ``end_index`` (exclusive)."""

    cluster: str
    group: str
    begin_index: int
    end_index: int
    holds_messages: bool = False
    """Whether the node is a broker, whose entries hold RocketMQ's messages."""


class TrimmedError(Exception):
    """Raised for entries that are no longer kept; ``begin_index`` is the first kept one."""

    def __init__(self, begin_index: int) -> None:
        super().__init__(begin_index)
        self.begin_index = begin_index


_log = logging.getLogger(__name__)
_CLIENTS_MAX: Final = 8
TRIMS_MAX: Final = 10
"""How often the log's beginning may be removed while one batch is planned."""


_T = TypeVar("_T", bound=DLedgerClient | Admin)
_Key = tuple[int, tuple[str, ...], str, SecurityOptions]


class _Shared(Generic[_T]):
    """One process's clients; the least recently used is closed when there are too many. Thread-safe."""

    def __init__(self, make: Callable[[tuple[str, ...], str, SecurityOptions], _T]) -> None:
        self._make = make
        self._lock = threading.Lock()  # guards what follows
        self._clients: OrderedDict[_Key, _T] = OrderedDict()

    def get(self, servers: tuple[str, ...], group: str, security: SecurityOptions) -> _T:
        """The client for a group."""
        key = (os.getpid(), servers, group, security)
        with self._lock:
            client = self._clients.get(key)
            if client is None:
                client = self._clients[key] = self._make(servers, group, security)
            self._clients.move_to_end(key)
            unused = [self._clients.popitem(last=False) for _ in range(len(self._clients) - _CLIENTS_MAX)]
        for (pid, *_), old in unused:
            if pid == os.getpid():  # clients inherited from a parent belong to the parent
                old.close()
        return client


_clients: Final = _Shared(
    lambda servers, group, security: DLedgerClient(servers, group=group, security=security.client())
)
_admins: Final = _Shared(lambda servers, _, security: Admin(servers, security=security.client()))


def shared_client(servers: tuple[str, ...], group: str, security: SecurityOptions) -> DLedgerClient:
    """This process's client for a group. Callers must not close it."""
    return _clients.get(servers, group, security)


def shared_admin(servers: tuple[str, ...], security: SecurityOptions) -> Admin:
    """This process's admin client for brokers. Callers must not close it."""
    return _admins.get(servers, "", security)


def status_of(servers: tuple[str, ...], group: str, security: SecurityOptions, timeout_s: float) -> NodeStatus:
    """A member's status. Raises ``OptionError`` with the right name if the group has another one."""
    try:
        return shared_client(servers, group, security).metadata(timeout_s=timeout_s)
    except IdentityError as error:
        raise OptionError(f"option group: {error}") from error


def _is_hidden(admin: Admin, topic: str) -> bool:
    """Whether this account may not see the topic; reading the log needs another permission."""
    try:
        admin.topic(topic)
    except NotFoundError:
        return False
    except ForbiddenError:
        return True
    return True  # made meanwhile


@dataclass(frozen=True, slots=True)
class ClientLog:
    """A running group's log, read according to the options. Pickles: holds no connection.

    Every call has a deadline; errors are ``DLedgerError``. Planning uses the leader's metadata, which are small
    requests, unless any member may be asked; ``readFrom`` selects which members send the log itself.
    """

    options: ReadOptions

    def committed(self) -> CommittedRange:
        """The committed range now. If any member may be asked, it starts where the one that keeps most does."""
        status = self._status()
        found = self._locate().range
        begin = found.begin.index
        if self.options.read_from == "any" and begin:
            members = self._client.members_status(timeout_s=min(DISCOVERY_TIMEOUT_S, self._timeout_s)).values()
            begin = min((begin, *(one.begin_index for one in members if not isinstance(one, DLedgerError))))
        return CommittedRange(status.cluster_id, status.group, begin, found.end.index, holds_messages=status.is_broker)

    def confirmed_end(self) -> int | None:
        """Like ``committed().end_index``, from a leader that has confirmed its leadership: no committed entry is beyond
        it.

        None if no leader can confirm. Implemented as a confirmed read between two requests to the same leader.
        """
        before = self._status()
        self._client.read(before.begin_index, count=1, mode=ReadMode.LINEARIZABLE, timeout_s=self._timeout_s)
        after = self._status()
        if after.role is not Role.LEADER or (before.node_id, before.term) != (after.node_id, after.term):
            return None
        return after.committed_index + 1

    def positions_of(self, indexes: Sequence[int]) -> list[int]:
        """The start positions of these entries; the committed end for the index after the last one.

        Raises ``TrimmedError``.
        """
        places = self._locate(indexes=indexes).places
        if any(place.index != index for place, index in zip(places, indexes, strict=True)):  # from a lagging member
            places = self._locate(ReadFrom.LEADER, indexes=indexes).places
        return [place.position for place in places]

    def indexes_at(self, positions: Sequence[int]) -> list[int]:
        """The first committed entries starting at or after these positions. Raises ``TrimmedError``."""
        return [place.index for place in self._locate(positions=positions).places]

    def index_at(self, time_ms: int) -> int:
        """The first committed entry stored at this time or later, or the committed end."""
        found = self._locate(times_ms=(time_ms,))
        if found.places[0].index >= found.range.end.index:  # not there yet, if from a lagging member
            found = self._locate(ReadFrom.LEADER, times_ms=(time_ms,))
        return found.places[0].index

    def times_ascend(self) -> bool:
        """Whether store times never go back: not if RocketMQ has written the first entries, which have no checksums."""
        begin = self._locate().range.begin.index
        try:
            chunk = next(self.chunks(begin, begin + 1), None)
        except TrimmedError:
            return False
        if chunk is None:
            return False
        header = EntryHeader(*HEADER.unpack_from(chunk.data))
        return (header.chain_crc, header.body_crc) != (0, 0)

    def chunks(self, first: int, end: int) -> Iterator[LogChunk]:
        """The stored entries from ``first`` up to ``end`` (exclusive), all of them. Raises ``TrimmedError``.

        Losses on the way are fetched again, from another member if there is one.
        """
        failures = 0
        while first < end:
            try:
                for chunk in self._client.fetch_log(
                    first, end, read_from=ReadFrom(self.options.read_from), timeout_s=self._timeout_s
                ):
                    yield chunk
                    first, failures = chunk.end_index, 0
            except IndexBeforeBeginError as error:
                raise self._trimmed(error, first) from None
            except DLedgerError as error:
                failures += 1
                if failures > self.options.fetch_retries or not is_retried_read(error):
                    raise

    def publish(self, consumer_group: str, index: int) -> None:
        """Publish everything before ``index`` as the consumer group's progress, in the queues of the topics read."""
        options = self.options
        admin = shared_admin(options.servers, options.security)
        topics: Sequence[str] = options.topics
        if not topics:
            every = [one.name for one in admin.topics()]
            topics = [one for one in every if re.fullmatch(options.topic_pattern or ".*", one)]
        try:
            (position,) = self.positions_of((index,))
        except TrimmedError as error:  # retention was faster than the stream
            (position,) = self.positions_of((error.begin_index,))
        admin.commit_position(consumer_group, position, topics)

    def check_topics(self) -> None:
        """Raises ``OptionError`` for a subscribed topic that does not exist, as Kafka's source does.

        With ``failOnDataLoss=false`` such a topic has no rows: the messages of a deleted one can be read so.
        """
        options = self.options
        if not options.topics or not options.fail_on_data_loss:
            return
        admin = shared_admin(options.servers, options.security)
        known = {one.name for one in admin.topics()}
        unknown = [name for name in options.topics if name not in known and not _is_hidden(admin, name)]
        if unknown:
            raise OptionError(
                f"option subscribe: there is no topic {' or '.join(unknown)}: create it first, or set "
                "failOnDataLoss=false to read the messages of a deleted one"
            )

    @property
    def _client(self) -> DLedgerClient:
        return shared_client(self.options.servers, self.options.group, self.options.security)

    @property
    def _timeout_s(self) -> float:
        return self.options.fetch_timeout_ms / 1000

    def _status(self) -> NodeStatus:
        return status_of(self.options.servers, self.options.group, self.options.security, self._timeout_s)

    def _locate(
        self,
        read_from: ReadFrom | None = None,
        *,
        indexes: Sequence[int] = (),
        positions: Sequence[int] = (),
        times_ms: Sequence[int] = (),
    ) -> LocatedEntries:
        if read_from is None:
            read_from = ReadFrom.ANY if self.options.read_from == "any" else ReadFrom.LEADER
        try:
            return self._client.locate(
                indexes=indexes,
                positions=positions,
                store_times_ms=times_ms,
                read_from=read_from,
                timeout_s=self._timeout_s,
            )
        except IndexBeforeBeginError as error:
            if not indexes:
                raise
            raise self._trimmed(error, min(indexes)) from None

    def _trimmed(self, error: IndexBeforeBeginError, first: int) -> TrimmedError | IndexBeforeBeginError:
        """The error to raise: readers continue after the trimmed part, so compare it with the log's start."""
        begin = self.committed().begin_index
        return TrimmedError(begin) if begin > first else error


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Entries from ``first`` up to ``end`` (exclusive); empty if they are equal."""

    first: int
    end: int

    @property
    def count(self) -> int:
        """The number of entries."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Cutting:
    """Limits for cutting: maximum bytes and entries per range, minimum number of ranges; 0: no limit."""

    split_bytes: int
    entries_max: int = 0
    ranges_min: int = 0


def cut(whole: IndexRange, cutting: Cutting, places: ClientLog) -> list[IndexRange]:
    """The ranges, in order, at least one: an empty stretch is one empty range."""
    if whole.count <= 0:
        return [IndexRange(whole.first, whole.first)]
    # Use the start of the last entry instead of the stretch's end, because a blank may be added after that entry
    # later.
    begin, last = places.positions_of((whole.first, whole.end - 1))
    wanted = min(max(1, cutting.ranges_min, _ceil(last - begin, cutting.split_bytes)), whole.count, SPLITS_MAX)
    bounds = [whole.first, whole.end]
    if wanted > 1:
        targets = [begin + (last - begin) * number // wanted for number in range(1, wanted)]
        bounds[1:1] = places.indexes_at(targets)
    bounds = _spread(bounds)
    if cutting.entries_max:
        bounds = _divided(bounds, cutting.entries_max)
    return [IndexRange(first, end) for first, end in pairwise(bounds)]


def end_within(whole: IndexRange, bytes_max: int, places: ClientLog) -> int:
    """The furthest end such that the entries before it take at most ``bytes_max`` bytes; at least one entry."""
    if whole.count <= 1:
        return whole.end
    begin, end = places.positions_of((whole.first, whole.end))
    if end - begin <= bytes_max:
        return whole.end
    beyond = min(places.indexes_at((begin + bytes_max,))[0], whole.end)  # the previous entry may exceed the limit
    if beyond > whole.first + 1 and places.positions_of((beyond,))[0] - begin > bytes_max:
        beyond -= 1
    return max(beyond, whole.first + 1)


def _spread(bounds: list[int]) -> list[int]:
    """Make bounds strictly ascending: a huge entry makes several cuts coincide.

    There are at least as many entries as ranges.
    """
    spread = [bounds[0]]
    for number, bound in enumerate(bounds[1:], 1):
        after = len(bounds) - 1 - number
        spread.append(min(max(bound, spread[-1] + 1), bounds[-1] - after))
    return spread


def _divided(bounds: list[int], entries_max: int) -> list[int]:
    divided = [bounds[0]]
    for first, end in pairwise(bounds):
        parts = _ceil(end - first, entries_max)
        divided += [first + (end - first) * part // parts for part in range(1, parts + 1)]
    return divided


def _ceil(amount: int, size: int) -> int:
    return -(-amount // size)


def cut_kept(log: ClientLog, whole: IndexRange, state: CommittedRange, options: ReadOptions) -> list[IndexRange]:
    """The kept ranges of a stretch. Raises ``DataLossError`` if a part is missing, unless the options allow it."""
    cutting = Cutting(options.split_bytes, options.max_records_per_partition, options.min_partitions)
    for _ in range(TRIMS_MAX):
        kept = whole
        if state.begin_index > whole.first:
            lost_end = min(state.begin_index, whole.end)
            if options.fail_on_data_loss:
                raise data_lost(state.group, whole.first, lost_end)
            _log.warning("entries %d to %d of %s are no longer kept", whole.first, lost_end - 1, state.group)
            kept = IndexRange(lost_end, whole.end)
        try:
            return cut(kept, cutting, log)
        except TrimmedError:
            state = log.committed()
    raise trimmed_too_fast(state.group)


def begin_within(options: ReadOptions, group: str, index: int, end_index: int) -> int:
    """The start if the requested one is beyond the end. Raises ``DataLossError``, unless the options allow it."""
    if options.fail_on_data_loss:
        raise DataLossError(
            f"the read starts at entry {index}, but the committed log of group {group} ends before entry "
            f"{end_index}: startingOffsets is too large or from another log, or the log was replaced by an older "
            "one. To start at its end, set failOnDataLoss=false"
        )
    _log.warning("the log of %s ends before entry %d: starting at %d", group, index, end_index)
    return end_index


def data_lost(group: str, first: int, end: int) -> DataLossError:
    """The error for requested entries that are no longer kept."""
    return DataLossError(
        f"entries {first} to {end - 1} ({end - first} entries) of group {group} are no longer kept: the log was "
        "trimmed before they were read. To continue without them, set failOnDataLoss=false; to keep more, raise "
        "fileReservedTime"
    )


def trimmed_too_fast(group: str) -> DataLossError:
    """The error if retention keeps overtaking the planning."""
    return DataLossError(
        f"the log of group {group} is being trimmed faster than a read can be planned: start later, or keep more of it"
    )
