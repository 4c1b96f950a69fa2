"""The producers' results: a function of the log, bounded, and the same after a snapshot."""

from __future__ import annotations

from random import Random

import pytest

from dledger.config import ReplicationConfig
from dledger.core.noop_payload import ProducerRecord, Registration, encode_registration, encode_snapshot
from dledger.errors import DamagedSnapshotError
from dledger.statemachine import commands
from dledger.statemachine.commands import PRODUCER_RESULT_BYTES_MAX, RESULTS_KEPT, Duplicates
from dledger.types import LogIndex


class Table:
    """The table, and a log that grows."""

    def __init__(self) -> None:
        self.of = Duplicates(ReplicationConfig())
        self.index = 0
        self.now_ms = 0

    def register(self, name: str, slot: int, dropped: int = 0) -> None:
        self._noop(encode_registration(Registration(name, slot, dropped)))

    def snapshot(self, *producers: tuple[str, int, int]) -> None:
        records = [ProducerRecord(name, slot, count, 0, ()) for name, slot, count in producers]
        self._noop(encode_snapshot(9, records))

    def _noop(self, body: bytes) -> None:
        self.index += 1
        self.of.note_noop(body, LogIndex(self.index), self.now_ms)

    def apply(self, slot: int, result: bytes) -> tuple[str, int]:
        return self.apply_all(slot, [result])

    def apply_all(self, slot: int, results: list[bytes]) -> tuple[str, int]:
        first = LogIndex(self.index + 1)
        self.index += len(results)
        name, sequence = self.of.note(slot, first, len(results), self.now_ms)
        if name:
            self.of.store(slot, sequence, results)
        return name, sequence

    def saved(self) -> bytes:
        return b"".join(self.of.view(self.now_ms).encode())


def test_each_producers_results_are_found_by_number() -> None:
    """S4, also of two whose entries alternate."""
    table = Table()
    table.register("p", 1)
    table.register("q", 2)
    for number in range(3):
        assert table.apply(1, b"p%d" % number) == ("p", number)
        assert table.apply(2, b"q%d" % number) == ("q", number)

    assert [table.of.find("p", number) for number in range(4)] == [b"p0", b"p1", b"p2", None]
    assert table.of.find("q", 2) == b"q2"
    assert table.of.find("r", 0) is None
    assert table.apply(3, b"x") == ("", -1), "a slot that nobody has"


def test_a_producer_that_gave_way_takes_its_results_with_it() -> None:
    """Its slot goes to another one, whose first command must not be answered with them."""
    table = Table()
    table.register("p", 1)
    table.apply(1, b"p0")
    table.register("q", 2, dropped=1)
    table.register("r", 1)
    assert table.of.find("p", 0) is None
    assert table.of.find("r", 0) is None
    table.apply(1, b"r0")
    table.register("r", 3)
    assert table.of.find("r", 0) is None, "it began anew"

    table.apply(3, b"r1")
    table.snapshot(("r", 3, 1), ("q", 4, 0))
    assert table.of.find("r", 0) == b"r1"
    table.snapshot(("q", 3, 0))
    assert table.of.find("q", 0) is None


def test_a_slot_that_is_taken_over_has_no_results() -> None:
    """A later leader may know of no producer there, and give the slot away without naming who had it."""
    table = Table()
    table.register("p", 1)
    table.apply(1, b"p0")
    table.register("q", 1)

    assert table.of.find("q", 0) is None
    assert table.apply(1, b"q0") == ("q", 0)
    assert table.of.find("q", 0) == b"q0"


def test_a_members_table_is_the_same_from_the_log_and_from_a_snapshot() -> None:
    """Byte for byte, so that members' snapshots can be compared; and both go on alike."""
    table = Table()
    table.register("p", 1)
    table.register("q", 2)
    for number in range(50):
        table.now_ms = number * 7
        table.apply(1 + number % 2, b"%d" % number)
    other = Table()
    other.index, other.now_ms = table.index, table.now_ms
    producers = other.of.load(table.saved(), table.now_ms)

    assert {one.name: one.next_sequence for one in producers.producers} == {"p": 25, "q": 25}
    assert other.saved() == table.saved()
    for one in (table, other):
        one.now_ms += 1000
        one.apply(2, b"next")
        one.register("r", 3)
    assert other.saved() == table.saved()


