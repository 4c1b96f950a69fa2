"""Any order of prepared, ended, repeated, refused, unknown, checked and lost transactions, over masters that die.

The log is a list of records, of which a master's death takes any that are not committed. Whatever happens, each half
has at most one commit in it, and none behind an op; and in the end each has ended as its producer says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rocketstore.broker.transactions.checks import AskedDone, Askers, Check
from rocketstore.broker.transactions.halves import op_target
from rocketstore.broker.transactions.run import EndRefusedError, NotReadyError, Run
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import LOOPBACK
from rocketstore.message.record import decode_record
from rocketstore.types import HALF_TOPIC, OP_TOPIC, BrokerRole
from tests.support.sweeps import fewer
from tests.support.waiting import ManualClock
from tests.unit.rocketstore.broker.transactions.bench import GROUP, half
from tests.unit.rocketstore.broker.transactions.fakes import Log, State, Store

INTERVAL_MS = 60_000
MODES = st.sampled_from(["ok", "ok", "ok", "late", "unknown", "refused"])


class Transactions(RuleBasedStateMachine):
    """A producer's transactions, by the positions of their half messages."""

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.state = State()
        self.clock = ManualClock()
        self.stores = [Store(self.log, clock=self.clock), Store(self.log, clock=self.clock, role=BrokerRole.SLAVE)]
        self.known: list[tuple[int, int]] = []
        self.wants: dict[int, bool] = {}
        self.made = 0
        self.checks: list[Check] = []
        self.late: list[Callable[[], None]] = []
        for store in self.stores:
            store.add_arrival_listener(lambda heads: self.run_.on_arrival(heads))
        self.run_ = self._new_run()

    def _new_run(self) -> Run:
        askers = Askers()
        askers.add(self._asked)
        config = BrokerConfig(
            transaction_check_interval=INTERVAL_MS, transaction_time_out=0, transaction_check_max=1000
        )
        return Run(config, self.master, self.state, self.clock, lambda: LOOPBACK, askers)

    def _asked(self, checks: Sequence[Check], done: AskedDone) -> None:
        self.checks += checks
        done([one.queue_offset for one in checks])

    @property
    def master(self) -> Store:
        return self.stores[0]

    # -- producers -----------------------------------------------------------------------------------------------------

    @rule(mode=MODES, commit=st.booleans())
    def prepare(self, mode: str, commit: bool) -> None:
        """Whatever the producer hears of it, it may be asked about it."""
        self.master.mode = mode
        before = len(self.log.records)
        self.master.submit([half(b"%d" % self.made)], lambda _results: None)
        self.made += 1
        if len(self.log.records) > before:
            head = self.log.records[-1].head
            self.wants[head.offset] = commit
            if self.log.committed == len(self.log.records):
                self.known.append((head.queue_offset, head.offset))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), mode=MODES, contradict=st.booleans())
    def end(self, data: st.DataObject, mode: str, contradict: bool) -> None:
        """Also one that has ended; and at times by a producer that says something else than before."""
        place = data.draw(st.sampled_from(self.known))
        commit = self.wants[place[1]] ^ (contradict and data.draw(st.booleans()))
        self.master.mode = mode
        self._end(*place, commit=commit)
        self.master.mode = "ok"

    def _end(self, queue_offset: int, offset: int, *, commit: bool) -> None:
        try:
            self.run_.end(queue_offset, offset, GROUP, commit=commit, done=lambda _problem: None)
        except (EndRefusedError, NotReadyError):
            return

    @precondition(lambda self: self.checks)
    @rule(mode=MODES)
    def answer(self, mode: str) -> None:
        """To a check, perhaps an old one."""
        check = self.checks.pop()
        self.master.mode = mode
        self._end(check.queue_offset, check.offset, commit=self.wants[check.offset])
        self.master.mode = "ok"

    # -- brokers -------------------------------------------------------------------------------------------------------

    @rule(mode=MODES)
    def step(self, mode: str) -> None:
        """What the thread does."""
        self.master.mode = mode
        self.run_.step()
        self.master.mode = "ok"

    @rule(behind=st.booleans())
    def hold_up_dispatch(self, behind: bool) -> None:
        """Or let it go on."""
        self.master.behind = behind
        self.master.dispatch()

    @rule()
    def quorum(self) -> None:
        """Everything is committed, and those who wait hear of it."""
        self.log.committed = len(self.log.records)
        held, self.master.held = self.master.held, []
        for answer in held:
            answer()
        self.master.dispatch()

    @rule(ms=st.sampled_from([100, 1000, 6000, INTERVAL_MS]))
    def wait(self, ms: int) -> None:
        """Time passes."""
        self.clock.now_ms += ms

    @rule(lost=st.integers(0, 6), orderly=st.booleans())
    def die(self, lost: int, orderly: bool) -> None:
        """Another becomes master, of the log that is left. What the old one waits for, it hears too late."""
        old = self.run_
        old.stop()
        if orderly:
            self.quorum()
        self.late += self.master.held
        self.master.held = []
        self.master.role = BrokerRole.SLAVE
        self.log.cut(len(self.log.records) - lost)
        self.log.committed = len(self.log.records)
        self.wants = {offset: commit for offset, commit in self.wants.items() if offset < self.log.end}
        self.checks = []
        self.stores.reverse()
        self.master.role, self.master.behind = BrokerRole.SYNC_MASTER, False
        self.master.dispatch()
        self.run_ = self._new_run()
        for answer in self.late:
            answer()
        self.late = []

    # -- promises ------------------------------------------------------------------------------------------------------

    @invariant()
    def each_ends_once(self) -> None:
        """By what the log says."""
        commits: set[int] = set()
        ops: set[int] = set()
        queue_offset_of = {one.head.offset: one.head.queue_offset for one in self.log.records}
        for head, record in self.log.records:
            if head.sys_flag & 0xC == 8:
                assert head.prepared_offset not in commits, "committed twice"
                assert queue_offset_of[head.prepared_offset] not in ops, "committed after its end"
                commits.add(head.prepared_offset)
            elif head.topic == OP_TOPIC:
                ops.add(op_target(decode_record(record)))

    def teardown(self) -> None:
        """In the end all have ended, and nothing is left to note."""
        for _ in range(200):
            self.clock.now_ms += INTERVAL_MS
            self.quorum()
            self.master.behind = False
            self.master.dispatch()
            self.run_.step()
            while self.checks:
                check = self.checks.pop()
                self._end(check.queue_offset, check.offset, commit=self.wants[check.offset])
            if self.run_.is_ready and not len(self.run_.halves) and not self.run_._arrivals:
                break
        halves = {one.head.queue_offset for one in self.log.records if one.head.topic == HALF_TOPIC}
        ops = {op_target(decode_record(one.record)) for one in self.log.records if one.head.topic == OP_TOPIC}
        assert halves == ops
        self.each_ends_once()
        for _ in range(3):
            self.clock.now_ms += INTERVAL_MS
            self.run_.step()
        assert self.state.noted.get(HALF_TOPIC, 0) == len(halves)
        self.run_.stop()


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(max_examples=fewer(100, 4), stateful_step_count=40, deadline=None)
