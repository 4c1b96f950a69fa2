"""A group's log over gRPC. Clients are made when first needed, one per process, and kept: Spark forks its workers.

A worker serves many tasks, one after the other, so a connection is worth keeping; one made before a fork would be
shared with the parent, so the process id is part of what a client is found by.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from dledger.client import DLedgerClient, ReadFrom, ReadMode
from dledger.client.discovery import DISCOVERY_TIMEOUT_S
from dledger.client.shared import is_retried_read
from dledger.errors import DLedgerError, IdentityError, IndexBeforeBeginError
from dledger.rpc.clients.bulk_codec import LocatedEntries
from dledger.rpc.ports import NodeStatus
from dledger.types import LogChunk, Role
from dledger_spark.errors import OptionError
from dledger_spark.options import ReadOptions, SecurityOptions
from dledger_spark.source.group_log import CommittedRange, TrimmedError
from rocketstore.client import Admin

_CLIENTS_MAX: Final = 8


_T = TypeVar("_T", bound=DLedgerClient | Admin)
_Key = tuple[int, tuple[str, ...], str, SecurityOptions]


class _Shared(Generic[_T]):
    """One process's clients; the least recently asked for is closed when there are too many. Thread-safe."""

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
            if pid == os.getpid():  # what was inherited from a parent is the parent's
                old.close()
        return client


_clients: Final = _Shared(
    lambda servers, group, security: DLedgerClient(servers, group=group, security=security.client())
)
_admins: Final = _Shared(lambda servers, _, security: Admin(servers, security=security.client()))


def shared_client(servers: tuple[str, ...], group: str, security: SecurityOptions) -> DLedgerClient:
    """This process's client for a group. Whoever asks does not close it."""
    return _clients.get(servers, group, security)


def shared_admin(servers: tuple[str, ...], security: SecurityOptions) -> Admin:
    """This process's administrator of brokers. Whoever asks does not close it."""
    return _admins.get(servers, "", security)


def status_of(servers: tuple[str, ...], group: str, security: SecurityOptions, timeout_s: float) -> NodeStatus:
    """What a member says of itself. Raises ``OptionError``, with the right name, if the group has another."""
    try:
        return shared_client(servers, group, security).metadata(timeout_s=timeout_s)
    except IdentityError as error:
        raise OptionError(f"option group: {error}") from error


@dataclass(frozen=True, slots=True)
class ClientLog:
    """A running group's log as these options say to read it. Pickles: holds no connection.

    Every call has a deadline; errors are ``DLedgerError``. Plans are made of what the leader says, which are small
    questions, unless any member may be asked; ``readFrom`` is about who sends the log itself.
    """

    options: ReadOptions

    def committed(self) -> CommittedRange:
        """What is committed now. Where any member may be asked it begins where the one that keeps most does."""
        status = self._status()
        found = self._locate().range
        begin = found.begin.index
        if self.options.read_from == "any" and begin:
            members = self._client.members_status(timeout_s=min(DISCOVERY_TIMEOUT_S, self._timeout_s)).values()
            begin = min((begin, *(one.begin_index for one in members if not isinstance(one, DLedgerError))))
        return CommittedRange(status.cluster_id, status.group, begin, found.end.index, holds_messages=status.is_broker)

    def confirmed_end(self) -> int | None:
        """As ``committed().end_index``, of a leader that has made sure that it is one: nothing was ever beyond it.

        None while no leader is that sure. A read that the leader confirms, between two looks at the same leader.
        """
        before = self._status()
        self._client.read(before.begin_index, count=1, mode=ReadMode.LINEARIZABLE, timeout_s=self._timeout_s)
        after = self._status()
        if after.role is not Role.LEADER or (before.node_id, before.term) != (after.node_id, after.term):
            return None
        return after.committed_index + 1

    def positions_of(self, indexes: Sequence[int]) -> list[int]:
        """Where these entries begin, in bytes of the log; the committed end for the index after the last one.

        Raises ``TrimmedError``.
        """
        places = self._locate(indexes=indexes).places
        if any(place.index != index for place, index in zip(places, indexes, strict=True)):  # one that is behind
            places = self._locate(ReadFrom.LEADER, indexes=indexes).places
        return [place.position for place in places]

    def indexes_at(self, positions: Sequence[int]) -> list[int]:
        """The first committed entries that begin at or after these positions. Raises ``TrimmedError``."""
        return [place.index for place in self._locate(positions=positions).places]

    def index_at(self, time_ms: int) -> int:
        """The first committed entry stored at this time or later, or the committed end."""
        return self._locate(times_ms=(time_ms,)).places[0].index

    def chunks(self, first: int, end: int) -> Iterator[LogChunk]:
        """The entries from ``first`` up to ``end`` (exclusive), all of them, as stored. Raises ``TrimmedError``.

        What is lost on the way is fetched again, from another member if there is one.
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
        """Make what is before ``index`` the consumer group's progress, in the queues of the topics that are read."""
        options = self.options
        admin = shared_admin(options.servers, options.security)
        topics: Sequence[str] = options.topics
        if options.topic_pattern:
            topics = [one.name for one in admin.topics() if re.fullmatch(options.topic_pattern, one.name)]
            if not topics:  # none named would mean all
                return
        admin.commit_position(consumer_group, index=index, topics=topics)

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
        """What to raise: readers go on behind what is trimmed, so that is held against where the log begins."""
        begin = self.committed().begin_index
        return TrimmedError(begin) if begin > first else error