def test_the_last_result_of_a_producer_is_kept_though_it_alone_is_too_much() -> None:
    """S4: a client that was not answered repeats its last command first of all."""
    table = Table()
    table.register("p", 1)
    table.apply(1, b"x")
    table.apply(1, bytes(PRODUCER_RESULT_BYTES_MAX + 1))
    assert table.of.find("p", 0) is None
    assert table.of.find("p", 1) == bytes(PRODUCER_RESULT_BYTES_MAX + 1)


def test_the_results_that_give_way_are_of_who_was_idle_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4: one that has just sent its command may repeat it; also in a table that was loaded."""
    monkeypatch.setattr(commands, "RESULT_BYTES_MAX", 25)
    table = Table()
    for slot, name in enumerate("pqr", 1):
        table.register(name, slot)
    for slot in (1, 2, 1):
        table.apply(slot, bytes(8))
    other = Table()
    other.of.load(table.saved(), table.now_ms)
    for one in (table, other):
        one.apply(3, bytes(8))
        assert one.of.find("q", 0) is None
        assert one.of.find("p", 1) == one.of.find("r", 0) == bytes(8)


def test_what_a_loaded_table_replaces_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4: a member that has fetched snapshots keeps the same results as the others."""
    monkeypatch.setattr(commands, "RESULT_BYTES_MAX", 25)
    table = Table()
    for slot, name in enumerate("pq", 1):
        table.register(name, slot)
        table.apply(slot, bytes(8))
    saved = table.saved()
    for _ in range(2):
        table.of.load(saved, table.now_ms)
    assert table.of.find("p", 0) == table.of.find("q", 0) == bytes(8)
    assert table.saved() == saved


def test_what_is_kept_is_bounded_for_each_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last result of a producer is kept whatever its size; in all, those idle longest give way."""
    table = Table()
    table.register("p", 1)
    for _ in range(RESULTS_KEPT + 5):
        table.apply(1, b"x")
    assert sum(table.of.find("p", number) is not None for number in range(RESULTS_KEPT + 5)) == RESULTS_KEPT
    table.apply(1, bytes(PRODUCER_RESULT_BYTES_MAX))
    assert sum(table.of.find("p", number) is not None for number in range(RESULTS_KEPT + 6)) == 1

    monkeypatch.setattr(commands, "RESULT_BYTES_MAX", PRODUCER_RESULT_BYTES_MAX + 10)
    table.register("q", 2)
    table.apply(2, bytes(11))
    assert table.of.find("p", RESULTS_KEPT + 5) is None
    assert table.of.find("q", 0) == bytes(11)
    assert table.apply(1, b"y") == ("p", RESULTS_KEPT + 6), "its count is not forgotten"


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_does_not_depend_on_how_entries_are_divided(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """S4: each member reads the log in ranges of its own, and their snapshots must be equal."""
    monkeypatch.setattr(commands, "RESULT_BYTES_MAX", 400)
    monkeypatch.setattr(commands, "PRODUCER_RESULT_BYTES_MAX", 200)
    dice = Random(seed)
    whole, single = Table(), Table()
    for slot in (1, 2, 3):
        for table in (whole, single):
            table.register(f"p{slot}", slot)
    for _ in range(30):
        slot = dice.choice((1, 2, 3))
        sizes = dice.choice(((0, 1), (0, 1, 5, dice.randrange(300))))  # all of many small ones may be kept, too
        results = [bytes(dice.choice(sizes)) for _ in range(dice.choice((1, 3, 40, 100)))]
        whole.apply_all(slot, results)
        for one in results:
            single.apply(slot, one)
        assert whole.saved() == single.saved()


@pytest.mark.parametrize("content", [b"", b"\0\0\0\1x", b"\0\0\0\0\0\0\0\0"])
def test_a_malformed_table_is_refused(content: bytes) -> None:
    """As a damaged snapshot."""
    with pytest.raises(DamagedSnapshotError):
        Table().of.load(content, 0)


def test_a_table_with_something_behind_it_is_refused() -> None:
    """So that no part is skipped unread."""
    table = Table()
    table.register("p", 1)
    with pytest.raises(DamagedSnapshotError):
        Table().of.load(table.saved() + b"x", 0)
