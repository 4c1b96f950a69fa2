"""Classic replication of one plain broker: a master's port for slaves, or a slave's connection to its master.

It has an event loop of its own: clients would wait for the milliseconds that verifying a megabyte of records takes.

A slave of a RocketMQ master also takes over its topics, groups, offsets and delay progress (``SlaveSync``), which are
not in that master's log; a master of ours has them there, and is not asked. Like RocketMQ's slaves, soon after the
start and then every ten seconds; but all four together or nothing, and offsets never go back. A single value that means
nothing here, such as an offset of -1, is left out with a warning.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Final

from dledger.clock import Clock
from dledger.errors import ConfigError, InvalidRequestError, TlsError
from dledger.monitoring import ConditionKind, Conditions
from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import RequestError
from dledger.remoting.connection import DisconnectedError, TooManyCallsError
from dledger.remoting.frame import Frame
from dledger.rpc import tls as tls_rules
from dledger.rpc.listening import listen
from dledger.rpc.loops import LoopThread, Report, supervise
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.store.fs import FileSystem
from rocketstore.broker_config import HA_PORT_OFFSET, BrokerConfig
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.config import MIB
from rocketstore.ha.master import REFUSED_MS, HaMaster, SlaveView
from rocketstore.ha.promotion import EpochFile, SlaveMemory
from rocketstore.ha.protocol import HaIdentity, HaPace
from rocketstore.ha.slave import HaSlave, MasterView
from rocketstore.ha.waits import ReplicaWaits
from rocketstore.message.message import DelayLevels
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.runtime import NEVER, FollowerFacts, HaFacts
from rocketstore.settings import override_path
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import Change
from rocketstore.state.rocketmq_files import CONSUMER_OFFSETS, DELAY_OFFSETS, GROUPS, TOPICS, changes_in
from rocketstore.types import BrokerRole, HaHandshake

_LOG: Final = logging.getLogger("rocketstore")
WATCH_INTERVAL_S: Final = 0.1
"""How often a SYNC_MASTER looks at its slaves, and at puts that have waited too long."""
MUCH_BYTES: Final = 32 * MIB
"""Lacking so much, a slave fetches the log first, and lets its queues wait."""
_LACKS_SLAVES: Final = "slaves"


class HaService:
    """From ``start`` to ``stop``."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        config: BrokerConfig,
        log: PlainCommitLog,
        conditions: Conditions,
        clock: Clock,
        *,
        tls: TlsKeeper | None,
        report: Report,
        require_replicas: Callable[[str], None],
        supersede: Callable[[str], None] = lambda _why: None,
        fs: FileSystem | None = None,
    ) -> None:
        """``require_replicas``, ``supersede``: see ``MessageStore``. Raises ``CorruptLogError``, ``OSError``."""
        self._supersede = supersede
        self._successor = ""
        self._config = config
        self.log: Final = log
        self._log = log
        self._conditions = conditions
        self._clock = clock
        self._tls = tls if config.store.ha_tls else None
        self._report = report
        self._require_replicas = require_replicas
        self._fs = fs or FileSystem()
        self._epoch = EpochFile(self._fs, config.store.config_dir)
        self._loop = LoopThread("rocketstore-ha", report)
        self._master: HaMaster | None = None
        self._slave: HaSlave | None = None
        self._waits: ReplicaWaits | None = None
        self._watch: asyncio.Task[None] | None = None
        self._identity = HaIdentity(
            config.cluster_name,
            config.name,
            config.broker_id,
            lambda: self._epoch.now,
            lambda: self._epoch.begin_offset,
            config.store.ha_names,
        )
        self.port = 0
        """The port for slaves, once started; 0: none."""
        self.known_master: Callable[[], str] = lambda: ""
        """The master's address for slaves as the name servers say it."""

    # -- life ----------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before the log starts: from then on, a SYNC_MASTER's puts wait for slaves."""
        store = self._config.store
        if store.broker_role is BrokerRole.SLAVE:
            return
        if store.broker_role is BrokerRole.SYNC_MASTER and store.in_sync_replicas > 1:
            self._waits = ReplicaWaits(
                self._clock,
                slaves_needed=store.in_sync_replicas - 1,
                timeout_ms=store.slave_timeout,
                behind_bytes_max=store.ha_slave_fallbehind_max,
                end=lambda: self._log.max_offset,
                living_ms=self._pace().living_ms,
            )
            self._log.replicate_with(self._waits.wait_for)
            self._look_at_slaves(self._waits)
        self._master = HaMaster(
            self._log,
            self._identity,
            self._pace(),
            self._waits,
            self._conditions,
            tls=None if self._tls is None else self._tls.accepting,
            outdated=self.suspected,
        )
        self._log.listen(self._master.advanced)

    def start(self, listen_port: int) -> None:
        """Serve slaves, or follow the master. Raises ``ConfigError``, ``OSError``."""
        master, listening = self._master, []
        self._warn_of_own_certificate()
        if master is not None:
            listening = self._listen(listen_port)
            if listening or self._epoch.now:  # a slave that became master without a port has succeeded one, too
                self._epoch.begin(self._log.end_offset)
            if not listening:
                return
            self.port = listening[0].getsockname()[1]
        bridge = self._loop.start()
        if master is not None:
            bridge.run(master.open(listening))
            if self._waits is not None:
                bridge.run(self._start_watching(self._waits))
            return
        store = self._config.store
        self._slave = slave = HaSlave(
            self._log,
            self._identity,
            self._epoch,
            self._pace(),
            self._conditions,
            self._clock,
            bridge,
            delay_levels=DelayLevels.parse(store.message_delay_level),
            master=lambda: store.ha_master_address or self.known_master(),
            tls=None if self._tls is None else self._tls.connecting,
            memory=SlaveMemory(self._fs, store.config_dir),
        )
        bridge.run(_on_loop(lambda: slave.start(self._report)))

    def stop(self, *, graceful: bool = False) -> None:
        """Answer anyone who waits for slaves, and end all connections. Idempotent.

        ``graceful``: a master first waits until its slaves have everything, at most ``slave_timeout``.
        """
        if graceful and self._master is not None and self._loop.bridge is not None:
            self._loop.bridge.run(self._master.drain(self._config.store.slave_timeout / 1000))
        if self._waits is not None:
            self._waits.close()
        bridge = self._loop.bridge
        if bridge is None:
            return
        if self._watch is not None:
            bridge.run(_on_loop(self._watch.cancel))
        for side in (self._master, self._slave):
            if side is not None:
                bridge.run(side.close())
        self._loop.stop()

    # -- how it stands -------------------------------------------------------------------------------------------------

    def slaves(self) -> list[SlaveView]:
        """Those that follow this master now."""
        return [] if self._master is None else self._master.slaves()

    def master(self) -> MasterView | None:
        """How this slave stands; None on a master."""
        return None if self._slave is None else self._slave.view()

    def lacks_master(self) -> bool:
        """Whether this is a slave that does not follow its master now. On any thread."""
        view = self.master()
        return view is not None and not view.is_connected

    def is_catching_up(self) -> bool:
        """Whether this is a slave that lacks much of what its master had when they connected."""
        view = self.master()
        return view is not None and view.is_connected and view.master_end - self._log.end_offset >= MUCH_BYTES

    @property
    def epoch(self) -> int:
        """Which master of this log this is, or the last that it followed."""
        return self._epoch.now

    def superseded(self, successor: str) -> None:
        """A later master is there: take no messages any more, which would be lost. On any thread."""
        if successor != self._successor:
            _LOG.critical("this broker is not the master any more: %s", successor)
        self._successor = successor
        self._supersede(successor)
        self._conditions.set(ConditionKind.SUPERSEDED, successor)

    def suspected(self, told: str) -> None:
        """Somebody says that there is a later master; anybody may say so, hence nothing is done about it here."""
        self._conditions.set(ConditionKind.SUPERSEDED, told, subject=_LACKS_SLAVES, for_ms=REFUSED_MS)

    def facts(self) -> HaFacts:
        """How both sides stand. On any thread."""
        epoch, end = self._epoch.now, self._log.max_offset
        view = self.master()
        if view is None:
            return HaFacts(
                self._config.store.broker_role is BrokerRole.SLAVE,
                epoch,
                end,
                self._successor,
                followers=tuple(self._followers()),
                copies=1 if self._waits is None else self._waits.in_sync + 1,
                copies_wanted=1 if self._waits is None else self._config.store.in_sync_replicas,
                begin=self._epoch.begin_offset,
            )
        now_ms, end = self._clock.monotonic_ms(), self._log.end_offset
        lag_bytes = max(0, view.master_end - end)
        return HaFacts(
            True,
            epoch,
            end,
            view.problem,
            master=view.address,
            is_connected=view.is_connected,
            master_end=view.master_end,
            lag_bytes=lag_bytes,
            lag_ms=_since(view.complete_ms, now_ms) if lag_bytes or not view.is_connected else 0,
            contact_ms=_since(view.heard_ms, now_ms),
            is_promoted=override_path(self._config).exists(),
        )

    def _followers(self) -> Iterator[FollowerFacts]:
        behind_max = self._config.store.ha_slave_fallbehind_max
        for one in self.slaves():
            in_sync = one.lag_bytes < behind_max
            yield FollowerFacts(one.broker_id, one.address, one.acknowledged, one.lag_bytes, one.lag_ms, in_sync)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _warn_of_own_certificate(self) -> None:
        """Master and slaves often have one kind of certificate: errors in ours are reported here first."""
        if self._tls is None:
            return
        try:
            tls_rules.check_one_of(self._tls.names, self._identity.certificate_names, "of this broker")
        except TlsError as error:
            _LOG.warning("%s: its master or slaves refuse it unless their ha_tls_names has one of its names", error)

    def _pace(self) -> HaPace:
        store = self._config.store
        return HaPace(
            heartbeat_s=store.ha_send_heartbeat_interval / 1000,
            silence_s_max=store.ha_housekeeping_interval / 1000,
            batch_bytes=store.ha_transfer_batch_size,
            slaves_max=store.ha_slaves_max,
            introduction_required=store.ha_handshake is HaHandshake.REQUIRED,
            introduces=store.ha_handshake is not HaHandshake.OFF,
        )

    def _listen(self, listen_port: int) -> list[socket.socket]:
        """The sockets for slaves; none if there is to be no port. Raises ``ConfigError``."""
        config, port = self._config, self._config.store.ha_listen_port
        may_do_without = port is None and config.store.broker_role is BrokerRole.ASYNC_MASTER
        if port is None:
            port = listen_port + HA_PORT_OFFSET if config.listen_port else 0
        if not port:
            return []
        if may_do_without and self._tls is None and (config.access.acl_enable or config.security.has_tls):
            what = "access control is on" if config.access.acl_enable else "clients use TLS"
            _LOG.warning(
                "no port for slaves: anyone who can connect to it reads everything, and %s. Set haTls=true, or "
                "haListenPort if that is meant",
                what,
            )
            return []
        try:
            return listen(config.bind_host, port, "broker's HA")
        except ConfigError as error:
            if not may_do_without:
                raise
            _LOG.warning("no port for slaves, set haListenPort to another one, or to 0 for none: %s", error)
            return []

    async def _start_watching(self, waits: ReplicaWaits) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._watch_waits(waits))
        supervise(self._watch, self._report)

    async def _watch_waits(self, waits: ReplicaWaits) -> None:
        while True:
            waits.expire()
            self._look_at_slaves(waits)
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _look_at_slaves(self, waits: ReplicaWaits) -> None:
        """Refuse puts while there are fewer copies than there must be, and say while there are fewer than wanted."""
        store, replicas = self._config.store, waits.in_sync + 1
        self._require_replicas(
            f"{replicas} of the brokers that must have every message are there, {store.min_in_sync_replicas} are "
            "needed (min_in_sync_replicas)"
            if replicas < store.min_in_sync_replicas
            else ""
        )
        if replicas < store.in_sync_replicas:
            what = f"{replicas} of {store.in_sync_replicas} brokers that should have every message are there"
            self._conditions.set(ConditionKind.NOT_REPLICATING, what, subject=_LACKS_SLAVES)
        else:
            self._conditions.clear(ConditionKind.NOT_REPLICATING, _LACKS_SLAVES)


