"""The console of one group: its parts and its event streams; and with name servers, one for each group looked into.

``Streams`` are server-sent events for all open pages, encoded once. They belong to the server's event loop. A page that
does not read its events is dropped (it reconnects and gets the whole current state); more than ``STREAMS_MAX`` pages
are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dledger_cli.console.browse import EntryBrowser, LetterBrowser, MessageBrowser
from dledger_cli.console.catalog import Catalog
from dledger_cli.console.changes import BrokerChanges, ClientLists
from dledger_cli.console.control import ClusterControl, GroupControl
from dledger_cli.console.history import History
from dledger_cli.console.probe import BROKER_TIMEOUT_S, GroupProbe
from dledger_cli.console.sampler import SamplePace, Sampler, wall_ms
from rocketstore.client import Admin

if TYPE_CHECKING:
    from dledger_cli.targets import BrokerTarget, GroupTarget

STREAMS_MAX: Final = 32
QUEUE_MAX: Final = 64
TICK_S: Final = 1.0
COALESCE_S: Final = 0.03
"""How long an urgent change waits for others, to be sent together."""


class TooManyStreamsError(Exception):
    """Raised when the maximum number of pages is open."""


def event(name: str, value: object) -> bytes:
    """One server-sent event."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {data}\n\n".encode()


