"""A consume queue against a dictionary: whatever is done to it, every message is where its queue offset says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.store.fs import FileSystem
from rocketstore.consume_queue.files import FILLER
from rocketstore.consume_queue.queue import FOREVER, ConsumeQueue
from tests.unit.rocketstore.heads import head

UNITS = 4


class Model:
    """The log of one queue and what of it the queue must hold."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int, int]] = []
        """Queue offset, physical offset and size of each record."""
        self.log_end = 0
        self.next_offset = 0
        self.log_begin = 0
        """Records before this physical offset are gone from the log."""
        self.durable = 0
        """No crash takes what lies before it: a file went because of a unit after it that is durable."""

    def add(self, count: int, gap: int) -> None:
        """Records come; ``gap`` queue offsets before them never do."""
        self.next_offset += gap
        for _ in range(count):
            size = 10 + self.log_end % 7
            self.log.append((self.next_offset, self.log_end, size))
            self.next_offset += 1
            self.log_end += size + 5  # records of other queues lie between

    def cut(self, physical: int) -> None:
        """The log loses its end. Queue offsets before the first lost record stay used."""
        lost = [one for one in self.log if one[1] + one[2] > physical]
        if lost:
            self.next_offset = lost[0][0]
            self.log_end = max(physical, 0)
            self.log = self.log[: len(self.log) - len(lost)]

    @property
    def kept(self) -> dict[int, tuple[int, int]]:
        return {offset: (physical, size) for offset, physical, size in self.log if physical >= self.log_begin}


def opened(directory: Path, limit: int = FOREVER) -> ConsumeQueue:
    queue = ConsumeQueue("T", 0, directory, UNITS * 20, FileSystem())
    queue.load()
    assert queue.recover(limit, whole=limit == FOREVER).replay_from is None
    return queue


def check(queue: ConsumeQueue, model: Model) -> None:
    low, high = queue.min_offset, queue.max_offset
    found = {number: unit[:2] for number in range(low, high) if (unit := queue.unit(number)) is not None}
    assert found == model.kept
    assert low == min(model.kept, default=high)
    if model.log:
        assert high == model.log[-1][0] + 1 or high == model.next_offset
    for start in range(low, high):
        units = queue.units(start, 100)
        assert len(units) == min(high - start, UNITS - start % UNITS)
        assert all(unit == FILLER or unit[:2] == model.kept[number] for number, unit in enumerate(units, start))
    for limit in {model.log_begin, *(physical + 1 for physical, _ in model.kept.values())}:
        before = {number: place for number, place in model.kept.items() if place[0] >= limit}
        assert queue.correct_min_offset(limit) == min(before, default=high)
    queue.correct_min_offset(model.log_begin)


def check_times(queue: ConsumeQueue, model: Model, time_ms: int) -> None:
    """A record's store time is its physical offset divided by 8, so that some have the same."""
    later = [number for number, (physical, _) in model.kept.items() if physical // 8 >= time_ms]
    expected = min(later, default=queue.max_offset)
    assert queue.offset_by_time(time_ms, lambda offset, _size: offset // 8) == expected


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 11), st.sampled_from([0, 0, 0, 1, 3, 9])),
        st.tuples(st.just("replay"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("truncate"), st.integers(0, 300), st.just(0)),
        st.tuples(st.just("expire"), st.integers(0, 300), st.just(0)),
        st.tuples(st.just("time"), st.integers(0, 50), st.just(0)),
        st.tuples(st.sampled_from(["reopen", "flush"]), st.just(0), st.just(0)),
    ),
    max_size=14,
)


@settings(deadline=None)
@given(steps=STEPS, begin=st.sampled_from([0, 0, 1, 4, 6]))
def test_every_message_is_where_its_offset_says(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]], begin: int
) -> None:
    directory = tmp_path_factory.mktemp("queue") / "0"
    queue, model = opened(directory), Model()
    model.next_offset = begin
    for step, number, gap in steps:
        if step == "append":
            first = len(model.log)
            model.add(number, gap)
            queue.append([head(offset, at, size=size) for offset, at, size in model.log[first:]])
        elif step == "replay":
            again = [one for one in model.log[number:] if one[1] >= model.log_begin]
            queue.append([head(offset, at, size=size) for offset, at, size in again])
        elif step == "truncate" and number >= max(model.log_begin, model.durable):
            model.cut(number)
            queue = opened(directory, number)
            queue.correct_min_offset(model.log_begin)
        elif step == "expire":
            model.log_begin = max(model.log_begin, min(number, model.log_end))
            if queue.delete_expired(model.log_begin):
                model.durable = model.log_end
            queue.correct_min_offset(model.log_begin)
        elif step == "time":
            check_times(queue, model, number)
        elif step == "reopen":
            queue = opened(directory)
            queue.correct_min_offset(model.log_begin)
        elif step == "flush":
            while not queue.flush(0):
                pass
        check(queue, model)