def _since(moment_ms: int, now_ms: int) -> int:
    return max(0, now_ms - moment_ms) if moment_ms else NEVER


async def _on_loop(step: Callable[[], object]) -> None:
    step()


FIRST_S: Final = 3.0
INTERVAL_S: Final = 10.0
TIMEOUT_S: Final = 5.0
REMARK_CHARS_MAX: Final = 200
_ASKED: Final = {
    TOPICS: RequestCode.GET_ALL_TOPIC_CONFIG,
    GROUPS: RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    CONSUMER_OFFSETS: RequestCode.GET_ALL_CONSUMER_OFFSET,
    DELAY_OFFSETS: RequestCode.GET_ALL_DELAY_OFFSET,
}
"""The file in which RocketMQ keeps each, and the request that a master answers with the same contents."""
_FAILURES: Final = (
    UnreachableError, DisconnectedError, TooManyCallsError, TimeoutError, RequestError, InvalidRequestError,
)  # fmt: skip


class SlaveSync:
    """On the event loop of the broker's clients, from ``start`` to ``close``."""

    def __init__(
        self,
        state: BrokerState,
        client: RemotingClient,
        master: Callable[[], MasterView | None],
        address: Callable[[], str],
    ) -> None:
        """``address``: the master's for clients, empty while unknown."""
        self._state = state
        self._client = client
        self._master = master
        self._address = address
        self._task: asyncio.Task[None] | None = None
        self.failure = ""
        """Why the last round took nothing over; empty if it did, or was not needed."""
        self.skipped: dict[str, str] = {}
        """The entries that the last round left out, by file."""

    def start(self, report: Report) -> None:
        """Begin; ``report`` is told if it ends by itself."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        supervise(self._task, report)

    async def close(self) -> None:
        """End. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        await asyncio.sleep(FIRST_S)
        while True:
            await self.step()
            await asyncio.sleep(INTERVAL_S)

    async def step(self) -> None:
        """One round."""
        view, address = self._master(), self._address()
        if view is None or not view.is_connected or view.is_ours:
            self._note("")
        elif not address:
            self._note("its address for clients is not known: set namesrvAddr")
        else:
            try:
                changes = [change for name in _ASKED for change in await self._asked(address, name)]
                await asyncio.to_thread(self._state.mirror, changes)
            except _FAILURES as error:
                self._note(str(error) or f"no answer within {TIMEOUT_S:g} s")
            else:
                self._note("")

    async def _asked(self, address: str, name: str) -> tuple[Change, ...]:
        answer = await self._client.call(address, Frame(_ASKED[name], 0), TIMEOUT_S)
        if not answer.body and name in (CONSUMER_OFFSETS, DELAY_OFFSETS):
            return ()  # nothing was ever consumed, or delivered late
        if answer.code:
            raise InvalidRequestError(f"{name}: it answered {answer.code}: {answer.remark[:REMARK_CHARS_MAX]!r}")
        found = await asyncio.to_thread(changes_in, name, answer.body)
        if found.skipped and found.skipped != self.skipped.get(name):
            _LOG.warning("%s: taken over from the master, except: %s", name, found.skipped)
        self.skipped[name] = found.skipped
        return found.changes

    def _note(self, failure: str) -> None:
        if failure and failure != self.failure:
            _LOG.warning("topics, groups and offsets are not taken over from the master: %s", failure)
        self.failure = failure
