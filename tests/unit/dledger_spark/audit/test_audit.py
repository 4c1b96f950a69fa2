"""What an audit of directories finds, without Spark: every kind of damage is named, and where it is."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dledger.errors import ConfigError
from dledger_spark.audit.difference import DifferenceKind
from dledger_spark.audit.replica import (
    SPLIT_BYTES,
    SPLIT_BYTES_MAX,
    common_end,
    coverage,
    open_replicas,
    split,
    split_bytes_for,
)
from dledger_spark.decode import walk
from tests.support.sweeps import fewer
from tests.unit.dledger.store.support import SEGMENT_BYTES
from tests.unit.dledger_spark.audit.members import (
    ENTRIES,
    audit,
    flip,
    flip_in_entry,
    forget_before,
    header,
    make_group,
    segment,
)

FIELDS = {
    0: "magic", 4: "size", 8: "index", 16: "term", 24: "pos", 32: "channel", 36: "chainCrc", 40: "bodyCrc",
    44: "bodyLength", 48: "body byte 0", 99 + 48: "body byte 99",
}  # fmt: skip


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A group of three, to be copied."""
    root = tmp_path_factory.mktemp("audit")
    make_group(root, 3)
    return root


@pytest.fixture
def nodes(pristine: Path, tmp_path: Path) -> list[Path]:
    shutil.copytree(pristine, tmp_path / "group")
    return sorted((tmp_path / "group").iterdir())


def test_equal_replicas_have_no_findings(nodes: list[Path]) -> None:
    """Nothing is found where there is nothing, whatever the block size."""
    assert audit(nodes) == []
    assert audit(nodes, 100) == []
    assert audit(nodes, 1 << 20) == []


@pytest.mark.parametrize(("offset", "field"), FIELDS.items())
@pytest.mark.parametrize("count", [2, 3])
def test_a_flipped_bit_is_named_by_entry_and_field(nodes: list[Path], offset: int, field: str, count: int) -> None:
    """With two replicas the entry's own CRCs tell who is damaged, with three also the majority."""
    position = flip_in_entry(nodes[1], 60, offset)

    (found,) = audit(nodes[:count])

    assert (found.replicas, found.index, found.term, found.field) == (("n1",), 60, 3, field)
    assert found.block <= position == found.position
    assert found.kind is DifferenceKind.ENTRY
    assert found.values["n0"] != found.values["n1"]


