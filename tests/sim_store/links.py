"""Connections between event loops of a simulation, as TCP has them: bytes in order, in pieces of any size, or none.

Whatever ends a connection cuts what is under way at any byte. A partition holds everything back until it is healed, and
neither side learns of it; nor does anybody learn of a machine that lost its power, until it is back.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, Final, cast

from tests.sim_store.threads import Group, Scheduler, running

if TYPE_CHECKING:
    from tests.sim_store.loops import SimLoop

_Factory = Callable[[], asyncio.BaseProtocol]
IN_FLIGHT_MAX: Final = 16 * 1024
"""So much is under way before a writer is told to wait."""
_ABORTS_CUT: Final = 0.2
_BODY: Final = b"." * 8
"""Occurs in bodies of messages only, which have a checksum."""


class Network:
    """All machines of one run. A machine's name is the first word of its processes' names."""

    def __init__(self, scheduler: Scheduler, random: Random) -> None:
        self.scheduler = scheduler
        self.random = random
        self.delay_us = 500
        self.garble = 0.0
        """How often a byte is turned in the body of a message under way."""
        self.parted: set[frozenset[str]] = set()
        self.hits: Counter[str] = Counter()
        self._listening: dict[int, Listening] = {}
        self._ends: list[End] = []

    def listen(self, _host: str, port: int, _whose: str) -> list[Listening]:
        """In the place of ``dledger.rpc.listening.listen``."""
        self._listening[port] = one = Listening(self, port, _process())
        return [one]

    async def dial(self, loop: SimLoop, factory: _Factory, port: int) -> tuple[End, asyncio.BaseProtocol]:
        """Connect to a port. Raises ``ConnectionRefusedError``; waits for ever if nobody can say that there is none."""
        here = _process()
        await asyncio.sleep(self.latency_us() / 1_000_000)
        found = self._listening.get(port)
        if found is not None and (self.are_parted(here.name, found.group.name) or found.is_silent):
            await loop.create_future()
        if found is None or found.loop is None or found.group.dead:
            raise ConnectionRefusedError(f"nobody listens at {port}")
        own, other = End(self, loop, here, port), End(self, found.loop, found.group, 0)
        own.other, other.other = other, own
        self._ends += [own, other]
        own.begin(factory())
        found.loop.call_soon_threadsafe(other.begin, found.factory())
        return own, own.protocol

    def latency_us(self) -> int:
        """How long something is under way."""
        return int(self.random.random() * self.delay_us)

    def are_parted(self, one: str, other: str) -> bool:
        """Whether nothing comes through between two processes' machines."""
        return frozenset((_machine(one), _machine(other))) in self.parted

    def heal(self) -> None:
        """Everything comes through, what was held back, too."""
        self.parted.clear()
        self.garble = 0.0
        for end in self._ends:
            end.wake()

    def cut(self, machine: str) -> None:
        """End all connections of a machine."""
        for end in self._of(machine):
            end.break_off()

    def died(self, machine: str, *, silently: bool) -> None:
        """A process is dead: its kernel says so to the others, or cannot."""
        for port, one in list(self._listening.items()):
            if _machine(one.group.name) == machine:
                if silently:
                    one.is_silent = True
                else:
                    del self._listening[port]
        for end in self._of(machine):
            if silently:
                end.other.is_deserted = True
            else:
                end.break_off()

    def is_back(self, machine: str) -> None:
        """It has power again, and knows of no connection."""
        self.died(machine, silently=False)

    def forget(self, end: End) -> None:
        """It is over."""
        if end in self._ends:
            self._ends.remove(end)

    def _of(self, machine: str) -> list[End]:
        return [end for end in self._ends if _machine(end.group.name) == machine]


class Listening:
    """In the place of a listening socket, and of ``asyncio.Server``."""

    def __init__(self, network: Network, port: int, group: Group) -> None:
        self.group = group
        self.loop: SimLoop | None = None
        self.factory: _Factory = asyncio.BaseProtocol
        self.is_silent = False
        self.sockets: tuple[Listening, ...] = (self,)
        self._network = network
        self._port = port

    def open(self, loop: SimLoop, factory: _Factory) -> None:
        """Accept from now on."""
        self.loop, self.factory = loop, factory

    def close(self) -> None:
        """Accept no more."""
        self._network._listening.pop(self._port, None)

    def getsockname(self) -> tuple[str, int]:
        """As a socket's."""
        return ("127.0.0.1", self._port)

    def fileno(self) -> int:
        """There is none."""
        return -1


