"""Serves remoting connections: dispatches requests to handlers, limits concurrency, and answers errors.

Independent of brokers and name servers, which pass in their handlers by request code.

``Turns`` starts requests a few at a time, so that a turn of the event loop stays short however many arrive at once.
Hosts take turns, and so do the connections of a host; the requests of a connection start in their order. How many start
in a turn follows from what the last ones took until they ended or had to wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import partial
from typing import Final, NamedTuple

from dledger.access.quota import HostQuota
from dledger.errors import Outcome
from dledger.log_output import BoundedLog
from dledger.records import record
from dledger.remoting.codes import OUTCOME_FIELD, AnswerCode, RequestError
from dledger.remoting.connection import NOTHING_ANNOUNCED, ByteRoom, Owner, Place, RemotingConnection
from dledger.remoting.frame import Frame

TURN_S: Final = 0.002
"""About the time that requests may take of one turn of the loop."""
STARTS_MAX: Final = 64
"""Maximum starts in a turn, for those that turn out to take longer than the ones before."""
_COST_S_MIN: Final = TURN_S / STARTS_MAX
_FORGET: Final = 0.9
"""The part of an earlier estimate that is kept after a turn whose requests took less."""
_BY_CONNECTION = dict[object, deque[Callable[[], None]]]


class Turns:
    """On the loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, _BY_CONNECTION] = {}  # by host; the first has the next turn
        self._count = 0
        self._is_running = False
        self._cost_s = _COST_S_MIN  # about what one start takes
        self._began_s = self._at_once_s = self._spent_s = 0.0
        self._started = 0

    def __len__(self) -> int:
        """How many have not started."""
        return self._count

    def add(self, host: str, connection: object, start: Callable[[], None]) -> None:
        """Call ``start`` in its turn; it may create a task."""
        self._waiting.setdefault(host, {}).setdefault(connection, deque()).append(start)
        self._count += 1
        if not self._is_running:
            self._is_running = True
            self._run()

    @property
    def has_time(self) -> bool:
        """Whether more may be done in this turn of the loop at once: nobody waits, and it has not taken long yet."""
        return not self._count and self._spent_s < TURN_S

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Counts what is done at once in this turn."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            if not self._spent_s:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._spent_s += max(time.thread_time() - began_s, _COST_S_MIN)

    def _next_turn(self) -> None:
        self._spent_s = 0.0

    def drop(self) -> None:
        """Start nothing that has not started yet."""
        self._waiting.clear()
        self._count = 0

    def _run(self) -> None:
        """The first steps of the tasks come one after the other, between the two measurements."""
        loop = asyncio.get_running_loop()
        run_s = time.thread_time()
        loop.call_soon(self._begin)
        self._started = min(self._count, max(1, round(TURN_S / self._cost_s)))
        for _ in range(self._started):
            self._next()()
        loop.call_soon(self._end)
        self._at_once_s = time.thread_time() - run_s

    def _begin(self) -> None:
        self._began_s = time.thread_time()

    def _end(self) -> None:
        took_s = (self._at_once_s + time.thread_time() - self._began_s) / self._started
        self._cost_s = max(took_s, self._cost_s * _FORGET, _COST_S_MIN)
        if self._count:
            self._run()
        else:
            self._is_running = False

    def _next(self) -> Callable[[], None]:
        host, connections = next(iter(self._waiting.items()))
        del self._waiting[host]
        connection, starts = next(iter(connections.items()))
        del connections[connection]
        start = starts.popleft()
        if starts:
            connections[connection] = starts
        if connections:
            self._waiting[host] = connections
        self._count -= 1
        return start


_LOG = logging.getLogger(__name__)

_IDLE_S_MAX: Final = 120.0
"""RocketMQ's: a connection without traffic for this long is closed."""
_PARTIAL_S_MAX: Final = 30.0
"""How long one frame may take to arrive."""
SCAN_INTERVAL_S: Final = 10.0
LITTLE: Final = 64
"""A connection with no more requests in progress may use what is reserved."""
SILENCE_S: Final = 0.1
"""How long nothing must have come or gone on a connection before a server that stops closes it."""
UNKNOWN: Final = -1
"""In the place of the code of requests that have no handler."""
_BUSY: Final = "[OVERLOAD] this server has too much to do, or too much of your host, try again later"

Answer = Frame | None
Handler = Callable[[RemotingConnection, Frame], Awaitable[Answer]]
"""Answers a request; None: it was, or will be, answered otherwise. May raise ``RequestError``."""
Prompt = Callable[[RemotingConnection, Frame], Handler | None]
"""Answers a request at once, without a separate task, and returns None; otherwise, the handler that can do it."""
Direct = Callable[[RemotingConnection, Frame], None]
"""Handles a request at once, without a separate task; calls the connection's ``done`` or ``let_go`` itself."""


