"""One member in the simulator: what the production driver does, as events (the contract is ``dledger.core.messages``).

After every call into the core the outbox is taken; the hard state of that moment is saved, and only then messages
leave and completions run. Each part of the core is stepped by an event of its own, at its due time or a random moment
after it was woken, so that the parts interleave in every order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Protocol

from dledger.config import FlushMode
from dledger.core.membership import Membership
from dledger.core.messages import (
    CheckedAppend,
    HeartbeatRequest,
    LoadRun,
    Message,
    Outbox,
    PushAppend,
    VoteRequest,
    Wake,
)
from dledger.core.node import Node
from dledger.core.standing import MemberRun
from dledger.errors import CorruptLogError, IndexBeforeBeginError, IndexOutOfRangeError, InvalidRequestError
from dledger.types import NO_INDEX, NO_TERM, Configuration, EntryRun, LogIndex, NodeId
from tests.sim.directory import MemberDirectory
from tests.sim.machines import Machine
from tests.sim.network import CALLS
from tests.sim.violations import require
from tests.sim_store.threads import Killed
from tests.support.invariants import LastCheck

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class Operation(Protocol):
    """Something a client waits for; a crash of the member loses its answer."""

    def lose(self) -> None:
        """The member went away without an answer."""


class SimNode(MemberDirectory):
    """A directory and, while it runs, a core."""

    def __init__(self, simulation: Simulation, name: NodeId, rate: int) -> None:
        super().__init__(simulation, name, partial(simulation.new_disk, self))
        self._scheduler = simulation.scheduler
        self._random = simulation.random
        self._rate = rate
        self.core: Node | None = None
        self.machine: Machine | None = None
        self.boots = 0
        self.wanted = True
        self.paused_until_us = 0
        self.slow_flush_us = 0
        self.hang_read_until_us = 0
        self.is_async = self.config.store.flush_mode is FlushMode.ASYNC
        self.operations: list[Operation] = []
        self.seen: LastCheck | None = None
        self.seen_sequence = 0
        self.seen_commit = NO_INDEX
        self.seen_leader_term = NO_TERM
        self.started_ms = self.campaigns = 0
        self._saved_version = 0
        self._saving = self._flushing = False
        self._flush_due_us = 0
        self._held: deque[tuple[int, Outbox]] = deque()
        self._pushes: dict[NodeId, deque[Message]] = {}
        self._overflowed: dict[NodeId, bool] = {}
        checker = simulation.checker
        self._observe = checker.observe_damaged if simulation.options.has("damage") else checker.observe
        self._pushes_max = 2 * self.config.replication.inflight_pushes_max + 16
        self._steps: dict[str, Callable[[int], int | None]] = {}
        self._due_us, self._stalled_until_us = dict[str, int](), dict[str, int]()
        self._ahead_ms = 0
        self._resumes_in_disorder = simulation.options.is_new
        self._strikes_sender = simulation.options.has("crash_send") or simulation.options.has("pause_leader")
        self._hears_again = simulation.options.has("stale")

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """This member's own monotonic clock, which runs at its own rate (1000 is true)."""
        return self._scheduler.now_us * self._rate // 1_000_000 + self._ahead_ms

    def global_us(self, local_ms: int) -> int:
        return -(-(local_ms - self._ahead_ms) * 1_000_000 // self._rate)

    def jump(self, ahead_ms: int) -> None:
        """The machine slept: this member's clock is so far ahead all at once, and whatever was to come is overdue."""
        self._ahead_ms += ahead_ms
        if self.core is not None:
            for part in self._steps:
                self._wake(part)

    @property
    def parts(self) -> list[str]:
        """What has a thread of its own."""
        return list(self._steps)

    def stall(self, part: str, until_us: int) -> None:
        """The thread of one part gets no processor until then; all others go on."""
        self._stalled_until_us[part] = until_us

    def free_all(self) -> None:
        """Nothing of this member is slow, full or held up any more."""
        self.log.disk_full = False
        self.slow_flush_us = self.hang_read_until_us = self.paused_until_us = 0
        if self.is_flushing_long and self._simulation.options.is_new:
            self._scheduler.after(1_000, self._flush, self.boots)
        stalled = [part for part, until_us in self._stalled_until_us.items() if until_us > self._scheduler.now_us]
        self._stalled_until_us.clear()
        for part in stalled:
            self._due_us.pop(part, None)
            if self.core is not None:
                self._wake(part)

    @property
    def is_flushing_long(self) -> bool:
        """Whether a flush has begun that takes much longer yet."""
        return self._flushing and self._flush_due_us > self._scheduler.now_us + 40_000

    @property
    def is_stalled(self) -> bool:
        """Whether some part's thread is held up."""
        return any(until_us > self._scheduler.now_us for until_us in self._stalled_until_us.values())

    @property
    def role(self) -> str:
        """What it is at the moment, for people."""
        return "down" if self.core is None else self.core.state.role_name.value.lower()

    @property
    def in_force(self) -> Configuration:
        """Which members count, to it; only while it runs."""
        if self.core is None:
            raise TypeError(self.name)
        return self.core.state.membership.current

    @property
    def held_index(self) -> LogIndex:
        """The last entry that it may say to hold: with ``flush_mode=async`` what is in the page cache, too."""
        return self.log.last.index if self.is_async else self.log.flushed.index

    def _later(self, call: Callable[..., None], arguments: tuple[object, ...], boot: int) -> bool:
        """Whether an event of life ``boot`` must not run now: it is over, or it waits until the member is resumed."""
        if boot != self.boots or self.core is None:
            return True
        if self.paused_until_us > self._scheduler.now_us:
            time_us = self.paused_until_us
            if self._resumes_in_disorder and call == self._step:  # its threads run again in any order
                time_us += int(self._random.random() * 3_000)
            self._scheduler.at(time_us, call, *arguments)
            return True
        return False

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start, or start again on what the disk holds."""
        self.boots += 1
        if self.file_is_lost:
            self.file, self.file_is_lost = replace(self._new_file(), is_lost=True), False
        if self._simulation.options.has_machines and not self._start_machine():
            return
        core = Node(
            self.config,
            log=self.log,
            hard_state=self.hard,
            random=Random(f"core/{self._simulation.options.seed}/{self.name}/{self.boots}"),
            run=MemberRun(self.boots, countersign=7000 + self.boots),
            now_ms=self.now_ms,
            remembered=self.remembered,
            membership=self.recover(),
            uid=self.file.uid,
            machine=None if self.machine is None else self.machine.host,
        )
        self.core = core
        self._simulation.mender.tell(self)
        self.seen = None
        self.seen_sequence = self.log.write_sequence
        self.seen_commit = NO_INDEX
        self.seen_leader_term = NO_TERM
        self.started_ms = self.now_ms
        self.campaigns = 0
        self.paused_until_us = 0
        self._saved_version = 0
        self._saving = self._flushing = False
        self._held.clear()
        self._pushes = {peer: deque() for peer in core.dispatchers}
        self._steps = {
            "elector": core.elector.step,
            "handler": core.handler.step,
            "quorum-ack": core.quorum_ack.step,
            **{f"dispatcher-{peer}": dispatcher.step for peer, dispatcher in core.dispatchers.items()},
        }
        self._due_us.clear()
        self._stalled_until_us.clear()
        self._overflowed.clear()
        for part in self._steps:
            self._wake(part)
        if self.machine is not None:
            self.machine.start()
        self.settle()

    def _start_machine(self) -> bool:
        """Load the newest snapshot; False if the disk did not let it: it is tried again."""
        lost = self.saved_to
        try:
            self.machine = Machine(self._simulation, self)
        except (OSError, Killed):
            self._simulation.hit("start_failed", self)
            self._simulation.crash(self)
            return False
        found = self.machine.host.snapshots.newest_index
        if self.log.begin.index > self.machine.host.applied_index:
            self._simulation.hit("state_lost", self)
        require(found >= lost or self.has_damage, "a durable snapshot is gone", self.name, found, lost)
        self.take_installed()
        return True

    def stop(self, keep_unflushed: int) -> None:
        """Die here and now; ``keep_unflushed`` unflushed changes of the log survive."""
        self.core = None
        if self.machine is not None:
            self.machine.kill()
            self.machine = None
        self.log.crash(keep_unflushed)
        operations, self.operations = self.operations, []
        for operation in operations:
            operation.lose()
        for peer in self._pushes:
            self._simulation.break_stream(peer, self.name)

    def become_whole(self) -> None:
        """What could not be read has been fetched."""
        if self.core is not None and not self.core.state.whole:
            self.core.state.whole = True
            if self.is_unread:
                found = self.recover()
                if self.may_be_old() and not self.core.state.membership.is_explicit:
                    self.core.state.hold_until_told(found)
                    self.settle()
                    return
                if found.committed.index != NO_INDEX:
                    self.core.state.install(found.committed)
                for one in found.appended:
                    self.core.state.adopt(one)
            self.settle()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _wake(self, part: str) -> None:
        chance = self._random.random()
        delay_us = int(chance * 400) if chance < 0.97 else int(self._random.random() * 8_000)
        self._schedule(part, self._scheduler.now_us + delay_us)

    def _schedule(self, part: str, time_us: int) -> None:
        due_us = self._due_us.get(part)
        if due_us is None or time_us < due_us:
            self._due_us[part] = time_us
            self._scheduler.at(time_us, self._step, part, time_us, self.boots)

    def _step(self, part: str, due_us: int, boot: int) -> None:
        if self._due_us.get(part) != due_us or self._later(self._step, (part, due_us, boot), boot):
            return
        if self._stalled_until_us and self._stalled_until_us.get(part, 0) > self._scheduler.now_us:
            self._scheduler.at(self._stalled_until_us[part], self._step, part, due_us, boot)
            return
        del self._due_us[part]
        simulation = self._simulation
        simulation.event(part, self)
        step = self._steps.get(part)
        if step is None:
            return  # of a peer that is none any more
        due_ms = step(self.now_ms)
        if part == "elector":
            simulation.checker.members.observe_contact(self)
        if due_ms is not None:
            if due_ms <= self.now_ms:
                self._wake(part)
            else:
                self._schedule(part, self.global_us(due_ms))
        self.settle()

    def settle(self) -> None:
        """What the driver does after each call: take the outbox, look, save, and let go what may go."""
        core = self.core
        if core is None:
            return
        state = core.state
        outbox = state.outbox
        if outbox:
            if outbox.membership is not None:
                self._observe(self)  # what it does may be its end
                if self._follow_membership(core, outbox.membership):
                    return
            self._tell(outbox)
            if outbox.messages or outbox.completions or outbox.role_changes:
                self._held.append((state.hard_state_version, outbox.take()))
            else:
                outbox.take()
        self._observe(self)
        if state.hard_state_version != self._saved_version and not self._saving:
            self._saving = True
            slow = self._simulation.slow("slow_save", 0.3, self)
            if slow:
                delay_us = int(self._random.random() * self._random.choice((2_000, 20_000, 400_000)))
                self._scheduler.after(delay_us * self._simulation.options.tempo // 1000, self._save, self.boots)
            else:
                self._save(self.boots)
        elif self._held:
            self._release()

    def _tell(self, outbox: Outbox) -> None:
        """What its own threads and the world are told."""
        if outbox.damage:
            self._simulation.hit("damage_met", self)
            self._simulation.mender.look_after(self)
        if outbox.wake:
            self._wake_workers(outbox.wake)
        if self.machine is not None:
            self.machine.tell(outbox)
        if self._hears_again and outbox.role_changes:
            self._simulation.network.replay(self.name, leads=self.role == "leader")

    def _follow_membership(self, core: Node, membership: Membership) -> bool:
        """Begin and end lanes, and save what is committed; True if it dies over that."""
        for peer in [peer for peer in self._pushes if peer not in core.dispatchers]:
            del self._pushes[peer]
            self._steps.pop(f"dispatcher-{peer}", None)
            self._overflowed.pop(peer, None)
        for peer, dispatcher in core.dispatchers.items():
            if self._steps.get(f"dispatcher-{peer}") != dispatcher.step:
                self._pushes[peer] = deque()
                self._steps[f"dispatcher-{peer}"] = dispatcher.step
                self._wake(f"dispatcher-{peer}")
        self.take_installed()
        known = self.file.configuration
        if membership.committed.index <= (NO_INDEX if known is None else known.index):
            return False
        crash = self._simulation.file_crash_point(self)
        if crash == "before":
            self._simulation.crash(self)
            return True
        self.file = replace(self.file, configuration=membership.committed, is_lost=False)
        if crash == "after":
            self._simulation.crash(self)
        return bool(crash)

    def _wake_workers(self, wake: int) -> None:
        if wake & Wake.ELECTOR:
            self._wake("elector")
        if wake & Wake.HANDLER:
            self._wake("handler")
        if wake & Wake.QUORUM_ACK:
            self._wake("quorum-ack")
        if wake & Wake.DISPATCHERS:
            for peer in self._pushes:
                self._wake(f"dispatcher-{peer}")
        if wake & Wake.FLUSH and not self._flushing:
            self._flushing = True
            delay_us = int(self._random.random() * (20_000 if self._random.random() < 0.2 else 2_000))
            if self.is_async and self._simulation.healed_us is None:
                delay_us += int(self._random.random() * 10_000)  # it comes once per period, and nobody waits for it
            if self.slow_flush_us:
                delay_us += int(self._random.random() * self.slow_flush_us)
                self._simulation.hit("slow_flush", self)
            self._flush_due_us = self._scheduler.now_us + delay_us
            self._scheduler.after(delay_us, self._flush, self.boots)

    def _flush(self, boot: int) -> None:
        if self._later(self._flush, (boot,), boot) or self.core is None:
            return
        self._simulation.event("flush", self)
        self._flushing = False
        self.log.flush()
        if not self._simulation.options.is_changing or self._uids.random() < 0.2:
            self.save_file(self.core.state)
        self.core.flushed()
        self.settle()

    def _save(self, boot: int) -> None:
        """Save the hard state of this moment, then let go what waited for it; a crash may come before or after."""
        if self._later(self._save, (boot,), boot) or self.core is None:
            return
        state = self.core.state
        crash = self._simulation.crash_point(self)
        if crash == "before":
            self._simulation.crash(self)
            return
        self._simulation.checker.observe_save(self, state.hard_state)
        self.hard = state.hard_state
        if crash == "after":
            self._simulation.crash(self)
            return
        self._saved_version = state.hard_state_version
        self._saving = False
        self._release()

    def _release(self) -> None:
        """Let go, in order, what depends on nothing that is not durable."""
        held = self._held
        boot = self.boots
        while held and held[0][0] <= self._saved_version and boot == self.boots and self.core is not None:
            outbox = held.popleft()[1]
            for target, message in outbox.messages:
                self._simulation.checker.observe_send(self, target, message)
                self._emit(target, message)
                if self._strikes_sender and self._simulation.nemesis.strikes_sender(self, message):
                    return  # what it was to send then, it never sent
            for complete in outbox.completions:
                complete()

    # -- messages ------------------------------------------------------------------------------------------------

    def _emit(self, target: NodeId, message: Message) -> None:
        simulation = self._simulation
        if isinstance(message, CALLS):
            simulation.network.send(self.name, target, message)
            return
        waiting = self._pushes.get(target)
        if waiting is None:
            if not isinstance(message, LoadRun):  # an answer goes back on its connection
                simulation.network.send(self.name, target, message)
        elif waiting or isinstance(message, LoadRun):
            if self.hang_read_until_us and len(waiting) >= self._pushes_max:
                self._overflowed[target] = True
                return
            waiting.append(message)
            if len(waiting) == 1:
                slow_us = 300 * simulation.options.tempo
                delay_us = slow_us if simulation.slow("slow_read", 0.1, self) else 300
                time_us = self._scheduler.now_us + int(self._random.random() * delay_us)
                if self.hang_read_until_us > time_us:
                    simulation.hit("read_hung", self)
                    time_us = self.hang_read_until_us
                self._scheduler.at(time_us, self._push, target, self.boots)
        else:
            simulation.network.send(self.name, target, message)

    def _push(self, target: NodeId, boot: int) -> None:
        """The stream's sender: read what is to be sent, outside the lock, and send everything in order."""
        if self._later(self._push, (target, boot), boot) or self.core is None:
            return
        self._simulation.event("push", self)
        waiting = self._pushes.get(target, deque())
        while waiting:
            message = waiting.popleft()
            if isinstance(message, LoadRun):
                run = self._load(message)
                if run is None:
                    waiting.clear()
                    self.core.connection_lost(target)
                    break
                if self.core.state.term != message.term:
                    self._simulation.hits["overtaken"] += 1
                    continue  # by now the bytes may be another leader's
                self._simulation.checker.members.observe_push(self, target, message.last_index)
                message = PushAppend(message.term, message.epoch, message.commit_index, run)
            self._simulation.network.send(self.name, target, message)
        if self._overflowed.pop(target, False):  # something was dropped: compare anew
            self.core.connection_lost(target)
        self.settle()

    def _load(self, message: LoadRun) -> EntryRun | None:
        try:
            return self.log.read_run(message.first_index, message.last_index)
        except (IndexBeforeBeginError, IndexOutOfRangeError):
            self._simulation.hits["gone"] += 1
            return None
        except CorruptLogError:
            self._simulation.mender.look_after(self)
            return None

    def deliver(self, sender: NodeId, message: Message, boot: int) -> None:
        """A message arrives."""
        if self._later(self.deliver, (sender, message, boot), boot) or self.core is None:
            return
        core = self.core
        self._simulation.event("receive", self, sender, message)
        if isinstance(message, VoteRequest | HeartbeatRequest):
            response = core.answer(sender, message, self.now_ms)
            core.state.outbox.messages.append((sender, response))
        elif isinstance(message, PushAppend):
            try:
                checked = self.log.check_run(self._simulation.damaged(message.run, self))
            except InvalidRequestError:
                self._simulation.break_stream(sender, self.name)
                return
            core.receive(sender, CheckedAppend(message.term, message.epoch, message.commit_index, checked), self.now_ms)
        else:
            core.receive(sender, message, self.now_ms)
        self.settle()

    def lose_connection(self, peer: NodeId, boot: int) -> None:
        """The stream towards ``peer`` broke."""
        if self._later(self.lose_connection, (peer, boot), boot) or self.core is None:
            return
        self._simulation.event("connection lost", self, peer)
        if peer not in self._pushes:
            return
        self._pushes[peer].clear()
        self.core.connection_lost(peer)
        self.settle()

    # -- what people ask -----------------------------------------------------------------------------------------

    def ask(self, question: Callable[[Node, int], None], boot: int) -> None:
        """Call into the core for a client or an operator."""
        if self._later(self.ask, (question, boot), boot) or self.core is None:
            return
        self._simulation.event("ask", self)
        question(self.core, self.now_ms)
        self.settle()
