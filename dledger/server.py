"""One complete node: store, core, threads, transports. The only module in which they all meet."""

from __future__ import annotations

import logging
import random
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from dledger.access.guard import AccessGuard
from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.core.member_state import Leader
from dledger.core.membership import Membership
from dledger.core.messages import Envelope, Message, PushAppend, RoleChange, RoleReason
from dledger.core.node import Node
from dledger.core.noops import Wrap
from dledger.core.ports import BatchHook
from dledger.core.standing import MemberRun
from dledger.errors import CorruptLogError, FencedError
from dledger.group_members import MemberRecords, MemberWatch
from dledger.host import Host, ServedLog
from dledger.log_output import speaks_for
from dledger.maintenance import LogMaintenance
from dledger.monitoring import SILENT, ConditionKind, Conditions, Instruments
from dledger.node_status import NodeMeasurements, NodeReports
from dledger.records import record
from dledger.remoting.log_service import LogHandlers
from dledger.requests import ClientRequests, PeerMessages
from dledger.rpc.clients.grpc_server import GrpcServer
from dledger.rpc.loops import LoopBridge
from dledger.rpc.peers.exchanges import PeerLogClient, PeerSnapshotClient
from dledger.rpc.peers.identity import BaseLogs, PeerAddresses, PeerIdentity
from dledger.rpc.peers.transport import PeerTransport
from dledger.rpc.ports import CommitEvent, NodeEvent, NodeStatus, RoleEvent
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.runtime.driver import SHARED_PATIENCE_S, Effects, NodeDriver
from dledger.runtime.events import NodeLines, PushTimes, RoleChangeHandler, RoleChangeNotifier
from dledger.runtime.threads import EXIT_FATAL, JOIN_TIMEOUT_S, Supervisor, Task
from dledger.statemachine.fetching import SnapshotFetcher
from dledger.statemachine.host import MachineHost
from dledger.statemachine.ports import StateMachine
from dledger.store.bulk_reader import StoreTime
from dledger.store.identity import layout_of, read_identity
from dledger.types import BaseLog, Boundary, Configuration, Entry, LogIndex, NodeId
from dledger.watch import LogWatch, ScrubbedStore, WatchSettings, open_log

_log = logging.getLogger("dledger")


@record(frozen=True, slots=True)
class BodyFormat:
    """The format of an application's entry bodies, as far as a node must know it."""

    wrap_noop: Wrap | None = None
    """Makes the bodies of NOOPs, in a log whose readers take every body for one of their records."""
    store_time: StoreTime | None = None
    """The store time of a body; None: entries have no times."""


OPAQUE: Final = BodyFormat()
"""Bodies of any format."""


