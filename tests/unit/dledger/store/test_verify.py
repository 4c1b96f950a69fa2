"""Everything in a node's directory is held against everything else; two directories are compared by their chains."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.clock import Clock
from dledger.store.durable_state import LogCheckpoint, Mark, create_checkpoint
from dledger.store.file_store import FileStore
from dledger.store.inspect import RecordItem
from dledger.store.verify import PROBLEMS_MAX, SAMPLE_ENTRIES, LogDivergence, VerifiedNode, compare_nodes, verify_node
from dledger.types import GENESIS, Boundary, LogIndex, Position, Term
from tests.support.damage import turn
from tests.unit.dledger.store.support import UnsyncedFs, abandon, fill, open_store, small_config


def made(base: Path, *, count: int = 60, clean: bool = True) -> Path:
    """A node's directory: several segments, everything but the last entries committed."""
    store = open_store(small_config(base))
    fill(store, count)
    store.flush()
    store.set_committed(LogIndex(count - 5))
    store.sync_checkpoint()
    if clean:
        store.close()
    else:
        abandon(store)
    return base / "dledger-n0"


def told(found: VerifiedNode) -> list[tuple[str, int, str]]:
    """Problems, short."""
    return [(one.path.name, one.offset, one.reason) for one in found.problems]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sound node that was stopped."""
    return made(tmp_path)


def segments(directory: Path, kind: str = "data") -> list[Path]:
    """Its files, oldest first."""
    return sorted((directory / kind).iterdir())


def test_a_sound_directory_has_no_problem_and_tells_what_is_in_it(directory: Path) -> None:
    """Entries, where they end, what is committed."""
    found = verify_node(directory)

    assert told(found) == []
    assert (found.entries, found.first_index, found.last_index, found.committed) == (60, 0, 59, 55)
    assert (found.committed_end, found.end) == (2 * 4096 + 2 * 148, 2 * 4096 + 6 * 148)
    assert found.identity is not None
    assert found.identity.node_id == "n0"


@pytest.mark.parametrize("number", [0, 1, -1])
def test_damage_in_the_first_a_middle_and_the_last_segment_is_named(directory: Path, number: int) -> None:
    """File and offset of the record that does not check out."""
    path = [one for one in segments(directory) if any(one.read_bytes()[:8])][number]
    turn(path, 60)

    assert (path.name, 0) in [(name, offset) for name, offset, _ in told(verify_node(directory))]


def test_what_is_missing_or_of_a_wrong_length_is_named(directory: Path) -> None:
    """Segments, and the directory of the index."""
    second, third = segments(directory)[1:3]
    second.unlink()
    third.write_bytes(third.read_bytes()[:1000])
    shutil.rmtree(directory / "index")

    found = told(verify_node(directory))

    assert (second.name, 0, "the segment is missing") in found
    assert (third.name, 1000, "the segment has 1000 bytes instead of 4096") in found
    assert ("index", 0, "the directory is missing") in found


def test_a_wrong_index_unit_is_named(directory: Path) -> None:
    """By the index's own rules, or because the record says otherwise; of a row of them the first one."""
    turn(segments(directory, "index")[1], 64 + 15)
    assert any("entry 12" in reason for _, _, reason in told(verify_node(directory)))

    turn(segments(directory, "index")[1], 64 + 15)
    segments(directory, "index")[2].write_bytes(bytes(320))
    assert [reason for _, _, reason in told(verify_node(directory))] == ["index and data disagree about entry 20"]


@pytest.mark.parametrize("name", ["identity", "hard_state", "checkpoint"])
def test_a_damaged_small_file_is_named(directory: Path, name: str) -> None:
    """All copies in it."""
    (directory / name).write_bytes(b"\xff" * 20000)

    assert next(one for one, _, _ in told(verify_node(directory))) == name


@pytest.mark.parametrize("pair", [0, 1])
def test_a_vote_that_may_be_older_than_the_newest_is_named(directory: Path, pair: int) -> None:
    """Neither copy of one of two states is readable: the member would come up without a vote. One copy is enough."""
    path = directory / "hard_state"
    content = bytearray(path.read_bytes())
    content[pair * 8192 : pair * 8192 + 40] = b"\xff" * 40
    path.write_bytes(content)
    assert told(verify_node(directory)) == []
    content[pair * 8192 + 4096 : pair * 8192 + 4136] = b"\xff" * 40
    path.write_bytes(content)

    found = told(verify_node(directory))

    assert [(name, "copies of a term and vote" in reason) for name, _, reason in found] == [("hard_state", True)]


