"""Wires up one broker: log, store, state, delayed delivery, roles, gRPC. The only module in which they all meet.

A process has one event loop for all gRPC services: two would wake each other. A plain broker has its own loop; a
DLedger broker uses its node's, which also serves the log service at the broker's address, and which is that of all
brokers of the process. So the client address that nodes tell each other is the broker's, and every broker knows the
master's address.

``ClockWatch`` notices a wall clock that was set, or that is behind the times of messages that are stored already.
Nothing depends on it: delays, checks and positions go on. But times in resets, queries and ``--from`` mean other
messages than people think.

``BrokersServer`` is several brokers in one process: a member of each of several groups, at ports of its own. RocketMQ's
clients address a broker, and their requests name no group, so a port belongs to one broker. The brokers share what
``dledger.host`` holds: the members' port, event loops, certificates, access rules, and the threads of what is due by
time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Final, TypeVar

from dledger.access.guard import AccessControl, AccessGuard
from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.errors import ConfigError, DLedgerError, LeaderHint
from dledger.host import Host
from dledger.hosted_groups import HostedGroups, problems_together
from dledger.monitoring import SILENT, ConditionKind, Conditions, Instruments
from dledger.rpc.loops import LoopBridge, LoopThread
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.runtime.threads import EXIT_FATAL, Supervisor
from dledger.server import DLedgerServer
from dledger.store.identity import layout_of
from rocketstore.broker.broker import Storage
from rocketstore.broker.mastership import CatchUp, GroupView, is_leader
from rocketstore.broker.role_change import BrokerRoleChange
from rocketstore.broker.schedule import ScheduleService
from rocketstore.broker.statistics import BrokerMeasurements, measure
from rocketstore.broker.timed.service import TimedService
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_ports import BrokerPorts, Served
from rocketstore.commit_log.base_log import group_has_begun, written_segments
from rocketstore.commit_log.mixed import MixedCommitLog
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.port import CommitLog
from rocketstore.commit_log.replicated import MESSAGES, ReplicatedCommitLog, for_broker
from rocketstore.ha.service import HaService
from rocketstore.message.message import DelayLevels
from rocketstore.state.broker_state import BrokerState, StateSettings
from rocketstore.state.files import TIMER_TOPIC, unserved
from rocketstore.state.publisher import StateLimits
from rocketstore.store.message_store import MessageStore
from rocketstore.store.takeover import take_over
from rocketstore.types import BrokerRole

JUMP_MS: Final = 60_000
AHEAD_MS: Final = 60_000
TOLD_MS: Final = 3_600_000
_JUMP: Final = "jump"
_AHEAD: Final = "ahead"


class ClockWatch:
    """One thread calls ``look`` every now and then. ``newest_ms``: when the newest message was stored (0: none)."""

    def __init__(self, clock: Clock, conditions: Conditions, newest_ms: Callable[[], int]) -> None:
        self._clock = clock
        self._conditions = conditions
        self._newest_ms = newest_ms
        self._last = clock.wall_ms(), clock.monotonic_ms()

    def look(self) -> None:
        """Begin and end conditions."""
        wall_ms, now_ms = self._clock.wall_ms(), self._clock.monotonic_ms()
        jump_ms = (wall_ms - self._last[0]) - (now_ms - self._last[1])
        self._last = wall_ms, now_ms
        if abs(jump_ms) > JUMP_MS:
            how = "forward (or the machine slept)" if jump_ms > 0 else "back"
            self._conditions.set(
                ConditionKind.CLOCK,
                f"the clock was set {how} by {abs(jump_ms) // 1000} s: times of messages from before and after "
                "disagree, so give offsets instead of times around it",
                subject=_JUMP,
                for_ms=TOLD_MS,
            )
        ahead_ms = self._newest_ms() - wall_ms
        if ahead_ms > AHEAD_MS:
            self._conditions.set(
                ConditionKind.CLOCK,
                f"the newest message is dated {ahead_ms // 1000} s after the present: this clock is behind, or that of "
                "this broker or of an earlier master was ahead. Set it right (NTP); positions by time find that "
                "message until its time has come",
                subject=_AHEAD,
            )
        else:
            self._conditions.clear(ConditionKind.CLOCK, _AHEAD)


_log = logging.getLogger("rocketstore")

STOP_GRACE_S: Final = 2.0
"""How long accepted requests may still be answered when the broker stops."""
WATCH_INTERVAL_S: Final = 1.0


class BrokerServer:
    """A broker from its directory to its port. Use ``start``, ``wait`` and ``stop``.

    The constructor raises, before opening a port: ``ConfigError``, ``DirectoryLockedError``, ``CorruptLogError``,
    ``IdentityError``, ``DiskError``. ``repair``: set a damaged replicated log aside and fetch it from the others.
    """

    def __init__(
        self,
        config: BrokerConfig,
        *,
        repair: bool = False,
        clock: Clock | None = None,
        instruments: Instruments = SILENT,
        host: Host | None = None,
    ) -> None:
        """``host``: of a process of several brokers, whose groups have this one's among them; see ``DLedgerServer``."""
        problems = config.problems()
        if problems:
            raise ConfigError(problems)
        if repair and config.dledger is None:
            raise ConfigError(
                [
                    "--repair fetches a damaged log from other members, and a plain broker has none: restore it "
                    "from a copy"
                ]
            )
        refuse_other_mode(config)
        self.config: Final = config
        self._tls: TlsKeeper | None = None
        if config.dledger is None and config.security.has_tls:
            self._tls = TlsKeeper(config.security, name=f"broker {config.name}", member=None)
        self._clock = clock or Clock()
        self.conditions = Conditions(config.node_id, self._clock)
        """The conditions of this broker; a replicated one shares its node's."""
        self._life_lock = threading.RLock()  # one start or stop at a time; a failed start stops
        self._stopped = threading.Event()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._role_change: BrokerRoleChange | None = None
        self._threads = Supervisor(self._fail)
        self._loop = LoopThread("rocketstore-rpc", self._threads.report)
        self._bridge: LoopBridge | None = None
        self.replication: HaService | None = None
        """Classic replication, of a plain broker."""
        self._watcher = self._threads.thread("rocketstore-watch", self._watch)
        self._watcher.daemon = True
        self._has_caught_up: Callable[[], bool] = lambda: True
        self.node: DLedgerServer | None = None
        self._access: AccessControl | None = None  # for a plain broker; a node has its own
        if config.dledger is None:
            self._access = AccessControl.of(config.access, name=config.name, clock=self._clock)
        self._open(config.dledger, instruments, host, repair=repair)
        storage = Storage(self.store, self.state, self.transactions, self.schedule, self.timed)
        parts = Served(storage, self.node, self.replication, self.guard, self._tls, self._clock, self.conditions)
        self._ports = BrokerPorts(config, parts, lambda: self._has_caught_up(), self._threads.report)

    def _open(self, dledger: ServerConfig | None, instruments: Instruments, host: Host | None, *, repair: bool) -> None:
        config = self.config
        log: CommitLog
        if dledger is None:
            log = PlainCommitLog(config.store, clock=self._clock, instruments=instruments)
        else:
            layout = layout_of(dledger.store, dledger.node_id)
            old = take_over(config.store, layout, dledger.store.segment_bytes, clock=self._clock)
            self.node = DLedgerServer(
                for_broker(dledger),
                repair=repair,
                clock=self._clock,
                instruments=instruments,
                bodies=MESSAGES,
                base_log=lambda: None if old is None else old.now(),
                client_ports=False,
                host=host,
            )
            self._tls = self.node.tls
            self.conditions = self.node.conditions
        try:
            if self.node is not None:
                log = replicated = ReplicatedCommitLog(self.node, config.store, clock=self._clock)
                if old is not None:
                    log = MixedCommitLog(old.files, replicated, old.record, old.expired)
            self.store = MessageStore(config.store, log, clock=self._clock, conditions=self.conditions)
            self.store.share_descriptors(1 if host is None else len(host.groups))
            if isinstance(log, PlainCommitLog):
                self.replication = HaService(
                    config,
                    log,
                    self.conditions,
                    self._clock,
                    tls=self._tls,
                    report=self._threads.report,
                    require_replicas=self.store.require_replicas,
                    supersede=self.store.supersede,
                )
                self.store.pace.log_goes_first = self.replication.is_catching_up
            self.state = BrokerState(
                self.store,
                config.store.config_dir,
                clock=self._clock,
                settings=StateSettings(
                    accept_incomplete=dledger is None,
                    limits=StateLimits(config.queues_max, config.groups_max, config.offsets_max),
                ),
                conditions=self.conditions,
            )
            delays = DelayLevels.parse(config.store.message_delay_level)
            self.schedule = ScheduleService(self.store, self.state, delays, self._clock)
            self.timed = TimedService(config, self.store, self.state, self._clock, conditions=self.conditions)
            self.transactions = TransactionService(
                config, self.store, self.state, self._clock, conditions=self.conditions
            )
            if self.node is not None:
                self._role_change = BrokerRoleChange(
                    self.node,
                    replicated,
                    self.store,
                    self.state,
                    self.schedule,
                    self.timed,
                    self.transactions,
                    name=self.node.name,
                    listener=self._role_changed,
                )
                self.node.add_role_change_handler(self._role_change)
            self.store.load()
            self.state.load()
            self._say_what_is_not_served()
            if self.replication is not None:
                self.replication.prepare()
            if self.node is not None:
                node = self.node
                caught_up = CatchUp(
                    node.status, self.store, lambda: replicated.max_offset, lambda: self.state.is_applied
                )
                self._has_caught_up = lambda: not node.fenced and not node.removed and caught_up()
        except BaseException:
            self._close_store()
            raise

    def _say_what_is_not_served(self) -> None:
        """Messages of RocketMQ 5 that would otherwise be missing without a word."""
        root = self.config.store.store_path_root_dir
        try:
            found = unserved(root, self.store.max_offset(TIMER_TOPIC, 0))
        except OSError as error:
            found = [f"unknown, because a part that RocketMQ 5 may have written cannot be read ({error})"]
        for what in found:
            _log.warning("%s: not served: %s", root, what)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> BrokerServer:
        """Serve, and join the group if any; does nothing after a stop. Raises ``ConfigError`` if a port is in use."""
        with self._life_lock:
            if self._stopped.is_set():
                return self
            try:
                leads = self.store.role is not BrokerRole.SLAVE
                if self.node is None:
                    self._bridge = bridge = self._loop.start()
                    leads = leads and not bridge.run(self._ports.has_successor())
                self.state.start()
                self.store.start()
                if self.node is None:
                    if self._access is not None:
                        self._access.start(bridge.post, self._threads.thread)
                    if leads:
                        self.state.catch_up()
                        self.schedule.start()
                        self.timed.start()
                        self.transactions.start()
                else:
                    self._bridge = bridge = self.node.bridge
                bridge.run(self._ports.open(bridge))
                if self.replication is not None:
                    self.replication.start(self._ports.port)
                self._watcher.start()
            except BaseException:
                self.stop(graceful=False)
                raise
            return self

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until the broker has stopped; returns its exit status (0, or 70 after a fatal error), or None on
        timeout.
        """
        if not self._stopped.wait(timeout_s):
            return None
        return EXIT_FATAL if self.fatal is not None else 0

    def stop(self, *, graceful: bool = True) -> None:
        """Stop: a master first transfers leadership (``graceful``), then accepted requests are answered. Idempotent."""
        with self._life_lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            if graceful and self.fatal is None:
                self.transactions.stop()
                self.timed.stop()
                self.schedule.stop()  # while the node leads, so that the next master knows what was delivered
                self._hand_over()
            self._close_ports(STOP_GRACE_S if graceful else 0)
            if self.replication is not None:
                self.replication.stop(graceful=graceful and self.fatal is None)
            self.transactions.stop()
            self.timed.stop()
            self.schedule.stop()
            self.state.shutdown()
            self._close_store()
            if self._access is not None:
                self._access.close()
            self._loop.stop()
            self._stopped.set()

    def fail(self, error: BaseException) -> None:
        """Acknowledge nothing more, because of ``error``."""
        self._failure = error
        if self.node is not None:
            self.node.fail(error)  # which tells the process of several groups

    @property
    def fatal(self) -> BaseException | None:
        """The error that made the broker stop itself, if any."""
        if self._failure is None and self.node is not None:
            return self.node.fatal
        return self._failure

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._ports.port

    @property
    def grpc_port(self) -> int:
        """The port of gRPC, once started; 0: none."""
        return self._ports.grpc_port

    @property
    def address(self) -> str:
        """The address for clients."""
        return self._ports.address

    @property
    def guard(self) -> AccessGuard | None:
        """Access control; None: everybody may do everything."""
        if self.node is not None:
            return self.node.guard
        return None if self._access is None else self._access.guard

    def view(self) -> GroupView:
        """This broker's view of its group."""
        return self._ports.view()

    @property
    def is_ready(self) -> bool:
        """Whether clients can use it: it serves, knows a master, and knows what is committed."""
        serves = self._ports.broker is not None and not self._stopping.is_set() and self.fatal is None
        return serves and bool(self.view().leader) and self._has_caught_up()

    def measure(self) -> BrokerMeasurements:
        """The broker's measurements for metrics, besides those of its node. May wait for a disk."""
        service = self._ports.counters()
        service = replace(
            service, dropped_messages=service.dropped_messages + self.schedule.dropped_count + self.timed.dropped
        )
        most, now_ms = self.config.metrics_topics_max, self._clock.wall_ms()
        return measure(self.store, self.state, service, topics_max=most, now_ms=now_ms)

    def _role_changed(self, _role: BrokerRole) -> None:
        self.state.wake()
        if self._bridge is not None:
            self._bridge.post(self._ports.role_changed)

    def _close_ports(self, grace_s: float) -> None:
        if self._bridge is not None:
            closing = self._ports.close(grace_s)
            try:
                self._bridge.run(closing)
            except RuntimeError:  # the node failed and its loop is gone
                closing.close()
        if self._ports.broker is not None:
            self._ports.broker.loop.readers.close()

    # -- stopping --------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Transfer leadership while clients are still served, so that they learn the new master's address from this
        one.
        """
        node = self.node
        if node is None or not node.has_peers or not is_leader(node.status()):
            return
        finished = threading.Event()

        def done(result: LeaderHint | DLedgerError) -> None:
            _log.info("%s: handing over: %s", node.name, result)
            finished.set()

        node.submit_transfer(None, done)
        finished.wait(node.config.election.transfer_timeout_ms / 1000 + 1)

    def _close_store(self) -> None:
        store: MessageStore | None = getattr(self, "store", None)
        try:
            if store is not None:
                store.shutdown()
        except (DLedgerError, OSError) as error:
            _log.error("closing the store of broker %s failed: %s", self.config.name, error)
            self.fail(self._failure or error)
        finally:
            if self.node is not None:
                self.node.stop(graceful=False)

    def _watch(self) -> None:
        """Stop the broker if its node failed; on a member, give up leadership if its store failed.

        It also stops if its state or delayed delivery fails, in a group or not, because no broker can do without them.
        """
        clock = ClockWatch(self._clock, self.conditions, lambda: self.store.index_end().store_ms)
        while not self._stopping.wait(WATCH_INTERVAL_S):
            clock.look()
            self.conditions.now()  # removes expired conditions
            failure = self.state.fatal or self.schedule.fatal or self.timed.fatal or self.transactions.fatal
            if self._role_change is not None:
                failure = failure or self._role_change.fatal
            if self.node is not None:
                failure = self.node.fatal or self.store.failure or failure
            if failure is not None:
                _log.critical("stopping broker %s: %s", self.config.name, failure)
                self._fail(failure)
                return
            if self.node is None:
                if self._tls is not None:
                    self._tls.refresh()
                continue
            self._has_caught_up()  # otherwise this would only be noticed at the first read, which would be refused

    def _fail(self, failure: BaseException) -> None:
        self.fail(failure)
        self._stopped.set()


def refuse_other_mode(config: BrokerConfig) -> None:
    """A plain broker must not start on a group member's directory: it would neither see nor continue the group's log.

    The other way round is a road: a group's log continues a plain one (``rocketstore.store.takeover``). Until the group
    has stored its first entry, a plain broker may still go on.

    Raises ``ConfigError`` if a plain broker's start would hide a group's messages.
    """
    if config.dledger is not None:
        return
    store = config.store
    root = store.store_path_root_dir
    plain = any(map(_holds, (*store.commit_log_dirs, *store.read_only_commit_log_dirs)))
    for node in sorted(root.glob("dledger-*")):
        data = node / "data"
        if group_has_begun(node) if plain else _holds(data):
            raise ConfigError(
                [
                    f"{data} holds the log of a group member, which a plain broker cannot read: its messages would "
                    "become unreadable. Set enableDLegerCommitLog=true, or give the plain broker another "
                    "storePathRootDir"
                ]
            )


def _holds(directory: Path) -> bool:
    return any(True for _ in written_segments(directory))


Named = Sequence[tuple[str, BrokerConfig]]
"""Brokers' configurations, each with the name of its file."""

