"""The file store against the memory store as its model: any sequence of operations, crashes and restarts."""

from __future__ import annotations

import shutil

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dledger.store.file_store import FileStore
from dledger.store.inspect import problems
from dledger.types import Boundary, LogIndex, Magic, Position, Term
from tests.support.memory_disk import new_directory
from tests.support.memory_store import MemoryStore
from tests.support.sweeps import fewer
from tests.unit.dledger.store.support import FakeClock, abandon, copy_log, open_store, same, small_config

_SIZES = st.one_of(st.integers(0, 200), st.sampled_from([407, 408, 450, 455, 456]))


class StoreMachine(RuleBasedStateMachine):
    """Segments of 512 bytes, so that a few entries roll; the index rolls every four."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = new_directory("store")
        self.config = small_config(
            self.directory,
            segment_bytes=512,
            index_segment_bytes=128,
            warm_bytes=128,
            retention_hours=0,
            disk_check_ratio=1e-9,
        )
        self.clock = FakeClock(4_000_000_000_000)
        self.store = self._open()
        self.model = MemoryStore(segment_bytes=512)
        self.term = 1

    def _open(self) -> FileStore:
        return open_store(self.config, clock=self.clock)

    @initialize(verify=st.sampled_from([0, 100, 10_000]))
    def choose(self, verify: int) -> None:
        self.store.close()
        self.config = small_config(
            self.directory,
            segment_bytes=512,
            index_segment_bytes=128,
            warm_bytes=128,
            retention_hours=0,
            disk_check_ratio=1e-9,
            recovery_verify_bytes=verify,
        )
        self.store = self._open()

    @rule(sizes=st.lists(_SIZES, min_size=1, max_size=8), new_term=st.booleans(), magic=st.sampled_from(list(Magic)))
    def append(self, sizes: list[int], new_term: bool, magic: Magic) -> None:
        self.term += new_term
        bodies = [bytes([self.term % 256]) * size for size in sizes]
        positions = self.store.append_as_leader(Term(self.term), bodies, magic).positions
        assert positions == self.model.append_as_leader(Term(self.term), bodies, magic).positions

    @rule(sizes=st.lists(_SIZES, min_size=1, max_size=12), max_bytes=st.sampled_from([1, 300, 1 << 20]))
    def append_runs(self, sizes: list[int], max_bytes: int) -> None:
        self.term += 1
        self.model.append_as_leader(Term(self.term), [b"run-" * (size // 4) for size in sizes])
        copy_log(self.model, self.store, max_bytes)

    @precondition(lambda self: self.model.last.index > max(self.model.committed_index, self.model.begin.index))
    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        lowest = max(self.model.committed_index, self.model.begin.index) + 1
        at = LogIndex(lowest + int(share * (self.model.last.index - lowest)))
        self.store.truncate(at)
        self.model.truncate(at)

    @rule(share=st.floats(0, 1))
    def commit(self, share: float) -> None:
        low, high = self.model.committed_index, self.model.last.index
        index = LogIndex(low + int(share * max(0, high - low)))
        self.store.set_committed(index)
        self.model.set_committed(index)

    @rule()
    def flush(self) -> None:
        mark = self.store.flush()
        assert mark.index == self.model.flush().index

    @rule()
    def sync_checkpoint(self) -> None:
        self.store.sync_checkpoint()
        self.model.flush()

    @rule()
    def warm(self) -> None:
        while self.store.warm():
            pass

    @rule()
    def clean(self) -> None:
        self.store.clean(self.store.committed_index)
        if self.store.begin.index > self.model.begin.index:
            assert self.store.begin.index <= self.model.committed_index
            self.model.drop_before(LogIndex(self.store.begin.index + 1))

    @rule(ahead=st.integers(0, 30), segment=st.integers(0, 6), head=st.sampled_from([0, 0, 48, 300]))
    def reset(self, ahead: int, segment: int, head: int) -> None:
        self.term += 1
        index = LogIndex(self.model.last.index + ahead)
        begin = Boundary(index, Term(self.term), Position(segment * 512 + head), 0xABC)
        self.store.reset(begin)
        self.model.reset(begin)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self._open()
        assert self.store.recovery_report.clean_stop
        assert self.store.recovery_report.cut_at is None
        self.model.flush()
        self.model.crash()
        self._after_restart()

    @rule()
    def kill(self) -> None:
        # The page cache survives a kill, so every entry does.
        abandon(self.store)
        self.store = self._open()
        self.model.crash(1 << 30)
        self._after_restart()

    def _after_restart(self) -> None:
        # A commit index is recorded with the next flush or checkpoint only, so it may come back lower.
        assert self.store.committed_index <= self.store.last.index
        self.store.set_committed(self.model.committed_index)

    @invariant()
    def agrees(self) -> None:
        store, model = self.store, self.model
        assert store.begin.index == model.begin.index
        assert store.begin.chain_crc == model.begin.chain_crc
        assert (store.last, store.end_position, store.last_chain_crc) == (
            model.last,
            model.end_position,
            model.last_chain_crc,
        )
        assert store.flushed.index == model.flushed.index
        if model.last.index > model.begin.index:
            first = LogIndex(model.begin.index + 1)
            assert same(
                store.read_range(first, model.last.index, 1 << 20), model.read_range(first, model.last.index, 1 << 20)
            )
            assert store.slice_run(first, 400) == model.slice_run(first, 400)
            assert store.first_index_of_term(Term(self.term)) == model.first_index_of_term(Term(self.term))

    def teardown(self) -> None:
        self.store.close()
        assert not list(problems(self.directory / "dledger-n0"))
        shutil.rmtree(self.directory)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=fewer(40, 4), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
