"""The master's side: sends its log to each slave, and hears how far they have it. See ``rocketstore.ha.wire``.

Everything runs on the event loop of replication, but ``advanced``, which any thread may call.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from dledger.conditions import ConditionKind, Conditions
from dledger.errors import CorruptLogError, DiskError
from dledger.records import record
from dledger.values import address_text
from rocketstore.ha.ports import HaIdentity, HaLog, HaPace
from rocketstore.ha.tail import tail_of
from rocketstore.ha.waits import ReplicaWaits
from rocketstore.ha.wire import (
    FRAME,
    GREETING,
    REPORT,
    TAIL_BYTES,
    VERDICT,
    WORDS_BYTES_MAX,
    HaProtocolError,
    MasterWords,
    SlaveVerdict,
    SlaveWords,
)

_LOG: Final = logging.getLogger("rocketstore")
CHUNK_BYTES: Final = 1024 * 1024
"""The most of the log in one frame to a slave of ours."""
BUFFER_BYTES_MAX: Final = 4 * 1024 * 1024
"""How much may wait in memory to be sent to one slave."""
SMALL_BYTES: Final = 64 * 1024
"""Up to here, head and bytes of a frame go out as one piece."""
GREETING_TIMEOUT_S: Final = 10.0
"""How long a new connection may take until it has said from where it wants the log."""
REFUSED_MS: Final = 60_000
"""How long the refusal of a slave, which tries again and again, counts as present."""


@record(frozen=True, slots=True)
class SlaveView:
    """One connected slave, for people. ``broker_id``: -1 if it is RocketMQ's, which does not say."""

    address: str
    broker_id: int
    begin: int
    sent: int
    acknowledged: int