class DLedgerServer(ClientRequests):
    """A member of a group, from its directory to its ports. Use ``start``, ``wait`` and ``stop``.

    Implements ``rpc.ports.LogNode`` (requests of clients). Raises from the constructor, before a port is open:
    ``ConfigError``, ``IdentityError``, ``DirectoryLockedError``, ``CorruptLogError`` (``repair=True`` sets a damaged
    log aside and fetches it again from the peers).
    """

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        config: ServerConfig,
        *,
        repair: bool = False,
        clock: Clock | None = None,
        instruments: Instruments = SILENT,
        bodies: BodyFormat = OPAQUE,
        base_log: Callable[[], BaseLog | None] = lambda: None,
        client_ports: bool = True,
        state_machine: StateMachine | None = None,
        host: Host | None = None,
    ) -> None:
        """``base_log``: of the older log that this one continues, as it is now; its ``end`` must not change.

        ``client_ports`` False: a broker serves clients of the log, at its own ports. ``state_machine``: what the log's
        entries are applied to; every member of the group must have the same. ``host``: of a process of several groups,
        this one among them; it is started before, and stopped after.
        """
        self._has_ports = client_ports
        self.bodies: Final = bodies
        self._base_log = base_log
        self._config = config = _of_its_cluster(config.check())
        self._instruments = instruments
        measured = instruments is not SILENT
        self._push_times = PushTimes(instruments) if measured else None
        self.grpc_port = 0
        """The port of gRPC, once started; 0: none. A broker sets its own."""
        self._cluster_id = config.effective_cluster_id
        self._clock = clock or Clock()
        self.name: Final = config.node_id if host is None else f"{config.group}/{config.node_id}"
        """How log lines call this node."""
        self.conditions = Conditions(self.name, self._clock, config.group)
        """The present problems of this node, set by the code that notices them."""
        self._stopped = threading.Event()
        self._life_lock = threading.RLock()  # one start or stop at a time; a failed start stops
        self._supervisor = Supervisor(self._failed, config.group)
        self._owns_host = host is None
        self._host = host or Host([config], self._clock, self._supervisor)
        self._patience_s = None if len(self._host.groups) == 1 else SHARED_PATIENCE_S
        with speaks_for(config.group):
            self.log = open_log(config, self._clock, instruments, base_log(), repair=repair)
        self.bulk = self.log.bulk_reader(self._refuse_if_fenced, bodies.store_time)
        """See ``LogNode.bulk``; its reads raise ``FencedError``."""
        self._lines = NodeLines(self.name)
        self._state_machine = state_machine
        self._machine: MachineHost | None = None
        try:
            with speaks_for(config.group):
                self._wire()
        except BaseException:
            self.log.close()
            raise

    def _failed(self, error: BaseException) -> None:
        self._stopped.set()
        self._host.failed(self._config.group, error)

    @property
    def tls(self) -> TlsKeeper | None:
        """The certificates in use; None for plaintext."""
        return self._host.tls

    def _wire(self) -> None:
        config = self._config
        if self._state_machine is not None:
            self._machine = MachineHost(
                config,
                self._state_machine,
                self.log,
                self._clock,
                self._supervisor,
                self.conditions,
                lambda: self._fenced_error() if self.fenced else None,
            )
        now_ms = self._clock.monotonic_ms()
        self._records = MemberRecords(config, self.log)
        self._node = Node(
            config,
            log=self.log,
            hard_state=self.log.hard_state.load(),
            random=random.Random(secrets.randbits(64)),
            run=MemberRun(boot_id=secrets.randbits(62), countersign=1 + secrets.randbits(62)),
            now_ms=now_ms,
            remembered=self.log.members.saved.remembered,
            wrap_noop=self.bodies.wrap_noop,
            membership=self._records.find(),
            uid=self._records.uid,
            machine=self._machine,
        )
        name = config.node_id
        self._lines.members_are(self._node.state.membership)
        self._member_watch = MemberWatch(config, self._node.state.membership, self.conditions, self._clock)
        self._roles = RoleChangeNotifier(name, self._supervisor)
        self._reports = NodeReports(
            config,
            self._node,
            self.log,
            self.conditions,
            self._clock,
            self._client_address_of,
            lambda: self.grpc_port,
            lambda: self._supervisor.fatal is not None,
            self._machine,
        )
        self._leader_hint = self._reports.hint
        base_logs = BaseLogs(self._base_log, self._compared_base_logs)
        self._addresses = PeerAddresses(config.node_id, config.peers, self._node.state.membership.copy())
        self._identity = PeerIdentity.of(config, base_logs, self._addresses)
        self._peer_log = PeerLogClient(self._identity, self.tls, self._learn)
        self._watch = self._make_watch(self._peer_log)
        self._driver = NodeDriver(
            config,
            self._node,
            self.log,
            self._clock,
            self._supervisor,
            Effects(
                save=self.log.hard_state.save,
                send=self._send,
                role_change=self._role_changed,
                commit=self._publish_commit,
                damage=self._found_damage,
                fenced=self._tell_fenced,
                flushed=lambda: self._maintenance.log_changed(),
                members=self._members_changed,
                fetch_snapshot=lambda fetch: self._fetcher.want(fetch) if self._fetcher is not None else None,
            ),
            self._host.housekeeping.timers,
            self._patience_s,
        )
        self._peer_messages = PeerMessages(
            self._node, self.log, self._driver, self._clock, self._member_watch, self._push_times, self._patience_s
        )
        self._fetcher = None if self._machine is None else self._make_fetcher(self._machine)
        if self.fenced:
            self._tell_fenced(self.fenced)
        self._listeners_lock = threading.Lock()  # guards the replacement of _commit_listeners
        self._commit_listeners: tuple[Callable[[NodeEvent], None], ...] = ()
        self._roles.listen(self._lines.role_changed)
        self._roles.listen(self._note_lost_leadership)
        self._transport: PeerTransport | None = None  # from `start` on: peers get the client port in use
        self._host.add(ServedLog(config, self, self.conditions))
        self._maintenance = LogMaintenance(
            config,
            self._node,
            self.log,
            self._driver,
            self.conditions,
            self._clock,
            self._supervisor,
            self._records,
            self._look_after_members,
            self._host.housekeeping,
            self._machine,
        )
        self._scrub = Task(self._host.housekeeping.scrub, self._watch.step, self._supervisor)
        self._tasks = [self._scrub]
        self.log.on_damage(self._watch.note_damage)  # only now: the watch reads and mends the log that calls it
        for damage in (*self.log.damage_at_start, *self._records.damage):
            self._node.state.whole = False
            self._watch.note_damage(damage)

    def _make_watch(self, peers: PeerLogClient) -> LogWatch:
        """The log's background verification and repair."""
        settings = WatchSettings(self._config.store.scrub_bytes_per_s, self._config.store.auto_repair)
        name, log = self._config.node_id, ScrubbedStore(self.log)
        return LogWatch(
            name,
            log,
            peers,
            settings,
            self.conditions,
            self._clock,
            wake=lambda: self._scrub.wake(),  # which steps it
            on_diverged=self._fence,
            on_whole=self._become_whole,
        )

    def _make_fetcher(self, machine: MachineHost) -> SnapshotFetcher:
        """Fetches snapshots for the state machine."""
        node, state = self._node, self._node.state

        def proven_leader(_node: Node) -> NodeId | None:
            leader = state.leader_id
            proven = leader is not None and node.handler.leader_check.is_known(leader, state.term)
            return leader if proven else None

        def reset_log(at: Boundary, configuration: Configuration | None) -> bool:
            return self._driver.call(lambda _now_ms: node.handler.adopt_snapshot(at, configuration))

        fetcher = SnapshotFetcher(
            self.name,
            machine,
            machine.snapshots,
            self.log,
            PeerSnapshotClient(self._identity, self.tls, self._learn),
            self._clock,
            self._supervisor,
            self.conditions,
            leader=lambda: self._driver.look(proven_leader),
            is_learner=lambda: not state.membership.is_voter,
            fenced=lambda: self._fenced_error() if self.fenced else None,
        )
        machine.lacks = fetcher.want_at_least
        machine.reset_log = reset_log
        return fetcher

    def _found_damage(self, damage: CorruptLogError) -> None:
        """If the log cannot be repaired from peers, a part of the core that finds damage ends the node."""
        mended = self.has_peers and self._config.store.auto_repair
        (self._watch.note_damage if mended else self._supervisor.report)(damage)

    def _become_whole(self) -> bool:
        """Everything that a peer can mend is mended: this member counts again from now on, if its memory is valid.

        Returns whether it does: damage behind the committed part may still hide what it must read.
        """

        def count(_now_ms: int) -> None:
            self._node.state.whole = self._records.read_on(self._node.state)

        if not self._node.state.whole:
            self._driver.call(count)
        return self._node.state.whole

    @property
    def fenced(self) -> str:
        """Why this member serves nothing; empty if it does."""
        return self._node.state.fenced

    def _fence(self, reason: str) -> None:
        """Most members hold another history: nothing here may be read, and this member counts for nothing."""
        self._driver.call(lambda now_ms: self._node.state.fence(reason, now_ms))

    def _tell_fenced(self, reason: str) -> None:
        advice = (
            "it serves nothing. Find out what wrote to its directory, then keep the directory and start the "
            "node with --repair"
        )
        self.conditions.set(ConditionKind.FENCED, f"{reason}: {advice}")
        if self._machine is not None:
            self._machine.applier.wake()  # it ends what waits

    def _compared_base_logs(self, peer: NodeId, apart: str) -> None:
        if apart:
            self.conditions.set(ConditionKind.OTHER_OLD_LOG, apart, subject=peer)
        else:
            self.conditions.clear(ConditionKind.OTHER_OLD_LOG, peer)

    def _note_lost_leadership(self, change: RoleChange) -> None:
        if change.reason is RoleReason.NO_PROGRESS:
            why = (
                "as leader it had a quorum but committed none of the waiting entries: it now leaves leadership "
                "to the others"
            )
            self.conditions.set(ConditionKind.STUCK_LEADER, why, for_ms=_STUCK_TOLD_MS)

    def _refuse_if_fenced(self) -> None:
        if self.fenced:
            raise self._fenced_error()

    def _fenced_error(self) -> FencedError:
        return FencedError(f"{self._config.node_id} is fenced: {self.fenced}. Ask another member")

    # -- life ----------------------------------------------------------------------------------------------------

    def add_batch_hook(self, hook: BatchHook) -> None:
        """Run ``hook`` on every batch this node appends as leader; only before ``start``."""
        self.log.add_batch_hook(hook)

    def keep_from(self, wanted: Callable[[], int | None], held_back: Callable[[int], None]) -> None:
        """Remove nothing from the position returned by ``wanted`` on (None: no limit); only before ``start``.

        ``wanted`` may wait for the disk. ``held_back``, which must be fast, gets the position up to which more would
        have been removed.
        """
        self._maintenance.retention.keep_from(wanted, held_back)

    def add_role_change_handler(self, handler: RoleChangeHandler) -> None:
        """Notify ``handler`` of role changes; only before ``start``."""
        self._roles.add_handler(handler)

    def start(self) -> DLedgerServer:
        """Open the ports and join the group; does nothing after a stop. Raises ``ConfigError`` if a port is taken."""
        with self._life_lock:
            if self._stopped.is_set():
                return self
            with speaks_for(self._config.group):
                self._lines.recovered(self.log.recovery_report)
            try:
                if self._owns_host:
                    self._host.start(client_ports=self._has_ports)
                self.grpc_port = self._host.clients.grpc_port
                self._node.elector.client_address = self.client_address  # only now: the port may be chosen freely
                self._transport = PeerTransport(
                    self._config,
                    client_address=self.client_address,
                    bridge=self._host.clients.bridge,
                    tls_keeper=self.tls,
                    log=self.log,
                    snapshots=None if self._machine is None else self._machine.offers,
                    identity=self._identity,
                    port=self._host.peer_port,
                    report=self._supervisor.report,
                )
                self._transport.start(self._peer_messages)
                if self._owns_host:
                    self._host.accept()
                self._roles.start()
                self._driver.start()
                if self._machine is not None:
                    self._machine.start()
                if self._fetcher is not None:
                    self._fetcher.start()
                self._maintenance.start()
                for task in self._tasks:
                    task.start()
            except BaseException:
                self.stop(graceful=False)
                raise
            return self

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Block until the node has stopped: its exit status (0, or 70 after a fatal error), None on timeout."""
        if not self._stopped.wait(timeout_s):
            return None
        return EXIT_FATAL if self._supervisor.fatal is not None else 0

    def stop(self, *, graceful: bool = True) -> None:
        """Stop: a leader first transfers leadership (``graceful``), then everything is closed. Idempotent.

        If the store cannot be closed properly, the stop counts as a failure: see ``wait`` and ``fatal``.
        """
        with self._life_lock:
            if graceful and self._supervisor.fatal is None and not self._stopped.is_set():
                self._step_down()
            if self._transport is not None:
                self._transport.close()  # before the clients' event loop, on which its pushes run
            if self._owns_host:
                self._host.close_ports()
            self._watch.stop()
            self._peer_log.close()
            if self._fetcher is not None:
                self._fetcher.stop(JOIN_TIMEOUT_S)
            self._maintenance.stop()
            for task in self._tasks:  # before the driver, which they use
                task.stop(JOIN_TIMEOUT_S)
            self._driver.stop()
            if self._owns_host:
                self._host.stop()
            if self._machine is not None:
                self._machine.stop(graceful=graceful)
            self._roles.stop()
            self._maintenance.save_remembered()
            self._supervisor.run(self.log.close)
            self._stopped.set()

    def _step_down(self) -> None:
        """Transfer leadership to the most up-to-date peer, or give up after the transfer's own time limit."""
        if not self._node.state.peers or not self._driver.look(lambda node: isinstance(node.state.role, Leader)):
            return
        finished = threading.Event()
        self.submit_transfer(None, lambda _result: finished.set())
        finished.wait(self._config.election.transfer_timeout_ms / 1000 + 1)

    def fail(self, error: BaseException) -> None:
        """Stop acknowledging because of ``error``, as after a failure of its own."""
        self._supervisor.report(error)

    @property
    def fatal(self) -> BaseException | None:
        """Why the node stopped itself, if it did."""
        return self._supervisor.fatal

    @property
    def client_address(self) -> str:
        """The node's address for clients."""
        return self._config.advertised_client_address or self._host.client_address

    @property
    def config(self) -> ServerConfig:
        """The configuration it was created with."""
        return self._config

    @property
    def bridge(self) -> LoopBridge:
        """The bridge to the event loop that serves clients, from ``start`` to ``stop``: others may serve there, too."""
        return self._host.clients.bridge

    @property
    def guard(self) -> AccessGuard | None:
        """Access control, for another server on ``bridge``; None: everything is allowed."""
        return self._host.guard

    @property
    def log_handlers(self) -> LogHandlers:
        """The log's handlers over remoting, from ``start`` on, for a broker's server on ``bridge``."""
        return self._host.clients.log_handlers(self._config.group)

    def grpc_server(self, name: str, connection_calls_max: int) -> GrpcServer:
        """A server of this log's service, not started yet, for a broker; on ``bridge``'s loop, from ``start`` on.

        ``name``: of the thread that watches its connections. ``connection_calls_max``: instead of the node's.
        """
        return self._host.clients.grpc_server(name, (self._config.group,), connection_calls_max)

    def _send(self, target: NodeId, message: Message) -> None:
        config = self._config
        if self._push_times is not None and isinstance(message, PushAppend):
            self._push_times.sent(target, message)
        if self._transport is not None:
            self._transport.send(Envelope(self._cluster_id, config.group, config.node_id, target, message))

    # -- LogNode: what clients read and follow ----------------------------------------------------------------------

    def read(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> list[Entry]:
        """See ``LogNode.read``. Raises ``FencedError``."""
        self._refuse_if_fenced()
        return self.log.read_range(first_index, last_index, max_bytes)

    def subscribe(self, listener: Callable[[NodeEvent], None]) -> Callable[[], None]:
        with self._listeners_lock:
            self._commit_listeners = (*self._commit_listeners, listener)
        cancel_roles = self._roles.listen(lambda change: listener(self._role_event(change)))

        def cancel() -> None:
            cancel_roles()
            with self._listeners_lock:
                self._commit_listeners = tuple(one for one in self._commit_listeners if one is not listener)

        return cancel

    def status(self) -> NodeStatus:
        return self._driver.look(self._reports.status)

    def measure(self) -> NodeMeasurements:
        """The figures for metrics beyond those of ``Instruments``. Holds the node's lock as briefly as ``status``."""
        transport = self._transport
        dropped = {} if transport is None else {peer: transport.dropped(peer) for peer in self._addresses.peers}
        return self._reports.measure(self._driver, dropped)

    # -- events --------------------------------------------------------------------------------------------------

    def _role_changed(self, change: RoleChange) -> None:
        self._reports.role_changed(change)
        self._roles.publish(change)

    def _members_changed(self, membership: Membership, spoken_with: frozenset[NodeId]) -> None:
        self._addresses.adopt(membership, spoken_with)
        self._records.save(membership)
        self._lines.members_changed(membership)
        self._member_watch.members_changed(membership)

    def _look_after_members(self) -> None:
        self._member_watch.look(self.status(), self._node.state.removed_at)
        if problem := self._records.problem:
            self.conditions.set(ConditionKind.NO_STANDING, problem, subject="members")
        else:
            self.conditions.clear(ConditionKind.NO_STANDING, "members")

    @property
    def has_peers(self) -> bool:
        """Whether its group has other members at this moment."""
        return bool(self._node.state.peers)

    def _publish_commit(self, index: LogIndex) -> None:
        self._maintenance.log_changed()
        if self._machine is not None:
            self._machine.applier.committed()
        event = CommitEvent(index)
        for listener in self._commit_listeners:
            listener(event)

    def _role_event(self, change: RoleChange) -> RoleEvent:
        return RoleEvent(self._config.node_id, change.role, change.term, self._reports.hint(change.leader))

    def _learn(self, peer: NodeId, client_address: str) -> None:
        """Followers say nothing to each other but when they compare logs."""
        if self._transport is not None:
            self._transport.learn(peer, client_address)

    def _client_address_of(self, node_id: NodeId) -> str:
        if node_id == self._config.node_id:
            return self.client_address
        return "" if self._transport is None else self._transport.client_addresses.get(node_id, "")


def _of_its_cluster(config: ServerConfig) -> ServerConfig:
    """A directory knows the cluster that it belongs to; a configured id must be that one."""
    with suppress(CorruptLogError):  # opening it says so
        known = read_identity(layout_of(config.store, config.node_id).directory)
        if known is not None and not config.cluster_id:
            return replace(config, cluster_id=known.cluster_id)
    return config


_STUCK_TOLD_MS = 60_000
"""How long status and metrics report that a leader made no progress."""