def test_a_log_that_ends_below_the_durable_mark_or_holds_another_entry_there_is_told(directory: Path) -> None:
    """The checkpoint is evidence: an older copy of a segment is not the log that was flushed."""
    last = [one for one in segments(directory) if any(one.read_bytes()[:8])][-1]
    last.write_bytes(bytes(4096))

    found = told(verify_node(directory))

    assert any(name == "checkpoint" and "entry 59 is not there" in reason for name, _, reason in found)


def test_a_log_that_lacks_no_more_than_the_last_committed_entry_is_told(directory: Path) -> None:
    """The entry was acknowledged, whatever became of those behind it."""
    last = [one for one in segments(directory) if any(one.read_bytes()[:8])][-1]
    last.write_bytes(last.read_bytes()[: 1 * 148].ljust(4096, b"\0"))

    found = told(verify_node(directory))

    assert ("checkpoint", 0, "entries up to 55 were committed, but the last one is 54") in found


def test_a_unit_that_was_durable_is_missing_also_after_an_unclean_stop(tmp_path: Path) -> None:
    """Those behind it may be: the next start makes them again."""
    directory = made(tmp_path, clean=False)
    store = open_store(small_config(tmp_path))
    fill(store, 10)
    store.flush()
    abandon(store)
    durable, *later = segments(directory, "index")[5:]
    for path in later:
        path.write_bytes(bytes(320))

    assert told(verify_node(directory)) == []
    durable.write_bytes(durable.read_bytes()[:-32] + bytes(32))
    assert [reason for _, _, reason in told(verify_node(directory))] == ["index and data disagree about entry 59"]


def test_what_an_unclean_stop_leaves_behind_the_durable_mark_is_no_damage(tmp_path: Path) -> None:
    """The next start cuts it; it is told as a torn end."""
    directory = made(tmp_path, clean=False)
    sound = verify_node(directory)
    assert told(sound) == []
    last = [one for one in segments(directory) if any(one.read_bytes()[:8])][-1]
    with last.open("r+b") as file:
        file.seek(sound.end % 4096)
        file.write(b"\x00\x00\x00\x01torn")

    found = verify_node(directory)

    assert told(found) == []
    assert found.torn is not None
    assert (found.torn.path, found.torn.offset) == (last, sound.end % 4096)


def test_what_is_behind_the_end_after_a_clean_stop_is_damage(directory: Path) -> None:
    """Nothing was under way that could have been torn."""
    end = verify_node(directory).end
    last = [one for one in segments(directory) if any(one.read_bytes()[:8])][-1]
    with last.open("r+b") as file:
        file.seek(end % 4096)
        file.write(b"\x00\x00\x00\x01torn")

    found = verify_node(directory)

    assert [(name, offset) for name, offset, _ in told(found)] == [(last.name, end % 4096)]
    assert found.torn is None


def copy(directory: Path, target: Path) -> Path:
    """Another member's: the same log."""
    shutil.copytree(directory, target)
    return target


def test_equal_directories_are_equal_and_one_may_be_behind(directory: Path, tmp_path: Path) -> None:
    """Only what both hold and know to be committed counts."""
    behind = made(tmp_path / "b", count=30)
    nodes = [verify_node(one) for one in (directory, copy(directory, tmp_path / "copy"), behind)]

    assert list(compare_nodes(nodes)) == []


def test_entries_that_only_one_knows_as_committed_are_not_compared(tmp_path: Path) -> None:
    """What the other one holds in their place was never acknowledged: it will be cut."""
    found: list[VerifiedNode] = []
    for name, committed in (("a", 59), ("b", 49)):
        store = open_store(small_config(tmp_path / name))
        fill(store, 50)
        store.append_as_leader(Term(2), [name.encode()] * 10)
        store.flush()
        store.set_committed(LogIndex(committed))
        store.close()
        found.append(verify_node(store.directory))

    assert [(one.last_index, one.committed) for one in found] == [(59, 59), (59, 49)]
    assert list(compare_nodes(found)) == []


def test_the_first_entry_that_differs_is_named_although_both_check_out(tmp_path: Path) -> None:
    """Another history, sound in itself: only the comparison shows it."""
    logs: list[Path] = []
    for name, odd in (("a", b"same"), ("b", b"else")):
        store = open_store(small_config(tmp_path / name, segment_bytes=1 << 20, index_segment_bytes=1 << 20))
        total = SAMPLE_ENTRIES + 100
        for start in range(0, total, 100):
            bodies = [b"%d" % number for number in range(start, start + 100)]
            if start == 4000:
                bodies[50] = odd
            store.append_as_leader(Term(1), bodies)
        store.flush()
        store.set_committed(store.last.index)
        store.close()
        logs.append(tmp_path / name / "dledger-n0")
    one, other = (verify_node(path) for path in logs)
    assert told(one) == told(other) == []

    (found,) = compare_nodes([one, other])

    assert isinstance(found, LogDivergence)
    assert found.index == 4050


