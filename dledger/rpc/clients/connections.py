"""The connections of gRPC's clients to one port: counts them per address, detects calls that do not end, and hangs up.

gRPC counts connections, but not by address, and keeps an answer in memory until the client reads it. So a thread checks
the process's connections once per second (ten times when there are many), and hangs up by shutting the socket down,
which gRPC takes for the client's own end. It hangs up on:

- clients that do not read their answers: those with answered calls that read none of the answers for ``call_ms_max``;
- connections beyond the limit of one address (``account_share_percent`` of ``connections_max``), or of all together:
  those of the address that has the most, longest idle first.

gRPC itself accepts twice ``connections_max``, so that newcomers have room until the next check.

``Leases`` limits the bytes of answers on their way to clients; the room is taken before the log is read for them. gRPC
accepts an answer of any size and keeps it until the client reads it. So a handler first takes room, and waits if there
is none: for the connection, for its account or address, or in total. The room is returned when the client has read the
answer, or is gone. Waiting connections are served in turn.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import grpc

from dledger.access.addresses import counted_host, host_of, place_of, plain_host
from dledger.access.quota import Quota, TooManyWaitsError
from dledger.config import ConnectionLimits
from dledger.monitoring import Conditions

_LOG = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 1.0
_CROWDED_INTERVAL_S: Final = 0.1
_LOOKS_APART: Final = 19
"""The least interval, in times of what a look takes: half a second for ten thousand connections."""
"""The check interval while more than half of the allowed connections are open."""
GRACE_S: Final = 2.0
"""A connection without calls counts as idle only after this time: a new one needs time to make its first call."""
BUSY: Final = math.inf
"""The "quiet since" of a connection with a call in progress."""
_DESCRIPTORS: Final = "/proc/self/fd"

Place = tuple[str, int]
"""A client's address and port."""