_EVERYWHERE: Final = {"", "0.0.0.0", "::"}
_Key = TypeVar("_Key", int, Path)


class BrokersServer(HostedGroups[BrokerServer]):
    """The constructor opens every broker's directory, and raises what ``BrokerServer`` does, before a port is open."""

    def __init__(
        self,
        named: Named,
        *,
        repair: bool = False,
        clock: Clock | None = None,
        instruments: Callable[[str], Instruments] = lambda _group: SILENT,
    ) -> None:
        """``instruments``: of a group's member."""
        nodes = check_brokers_together(named)
        clock = clock or Clock()

        def make(number: int, host: Host) -> BrokerServer:
            _, config = named[number]
            told = instruments(nodes[number].group)
            return BrokerServer(config, repair=repair, clock=clock, instruments=told, host=host)

        super().__init__(nodes, make, clock, client_ports=False)


def check_brokers_together(named: Named) -> list[ServerConfig]:
    """Check the settings of the brokers of one process; returns those of their nodes.

    Raises ``ConfigError`` with everything that is wrong.
    """
    nodes = [(name, config.dledger) for name, config in named if config.dledger is not None]
    problems = [
        f"{name} is of a plain broker: start it in a process of its own, or set enableDLegerCommitLog=true"
        for name, config in named
        if config.dledger is None
    ]
    problems += [problem for _, config in named for problem in config.problems()]
    if problems:
        raise ConfigError(problems)
    problems += problems_together(nodes, client_ports=False)
    for (one_name, one), (other_name, other) in combinations(named, 2):
        if one.name == other.name:
            problems.append(
                f"{one_name} and {other_name} both have brokerName={one.name}: name servers tell groups apart by it"
            )
        problems += [
            f"{path} is {ours} in {one_name} and {theirs} in {other_name}: each broker needs directories of its own"
            for path, ours, theirs in _common(_directories(one), _directories(other))
        ]
        problems += [
            f"port {port} is {ours} in {one_name} and {theirs} in {other_name}: change one of them; each broker of a "
            "process has ports of its own for clients, by default listenPort, listenPort - 2 (vipPort) and "
            "listenPort + 2 (grpcServerPort)"
            for port, ours, theirs in _common(_ports(one), _ports(other))
            if _may_clash(one.bind_host, other.bind_host)
        ]
    if problems:
        raise ConfigError(problems)
    return [config for _, config in nodes]


def _common(one: Mapping[_Key, str], other: Mapping[_Key, str]) -> Iterator[tuple[_Key, str, str]]:
    for key in sorted(one.keys() & other.keys()):
        yield key, one[key], other[key]


def _ports(config: BrokerConfig) -> dict[int, str]:
    ports = {config.vip_bind_port: "vipPort", config.grpc_bind_port or 0: "grpcServerPort"}
    ports |= {config.listen_port: "listenPort"}
    ports.pop(0, None)
    return ports


def _directories(config: BrokerConfig) -> dict[Path, str]:
    logs = dict.fromkeys((path.absolute() for path in config.store.commit_log_dirs), "storePathCommitLog")
    return {**logs, config.store.store_path_root_dir.absolute(): "storePathRootDir"}


def _may_clash(one: str, other: str) -> bool:
    return one == other or bool({one, other} & _EVERYWHERE)