class HaMaster:
    """Accepts slaves from ``open`` to ``close``."""

    def __init__(
        self,
        log: HaLog,
        identity: HaIdentity,
        pace: HaPace,
        waits: ReplicaWaits | None,
        conditions: Conditions,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """``waits``: only with SYNC_MASTER. ``tls``: the context for the next connection; None: plain TCP."""
        self._log = log
        self._identity = identity
        self._pace = pace
        self._waits = waits
        self._conditions = conditions
        self._tls = tls
        self._servers: list[asyncio.Server] = []
        self._slaves: dict[asyncio.Task[None], _Slave] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = False

    async def open(self, listening: list[socket.socket]) -> None:
        """Accept slaves at these sockets, and own them."""
        self._loop = asyncio.get_running_loop()
        for one in listening:
            self._servers.append(await asyncio.start_server(self._accept, sock=one, limit=WORDS_BYTES_MAX))

    def advanced(self) -> None:
        """There is more to read in the log. On any thread; cheap."""
        loop = self._loop
        if loop is not None and self._slaves and not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._wake)

    def slaves(self) -> list[SlaveView]:
        """Those connected now. On any thread."""
        return [one.view() for one in list(self._slaves.values())]

    async def close(self) -> None:
        """Stop accepting, and end all connections. Idempotent."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        tasks = tuple(self._slaves)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._woken = False
        for one in self._slaves.values():
            one.more.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = writer.get_extra_info("peername")
        address = address_text(name[0], name[1]) if name else "a client that has gone"
        if len(self._slaves) >= self._pace.slaves_max:
            _LOG.warning(
                "%s may not replicate: there are %d slaves already (ha_slaves_max)", address, len(self._slaves)
            )
            writer.transport.abort()
            return
        slave = _Slave(reader, writer, address, self._log, self._pace)
        self._slaves[asyncio.create_task(self._serve(slave))] = slave

    async def _serve(self, slave: _Slave) -> None:
        try:
            if self._tls is not None:
                async with asyncio.timeout(GREETING_TIMEOUT_S):
                    await slave.start_tls(self._tls())
            await self._replicate(slave)
        except HaProtocolError as error:
            self._refuse(slave, str(error))
        except (CorruptLogError, DiskError) as error:
            self._refuse(slave, f"its part of the log cannot be read: {error}")
        except (OSError, EOFError, TimeoutError) as error:
            _LOG.info("the slave %s is gone: %s", slave.name, error or f"silent for {self._pace.silence_s_max:g} s")
        finally:
            task = asyncio.current_task()
            if task is not None:
                del self._slaves[task]
            slave.abort()

    def _refuse(self, slave: _Slave, why: str) -> None:
        _LOG.warning("the slave %s cannot be served: %s", slave.name, why)
        self._conditions.set(
            ConditionKind.NOT_REPLICATING, f"the slave {slave.name}: {why}", subject=slave.host, for_ms=REFUSED_MS
        )

    async def _replicate(self, slave: _Slave) -> None:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            first = await slave.first_report()
            begin, had = await self._introduced(slave) if first == GREETING else self._unintroduced(slave, first)
        slave.begins_at(begin, acknowledged=had)
        _LOG.info("the slave %s follows from offset %d on", slave.name, begin)
        waits = self._waits
        if waits is not None:
            for other in self._slaves.values():
                if other is not slave and other.broker_id == slave.broker_id >= 0:
                    waits.left(other)  # a broker is one copy, however often it is connected
            waits.joined(slave, had)
        both = [asyncio.create_task(slave.send_all()), asyncio.create_task(self._hear(slave))]
        try:
            await asyncio.gather(*both)
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            if waits is not None:
                waits.left(slave)

    async def _hear(self, slave: _Slave) -> None:
        while True:
            async with asyncio.timeout(self._pace.silence_s_max):
                await slave.hear()
            if self._waits is not None:
                self._waits.acknowledged(slave, slave.acknowledged)

    def _unintroduced(self, slave: _Slave, first: int) -> tuple[int, int]:
        """From where a slave of RocketMQ gets the log, and up to where it has it. Raises ``HaProtocolError``."""
        log = self._log
        if self._pace.introduction_required:
            raise HaProtocolError("it does not say who it is (ha_handshake=required)")
        if first == 0:
            return self._begin_of_all(), 0
        if not log.min_offset <= first <= log.max_offset:
            raise HaProtocolError(_outside(first, log))
        slave.chunk_bytes = self._pace.batch_bytes
        return first, first

    async def _introduced(self, slave: _Slave) -> tuple[int, int]:
        """The same for a slave of ours. Raises ``HaProtocolError``, after having told it why."""
        log, own = self._log, self._identity
        mine = MasterWords(own.cluster, own.broker, own.epoch(), log.segment_bytes, log.min_offset, log.max_offset)
        slave.write(mine.encode(GREETING))
        words = SlaveWords.decode(await slave.words(GREETING))
        slave.broker_id = words.broker_id
        slave.chunk_bytes = CHUNK_BYTES
        problem = self._problem(words)
        begin = words.end or self._begin_of_all()
        slave.write(SlaveVerdict(begin, problem).encode(VERDICT))
        if problem:
            await slave.drain()
            raise HaProtocolError(problem)
        return begin, words.end

    def _problem(self, words: SlaveWords) -> str:
        """Why this slave's log is no copy of a part of ours; empty if it is one."""
        log, own = self._log, self._identity
        if (words.cluster, words.broker) != (own.cluster, own.broker):
            return f"it belongs to {words.broker} of {words.cluster}, this master to {own.broker} of {own.cluster}"
        if words.segment_bytes != log.segment_bytes:
            return f"its log files have {words.segment_bytes} bytes, the master's {log.segment_bytes}"
        if words.epoch > own.epoch():
            return f"it has followed a later master (epoch {words.epoch}, here {own.epoch()}): this one is outdated"
        if words.end and not log.min_offset <= words.end <= log.max_offset:
            return _outside(words.end, log)
        if not 0 <= words.tail_bytes <= TAIL_BYTES:
            return f"it compares {words.tail_bytes} bytes of its log with the master's; it may compare {TAIL_BYTES}"
        length, crc = tail_of(log, words.end, words.tail_bytes) if words.tail_bytes else (0, 0)
        if length == words.tail_bytes and crc != words.tail_crc:
            return (
                f"its log differs from the master's somewhere in the {length} bytes before offset {words.end}: wipe "
                "the one that is wrong, after having looked at what only it holds"
            )
        return ""

    def _begin_of_all(self) -> int:
        """Where a slave without a log begins."""
        log = self._log
        return log.min_offset if self._pace.full else log.max_offset - log.max_offset % log.segment_bytes


