"""A network in user space: one TCP proxy per directed pair of nodes, which can hold back or delay bytes.

Held-back bytes are kept, not dropped: they arrive after the heal, as if retransmitted by TCP, unless the connections
were cut. New connections to a blocked direction are accepted and stay silent, like a black hole; the server behind is
reached only when the block is gone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from functools import cached_property
from types import TracebackType
from typing import Self, TypeVar

from dledger.rpc.listening import stop_serving
from dledger.types import NodeId
from dledger_cli.local.group import HOST, LocalGroup, LocalNode

_CHUNK_BYTES = 64 * 1024
_QUEUED_CHUNKS_MAX = 64
_CALL_TIMEOUT_S = 10.0

Result = TypeVar("Result")
Address = tuple[str, int]


class _Direction:
    """One direction of a link: may be blocked, and may add ``delay_s``. Used only on the loop's thread."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()

    def block(self, *, blocked: bool) -> None:
        if blocked:
            self._open.clear()
        else:
            self._open.set()

    async def passable(self) -> None:
        await self._open.wait()


class _Link:
    """Connections opened by ``source`` to ``target``, in both directions."""

    def __init__(self, target: Address) -> None:
        self.target = target
        self.port = 0
        self.forward = _Direction()
        self.backward = _Direction()
        self.writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)  # not in the task, which may be cancelled before its first step
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward: asyncio.StreamWriter | None = None
        try:
            await self.forward.passable()
            far_reader, onward = await asyncio.open_connection(*self.target)
            self.writers.add(onward)
            ways = [
                asyncio.ensure_future(_pump(reader, onward, self.forward)),
                asyncio.ensure_future(_pump(far_reader, writer, self.backward)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # the target is down: the source's connection is closed
        finally:
            for one in (writer, onward):
                if one is not None:
                    self.writers.discard(one)
                    one.transport.abort()

    def cut(self) -> None:
        for writer in tuple(self.writers):
            writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: _Direction) -> None:
    """Forward bytes in order, each chunk ``delay_s`` after its arrival, and none while the direction is blocked."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS_MAX)

    async def deliver() -> None:
        while True:
            due, data = await queue.get()
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            await way.passable()
            if not data:
                return
            writer.write(data)
            await writer.drain()

    delivery = asyncio.ensure_future(deliver())
    try:
        while not delivery.done():
            data = await reader.read(_CHUNK_BYTES)
            await queue.put((loop.time() + way.delay_s, data))
            if not data:
                await delivery
                return
    except OSError:
        return
    finally:
        delivery.cancel()
        await asyncio.gather(delivery, return_exceptions=True)


class ProxyNetwork:
    """Links between all pairs of nodes. Nodes connect to ``port(me, peer)`` instead of the peer's own port.

    ``block`` and ``heal`` apply to all bytes that one node sends to another, on connections opened by either.
    """

    def __init__(self, targets: dict[NodeId, Address]) -> None:
        self._nodes = tuple(targets)
        self._loop = asyncio.new_event_loop()
        self._links: dict[tuple[NodeId, NodeId], _Link] = {}
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy-network")
        self._thread.start()
        try:
            self._run(self._listen(targets))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def port(self, source: NodeId, target: NodeId) -> int:
        """The port at which ``source`` reaches ``target`` through this network."""
        return self._links[source, target].port

    def block(self, source: NodeId, target: NodeId) -> None:
        """Hold back everything that ``source`` sends to ``target``."""
        self._set(source, target, blocked=True)

    def heal(self, source: NodeId, target: NodeId) -> None:
        """Deliver the held-back bytes, and everything after them."""
        self._set(source, target, blocked=False)

    def partition(self, side: Iterable[NodeId], *, cut: bool = False) -> None:
        """Separate ``side`` from all others, in both directions; ``cut`` also closes the connections between them."""
        inside = tuple(side)
        for one in inside:
            for other in self._nodes:
                if other not in inside:
                    self.block(one, other)
                    self.block(other, one)
        if cut:
            self.cut()

    def heal_all(self) -> None:
        """Remove all blocks and delays."""
        for source, target in self._links:
            self.heal(source, target)
            self.delay(source, target, 0.0)

    def delay(self, source: NodeId, target: NodeId, delay_s: float) -> None:
        """Delay every chunk from ``source`` to ``target``."""

        def change() -> None:
            self._links[source, target].forward.delay_s = delay_s
            self._links[target, source].backward.delay_s = delay_s

        self._call(change)

    def cut(self, source: NodeId | None = None, target: NodeId | None = None) -> None:
        """Close every connection through the proxies, or only those that ``source`` made to ``target``."""

        def cut() -> None:
            for (one, other), link in self._links.items():
                if source in (None, one) and target in (None, other):
                    link.cut()

        self._call(cut)

    def close(self) -> None:
        """Close everything and join the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self._run(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _set(self, source: NodeId, target: NodeId, *, blocked: bool) -> None:
        def change() -> None:
            self._links[source, target].forward.block(blocked=blocked)
            self._links[target, source].backward.block(blocked=blocked)

        self._call(change)

    async def _listen(self, targets: dict[NodeId, Address]) -> None:
        for source in targets:
            for target, address in targets.items():
                if source != target:
                    link = self._links[source, target] = _Link(address)
                    self._servers.append(await link.listen())

    async def _shut_down(self) -> None:
        for server in self._servers:
            await stop_serving(server)
        for link in self._links.values():
            link.cut()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _call(self, action: Callable[[], None]) -> None:
        async def run() -> None:
            action()

        self._run(run())

    def _run(self, work: Coroutine[object, object, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)


class LocalProxiedGroup(LocalGroup):
    """Nodes that reach each other only through a network in user space."""

    @cached_property
    def network(self) -> ProxyNetwork:
        """Ends after the nodes."""
        return ProxyNetwork({node: (HOST, one.peer_port) for node, one in self.nodes.items()})

    def peer_address(self, node: NodeId, other: LocalNode) -> str:
        """The real port for itself, the proxies for the others."""
        port = other.peer_port if node == other.node_id else self.network.port(node, other.node_id)
        return f"{HOST}:{port}"

    def close(self) -> None:
        """Stop the nodes, then the network."""
        super().close()
        if "network" in vars(self):
            self.network.close()
