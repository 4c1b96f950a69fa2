"""The slave's side: fetches the master's log, verifies it, and says how far it has it. See ``rocketstore.ha.protocol``.

Everything runs on the event loop of replication. The slave reports as soon as it is connected (RocketMQ's waits for
five seconds), and acknowledges only whole, sound records, once they are as durable as ``flush_disk_type`` wants it: the
beginning of a record waits in memory for the rest (RocketMQ's slave writes and acknowledges half records).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple, cast

from dledger.clock import Clock
from dledger.errors import CorruptLogError, DiskError, DLedgerError, TlsError
from dledger.monitoring import ConditionKind, Conditions
from dledger.records import record
from dledger.rpc import loops, tls
from dledger.rpc.loops import LoopBridge, LoopCallback, Report, supervise
from dledger.values import parse_address
from rocketstore.ha.promotion import EpochFile, KnownMaster, SlaveMemory
from rocketstore.ha.protocol import (
    GREETING,
    REPORT,
    STANDING,
    VERDICT,
    FrameReader,
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
from rocketstore.message.columns import RecordColumns, read_sound_records
from rocketstore.message.message import DelayLevels
from rocketstore.message.record import BLANK
from rocketstore.message.scan import RecordScanOutcome
from rocketstore.types import PutMessageStatus

ROOM_BYTES: Final = 1024 * 1024
"""The most that is received before some of it is taken."""


class Inbox(asyncio.BufferedProtocol):
    """One connection's."""

    def __init__(self) -> None:
        self._room = memoryview(bytearray(ROOM_BYTES))
        self._filled = 0
        self._has_ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established."""
        self._transport = cast("asyncio.Transport", transport)  # of a stream, as asked for

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # as asyncio has it
        """Where the next bytes go; not called while there is no room."""
        return self._room[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many have come."""
        self._filled += nbytes
        if self._filled == len(self._room) and self._transport is not None:
            self._transport.pause_reading()
        self._news.set()

    def eof_received(self) -> bool:
        """Nothing more comes."""
        self._end(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._end(exc)

    async def wait(self) -> None:
        """Return once there is something to take. Raises ``EOFError`` or ``OSError``: there is nothing, for ever."""
        while not self._filled:
            if self._has_ended:
                raise self._error or EOFError("it closed the connection")
            self._news.clear()
            await self._news.wait()

    def take(self) -> memoryview:
        """Everything that has come; valid until the next step of the event loop."""
        data = self._room[: self._filled]
        self._filled = 0
        if self._transport is not None:
            self._transport.resume_reading()
        return data

    def _end(self, error: Exception | None) -> None:
        self._has_ended = True
        self._error = self._error or error
        self._news.set()


RECORD_BYTES_MAX: Final = 64 * 1024 * 1024
"""The limit of a record: what a slave may have to keep in memory."""


class DamagedStreamError(DLedgerError):
    """Raised if what arrives is not the continuation of the log: a gap, or no records; says where."""


class ReceivedStretch(NamedTuple):
    """Verified bytes of the log, all in one file: records, or a part of the blank at its end."""

    offset: int
    data: bytes
    store_timestamp: int
    """Of the last record; 0 in a blank."""


class ReceivedLog:
    """Turns what arrives into stretches to be written. ``end``: of what has been given out.

    ``blank_left``: so many bytes of a blank, of which a part has been given out, come next.
    """

    def __init__(self, end: int, segment_bytes: int, delay_levels: DelayLevels, *, blank_left: int = 0) -> None:
        self.end = end
        self.blank_left = blank_left
        self._segment_bytes = segment_bytes
        self._delay_levels = delay_levels
        self._pending: list[bytes] = []  # joined once: a record of megabytes may come in many pieces
        self._pending_bytes = 0
        self._needed = 0  # so many bytes, before it is worth looking again

    @property
    def received(self) -> int:
        """The end of what has arrived."""
        return self.end + self._pending_bytes

    def feed(self, offset: int, data: bytes) -> Iterator[ReceivedStretch]:
        """The records that have become whole. Raises ``DamagedStreamError``."""
        if offset != self.received:
            raise DamagedStreamError(f"the master sends offset {offset}, but {self.received} comes next")
        if self._pending:
            self._pending.append(data)
            self._pending_bytes += len(data)
            if self._pending_bytes < self._needed:
                return
            data = b"".join(self._pending)
            self._pending, self._pending_bytes = [], 0
        while data:
            if self.blank_left:
                part = data[: self.blank_left]
                yield self._given(part, 0)
                self.blank_left -= len(part)
                data = data[len(part) :]
                continue
            if len(data) < self._needed:
                break
            file_left = self._segment_bytes - self.end % self._segment_bytes
            whole = self._verified(data[:file_left] if len(data) > file_left else data, file_left)
            if whole.consumed:
                yield self._given(data[: whole.consumed], _last_timestamp(whole))
                data = data[whole.consumed :]
            if whole.end == "blank":
                self.blank_left = whole.needed
            elif whole.end == "more":
                self._needed = whole.needed
                break
        if data:
            self._pending, self._pending_bytes = [data], len(data)

    def _given(self, data: bytes, store_timestamp: int) -> ReceivedStretch:
        stretch = ReceivedStretch(self.end, data, store_timestamp)
        self.end += len(data)
        self._needed = 0
        return stretch

    def _verified(self, data: bytes, file_left: int) -> RecordScanOutcome:
        """Raises ``DamagedStreamError``."""
        found = read_sound_records(data, self.end, delay_levels=self._delay_levels)
        if found.end == "damaged":
            raise DamagedStreamError(f"the master sends no sound record: {found.reason}")
        left = file_left - found.consumed
        if found.end == "blank" and found.needed != left:
            raise DamagedStreamError(f"a blank of {found.needed} bytes where the file has {left} left")
        if found.needed > min(left - BLANK.size, RECORD_BYTES_MAX) and found.end == "more":
            raise DamagedStreamError(f"a record of {found.needed} bytes at offset {self.end + found.consumed}")
        if found.end == "more" and left < BLANK.size:
            raise DamagedStreamError(f"the file ends at offset {self.end + file_left} without a blank")
        return found


def _last_timestamp(found: RecordScanOutcome) -> int:
    heads = found.heads
    if isinstance(heads, RecordColumns):
        return int(heads.store_timestamps[-1])
    return heads[-1].store_timestamp if heads else 0


_LOG: Final = logging.getLogger("rocketstore")
CONNECT_TIMEOUT_S: Final = 5.0
GREETING_WAIT_S: Final = 1.0
"""How long a master of ours may take to answer the greeting. RocketMQ's does not, and waits for a number after it."""


REMEMBER_INTERVAL_MS: Final = 5000
"""How often a slave writes down what it knows of its master."""


class MasterRefusedError(DLedgerError):
    """Raised if master and slave do not fit together; says why, and what to do."""


@record(frozen=True, slots=True)
class MasterView:
    """How a slave stands."""

    address: str = ""
    is_connected: bool = False
    is_ours: bool = False
    master_end: int = 0
    """The end of the master's log, as far as it has said."""
    heard_ms: int = 0
    """When it last said anything, in monotonic ms; 0: never."""
    complete_ms: int = 0
    """When this slave last had everything that the master was known to have, in monotonic ms; 0: never."""
    problem: str = ""
    """Why there is no connection; empty if there is one, or was none yet."""


class HaSlave:
    """Follows a master from ``start`` to ``close``."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        log: HaLog,
        identity: HaIdentity,
        epoch: EpochFile,
        pace: HaPace,
        conditions: Conditions,
        clock: Clock,
        bridge: LoopBridge,
        *,
        delay_levels: DelayLevels,
        master: Callable[[], str],
        tls: Callable[[], ssl.SSLContext] | None = None,
        memory: SlaveMemory | None = None,
    ) -> None:
        """``master``: its address for slaves, empty while unknown; asked before every connection.

        ``memory``: where to keep what is known of it; None: nowhere.
        """
        self.log: Final = log
        self.identity: Final = identity
        self.epoch: Final = epoch
        self.pace: Final = pace
        self.bridge: Final = bridge
        self.delay_levels: Final = delay_levels
        self._conditions = conditions
        self._clock = clock
        self._master = master
        self._tls = tls
        self._task: asyncio.Task[None] | None = None
        self._view = MasterView()
        self._said = ""  # the problem that the log file has last been told
        self._received: ReceivedLog | None = None
        self._aimed = (0, 0)  # an end of the master's log, and when it was heard: complete once it is here
        self._memory = memory
        if memory is not None:
            self._view = self._remembered(memory)
        self._remember_ms = 0
        self._remembering: asyncio.Task[None] | None = None

    def start(self, report: Report) -> None:
        """Begin; ``report`` is told if it ends by itself."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        supervise(self._task, report)

    def view(self) -> MasterView:
        """How it stands. On any thread."""
        return self._view

    async def close(self) -> None:
        """End. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self._view.is_connected:
                self._remember_soon(self._clock.monotonic_ms())
            if self._remembering is not None:
                await self._remembering

    def heard(self, master_end: int, *, is_ours: bool | None = None) -> None:
        """The master has said something, and by that that its log reaches ``master_end``."""
        view, now_ms = self._view, self._clock.monotonic_ms()
        if is_ours is None:
            self._view = replace(view, master_end=max(master_end, view.master_end), heard_ms=now_ms)
        else:
            self._view = replace(
                view, is_connected=True, is_ours=is_ours, master_end=master_end, heard_ms=now_ms, problem=""
            )
            self._aimed = master_end, now_ms
            self._remember_soon(now_ms)

    def advanced(self) -> None:
        """This slave may have more of the log than before."""
        end, now_ms = self.log.end_offset, self._clock.monotonic_ms()
        aimed_end, aimed_ms = self._aimed
        if end >= aimed_end:
            complete_ms = now_ms if end >= self._view.master_end else aimed_ms
            self._view = replace(self._view, complete_ms=complete_ms)
            self._aimed = self._view.master_end, self._view.heard_ms
        if now_ms >= self._remember_ms:
            self._remember_soon(now_ms)

    def goes_on(self) -> None:
        """It has taken something, or has everything: only then is an earlier problem over."""
        self._said = ""
        self._conditions.clear(ConditionKind.NOT_REPLICATING)

    def received_from(self, offset: int) -> ReceivedLog:
        """A receiver of the master's log from ``offset`` on; it knows if the last connection ended within a blank."""
        before = self._received
        blank_left = before.blank_left if before is not None and before.end == offset else 0
        self._received = now = ReceivedLog(offset, self.log.segment_bytes, self.delay_levels, blank_left=blank_left)
        return now

    # -- inside --------------------------------------------------------------------------------------------------------

    def _remembered(self, memory: SlaveMemory) -> MasterView:
        """The memory of this broker's last run."""
        try:
            known = memory.read()
        except (CorruptLogError, OSError) as error:
            _LOG.warning("what this slave knew of its master is lost: %s", error)
            return MasterView()
        ago = self._clock.monotonic_ms() - self._clock.wall_ms()
        heard_ms = known.heard_ms + ago if known.heard_ms else 0
        complete_ms = known.complete_ms + ago if known.complete_ms else 0
        return MasterView(known.address, master_end=known.end, heard_ms=heard_ms, complete_ms=complete_ms)

    def _remember_soon(self, now_ms: int) -> None:
        """Keep on disk what is known of the master; not on the event loop, which would wait for the disk."""
        self._remember_ms = now_ms + REMEMBER_INTERVAL_MS
        if self._memory is None or (self._remembering is not None and not self._remembering.done()):
            return
        ago = self._clock.wall_ms() - now_ms
        view = self._view
        known = KnownMaster(
            view.address,
            view.master_end,
            self.log.end_offset,
            view.heard_ms + ago,
            view.complete_ms + ago if view.complete_ms else 0,
        )
        self._remembering = asyncio.get_running_loop().create_task(self._remember(self._memory, known))

    async def _remember(self, memory: SlaveMemory, known: KnownMaster) -> None:
        try:
            await asyncio.to_thread(memory.write, known)
        except OSError as error:  # the disk is full, for example: the log says so, too
            _LOG.warning("what is known of the master cannot be kept: %s", error)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(await self._follow_once())

    async def _follow_once(self) -> float:
        """One connection; returns for how many seconds to wait before the next."""
        address = self._master()
        if not address:
            self._lost("", "its address is not known: set haMasterAddress, or namesrvAddr")
            return self.pace.retry_s
        try:
            await self._follow(address)
        except DLedgerError as error:  # refused, damaged, nonsense; a disk that is full, or failed
            self._lost(address, str(error))
            return self.pace.refused_retry_s
        except TimeoutError:
            self._lost(address, "it is silent")
        except (OSError, EOFError) as error:
            self._lost(address, str(error))
        return self.pace.retry_s

    def _lost(self, address: str, problem: str) -> None:
        if problem != self._said:
            self._said = problem
            _LOG.warning("this slave does not follow its master %s: %s", address, problem)
        was_connected = self._view.is_connected
        self._view = replace(
            self._view, address=address or self._view.address, is_connected=False, problem=problem
        )  # the last known one is where the old master was
        if was_connected:
            self._remember_soon(self._clock.monotonic_ms())
        self._conditions.set(ConditionKind.NOT_REPLICATING, f"this slave does not follow its master: {problem}")

    async def _follow(self, address: str) -> None:
        context = None if self._tls is None else self._tls()
        try:
            host, port = parse_address(address)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                transport, inbox = await loops.connect(Inbox, host, port, context=context)
        except ValueError as error:  # no address, or no name of a host
            raise MasterRefusedError(f"invalid address {address!r}: {error}") from error
        try:
            self._view = replace(self._view, address=address)
            if context is not None:
                self._check_certificate(transport, address)
            await _Session(self, inbox, transport).follow()
        finally:
            transport.abort()

    def _check_certificate(self, transport: asyncio.Transport, address: str) -> None:
        """Others have certificates of the same authority, too. Raises ``RefusedError``."""
        names = tls.names_of(transport.get_extra_info("ssl_object").getpeercert())
        try:
            tls.check_one_of(names, self.identity.certificate_names, f"of {address}")
        except TlsError as error:
            raise MasterRefusedError(f"{error}, or set ha_tls_names") from error


class _Session:
    """One connection to a master."""

    def __init__(self, slave: HaSlave, inbox: Inbox, transport: asyncio.Transport) -> None:
        self._slave = slave
        self._log = slave.log
        self._inbox = inbox
        self._transport = transport
        self._frames = FrameReader()
        self._received: ReceivedLog | None = None
        self._reported = -1
        self._durable = 0
        self._failure = ""

    async def follow(self) -> None:
        """Returns never: raises what ends it."""
        await self._flush_everything()
        pieces = await self._agree()
        _LOG.info("this slave follows its master from offset %d on", self._log.end_offset)
        reporting = asyncio.create_task(self._report_regularly())
        try:
            while True:
                for offset, data in pieces:
                    self._take(offset, data)
                self._slave.advanced()
                self._acknowledge()
                pieces = await self._pieces(self._slave.pace.silence_s_max)
        finally:
            reporting.cancel()

    async def _pieces(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """The master's next frames; there may be no whole one yet. Raises ``TimeoutError``, ``EOFError``."""
        async with asyncio.timeout(timeout_s):
            await self._inbox.wait()
        return self._frames.feed(self._inbox.take())

    async def _flush_everything(self) -> None:
        """Flush the whole log: an offset that is asked for counts as acknowledged. Raises ``DiskError``."""
        end, waited = self._log.end_offset, LoopCallback[tuple[PutMessageStatus, str]](self._slave.bridge)
        self._log.when_flushed(end, lambda status, why: waited.done((status, why)))
        status, why = await waited.future
        if status is not PutMessageStatus.PUT_OK:
            raise DiskError(f"its own log is not flushed: {why}")
        self._durable = end

    # -- introductions -------------------------------------------------------------------------------------------------

    async def _agree(self) -> list[tuple[int, bytes]]:
        """Until the master sends its log; returns what it has sent of it already. Raises ``RefusedError``."""
        slave = self._slave
        if not slave.pace.introduces:
            return self._unintroduced()
        self._say(REPORT.pack(GREETING))
        try:
            said, _ = await self._words(GREETING)
        except TimeoutError:
            if slave.pace.introduction_required:
                raise MasterRefusedError(
                    "it does not say who it is, as a master of RocketMQ (ha_handshake=required)"
                ) from None
            return self._unintroduced()
        master = MasterWords.decode(said)
        own, end = slave.identity, self._log.end_offset
        if problem := self._problem(master):
            raise MasterRefusedError(problem)
        length, crc = tail_of(self._log, end)
        words = SlaveWords(
            own.cluster, own.broker, own.broker_id, slave.epoch.now, self._log.segment_bytes, end, length, crc
        )
        self._say(words.encode(GREETING))
        said, begun = await self._words(VERDICT, slave.pace.silence_s_max)
        verdict = SlaveVerdict.decode(said)
        if verdict.refusal:
            raise MasterRefusedError(verdict.refusal)
        if end and verdict.begin != end:
            raise HaProtocolError(f"it sends from offset {verdict.begin} on, and {end} comes next")
        slave.epoch.follow(master.epoch)
        slave.heard(master.max_offset, is_ours=True)
        if end >= master.max_offset:
            slave.goes_on()
        self._begin(verdict.begin)
        return begun

    async def _words(self, offset: int, timeout_s: float = GREETING_WAIT_S) -> tuple[bytes, list[tuple[int, bytes]]]:
        """The master's frame at ``offset``, and those that it has sent after it. Raises ``TimeoutError``."""
        async with asyncio.timeout(timeout_s):
            while not (pieces := await self._pieces(timeout_s)):
                pass
        if pieces[0][0] == VERDICT != offset:  # before it has said anything else
            raise MasterRefusedError(SlaveVerdict.decode(pieces[0][1]).refusal or "it refuses, and does not say why")
        if pieces[0][0] != offset:
            raise HaProtocolError(f"it sends offset {pieces[0][0]} instead of introducing itself")
        return pieces[0][1], pieces[1:]

    def _unintroduced(self) -> list[tuple[int, bytes]]:
        """To a master of RocketMQ."""
        self._slave.heard(0, is_ours=False)
        self._report(self._log.end_offset)
        return []

    def _problem(self, master: MasterWords) -> str:
        own, log = self._slave.identity, self._log
        if (master.cluster, master.broker) != (own.cluster, own.broker):
            return f"it is {master.broker} of {master.cluster}, this slave belongs to {own.broker} of {own.cluster}"
        if master.segment_bytes != log.segment_bytes:
            return f"its log files have {master.segment_bytes} bytes, this slave's {log.segment_bytes}"
        if master.epoch < self._slave.epoch.now:
            return f"this slave has followed a later master (epoch {self._slave.epoch.now}, there {master.epoch})"
        return ""

    # -- the log -------------------------------------------------------------------------------------------------------

    def _begin(self, offset: int) -> ReceivedLog:
        self._received = received = self._slave.received_from(offset)
        return received

    def _take(self, offset: int, data: bytes) -> None:
        """A piece of the log. Raises ``DamagedStreamError``, ``DiskError``, ``DiskFullError``."""
        if offset == STANDING and self._slave.view().is_ours:
            self._slave.heard(MasterStanding.decode(data).max_offset)
            return
        if offset < 0:
            raise HaProtocolError("it introduces itself in the middle of the log")
        self._slave.heard(offset + len(data))
        if not data:
            self._slave.goes_on()
            return
        received = self._received
        if received is None:
            end = self._log.end_offset
            if not end and offset % self._log.segment_bytes:
                raise HaProtocolError(
                    f"it begins with offset {offset}, in the middle of a file: is its file size ours?"
                )
            received = self._begin(end or offset)
        for stretch in received.feed(offset, data):
            self._log.append_received(stretch.offset, stretch.data, stretch.store_timestamp)
            self._slave.goes_on()

    def _acknowledge(self) -> None:
        """Say how far we have it, as soon as it is durable."""
        end = self._log.end_offset
        if self._failure:
            raise DiskError(self._failure)
        if end > self._durable:
            self._log.when_flushed(
                end, lambda status, why: self._slave.bridge.post(lambda: self._flushed(end, status, why))
            )

    def _flushed(self, end: int, status: PutMessageStatus, why: str) -> None:
        if status is PutMessageStatus.PUT_OK:
            self._durable = max(end, self._durable)
            self._report(self._durable)
        elif status is not PutMessageStatus.FLUSH_DISK_TIMEOUT:  # a later one covers it
            self._failure = f"its log is not flushed: {why}"

    def _report(self, end: int) -> None:
        if not self._transport.is_closing():
            self._reported = end
            self._say(REPORT.pack(end))

    def _say(self, data: bytes) -> None:
        """Send, unless the connection has ended, which the next read says; uvloop would refuse."""
        if not self._transport.is_closing():
            self._transport.write(data)

    async def _report_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._slave.pace.heartbeat_s)
            if self._reported >= 0:
                self._report(self._reported)