class Connection:
    """A client's connection that has, or had, calls. On the loop; the thread reads its numbers, too."""

    __slots__ = ("calls", "handled", "heard_at", "host", "hung_up", "peer", "place", "taken_at")

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.host = counted_host(host_of(peer))
        self.place = place_of(peer)
        self.hung_up = False
        """Whether we have closed it: its calls end one by one, and none of them may start anything."""
        self.calls = 0
        """Calls that gRPC has not finished."""
        self.handled = 0
        """Those of them that a handler is working on; the others wait for the client."""
        self.heard_at = 0.0
        """When a call began or ended."""
        self.taken_at = 0.0
        """When the client read an answer or a stream message, or when the wait for that began."""

    @property
    def awaited(self) -> int:
        """Calls that wait for the client."""
        return self.calls - self.handled

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wraps the sending of a stream message."""
        self._clients_turn()
        try:
            yield
        finally:
            self.handled += 1
            self.taken_at = time.monotonic()

    def _clients_turn(self) -> None:
        if self.calls == self.handled:
            self.taken_at = time.monotonic()
        self.handled -= 1


class Connections:
    """Wrap each call in ``call``, on the loop. ``watch`` the port once it is known; ``close`` joins the thread."""

    def __init__(
        self, name: str, limits: ConnectionLimits, *, share_percent: int, conditions: Conditions | None = None
    ) -> None:
        self._limits = limits
        self._conditions = conditions or Conditions(name)
        self._share = share_percent
        self._calls_max = 0
        self._calls: Counter[str] = Counter()  # by address
        self._known: dict[str, Connection] = {}
        self._first_seen: dict[_Link, float] = {}
        self._condemned: deque[Place] = deque()
        self._port = 0
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name)
        self.client_of: Callable[[str], str] = str
        """gRPC's name of the client behind what it takes for one, where connections are relayed."""

    def watch(self, port: int, calls_max: int) -> None:
        """Watch the connections to this port, whose server accepts ``calls_max`` calls at once; call it once."""
        self._port = port
        self._calls_max = max(1, calls_max * self._share // 100)
        self._thread.start()

    def close(self) -> None:
        """Stop and join the thread. Idempotent."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    # -- calls, on the loop --------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[Connection]:  # Any: of any messages
        """Wraps the handler of a call. Raises ``TooManyWaitsError`` if the client's address has too many."""
        peer = self.client_of(context.peer())
        one = self._known.get(peer)
        if one is None or (one.hung_up and not one.calls):  # a new client on the same port is another connection
            one = self._new(peer)
        if 0 < self._calls_max <= self._calls[one.host]:
            raise TooManyWaitsError(
                f"{one.host} has {self._calls[one.host]} calls in progress, the limit per address "
                "(account_share_percent)"
            )
        self._calls[one.host] += 1
        one.calls += 1
        one.handled += 1
        one.heard_at = time.monotonic()
        answered = False

        def ended(_: object) -> None:
            self._ended(one)
            if answered:
                one.taken_at = one.heard_at

        context.add_done_callback(ended)  # type: ignore[arg-type]  # grpc-stubs: of their own type
        try:
            yield one
            answered = True
        finally:
            one._clients_turn()

    def hang_up(self, one: Connection) -> None:
        """Close a connection, with everything that gRPC keeps for it."""
        self._condemned.append(one.place)
        self._wake.set()

    def _new(self, peer: str) -> Connection:
        if len(self._known) >= 4 * self._limits.connections_max:
            self._known = {name: one for name, one in self._known.items() if one.calls}
        one = self._known[peer] = Connection(peer)
        return one

    def _ended(self, one: Connection) -> None:
        one.calls -= 1
        one.heard_at = time.monotonic()
        self._calls[one.host] -= 1
        if not self._calls[one.host]:
            del self._calls[one.host]

    # -- hanging up, on the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        interval_s = LOOK_INTERVAL_S
        while True:
            self._wake.wait(interval_s)
            self._wake.clear()
            if self._stopping:
                return
            began_s = time.thread_time()
            self._condemn_untaking()
            crowded = len(_descriptors()) > self._limits.connections_max // 2
            interval_s = LOOK_INTERVAL_S
            if crowded or self._condemned:
                condemned = {self._condemned.popleft() for _ in range(len(self._condemned))}
                links = links_to(self._port)
                self._hang_up([one for one in links if one.place in condemned])
                if self._make_room([one for one in links if one.place not in condemned]):
                    interval_s = max(_CROWDED_INTERVAL_S, _LOOKS_APART * (time.thread_time() - began_s))

    def _condemn_untaking(self) -> None:
        too_old = time.monotonic() - self._limits.call_ms_max / 1000
        for one in tuple(self._known.values()):
            if one.awaited > 0 and one.taken_at < too_old:
                _LOG.warning(
                    "closing the connection of a client at %s: none of %d answers read for %d ms (call_ms_max)",
                    one.host,
                    one.awaited,
                    self._limits.call_ms_max,
                )
                self._condemned.append(one.place)

    def _make_room(self, links: list[_Link]) -> bool:
        """Close the surplus; returns whether there are so many that the next check should come soon."""
        now = time.monotonic()
        present = set(links)
        seen_before = {one: at for one, at in self._first_seen.items() if one in present}
        self._first_seen = seen_before | {one: now for one in links if one not in seen_before}  # the newest last
        known = {one.place: one for one in tuple(self._known.values())}
        total_max = self._limits.connections_max
        leaving = surplus(
            {one: self._quiet_since(one, known.get(one.place)) for one in self._first_seen},
            total_max=total_max,
            address_max=max(1, total_max * self._share // 100),
            idle_before=now - GRACE_S,
        )
        if leaving:
            (host, number), *_ = Counter(counted_host(one.place[0]) for one in leaving).most_common(1)
            why = (
                f"closing {len(leaving)} of {len(links)} connections, {number} of them from {host}: at most "
                f"{total_max} may be open, {self._share}% of them from one address (connections_max, "
                "account_share_percent)"
            )
            _LOG.warning("%s", why)
            self._conditions.limit(why)
        self._hang_up(leaving)
        return len(links) > total_max // 2

    def _hang_up(self, links: list[_Link]) -> None:
        places = {one.place for one in links}
        for known in tuple(self._known.values()):
            if known.place in places:
                known.hung_up = True
        _hang_up(links)

    def _quiet_since(self, link: _Link, known: Connection | None) -> float:
        """Since when it has had no call; ``BUSY`` if it has one."""
        if known is None:
            return self._first_seen[link]
        return BUSY if known.calls else max(known.heard_at, self._first_seen[link])


class _Link(NamedTuple):
    """A client's connection to this process."""

    place: Place
    inode: int
    descriptor: int


def surplus(quiet_since: Mapping[_Link, float], *, total_max: int, address_max: int, idle_before: float) -> list[_Link]:
    """The surplus connections, of those given newest last: of the address with the most, first those idle longest,
    then the newest without a call, then the newest.
    """
    age = {link: -number for number, link in enumerate(quiet_since)}

    def rank(link: _Link) -> tuple[bool, bool, float]:
        since = quiet_since[link]
        return (False, False, since) if since < idle_before else (True, since == BUSY, age[link])

    by_host: dict[str, deque[_Link]] = {}
    for link in sorted(quiet_since, key=rank):
        by_host.setdefault(counted_host(link.place[0]), deque()).append(link)
    leaving: list[_Link] = []
    left = len(quiet_since)
    while by_host:
        most = max(by_host.values(), key=len)
        if left <= total_max and len(most) <= address_max:
            break
        leaving.append(most.popleft())
        left -= 1
    return leaving


def _descriptors() -> list[str]:
    try:
        return os.listdir(_DESCRIPTORS)
    except OSError:  # no /proc, or no file descriptor left
        return []


def links_to(port: int) -> list[_Link]:
    """This process's connections to this port."""
    found: list[_Link] = []
    for name in _descriptors():
        with suppress(OSError):  # closed meanwhile
            descriptor = int(name)
            status = os.stat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                link = _link(descriptor, status.st_ino, port)
                if link is not None:
                    found.append(link)
    return found


def _copy(descriptor: int) -> socket.socket:
    """Our own socket for the same connection. Raises ``OSError`` if the descriptor is of something else."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _link(descriptor: int, inode: int, port: int) -> _Link | None:
    with _copy(descriptor) as link:
        if link.family not in (socket.AF_INET, socket.AF_INET6) or link.getsockname()[1] != port:
            return None
        host, its_port = link.getpeername()[:2]
        return _Link((plain_host(host), its_port), inode, descriptor)


def _hang_up(links: list[_Link]) -> None:
    for link in links:
        with suppress(OSError), _copy(link.descriptor) as copy:
            if os.fstat(copy.fileno()).st_ino == link.inode:  # otherwise the number now belongs to another socket
                copy.shutdown(socket.SHUT_RDWR)


SMALL_BYTES: Final = 64 * 1024
"""Answers up to this size count as calls only."""


class Leases:
    """The room of one call, which has one answer or stream message at a time. On the loop; also a context manager."""

    __slots__ = ("_connection", "_quota", "_room", "_size")

    def __init__(self, room: AnswerRoom, quota: Quota, connection: Connection | None = None) -> None:
        self._room = room
        self._quota = quota
        self._connection = connection
        self._size = 0

    async def take(self, size: int) -> None:
        """Wait for room for an answer of about ``size`` bytes, replacing the room taken before.

        Raises ``TooManyWaitsError`` once the connection was hung up on: otherwise each call that ends would pass its
        room to the connection's next call, and the log would be read for nobody.
        """
        self.end()
        await self._room.wait(self._quota, size)
        self._size = size
        if self._connection is not None and self._connection.hung_up:
            self.end()
            raise TooManyWaitsError(f"{self._quota.name} was disconnected")

    def take_now(self, size: int) -> None:
        """Take room without waiting. Raises ``TooManyWaitsError``."""
        if not self._quota.try_answer(size):
            raise TooManyWaitsError(
                f"{self._quota.name} has {self._quota.answer_bytes} bytes of unread answers: no room for another "
                f"{size} (answer_bytes_max)"
            )
        self._size = size

    def take_at_once(self, size: int) -> bool:
        """Take room if that needs no waiting; whether it did."""
        taken = self._room.try_take(self._quota, size)
        if taken:
            self._size = size
        return taken

    def move(self) -> Leases:
        """The room in the hands of another call, which returns it."""
        moved = Leases(self._room, self._quota, self._connection)
        moved._size, self._size = self._size, 0
        return moved

    def resize(self, size: int) -> None:
        """Adjust the room to the answer's actual size."""
        more, self._size = size - self._size, size
        self._quota.change_answer(more)
        if more < 0:
            self._room.grown()

    def end(self) -> None:
        """Return the room: the client has read the answer, or is gone. Idempotent."""
        if self._size:
            self.resize(0)

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class AnswerRoom:
    """The room of one server."""

    def __init__(self) -> None:
        # The oldest waiter of each connection gets room first; connections take turns.
        self._waiting: dict[Quota, deque[tuple[int, asyncio.Future[None]]]] = {}

    def try_take(self, quota: Quota, size: int) -> bool:
        """Take room for an answer of ``size`` bytes, unless the quota's earlier calls wait for it or there is none."""
        return quota not in self._waiting and quota.try_answer(size)

    async def wait(self, quota: Quota, size: int) -> None:
        """Return once room for an answer of ``size`` bytes is taken."""
        if self.try_take(quota, size):
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(quota, deque()).append((size, ready))
        try:
            await ready
        except asyncio.CancelledError:
            if not ready.cancelled():  # granted just now
                quota.change_answer(-size)
            self.grown()  # the next waiter may fit
            raise

    def grown(self) -> None:
        """Room was returned: wake the waiters that now fit."""
        served = True
        while served:
            served = False
            for quota in tuple(self._waiting):
                line = self._waiting[quota]
                while line and line[0][1].done():  # cancelled
                    line.popleft()
                if line and not quota.try_answer(line[0][0]):
                    continue
                del self._waiting[quota]
                if line:
                    line.popleft()[1].set_result(None)
                    served = True
                if line:
                    self._waiting[quota] = line  # at the end: its next waiter comes after the other connections'