def test_directories_of_two_groups_are_not_compared(directory: Path, tmp_path: Path) -> None:
    """That they differ says nothing."""
    store = FileStore.open(
        small_config(tmp_path / "x"), cluster_id="other", group="g", node_id="n0", clock=_Clock(), fs=UnsyncedFs()
    )
    fill(store, 10)
    store.close()

    (said,) = compare_nodes([verify_node(directory), verify_node(tmp_path / "x" / "dledger-n0")])

    assert isinstance(said, str)
    assert "belong to different groups" in said


class _Clock(Clock):
    def monotonic_ms(self) -> int:
        return 0

    def wall_ms(self) -> int:
        return 0


@pytest.mark.parametrize("count", [0, 3, 60])
def test_a_log_that_begins_later_is_whole(tmp_path: Path, count: int) -> None:
    """A directory that was emptied and begins in the middle of segments has nothing missing before that."""
    store = open_store(small_config(tmp_path))
    store.reset(Boundary(LogIndex(12), Term(1), Position(2 * 4096 + 100), 7))
    fill(store, count)
    store.set_committed(store.last.index)
    store.close()

    found = verify_node(store.directory)

    assert told(found) == []
    assert found.entries == count


@pytest.mark.parametrize("kind", ["data", "index"])
def test_a_file_of_a_terabyte_is_named_and_not_looked_through(directory: Path, kind: str) -> None:
    """It would take hours, and more memory to map than a process may have."""
    huge = segments(directory, kind)[-1]
    huge.write_bytes(b"\x00\x00\x00\x01 no record, nor a unit")
    os.truncate(huge, 1 << 40)

    (reason,) = (reason for name, _, reason in told(verify_node(directory)) if name == huge.name)
    assert "bytes instead of" in reason


def test_what_is_no_ordinary_file_is_named(directory: Path) -> None:
    """Whether its name is a segment's or not, it is told and not followed."""
    one, other = segments(directory)[1], segments(directory, "index")[1]
    for path in (one, other):
        path.unlink()
        path.symlink_to(path.with_name("gone"))

    found = told(verify_node(directory))

    assert (one.name, 0, "not a regular file") in found
    assert (other.name, 0, "not a regular file") in found


@pytest.mark.parametrize("size", [-4096, 0, 1, 32])
def test_an_identity_with_another_segment_size_is_told_and_takes_no_time(directory: Path, size: int) -> None:
    """People copy that file from another member and write in it. Every missing segment is counted, few are listed."""
    identity = json.loads((directory / "identity").read_text())
    (directory / "identity").write_text(json.dumps({**identity, "segment_bytes": size}))
    end = 1 << 50
    mark = Mark(LogIndex(59), end, 1)
    create_checkpoint(
        UnsyncedFs(),
        directory / "checkpoint",
        LogCheckpoint(mark, LogIndex(59), LogIndex(55), GENESIS, clean_stop=True),
    )

    found = verify_node(directory)

    assert PROBLEMS_MAX >= len(found.problems) > 0
    if size == 32:
        assert found.problem_count >= end // size - len(segments(directory))
    else:
        assert found.identity is None


def test_nodes_are_compared_although_the_data_of_one_is_missing(directory: Path, tmp_path: Path) -> None:
    """It is told, and so is that nothing was compared."""
    other = copy(directory, tmp_path / "copy")
    shutil.rmtree(other / "data")

    (said,) = compare_nodes([verify_node(directory), verify_node(other)])

    assert isinstance(said, str)
    assert "nothing was compared" in said


def test_only_what_both_hold_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a log that begins a thousand million entries later than the other, that much is not read again, nor kept."""
    read: list[int] = []

    def note(_node: VerifiedNode, low: int, _high: int) -> Iterator[RecordItem]:
        read.append(low)
        return iter(())

    monkeypatch.setattr("dledger.store.verify._records", note)
    last = LogIndex(10**9)
    checkpoint = LogCheckpoint(Mark(last, 1, 1), last, last, GENESIS, clean_stop=True)
    nodes = [
        VerifiedNode(
            Path(f"n{first}"), (), checkpoint=checkpoint, first_index=first, last_index=last, samples={last: first}
        )
        for first in (0, 10**9 - 10)
    ]

    assert list(compare_nodes(nodes)) == []
    assert read == [10**9 - 11] * 2