@settings(max_examples=fewer(60, 4), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    byte=st.integers(0, 3 * SEGMENT_BYTES - 1), bit=st.integers(0, 7), block=st.sampled_from([128, 500, 4096, 1 << 20])
)
def test_any_flipped_bit_is_found_and_blamed_on_its_replica(pristine: Path, byte: int, bit: int, block: int) -> None:
    """Whatever the bit, in a header, a body or a blank: one finding, in the replica that has it, at that very byte."""
    nodes = sorted(pristine.iterdir())[:2]
    path = segment(nodes[1], byte // SEGMENT_BYTES)
    flip(path, byte % SEGMENT_BYTES, bit)
    try:
        (found,) = audit(nodes, block)
    finally:
        flip(path, byte % SEGMENT_BYTES, bit)

    assert (found.replicas, found.position) == (("n1",), byte)


def test_a_flipped_bit_in_a_blank_is_told_from_one_in_an_entry(nodes: list[Path]) -> None:
    flip(segment(nodes[0], 1), SEGMENT_BYTES - 1)

    (found,) = audit(nodes)

    assert (found.kind, found.replicas, found.segment) == (DifferenceKind.BLANK, ("n0",), f"{SEGMENT_BYTES:020d}")
    assert found.field.startswith("blank byte")
    assert found.index == header(nodes[1], found.index).index


@pytest.mark.parametrize(("at", "field"), [(0, "blank magic"), (4, "blank length")])
def test_a_flipped_bit_in_the_head_of_a_blank_is_named(nodes: list[Path], at: int, field: str) -> None:
    """By the field, with what each replica has there: a wrong length is another one's damage than a wrong magic."""
    begin = walk(segment(nodes[0], 0).read_bytes(), "entry").end
    flip(segment(nodes[0], 0), begin + at)

    (found,) = audit(nodes)

    assert (found.kind, found.replicas, found.field) == (DifferenceKind.BLANK, ("n0",), field)
    assert found.values["n1"] == str(-1 if at == 0 else SEGMENT_BYTES - begin)


def test_missing_files_are_told_once_and_hide_nothing_else(nodes: list[Path]) -> None:
    """A missing segment of one replica does not keep damage of another one in it from being found."""
    segment(nodes[0], 1).unlink()
    flip(segment(nodes[1], 1), 500)

    missing, damaged = audit(nodes)

    assert (missing.kind, missing.replicas, missing.segment) == (
        DifferenceKind.SEGMENT,
        ("n0",),
        f"{SEGMENT_BYTES:020d}",
    )
    assert (damaged.kind, damaged.replicas, damaged.position) == (DifferenceKind.ENTRY, ("n1",), SEGMENT_BYTES + 500)


@pytest.mark.parametrize("zeros", [True, False])
def test_a_missing_tail_is_named_by_its_first_entry(nodes: list[Path], zeros: bool) -> None:
    """A file cut short, or whose end was zeroed as by a lost write, is no flipped bit."""
    position = header(nodes[2], ENTRIES - 5).position
    path = segment(nodes[2], position // SEGMENT_BYTES)
    os.truncate(path, position % SEGMENT_BYTES)
    if zeros:
        os.truncate(path, SEGMENT_BYTES)

    (found,) = audit(nodes)

    assert (found.kind, found.replicas, found.index) == (DifferenceKind.TAIL, ("n2",), ENTRIES - 5)


def test_a_zeroed_hole_is_no_missing_tail(nodes: list[Path]) -> None:
    position = header(nodes[1], 30).position
    with segment(nodes[1], position // SEGMENT_BYTES).open("r+b") as file:
        os.pwrite(file.fileno(), bytes(148), position % SEGMENT_BYTES)

    (found,) = audit(nodes)

    assert (found.kind, found.replicas, found.index) == (DifferenceKind.ENTRY, ("n1",), 30)


def test_a_directory_in_place_of_a_file_is_unreadable(nodes: list[Path]) -> None:
    """Whatever the disk answers instead of bytes is named, with the file."""
    segment(nodes[0], 0).unlink()
    segment(nodes[0], 0).mkdir()

    (found,) = audit(nodes)

    assert (found.kind, found.replicas) == (DifferenceKind.UNREADABLE, ("n0",))
    assert "Is a directory" in found.detail


def test_every_damaged_replica_is_told(nodes: list[Path]) -> None:
    """Different bits in two of three: each is told with its own place, although there is a majority only per block."""
    flip_in_entry(nodes[0], 10, 60)
    flip_in_entry(nodes[2], 80, 60)

    assert [(one.replicas, one.index) for one in audit(nodes)] == [(("n0",), 10), (("n2",), 80)]


def test_without_any_index_files_places_are_named_all_the_same(nodes: list[Path]) -> None:
    for node in nodes:
        shutil.rmtree(node / "index")
    flip_in_entry(nodes[1], 77, 50)

    (found,) = audit(nodes)

    assert (found.replicas, found.index, found.field) == (("n1",), 77, "body byte 2")


def test_histories_that_both_check_out_are_not_blamed_on_anybody(tmp_path: Path) -> None:
    """Two logs that no CRC tells apart: a fork, which two replicas cannot decide and three can."""
    one, two = make_group(tmp_path / "a", 2)
    fork = make_group(tmp_path / "b", 2, entry_bytes=90)[1]
    (fork / "identity").write_text((two / "identity").read_text())
    three = one.with_name("dledger-n2")
    shutil.copytree(one, three)
    (three / "identity").write_text((one / "identity").read_text().replace('"n0"', '"n2"'))

    (undecided,) = audit([one, fork])
    (decided,) = audit([one, fork, three])

    assert (undecided.replicas, undecided.index) == ((), 0)
    assert "histories differ" in undecided.detail
    assert decided.replicas == ("n1",)


def test_a_replica_that_begins_later_is_compared_from_there_on(nodes: list[Path]) -> None:
    """Retention: what one has removed is still compared between the others; it is no missing segment."""
    forget_before(nodes[2], 2)
    assert audit(nodes) == []
    flip(segment(nodes[0], 0), 700)
    flip(segment(nodes[2], 2), 0)

    first, second = audit(nodes)

    assert (first.replicas, first.position) == (("n0",), 700)
    assert (second.replicas, second.position, second.field) == (("n2",), 2 * SEGMENT_BYTES + 0, "magic")


def test_what_only_one_replica_holds_is_counted_not_compared() -> None:
    found = coverage([("a", 0), ("b", 1500)], 5000, 1000)

    assert found.alone_bytes == 1500
    assert [(one.start, one.stop) for one in found.ranges] == [(1500, 2000), (2000, 3000), (3000, 4000), (4000, 5000)]
    assert found.compared_bytes == 3500


def test_the_common_end_is_that_of_the_replica_that_knows_least(tmp_path: Path) -> None:
    """Entries that only some know to be committed may still differ."""
    replicas = open_replicas(make_group(tmp_path, 2))
    behind = replace(replicas[1], committed=41)

    end = common_end([replicas[0], behind])

    assert end is not None
    expected = header(replicas[0].directory, 41)
    assert (end.index, end.position, end.bounded_by) == (41, expected.position + expected.size, "n1")
    assert end.chain_crc == expected.chain_crc


def test_an_unreadable_checkpoint_is_a_problem_of_that_replica_alone(nodes: list[Path]) -> None:
    (nodes[1] / "checkpoint").write_bytes(bytes(100))

    replicas = open_replicas(nodes)

    assert [bool(one.problem) for one in replicas] == [False, True, False]
    assert common_end(replicas) is not None
    assert audit(nodes) == []


def test_strangers_are_refused(tmp_path: Path) -> None:
    """Comparing logs of different groups would blame one of them."""
    nodes = make_group(tmp_path, 2)
    (nodes[1] / "identity").write_text((nodes[1] / "identity").read_text().replace('"g"', '"other"'))

    with pytest.raises(ConfigError, match="only replicas of one group"):
        open_replicas(nodes)
    with pytest.raises(ConfigError, match="at least two"):
        open_replicas(nodes[:1])
    with pytest.raises(ConfigError, match="given twice"):
        open_replicas([nodes[0], nodes[0]])
    with pytest.raises(ConfigError, match="not a node's directory"):
        open_replicas([nodes[0], tmp_path / "nothing"])


@given(
    start=st.integers(0, 5000), length=st.integers(1, 50_000), block=st.integers(1, 1000), wanted=st.integers(1, 60_000)
)
def test_a_range_is_split_between_blocks_into_parts_that_are_alike(
    start: int, length: int, block: int, wanted: int
) -> None:
    """Every byte is in one part; parts differ by a block, and what is cut off at the range's ends; none is empty."""
    parts = list(split(start, start + length, block, wanted))

    assert [low for low, _ in parts] + [start + length] == [start] + [high for _, high in parts]
    assert all(high % block == 0 for _, high in parts[:-1])
    sizes = [high - low for low, high in parts]
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) < 3 * block
    assert len(parts) == 1 or max(sizes) <= 2 * wanted + block


def test_tasks_are_few_on_few_processors_and_no_larger_than_a_segment() -> None:
    """Two replicas of 3 GiB are six tasks on two processors, more of less each on many."""
    covered = coverage([("a", 0), ("b", 0)], 3 << 30, 1 << 30)

    assert split_bytes_for(covered, 2) == SPLIT_BYTES_MAX == 1 << 30
    assert split_bytes_for(covered, 4) == 512 << 20
    assert split_bytes_for(covered, 64) == SPLIT_BYTES
    assert len(list(split(0, 1 << 30, 4 << 20, (1 << 30) - 400))) == 1