class Streams:
    """Sends what changes to pages every second, and what is important at once."""

    def __init__(
        self,
        snapshot: Callable[[], dict[str, object]],
        update: Callable[[int], dict[str, object]],
        catalog: Callable[[], dict[str, object]],
        watch: Callable[[bool], None],
        limit: int = STREAMS_MAX,
    ) -> None:
        self._snapshot = snapshot
        self._update = update
        self._catalog = catalog
        self._watch = watch
        self._limit = limit
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._urgent = asyncio.Event()
        self._open = asyncio.Event()
        self._catalog_is_new = False
        self._closed = False

    @property
    def count(self) -> int:
        """The number of open pages."""
        return len(self._queues)

    def hurry(self, *, catalog: bool = False) -> None:
        """Publish soon: something important happened. Callable from any thread."""
        loop = self._loop
        if loop is None or self._closed:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._on_hurry, catalog)

    def close(self) -> None:
        """Close all streams. Must be called on the loop."""
        self._closed = True
        for queue in self._queues:
            _put(queue, None)
        self._open.set()
        self._urgent.set()

    def close_soon(self) -> None:
        """``close``, from any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.close)

    async def run(self) -> None:
        """Publish until closed."""
        self._loop = asyncio.get_running_loop()
        while not self._closed:
            if not self._queues:
                self._open.clear()
                await self._open.wait()
                continue
            await self._wait_for_tick()
            if self._queues and not self._closed:
                self._publish()

    async def messages(self, queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
        """The events of an admitted page: the whole state, then changes."""
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self.leave(queue)

    def admit(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Admit a page. Raises ``TooManyStreamsError``."""
        if self._closed or len(self._queues) >= self._limit:
            raise TooManyStreamsError(f"{len(self._queues)} pages are already open: close some")
        first = not self._queues
        self._queues.add(queue)
        if first:
            self._watch(True)
            self._number = 0
        snapshot = self._snapshot()
        number = snapshot["number"]
        self._number = max(self._number, number if first and isinstance(number, int) else 0)
        _put(queue, b"retry: 1000\n\n" + event("snapshot", snapshot) + event("catalog", self._catalog()))
        self._open.set()

    def leave(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Remove a closed page. Idempotent."""
        if queue in self._queues:
            self._queues.discard(queue)
            if not self._queues:
                self._watch(False)

    async def _wait_for_tick(self) -> None:
        try:
            await asyncio.wait_for(self._urgent.wait(), TICK_S)
        except TimeoutError:
            return
        if not self._closed:
            await asyncio.sleep(COALESCE_S)
        self._urgent.clear()

    def _publish(self) -> None:
        update = self._update(self._number)
        number = update["number"]
        self._number = number if isinstance(number, int) else self._number
        message = event("update", update)
        if self._catalog_is_new:
            self._catalog_is_new = False
            message += event("catalog", self._catalog())
        for queue in tuple(self._queues):
            if not _put(queue, message):
                self.leave(queue)
                _replace(queue)

    def _on_hurry(self, catalog: bool) -> None:
        self._catalog_is_new |= catalog
        self._urgent.set()


def _put(queue: asyncio.Queue[bytes | None], message: bytes | None) -> bool:
    try:
        queue.put_nowait(message)
    except asyncio.QueueFull:
        return False
    return True


def _replace(queue: asyncio.Queue[bytes | None]) -> None:
    """Close a page that is too slow, dropping its queued events."""
    while not queue.empty():
        queue.get_nowait()
    _put(queue, None)


GROUP_PAGES_MAX: Final = 8
"""Groups looked into at the same time: each has a thread per node."""
IDLE_S: Final = 60.0
"""After so long without a page or a request, a group is not looked into any more."""
LOOK_INTERVAL_S: Final = 5.0


class TooManyGroupPagesError(Exception):
    """Raised when the maximum number of groups is being looked into."""


class GroupPage:
    """One group. Between ``start`` and ``close``, it has a thread per node and one for topics."""

    def __init__(
        self,
        target: GroupTarget,
        brokers: BrokerTarget,
        control: ClusterControl | None = None,
        pace: SamplePace | None = None,
        name_servers: Sequence[str] = (),
    ) -> None:
        """``name_servers`` know other groups of brokers that have queues of the same topics."""
        security = brokers.security.for_client()
        self._admin: Final = Admin(brokers.addresses, timeout_s=brokers.timeout_s, security=security)
        asking = Admin(brokers.addresses, timeout_s=BROKER_TIMEOUT_S, security=security)
        self._everywhere: Final = (
            Admin(name_servers=name_servers, timeout_s=brokers.timeout_s, security=security) if name_servers else None
        )
        self.history: Final = History(target.bootstrap, lambda: self.streams.hurry())
        self.sampler: Final = Sampler(GroupProbe(target.client(), asking), self.history, pace)
        self.catalog: Final = Catalog(
            self._admin,
            lambda: self.history.kind in ("brokers", "broker"),
            lambda: self.streams.hurry(catalog=True),
        )
        self.messages: Final = MessageBrowser(self._admin)
        self.clients: Final = ClientLists(self._admin, self._everywhere)
        self.changes: Final = BrokerChanges(brokers, self._admin, self.clients)
        self.letters: Final = LetterBrowser(self._admin)
        self.entries: Final = EntryBrowser(target)
        self.control: Final = control or GroupControl(target, lambda: self.history.group)
        self.streams: Final = Streams(
            lambda: self.present(self.history.snapshot(wall_ms())),
            lambda after: self.present(self.history.update(after, wall_ms())),
            self.catalog.state,
            self._watch,
        )

    def start(self) -> None:
        self.sampler.start()
        self.catalog.start()

    def close(self) -> None:
        """Stop polling; waits for the threads. Idempotent."""
        self.sampler.stop()
        self.catalog.stop()
        self.changes.close()
        self._admin.close()
        if self._everywhere is not None:
            self._everywhere.close()

    def hang_up(self) -> None:
        """Close the streams of all pages, for a server that is about to end. On any thread."""
        self.streams.close_soon()

    def state(self) -> dict[str, object]:
        """Everything, for scripts."""
        return {**self.present(self.history.snapshot(wall_ms())), "catalog": self.catalog.state()}

    def present(self, state: dict[str, object]) -> dict[str, object]:
        """The history's state with the processes under control."""
        return {**state, "processes": self.control.processes()}

    def _watch(self, watched: bool) -> None:
        self.sampler.watch(watched=watched)
        self.catalog.watch(watched=watched)


@dataclass(slots=True)
class _Open:
    group_page: GroupPage
    publishing: asyncio.Task[None]
    used_at: float = field(default_factory=time.monotonic)

    @property
    def is_idle(self) -> bool:
        """Whether no page shows it."""
        return self.group_page.streams.count == 0


class GroupPages:
    """Opens a group page when somebody looks into a group, and closes it after a while. On the console's event loop."""

    def __init__(self, make: Callable[[tuple[str, ...]], GroupPage]) -> None:
        self._make = make
        self._open: dict[str, _Open] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def pages(self) -> int:
        """The number of open pages."""
        return sum(one.group_page.streams.count for one in self._open.values())

    def get(self, name: str, addresses: tuple[str, ...]) -> GroupPage:
        """The page of a group, opened if need be. Raises ``TooManyGroupPagesError``."""
        found = self._open.get(name)
        if found is None:
            self._make_room()
            group_page = self._make(addresses)
            group_page.start()
            found = self._open[name] = _Open(group_page, asyncio.create_task(group_page.streams.run()))
        found.used_at = time.monotonic()
        return found.group_page

    def hang_up(self) -> None:
        """Close the streams of all pages. On any thread."""
        for one in tuple(self._open.values()):
            one.group_page.hang_up()

    async def run(self) -> None:
        """Close those that nobody uses, until cancelled; then all."""
        try:
            while True:
                await asyncio.sleep(LOOK_INTERVAL_S)
                idle_since = time.monotonic() - IDLE_S
                for name in [name for name, one in self._open.items() if one.is_idle and one.used_at < idle_since]:
                    self._close(name)
        finally:
            for name in tuple(self._open):
                self._close(name)
            await asyncio.gather(*self._closing)

    def _make_room(self) -> None:
        if len(self._open) + len(self._closing) < GROUP_PAGES_MAX:
            return
        idle = [(one.used_at, name) for name, one in self._open.items() if one.is_idle]
        if not idle:
            raise TooManyGroupPagesError(
                f"{GROUP_PAGES_MAX} groups are being looked into already: close some of their pages"
            )
        self._close(min(idle)[1])

    def _close(self, name: str) -> None:
        closing = asyncio.create_task(_closed(self._open.pop(name)))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def _closed(one: _Open) -> None:
    one.group_page.streams.close()
    await one.publishing
    await asyncio.to_thread(one.group_page.close)
