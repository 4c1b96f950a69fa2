"""The master's side: sends its log to each slave, and hears how far they have it. See ``rocketstore.ha.protocol``.

Everything runs on the event loop of replication, but ``advanced``, which any thread may call.

Anyone who can connect takes a place only once it has said from where it wants the log; those that have not yet cannot
crowd each other out, or real slaves.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from dledger.clock import Clock
from dledger.errors import CorruptLogError, DiskError, TlsError
from dledger.log_output import BoundedLog
from dledger.monitoring import ConditionKind, Conditions
from dledger.records import record
from dledger.rpc import tls as tls_rules
from dledger.rpc.listening import Acceptor, Arrival, stop_serving
from dledger.values import address_text
from rocketstore.ha.protocol import (
    FRAME,
    GREETING,
    REPORT,
    STANDING,
    TAIL_BYTES,
    VERDICT,
    WORDS_BYTES_MAX,
    HaIdentity,
    HaLog,
    HaPace,
    HaProtocolError,
    MasterStanding,
    MasterWords,
    SlaveVerdict,
    SlaveWords,
    tail_of,
)
from rocketstore.ha.waits import UNNAMED, ReplicaWaits

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
STANDING_INTERVAL_MS: Final = 1000
"""How often a slave that is behind is told how far the log reaches."""
DRAIN_LOOK_S: Final = 0.01
"""How often a master that stops looks whether its slaves have everything."""
GREETING_MAX: Final = 64
"""Connections that have said nothing yet. One more ends the oldest of the host that has most."""
GREETING_MAX_PER_HOST: Final = 8


@record(frozen=True, slots=True)
class SlaveView:
    """One connected slave, for people. ``broker_id``: -1 if it is RocketMQ's, which does not say."""

    address: str
    broker_id: int
    begin: int
    sent: int
    acknowledged: int
    lag_bytes: int = 0
    """The bytes that it has not acknowledged."""
    lag_ms: int = 0
    """How long ago the log was as it has acknowledged it; 0: it has all."""