def _outside(offset: int, log: HaLog) -> str:
    if offset > log.max_offset:
        return (
            f"it has {offset - log.max_offset} bytes more than the master, whose log ends at {log.max_offset}: perhaps "
            "the master was replaced by an older copy, or the slave should be master"
        )
    return (
        f"it ends at offset {offset}, and the master's log begins at {log.min_offset}: what is between has expired, so "
        "wipe the slave's store to have it begin anew"
    )


class _Slave:
    """One connection, once accepted."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, log: HaLog, pace: HaPace
    ) -> None:
        self.address = address
        self.host = address.rpartition(":")[0]
        self.broker_id = -1
        self.chunk_bytes = pace.batch_bytes
        self.more = asyncio.Event()
        self.begin = self.sent = self.acknowledged = 0
        self._reader = reader
        self._writer = writer
        self._log = log
        self._pace = pace
        self._rest = b""
        writer.transport.set_write_buffer_limits(BUFFER_BYTES_MAX)

    @property
    def name(self) -> str:
        """For people."""
        return self.address if self.broker_id < 0 else f"{self.broker_id} ({self.address})"

    def view(self) -> SlaveView:
        """How it stands."""
        return SlaveView(self.address, self.broker_id, self.begin, self.sent, self.acknowledged)

    def begins_at(self, begin: int, acknowledged: int) -> None:
        """It gets the log from ``begin`` on, and has what is before ``acknowledged``."""
        self.begin = self.sent = begin
        self.acknowledged = acknowledged

    async def start_tls(self, context: ssl.SSLContext) -> None:
        """Go on with TLS."""
        await self._writer.start_tls(context)

    def abort(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()

    def write(self, data: bytes) -> None:
        """Send soon."""
        self._writer.write(data)

    async def drain(self) -> None:
        """Wait until there is room to send more."""
        await self._writer.drain()

    async def first_report(self) -> int:
        """The first number."""
        number: int = REPORT.unpack(await self._reader.readexactly(REPORT.size))[0]
        if number < GREETING:
            raise HaProtocolError(f"it begins with {number}, which is no offset")
        return number

    async def words(self, offset: int) -> bytes:
        """What it says in the frame at ``offset``. Raises ``HaProtocolError``."""
        found, size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
        if found != offset or not 0 < size <= WORDS_BYTES_MAX:
            raise HaProtocolError(f"it sends {size} bytes at offset {found} instead of introducing itself")
        return await self._reader.readexactly(size)

    async def hear(self) -> None:
        """Wait for acknowledgements. Raises ``HaProtocolError`` for one of what it was not sent, ``EOFError``."""
        data = await self._reader.read(WORDS_BYTES_MAX)
        if not data:
            raise EOFError("it closed the connection")
        data = self._rest + data
        whole = len(data) - len(data) % REPORT.size
        for (end,) in REPORT.iter_unpack(data[:whole]):
            if end > self.sent:
                raise HaProtocolError(f"it acknowledges offset {end}, and was sent only what is before {self.sent}")
            if end < self.acknowledged:
                raise HaProtocolError(f"it has {end} after having acknowledged {self.acknowledged}")
            self.acknowledged = end
        self._rest = data[whole:]

    async def send_all(self) -> None:
        """Send the log as it grows, and signs of life. Raises ``HaProtocolError`` once it is gone from where we are."""
        while True:
            self.more.clear()
            data = self._log.stretch(self.sent, self.chunk_bytes)
            if data:
                self._send(data)
                await self.drain()
                continue
            if self.sent < self._log.min_offset:
                raise HaProtocolError(_outside(self.sent, self._log))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.heartbeat_s):
                    await self.more.wait()
                continue
            self.write(FRAME.pack(self.sent, 0))

    def _send(self, data: bytes) -> None:
        head = FRAME.pack(self.sent, len(data))
        if len(data) <= SMALL_BYTES:
            self.write(head + data)
        else:
            self.write(head)
            self.write(data)
        self.sent += len(data)