class End(asyncio.Transport):
    """One side of a connection. ``port``: the other side's; 0: it has one that nobody listens at."""

    other: End
    protocol: asyncio.BaseProtocol

    def __init__(self, network: Network, loop: SimLoop, group: Group, port: int) -> None:
        super().__init__()
        self.group = group
        self.is_deserted = False
        """Whether the other side is gone and cannot say so."""
        self._network = network
        self._loop = loop
        self._port = port
        self._coming: deque[tuple[int, bytes]] = deque()
        """What is under way to this side, and when it is here; nothing: the end of it all."""
        self._coming_bytes = 0
        self._is_reading = True
        self._is_closed = False
        self._was_told_to_wait = False

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """The connection is established."""
        self.protocol = protocol
        if not self.group.dead:
            protocol.connection_made(self)
            self._receive()

    # -- what protocols call -------------------------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401  # as asyncio has it
        """The other side's address."""
        machine = _machine(self.other.group.name)
        return (f"machine-{machine}", self._port or 50_000) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It has its own."""

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._is_closed or self.group.dead or self._loop.is_closed()

    def is_reading(self) -> bool:
        """Whether it takes what comes."""
        return self._is_reading

    def pause_reading(self) -> None:
        """Take nothing for now."""
        self._is_reading = False

    def resume_reading(self) -> None:
        """Take what comes."""
        if not self._is_reading and not self.group.dead:
            self._is_reading = True
            self._loop.call_soon(self._receive)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send it."""
        if self._is_closed or self.group.dead or not data:
            return
        other = self.other
        other.arrive(self._garbled(bytes(data)))
        if other._coming_bytes > IN_FLIGHT_MAX and not self._was_told_to_wait:
            self._was_told_to_wait = True
            cast("asyncio.Protocol", self.protocol).pause_writing()

    def close(self) -> None:
        """End it after what was written."""
        if not self._is_closed and not self.group.dead:
            self.other.arrive(b"")
            self._end(None)

    def abort(self) -> None:
        """End it at once; the kernel mostly sends what it was given."""
        if not self._is_closed and not self.group.dead:
            if self._network.random.random() < _ABORTS_CUT:
                self.other.cut_short()
            else:
                self.other.arrive(b"")
            self._end(None)

    # -- links ---------------------------------------------------------------------------------------------------------

    def arrive(self, data: bytes) -> None:
        """Something is under way to this side."""
        due_us = self._network.scheduler.now_us + self._network.latency_us()
        if self._coming:
            due_us = max(due_us, self._coming[-1][0])
        self._coming.append((due_us, data))
        self._coming_bytes += len(data)
        self.wake()

    def cut_short(self) -> None:
        """Of what is under way only a part arrives, and then the end."""
        left = int(self._network.random.random() * (self._coming_bytes + 1))
        kept: deque[tuple[int, bytes]] = deque()
        while self._coming and left > 0:
            due_us, data = self._coming.popleft()
            kept.append((due_us, data[:left]))
            left -= len(data)
        self._coming = kept
        self._coming_bytes = sum(len(data) for _, data in kept)
        self._network.hits["cut stream"] += 1
        self.arrive(b"")

    def break_off(self) -> None:
        """Whatever is under way to either side is cut."""
        self.is_deserted = self.other.is_deserted = False
        for one in (self, self.other):
            if not one._is_closed and not one.group.dead:
                one.cut_short()
        self._network.forget(self)
        self._network.forget(self.other)

    def wake(self) -> None:
        """Look what has come. From any loop."""
        if not self._is_closed and not self.group.dead and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive)

    def _receive(self) -> None:
        network, scheduler = self._network, self._network.scheduler
        while self._coming and self._is_reading and not self._is_closed and not self.is_deserted:
            if network.are_parted(self.group.name, self.other.group.name):
                return
            due_us, data = self._coming[0]
            if due_us > scheduler.now_us:
                self._loop.call_at(due_us / 1_000_000 + 1e-6, self._receive)
                return
            self._coming.popleft()
            if not data:
                self._end(ConnectionResetError("the connection is gone") if network.random.random() < 0.5 else None)
                return
            size = len(data)
            if network.random.random() < 0.3:
                size = network.random.randrange(size) + 1
            if rest := data[size:]:
                self._coming.appendleft((due_us + network.latency_us(), rest))
            self._coming_bytes -= size
            size = self._give(data[:size])
            self.other.written()

    def _give(self, data: bytes) -> int:
        protocol = self.protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            room = memoryview(protocol.get_buffer(-1))
            size = min(len(room), len(data))
            room[:size] = data[:size]
            protocol.buffer_updated(size)
            if rest := data[size:]:
                self._coming.appendleft((0, rest))
                self._coming_bytes += len(rest)
            return size
        cast("asyncio.Protocol", protocol).data_received(data)
        return len(data)

    def written(self) -> None:
        """The other side has taken something."""
        if self._was_told_to_wait and self.other._coming_bytes <= IN_FLIGHT_MAX // 4:
            self._was_told_to_wait = False
            if not self._is_closed and not self.group.dead:
                self._loop.call_soon_threadsafe(cast("asyncio.Protocol", self.protocol).resume_writing)

    def _end(self, error: Exception | None) -> None:
        self._is_closed = True
        self._network.forget(self)
        self._loop.call_soon(self.protocol.connection_lost, error)

    def _garbled(self, data: bytes) -> bytes:
        network = self._network
        at = data.find(_BODY)
        if at < 0 or not network.garble or network.random.random() >= network.garble:
            return data
        network.hits["garbled body"] += 1
        at += len(_BODY) // 2
        return data[:at] + b"," + data[at + 1 :]


def _machine(process: str) -> str:
    return process.split()[0]


def _process() -> Group:
    group = running().current.group
    assert group is not None
    return group


_networks: list[Network] = []


def connect(network: Network) -> None:
    """Whoever dials or listens from now on uses this network."""
    _networks[:] = [network]


def network() -> Network:
    """That of the run."""
    return _networks[-1]


def listen(host: str, port: int, whose: str) -> list[Listening]:
    """In the place of ``dledger.rpc.listening.listen``."""
    return network().listen(host, port, whose)