class HaMaster:
    """Accepts slaves from ``open`` to ``close``."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        log: HaLog,
        identity: HaIdentity,
        pace: HaPace,
        waits: ReplicaWaits | None,
        conditions: Conditions,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        outdated: Callable[[str], None] = lambda _why: None,
        clock: Clock | None = None,
    ) -> None:
        """``waits``: only with SYNC_MASTER. ``tls``: the context for the next connection; None: plain TCP. With TLS,
        slaves must have one of the identity's names in their certificates.

        ``outdated``: told when a slave has followed a later master.
        """
        self._outdated = outdated
        self._clock = clock or Clock()
        self._log = log
        self._identity = identity
        self._pace = pace
        self._waits = waits
        self._conditions = conditions
        self._tls = tls
        self._ends = BoundedLog(_LOG)
        """Of connections, which anyone can open who reaches the port."""
        self._servers: list[asyncio.Server] = []
        self._acceptor: Acceptor | None = None
        self._slaves: dict[asyncio.Task[None], _Slave] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = False

    async def open(self, listening: list[socket.socket]) -> None:
        """Accept slaves at these sockets, and own them."""
        self._loop = asyncio.get_running_loop()
        if self._tls is not None:  # not with ``start_tls``: uvloop may have read the slave's first bytes by then
            greet = partial(self._shake_hands, self._tls)
            self._acceptor = Acceptor("replication", greet, GREETING_TIMEOUT_S, GREETING_MAX)
            self._acceptor.open(listening)
            return
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
        """Those that follow now. On any thread."""
        return [one.view() for one in list(self._slaves.values()) if one.follows]

    async def drain(self, timeout_s: float) -> None:
        """Wait until all slaves that follow have everything; at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(one.follows and one.acknowledged < self._log.max_offset for one in self._slaves.values()):
                    await asyncio.sleep(DRAIN_LOOK_S)

    async def close(self) -> None:
        """Stop accepting, and end all connections. Idempotent."""
        servers, self._servers = self._servers, []
        for server in servers:
            await stop_serving(server)
        if self._acceptor is not None:
            await self._acceptor.close()
        tasks = tuple(self._slaves)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._woken = False
        for one in self._slaves.values():
            one.more.set()

    async def _shake_hands(self, tls: Callable[[], ssl.SSLContext], arrival: Arrival) -> None:
        """Accept a slave with TLS."""
        context, address = tls(), address_text(*arrival.link.getpeername()[:2])
        accepting = asyncio.StreamReaderProtocol(asyncio.StreamReader(WORDS_BYTES_MAX), self._accept)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: accepting, arrival.take(), ssl=context, ssl_handshake_timeout=GREETING_TIMEOUT_S
            )
        except OSError as error:
            self._ends.info("the slave %s is gone: %s", address, error)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = writer.get_extra_info("peername")
        address = address_text(name[0], name[1]) if name else "a client that has gone"
        slave = _Slave(reader, writer, address, self._log, self._pace, self._clock)
        self._make_room_to_greet(slave.host)
        task = asyncio.create_task(self._serve(slave))
        self._slaves[task] = slave
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Runs in any case, also when the task was cancelled before its first step."""
        self._slaves.pop(task).abort()

    def _make_room_to_greet(self, host: str) -> None:
        """End the connection that has been silent for longest, if there are too many of them."""
        silent = [one for one in self._slaves.values() if one.is_new]
        by_host = Counter(one.host for one in silent)
        if by_host[host] < GREETING_MAX_PER_HOST:
            if len(silent) < GREETING_MAX:
                return
            host = by_host.most_common(1)[0][0]
        oldest = next(one for one in silent if one.host == host)
        self._ends.info(
            "the connection of %s is ended: it has not said what it wants, as others that wait", oldest.name
        )
        oldest.end()

    def _make_room_to_follow(self, slave: _Slave) -> str:
        """Why there is no place for it; empty if there is one now.

        If all are taken, one that says who it is gets that of its own earlier connection, unless that is alive, or of
        one that does not. Of those that do not, one host has at most half of all places.
        """
        following = [one for one in self._slaves.values() if one.follows]
        unnamed = [one for one in following if one.broker_id == UNNAMED]
        places = self._pace.slaves_max
        if slave.broker_id == UNNAMED and sum(one.host == slave.host for one in unnamed) >= max(1, places // 2):
            return f"{slave.host} has half of the places for slaves already (ha_slaves_max={places})"
        if len(following) < places:
            return ""
        own = [one for one in following if one.broker_id == slave.broker_id and not one.is_living]
        leaving = own[:1] or unnamed[-1:]
        if slave.broker_id == UNNAMED or not leaving:
            return f"there are {places} slaves already (ha_slaves_max)"
        _LOG.warning("the slave %s leaves its place to %s", leaving[0].name, slave.name)
        leaving[0].end()
        return ""

    async def _serve(self, slave: _Slave) -> None:
        try:
            await self._replicate(slave)
        except HaProtocolError as error:
            self._refuse(slave, str(error))
        except (CorruptLogError, DiskError) as error:
            self._refuse(slave, f"its part of the log cannot be read: {error}")
        except (OSError, EOFError, TimeoutError) as error:
            self._ends.info(
                "the slave %s is gone: %s", slave.name, error or f"silent for {self._pace.silence_s_max:g} s"
            )

    def _refuse(self, slave: _Slave, why: str) -> None:
        self._ends.warning("the slave %s cannot be served: %s", slave.name, why)
        self._conditions.set(
            ConditionKind.NOT_REPLICATING, f"the slave {slave.name}: {why}", subject=slave.host, for_ms=REFUSED_MS
        )

    async def _replicate(self, slave: _Slave) -> None:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            first = await slave.first_report()
            await self._check_certificate(slave)
            begin, had = await self._introduced(slave) if first == GREETING else self._unintroduced(slave, first)
        slave.begins_at(begin, acknowledged=had)
        self._conditions.clear(ConditionKind.NOT_REPLICATING, slave.host)
        _LOG.info("the slave %s follows from offset %d on", slave.name, begin)
        waits = self._waits
        self._look_for_another(slave)
        if waits is not None:
            waits.joined(slave, slave.broker_id, had)
        both = [asyncio.create_task(slave.send_all()), asyncio.create_task(self._hear(slave))]
        try:
            await asyncio.gather(*both)
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            if waits is not None:
                waits.left(slave)

    async def _check_certificate(self, slave: _Slave) -> None:
        """Any client may have a certificate of the same authority. Raises ``HaProtocolError``, having told it why."""
        if self._tls is None:
            return
        try:
            tls_rules.check_one_of(slave.names, self._identity.certificate_names, f"that {slave.host} showed")
        except TlsError as error:
            slave.write(SlaveVerdict(0, f"{error} (or set ha_tls_names at the master)").encode(VERDICT))
            await slave.drain()
            raise HaProtocolError(str(error)) from error

    def _look_for_another(self, slave: _Slave) -> None:
        """Say so if a slave is connected twice, and find out whether the older connection is alive."""
        for one in self._slaves.values():
            if one is not slave and one.follows and one.broker_id == slave.broker_id != UNNAMED and one.is_living:
                _LOG.warning(
                    "%s and %s say that they are the same slave: the older one counts while it lives. Do two slaves "
                    "have the same brokerId?",
                    one.name,
                    slave.name,
                )
                one.poke()

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
        if first and not log.min_offset <= first <= log.max_offset:
            raise HaProtocolError(_outside(first, log))
        if problem := self._make_room_to_follow(slave):
            raise HaProtocolError(problem)
        return (first, first) if first else (self._log.min_offset, 0)

    async def _introduced(self, slave: _Slave) -> tuple[int, int]:
        """The same for a slave of ours. Raises ``HaProtocolError``, after having told it why."""
        log, own = self._log, self._identity
        mine = MasterWords(own.cluster, own.broker, own.epoch(), log.segment_bytes, log.min_offset, log.max_offset)
        slave.write(mine.encode(GREETING))
        words = SlaveWords.decode(await slave.words(GREETING))
        slave.broker_id = words.broker_id
        slave.chunk_bytes = CHUNK_BYTES
        problem = self._problem(slave, words) or self._make_room_to_follow(slave)
        begin = words.end or self._log.min_offset
        slave.write(SlaveVerdict(begin, problem).encode(VERDICT))
        if problem:
            await slave.drain()
            raise HaProtocolError(problem)
        return begin, words.end if words.tail_bytes else 0

    def _problem(self, slave: _Slave, words: SlaveWords) -> str:
        """Why this slave's log is no copy of a part of ours; empty if it is one."""
        log, own = self._log, self._identity
        if (words.cluster, words.broker) != (own.cluster, own.broker):
            return f"it belongs to {words.broker} of {words.cluster}, this master to {own.broker} of {own.cluster}"
        if words.segment_bytes != log.segment_bytes:
            return f"its log files have {words.segment_bytes} bytes, the master's {log.segment_bytes}"
        if words.epoch > own.epoch():
            why = f"it has followed a later master (epoch {words.epoch}, here {own.epoch()}): this one is outdated"
            self._outdated(f"the slave {words.broker_id} ({slave.address}): {why}")
            return why
        if why := self._beyond(words):
            return why
        if words.end and not log.min_offset <= words.end <= log.max_offset:
            return _outside(words.end, log)
        if not 0 <= words.tail_bytes <= TAIL_BYTES:
            return f"it compares {words.tail_bytes} bytes of its log with the master's; it may compare {TAIL_BYTES}"
        length, crc = tail_of(log, words.end)
        if length and not words.tail_bytes:
            return f"it says that it has the log up to offset {words.end}, and does not prove it by the end of its own"
        if length and words.tail_bytes and (length, crc) != (words.tail_bytes, words.tail_crc):
            return (
                f"its log differs from the master's somewhere before offset {words.end}: wipe "
                "the one that is wrong, after having looked at what only it holds"
            )
        return ""

    def _beyond(self, words: SlaveWords) -> str:
        """For the old master that returns, and for who followed it further than its successor; empty for others.

        Independent of the tails: a slave has this master's number before it has anything of its log.
        """
        begin, own = self._identity.begin_offset(), self._identity.epoch()
        if not (0 <= begin < words.end and 0 < words.epoch < own):
            return ""
        return (
            f"this master took over at offset {begin} (epoch {own}), as the successor of the one that this broker was, "
            f"or followed (epoch {words.epoch}). {words.end - begin} bytes from that offset on exist only in this "
            "broker's log, and nobody reads them any more: look at what they hold, then wipe its store"
        )


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
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        address: str,
        log: HaLog,
        pace: HaPace,
        clock: Clock,
    ) -> None:
        self.address = address
        self.host = address.rpartition(":")[0]
        self.broker_id = UNNAMED
        self.is_new = True
        """Whether it has said nothing yet."""
        self.follows = False
        self.chunk_bytes = pace.batch_bytes
        self.more = asyncio.Event()
        self.begin = self.sent = self.acknowledged = 0
        self._reader = reader
        self._writer = writer
        self._log = log
        self._pace = pace
        self._clock = clock
        self._rest = b""
        self._heard_ms = clock.monotonic_ms()
        self._seen_end = self._seen_ms = 0  # the log's end a while ago, and when that was
        self._complete_ms = 0  # when the log was as it has acknowledged it
        writer.transport.set_write_buffer_limits(BUFFER_BYTES_MAX)

    @property
    def name(self) -> str:
        """For people."""
        return self.address if self.broker_id == UNNAMED else f"{self.broker_id} ({self.address})"

    @property
    def is_living(self) -> bool:
        """Whether it has said something lately."""
        return self._clock.monotonic_ms() - self._heard_ms < self._pace.living_ms

    @property
    def names(self) -> tuple[str, ...]:
        """The DNS names in its certificate."""
        tls = self._writer.get_extra_info("ssl_object")
        return () if tls is None else tls_rules.names_of(tls.getpeercert())

    def poke(self) -> None:
        """A sign of life: if it is gone without a word, its machine says so."""
        self.write(FRAME.pack(self.sent, 0))

    def view(self) -> SlaveView:
        """How it stands. On any thread."""
        lag_bytes = max(0, self._log.max_offset - self.acknowledged)
        lag_ms = max(0, self._clock.monotonic_ms() - self._complete_ms) if lag_bytes else 0
        return SlaveView(self.address, self.broker_id, self.begin, self.sent, self.acknowledged, lag_bytes, lag_ms)

    def look(self) -> None:
        """Take note of whether it has everything."""
        end, now_ms = self._log.max_offset, self._clock.monotonic_ms()
        if self.acknowledged >= self._seen_end:
            self._complete_ms = now_ms if self.acknowledged >= end else self._seen_ms
            self._seen_end, self._seen_ms = end, now_ms

    def end(self) -> None:
        """Give up its place, and end the connection."""
        self.is_new = self.follows = False
        self.abort()

    def begins_at(self, begin: int, acknowledged: int) -> None:
        """It gets the log from ``begin`` on, and has what is before ``acknowledged``."""
        self.begin = self.sent = begin
        self.acknowledged = acknowledged
        self.is_new, self.follows = False, True
        self._seen_end, self._seen_ms = self._log.max_offset, self._clock.monotonic_ms()
        self._complete_ms = self._seen_ms

    def abort(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()

    def write(self, data: bytes) -> None:
        """Send soon, unless the connection has ended: ``drain`` says so then, and uvloop would refuse."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def drain(self) -> None:
        """Wait until there is room to send more."""
        await self._writer.drain()

    async def first_report(self) -> int:
        """The first number."""
        number: int = REPORT.unpack(await self._reader.readexactly(REPORT.size))[0]
        if number < GREETING:
            raise HaProtocolError(f"it begins with {number}, which is not an offset")
        return number

    async def words(self, offset: int) -> bytes:
        """The words in the frame at ``offset``. Raises ``HaProtocolError``."""
        found, size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
        if found != offset or not 0 < size <= WORDS_BYTES_MAX:
            raise HaProtocolError(f"it sends {size} bytes at offset {found} instead of introducing itself")
        return await self._reader.readexactly(size)

    async def hear(self) -> None:
        """Wait for acknowledgements. Raises ``HaProtocolError`` for one of what it was not sent, ``EOFError``."""
        data = await self._reader.read(WORDS_BYTES_MAX)
        if not data:
            raise EOFError("it closed the connection")
        self._heard_ms = self._clock.monotonic_ms()
        data = self._rest + data
        whole = len(data) - len(data) % REPORT.size
        for (end,) in REPORT.iter_unpack(data[:whole]):
            if end > self.sent:
                raise HaProtocolError(f"it acknowledges offset {end}, and was sent only what is before {self.sent}")
            if end < self.acknowledged:
                raise HaProtocolError(f"it has {end} after having acknowledged {self.acknowledged}")
            self.acknowledged = end
        self._rest = data[whole:]
        self.look()

    async def send_all(self) -> None:
        """Send the log as it grows, and signs of life. Raises ``HaProtocolError`` once it is gone from where we are."""
        told_ms = 0
        while True:
            self.more.clear()
            data = self._log.stretch(self.sent, self.chunk_bytes)
            if data:
                self._send(data)
                now_ms = self._clock.monotonic_ms()
                if self.broker_id != UNNAMED and self.sent < self._log.max_offset and now_ms >= told_ms:
                    self.write(MasterStanding(self._log.max_offset).encode(STANDING))
                    told_ms = now_ms + STANDING_INTERVAL_MS
                await self.drain()
                continue
            if self.sent < self._log.min_offset:
                raise HaProtocolError(_outside(self.sent, self._log))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.heartbeat_s):
                    await self.more.wait()
                continue
            self.poke()

    def _send(self, data: bytes) -> None:
        head = FRAME.pack(self.sent, len(data))
        if len(data) <= SMALL_BYTES:
            self.write(head + data)
        else:
            self.write(head)
            self.write(data)
        self.sent += len(data)