@record(frozen=True, slots=True)
class ServerLimits:
    connections_max: int
    host_connections_max: int
    requests_max: int
    """Maximum requests in progress of all connections together, except those handled directly."""
    host_requests_max: int
    request_s_max: float
    """Maximum time for handling a request."""
    receive_bytes_max: int
    host_receive_bytes_max: int
    unsent_bytes_max: int
    """Maximum bytes of answers that slow readers leave."""
    host_unsent_bytes_max: int


class Refused(NamedTuple):
    """How a request is refused."""

    code: AnswerCode
    outcome: Outcome
    """Whether it may have taken effect."""


@record(frozen=True, slots=True)
class Handlers:
    """A server's handlers, by request code. ``refusal_of``: how handlers' errors are answered; None: as failures."""

    direct: Mapping[int, Direct]
    awaited: Mapping[int, Handler]
    closed: Callable[[RemotingConnection], None]
    refusal_of: Callable[[Exception], Refused | None]
    admit: Callable[[RemotingConnection, Frame], None] | None = None
    """Comes before everything else, whatever the request's code; refuses a request by raising an error."""
    prompt: Mapping[int, Prompt] = field(default_factory=dict)


class RemotingServer:
    """Create a ``protocol()`` for each accepted connection. Everything runs on the loop's thread."""

    def __init__(
        self, name: str, handlers: Handlers, limits: ServerLimits, announced: Mapping[str, str] = NOTHING_ANNOUNCED
    ) -> None:
        """``announced``: fields that the first answer on each connection has besides its own."""
        self._name = name
        self._announced = announced
        self._handlers = handlers
        self._limits = limits
        self._room = ByteRoom(limits.receive_bytes_max, limits.host_receive_bytes_max)
        self._unsent_room = ByteRoom(limits.unsent_bytes_max, limits.host_unsent_bytes_max)
        self._hang_ups = BoundedLog(_LOG)
        self._owner = Owner(self._admit, self._take, self._forget, self._hang_ups)
        self.refusals: Counter[tuple[int, int]] = Counter()
        """By the code of the request (``UNKNOWN`` if it has no handler) and of the answer."""
        self._connections: dict[RemotingConnection, None] = {}  # in order of arrival
        self._by_host: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._quota = HostQuota(limits.requests_max, limits.host_requests_max)  # of the tasks
        self._turns = Turns()
        self._scan: asyncio.TimerHandle | None = None
        self._is_closing = False

    @property
    def connections(self) -> int:
        """The number of connections."""
        return len(self._connections)

    @property
    def requests_under_way(self) -> int:
        """The number of requests with their own task, or to have one in their turn."""
        return len(self._tasks) + len(self._turns)

    @property
    def codes(self) -> frozenset[int]:
        """The requests that have a handler."""
        handlers = self._handlers
        return frozenset(handlers.direct.keys() | handlers.prompt.keys() | handlers.awaited.keys())

    def protocol(self) -> RemotingConnection:
        """The protocol of one accepted connection."""
        if self._scan is None and not self._is_closing:
            self._scan = asyncio.get_running_loop().call_later(SCAN_INTERVAL_S, self._look)
        return RemotingConnection(self._owner, self._room, self._unsent_room, announced=self._announced)

    async def close(self, grace_s: float) -> None:
        """Accept no more requests, let those in progress finish, then close the connections; all within ``grace_s``.

        Requests that come meanwhile are refused: their senders know at least that nothing became of them.
        """
        self._is_closing = True
        if self._scan is not None:
            self._scan.cancel()
        if grace_s > 0:  # sends have no tasks, but answers that matter even more
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.gather(*(_drained(one) for one in tuple(self._connections)))
        self._turns.drop()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in tuple(self._connections):
            connection.finish()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _admit(self, connection: RemotingConnection) -> None:
        """Add a connection, or close it if there are too many that have asked for something."""
        connection.reset_if_killed()
        host, limits = connection.counted_as, self._limits
        self._connections[connection] = None
        self._by_host[host] += 1
        if self._is_closing:
            connection.close("this server is stopping")
        elif self._by_host[host] > limits.host_connections_max:
            full = f"{host} has {limits.host_connections_max} connections, the most one host may have"
            self._mute_one_of(host, connection).close(full)
        elif len(self._connections) > limits.connections_max:
            full = f"{limits.connections_max} connections are open, the most there may be"
            self._mute_one_of(self._by_host.most_common(1)[0][0], connection).close(full)

    def _mute_one_of(self, host: str, newest: RemotingConnection) -> RemotingConnection:
        """The oldest connection of this host that has never sent a whole frame; else ``newest``."""
        mute = (one for one in self._connections if one.counted_as == host and not one.has_spoken)
        return next(mute, newest)

    def _forget(self, connection: RemotingConnection) -> None:
        if connection not in self._connections:
            return
        del self._connections[connection]
        host = connection.counted_as
        self._by_host[host] -= 1
        if not self._by_host[host]:
            del self._by_host[host]
        self._handlers.closed(connection)

    def _look(self) -> None:
        """Close idle connections, and those with overdue incomplete frames."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in tuple(self._connections):
            partial = connection.partial_since
            if partial is not None and now - partial > _PARTIAL_S_MAX and not connection.is_paused:
                connection.close(f"a frame has not come to its end within {_PARTIAL_S_MAX:.0f} s")
            elif now - connection.heard_at > _IDLE_S_MAX:
                connection.close(f"nothing came or went for {_IDLE_S_MAX:.0f} s")
        self._hang_ups.flush()
        self._scan = loop.call_later(SCAN_INTERVAL_S, self._look)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _take(self, connection: RemotingConnection, frame: Frame) -> None:
        try:
            self._begin(connection, frame)
        except Exception as error:  # noqa: BLE001  # one request must not end its connection
            connection.done(frame, self._failed(connection.place, frame, error))

    def _begin(self, connection: RemotingConnection, frame: Frame) -> None:
        """Handle a request at once, or in its turn."""
        handlers, code, host = self._handlers, frame.code, connection.counted_as
        if self._is_closing:
            raise RequestError("this server is stopping", AnswerCode.SERVICE_NOT_AVAILABLE)
        if handlers.admit is not None:
            handlers.admit(connection, frame)
        if (direct := handlers.direct.get(code)) is not None:
            direct(connection, frame)
            return
        handler, prompt = handlers.awaited.get(code), handlers.prompt.get(code)
        if handler is None and prompt is None:
            raise RequestError(f" request type {code} not supported", AnswerCode.REQUEST_CODE_NOT_SUPPORTED)
        if not self._quota.has_room(host, little=connection.under_way <= LITTLE):
            raise RequestError(_BUSY, AnswerCode.SYSTEM_BUSY)
        if prompt is not None and self._turns.has_time:
            with self._turns.spent():
                handler, prompt = prompt(connection, frame), None
            if handler is None:
                connection.let_go(frame)
                return
        self._quota.change(host, 1)
        if prompt is not None:
            self._turns.add(host, connection, partial(self._start_prompt, prompt, connection, frame))
        elif handler is not None:
            self._turns.add(host, connection, partial(self._start, handler, connection, frame))

    def _start_prompt(self, prompt: Prompt, connection: RemotingConnection, frame: Frame) -> None:
        try:
            handler = prompt(connection, frame)
        except Exception as error:  # noqa: BLE001  # one request must not end its connection
            connection.done(frame, self._failed(connection.place, frame, error))
        else:
            if handler is not None:
                self._start(handler, connection, frame)
                return
            connection.let_go(frame)
        self._quota.change(connection.counted_as, -1)

    def _start(self, handler: Handler, connection: RemotingConnection, frame: Frame) -> None:
        task = asyncio.get_running_loop().create_task(self._handle(handler, connection, frame))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, connection.counted_as))

    def _ended(self, host: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._quota.change(host, -1)

    async def _handle(self, handler: Handler, connection: RemotingConnection, frame: Frame) -> None:
        answer: Answer = None
        try:
            async with asyncio.timeout(self._limits.request_s_max):
                answer = await handler(connection, frame)
        except TimeoutError:
            answer = frame.answer(
                AnswerCode.SYSTEM_ERROR, f"not answered within {self._limits.request_s_max:g} s: it may still be done"
            )
        except asyncio.CancelledError:
            answer = frame.answer(AnswerCode.SERVICE_NOT_AVAILABLE, "this server is stopping: it may still be done")
            raise
        except Exception as error:  # noqa: BLE001  # one request must not end its connection
            answer = self._failed(connection.place, frame, error)
        finally:
            connection.done(frame, answer)

    def _failed(self, place: Place, frame: Frame, error: Exception) -> Frame:
        answer = self._refusal(place, frame, error)
        self.refusals[frame.code if frame.code in self.codes else UNKNOWN, answer.code] += 1
        return answer

    def _refusal(self, place: Place, frame: Frame, error: Exception) -> Frame:
        if isinstance(error, RequestError):
            return frame.answer(error.code, str(error))
        refused = self._handlers.refusal_of(error)
        if refused is not None:
            return frame.answer(refused.code, str(error), {OUTCOME_FIELD: refused.outcome})
        _LOG.error("%s: request %d of %s failed", self._name, frame.code, place, exc_info=error)
        return frame.answer(AnswerCode.SYSTEM_ERROR, f"request {frame.code} failed: see the log of {self._name}")


async def _drained(connection: RemotingConnection) -> None:
    """Wait until no request is in progress or on its way: refused clients pause before they try again."""
    loop = asyncio.get_running_loop()
    while not connection.is_closed:
        await connection.quiet()
        left_s = connection.heard_at + SILENCE_S - loop.time()
        if left_s <= 0:
            return
        await asyncio.sleep(left_s)
