"""The state machine of one life of a member: the product's host, applier, snapshots and fetcher, as events.

What has a thread there is a fiber here (``fibers``): a snapshot's files are written call by call, and a transfer goes
piece by piece, while everything else goes on or dies. Files are real ones, on a disk that may lose or tear what is not
synced (``tests.sim_store.disk``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

from dledger.clock import Clock
from dledger.core.messages import Outbox
from dledger.core.node import Node
from dledger.core.ports import PreparedAppend
from dledger.errors import CorruptLogError, DamagedSnapshotError, DLedgerError, UnavailableError
from dledger.monitoring import Conditions
from dledger.rpc.peers.codec import SnapshotRequest
from dledger.rpc.peers.exchanges import PeerSnapshotClient
from dledger.runtime.threads import Supervisor
from dledger.statemachine import applier, fetching, host
from dledger.statemachine.commands import CommandDone
from dledger.statemachine.fetching import SnapshotFetcher
from dledger.statemachine.host import MachineHost, QueryDone
from dledger.store.file_store import FileStore
from dledger.types import NO_INDEX, AppendedBatch, Boundary, Configuration, LogIndex, NodeId, ProducerBatch
from tests.sim.fibers import Fiber, SimClock
from tests.sim.register import ConcurrentRegister, Register
from tests.sim.violations import require
from tests.sim_store.disk import SimFs
from tests.sim_store.threads import Killed

if TYPE_CHECKING:
    from dledger.rpc.ports import OfferedSnapshot
    from tests.sim.driver import SimNode
    from tests.sim.simulation import Simulation


logging.getLogger("dledger").addHandler(logging.NullHandler())  # what a run says is its result


class EventWorker:
    """In the place of ``dledger.runtime.threads.Worker``."""

    def __init__(
        self, machine: Machine, name: str, step: Callable[[], int | None], _clock: Clock, _supervisor: Supervisor
    ) -> None:
        self._machine = machine
        self.name = name
        self._step = step
        self._fiber = machine.new_fiber()
        self._woken = False
        self._due_us: int | None = None
        self.is_alive = False

    def start(self) -> None:
        """See ``Worker``."""
        self.is_alive = True
        self._soon()

    def wake(self) -> None:
        """See ``Worker``."""
        if self._fiber.is_busy:
            self._woken = True
        elif self.is_alive:
            self._soon()

    def stop(self, _timeout_s: float) -> bool:
        """See ``Worker``."""
        self.is_alive = False
        return not self._fiber.is_busy

    def _soon(self) -> None:
        self._schedule(self._machine.now_us + self._machine.wake_up_us())

    def _schedule(self, time_us: int) -> None:
        if self._due_us is None or time_us < self._due_us:
            self._due_us = time_us
            self._machine.at(time_us, self._event, time_us)

    def _event(self, time_us: int) -> None:
        if self._due_us != time_us or not self.is_alive or self._machine.dead:
            return
        if (resumed_us := self._fiber.not_before_us()) > self._machine.now_us:
            self._machine.at(resumed_us, self._event, time_us)
            return
        self._due_us = None
        self._machine.event(self.name)
        if self._machine.is_quick(self.name):
            self._run()
        else:
            self._fiber.run(self._run)

    def _run(self) -> None:
        self._woken = False
        try:
            due_ms = self._step()
        except Exception as error:  # noqa: BLE001 - the supervisor sees everything
            self._machine.failed(error)
            return
        if self._woken:
            self._soon()
        if due_ms is not None:
            self._schedule(max(self._machine.global_us(due_ms), self._machine.now_us + 10))


class EventExecutor:
    """In the place of the threads that answer queries."""

    def __init__(self, machine: Machine, threads: int, **_: object) -> None:
        self._machine = machine
        self._fibers = [machine.new_fiber() for _ in range(threads)]
        self._waiting: deque[tuple[Future[None], Callable[[], object]]] = deque()

    def submit(self, call: Callable[..., object], *arguments: object) -> Future[None]:
        """Run it on one of the threads."""
        future = Future[None]()
        self._waiting.append((future, partial(call, *arguments)))
        self._machine.at(self._machine.now_us + self._machine.wake_up_us(), self._next)
        return future

    def _next(self) -> None:
        free = next((one for one in self._fibers if not one.is_busy), None)
        if self._machine.dead or not self._waiting or free is None:
            return
        if (resumed_us := free.not_before_us()) > self._machine.now_us:
            self._machine.at(resumed_us, self._next)
            return
        self._machine.event("query")
        if self._machine.is_quick("query"):
            self._run()
        else:
            free.run(self._run)

    def _run(self) -> None:
        while self._waiting:
            future, call = self._waiting.popleft()
            call()
            future.set_result(None)


class Transfer:
    """A snapshot on its way, in the place of ``SnapshotTransfer``."""

    def __init__(self, client: SnapshotClient, sender: NodeId, boots: int, offer: OfferedSnapshot) -> None:
        self._client = client
        self._sender = sender
        self._boots = boots
        self._offer = offer

    @property
    def description(self) -> bytes:
        """See ``SnapshotTransfer``."""
        return self._offer.description

    def pieces(self, file: str, offset: int, length: int) -> Iterator[bytes]:
        """See ``SnapshotTransfer``."""
        while offset < length:
            self._client.travel(self._sender, self._boots)
            try:
                data = self._offer.piece(file, offset, self._client.piece_bytes)
            except DLedgerError as error:
                raise UnavailableError(str(error)) from error
            if not data:
                raise UnavailableError(f"it says that {file!r} ends at {offset}")
            offset += len(data)
            yield self._client.damaged(data)


class SnapshotClient:
    """The connection to other members, in the place of ``PeerSnapshotClient``."""

    def __init__(self, machine: Machine, simulation: Simulation, node: SimNode) -> None:
        self._machine: Machine = machine
        self._simulation = simulation
        self._node = node
        self.piece_bytes = machine.random.choice((40, 200, 1000))

    @property
    def peers(self) -> tuple[NodeId, ...]:
        """See ``PeerSnapshotClient``."""
        if self._node.core is None:
            return ()
        state = self._node.core.state
        return (*state.voting_peers, *(one for one in state.peers if one not in state.voting_peers))

    def travel(self, peer: NodeId, boots: int | None = None) -> SimNode:
        """A question reaches ``peer``, and nothing has become of it meanwhile. Raises ``UnavailableError``."""
        simulation, random = self._simulation, self._machine.random
        delay_us = 200 + int(random.random() * 3_000)
        if simulation.slow("slow_transfer", 0.2, self._node):
            delay_us += int(random.random() * 400_000)
        self._machine.sleep_us(delay_us)
        sender, network = simulation.by_name(peer), simulation.network
        if sender.paused_until_us > simulation.scheduler.now_us:
            self._machine.sleep_us(sender.paused_until_us - simulation.scheduler.now_us)
        heard = network.is_heard(peer, self._node.name) and network.is_heard(self._node.name, peer)
        if not heard or sender.core is None or boots not in (None, sender.boots):
            raise UnavailableError(f"{peer} does not answer")
        return sender

    @contextmanager
    def transfer(self, peer: NodeId, request: SnapshotRequest) -> Iterator[Transfer]:
        """See ``PeerSnapshotClient``."""
        sender = self.travel(peer)
        theirs = sender.machine
        if theirs is None:
            raise UnavailableError(f"{peer} has no state machine")
        with ExitStack() as stack:
            try:
                theirs.host.offers.doubt(request.doubted)
                offer = stack.enter_context(theirs.host.offers.offered(request.at_least, request.index))
            except DLedgerError as error:
                raise UnavailableError(str(error)) from error
            except Killed:
                if self._machine.dead:
                    raise
                raise UnavailableError(f"{peer} hung up") from None
            self._simulation.hit("transfer_begun", sender)
            yield Transfer(self, peer, sender.boots, offer)

    def damaged(self, data: bytes) -> bytes:
        """What arrives: sometimes with a flipped bit."""
        simulation, random = self._simulation, self._machine.random
        if not simulation.options.has("corrupt") or simulation.healed_us is not None or random.random() >= 0.02:
            return data
        simulation.hit("snapshot_corrupt", self._node)
        return flipped(data, random)

    def chain_crc(self, peer: NodeId, index: LogIndex) -> int | None:
        """See ``PeerSnapshotClient``."""
        log = self.travel(peer).log
        try:
            return log.chain_crc_at(index) if log.begin.index <= index <= log.committed_index else None
        except CorruptLogError as error:
            raise UnavailableError(str(error)) from error

    def close(self) -> None:
        """See ``PeerSnapshotClient``."""


class Machine:
    """See the module. Raises what ``MachineHost`` raises, and ``Killed``."""

    random: Random

    def __init__(self, simulation: Simulation, node: SimNode) -> None:
        options = simulation.options
        self._simulation = simulation
        self._node = node
        self._life = node.boots
        self._fibers: list[Fiber] = []
        self.dead = False
        self.random = Random(f"machine/{options.seed}/{node.name}/{node.boots}")
        self._fs = SimFs(node.disk, lambda: self.dead)
        node.log.file_system, node.log.directory = self._fs, node.disk.root
        self._clock = cast("Clock", SimClock(lambda: node.now_ms, options.everybody.index(node.name) * 250))
        kind = ConcurrentRegister if options.concurrent_queries else Register
        checks = simulation.machine_checks
        pause = self._pause if options.concurrent_queries else _nothing
        self.register = kind(partial(checks.observe_applied, node), partial(checks.observe_loaded, node), pause)
        conditions = Conditions(node.name, self._clock)
        log, supervisor = cast("FileStore", node.log), cast("Supervisor", self)
        with ExitStack() as stack:
            for module in (applier, fetching):
                stack.enter_context(patch.object(module, "Worker", partial(EventWorker, self)))
            stack.enter_context(patch.object(host, "ThreadPoolExecutor", partial(EventExecutor, self)))
            self.host = MachineHost(node.config, self.register, log, self._clock, supervisor, conditions, lambda: None)
            self.fetcher = SnapshotFetcher(
                node.name,
                self.host,
                self.host.snapshots,
                log,
                cast("PeerSnapshotClient", SnapshotClient(self, simulation, node)),
                self._clock,
                supervisor,
                conditions,
                leader=self._proven_leader,
                is_learner=lambda: node.core is not None and not node.core.state.membership.is_voter,
                fenced=lambda: None,
            )
        self.host.lacks = self.fetcher.want_at_least
        self.host.reset_log = self._reset_log
        self._seen = NO_INDEX

    # -- what the server does --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads."""
        self.host.start()
        self.fetcher.start()

    def tell(self, outbox: Outbox) -> None:
        """What the node's driver tells it."""
        if outbox.fetch_snapshot is not None:
            self.fetcher.want(outbox.fetch_snapshot)
        if outbox.committed is not None:
            self.host.applier.committed()

    def kill(self) -> None:
        """The process is dead."""
        self.dead = True
        for fiber in self._fibers:
            fiber.kill()
        self._fs.let_go()

    def _proven_leader(self) -> NodeId | None:
        core = self._node.core
        leader = core.state.leader_id if core is not None else None
        proven = core is not None and leader is not None and core.handler.leader_check.is_known(leader, core.state.term)
        return leader if proven else None

    def _reset_log(self, at: Boundary, configuration: Configuration | None) -> bool:
        if self._node.core is None:
            raise Killed
        done = self._node.core.handler.adopt_snapshot(at, configuration)
        self._node.settle()
        if self.dead:
            raise Killed
        return done

    def submit(
        self, core: Node, now_ms: int, bodies: list[bytes], done: CommandDone, number: ProducerBatch | None
    ) -> None:
        """A client's commands."""

        def submit(
            prepared: PreparedAppend,
            appended: Callable[[AppendedBatch | DLedgerError], None],
            producer: ProducerBatch | None,
        ) -> None:
            core.quorum_ack.append_prepared(prepared, now_ms, appended, producer)

        self.host.submit_commands(bodies, done, number, submit)

    def query(self, core: Node, now_ms: int, request: bytes, done: QueryDone, *, linearizable: bool) -> None:
        """A client's question, see ``DLedgerServer.submit_query``."""
        if not linearizable:
            self.host.query(request, NO_INDEX, 0, done, even_if_late=True)
            return

        def confirmed(index: LogIndex | DLedgerError) -> None:
            if isinstance(index, DLedgerError):
                done(index)
            else:
                timeout_ms = self._node.config.replication.ack_timeout_ms
                self.host.query(request, index, timeout_ms, done, even_if_late=False)

        core.reads.submit(now_ms, confirmed)

    def look(self) -> None:
        """After each event: a new snapshot is checked, and counts from now on, whatever happens."""
        newest, node = self.host.snapshots.newest, self._node
        held = node.log.begin.index <= self.host.snapshots.newest_index or node.has_damage
        require(held, "a log that begins after the newest snapshot", node.name, node.log.begin)
        if newest is not None and newest.index > self._seen:
            self._seen = newest.index
            node.saved_to = max(node.saved_to, newest.index)
            self._simulation.hit("snapshot_saved", node)
            self._simulation.machine_checks.observe_snapshot(node, newest)

    # -- the supervisor --------------------------------------------------------------------------------------------

    fatal = None

    def run(self, target: Callable[[], None]) -> None:
        """See ``Supervisor``."""
        target()

    def failed(self, error: Exception) -> None:
        """A thread failed: the node's end, which only a disk may bring on."""
        if not isinstance(error, DamagedSnapshotError | OSError):
            raise error
        self._simulation.hit("stopped_itself", self._node)
        self.at(self.now_us, self._die)

    def _die(self) -> None:
        if not self.dead:
            self._simulation.crash(self._node)

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def now_us(self) -> int:
        """The run's."""
        return self._simulation.scheduler.now_us

    def global_us(self, local_ms: int) -> int:
        """When the member's clock will show that."""
        return self._node.global_us(local_ms)

    def at(self, time_us: int, call: Callable[..., None], *arguments: object) -> None:
        """An event."""
        self._simulation.scheduler.at(time_us, call, *arguments)

    def wake_up_us(self) -> int:
        """How long a thread takes to run after it was woken."""
        if self._simulation.slow("slow_apply", 0.1, self._node):
            return int(self.random.random() * 600 * self._simulation.options.tempo)
        chance = self.random.random()
        return int(chance * 400) if chance < 0.97 else int(self.random.random() * 8_000)

    def event(self, what: str) -> None:
        """Something happens here."""
        self._simulation.event(what.removeprefix("dledger-"), self._node)

    def new_fiber(self) -> Fiber:
        """Which ends with this life."""
        fiber = Fiber(self._simulation.fibers, lambda: self._node.paused_until_us)
        self._fibers.append(fiber)
        return fiber

    def is_quick(self, what: str) -> bool:
        """Whether what a thread does now happens all at once: changing threads takes long on a busy machine."""
        if "snapshot" in what or "fetch" in what or ("apply" in what and self.host.applier._installs):
            return False
        return self.random.random() < 0.85

    def sleep_us(self, delay_us: int) -> None:
        """Wait, in a fiber. Raises ``Killed``."""
        self._simulation.fibers.sleep_us(delay_us)

    def _pause(self) -> None:
        if self._simulation.fibers.current is not None and self.random.random() < 0.05:
            self.sleep_us(int(self.random.random() * 3_000))


def _nothing() -> None:
    pass


def flipped(data: bytes, random: Random) -> bytes:
    """The same with another bit."""
    changed = bytearray(data)
    changed[int(random.random() * len(data))] ^= 1 << int(random.random() * 8)
    return bytes(changed)
