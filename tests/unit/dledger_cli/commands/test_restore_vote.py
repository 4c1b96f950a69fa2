"""``dledger restore-vote``: a person's word lets a stopped node's vote count, and only after being asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.store.file_store import FileStore
from dledger.store.fs import FileSystem
from dledger.store.identity import MembersFile
from dledger.types import EntryId, HardState, LogIndex, NodeId, Standing, Term
from dledger_cli.cli import main

DOUBTFUL = HardState(Term(3), NodeId("n1"), Standing.DOUBTFUL, "its disk was set back")


def open_store(base_dir: Path) -> FileStore:
    """The store of n0."""
    config = StoreConfig(base_dir=base_dir, segment_bytes=1024, index_segment_bytes=640, warm_bytes=0)
    return FileStore.open(config, cluster_id="c", group="g", node_id=NodeId("n0"), clock=Clock())


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    """The store of a stopped node with two entries whose memory is in doubt."""
    store = open_store(tmp_path)
    try:
        store.append_as_leader(Term(2), [b"a", b"b"])
        store.flush()
        store.hard_state.save(DOUBTFUL)
    finally:
        store.close()
    return tmp_path


def saved(base_dir: Path) -> HardState:
    """What is durable."""
    store = open_store(base_dir)
    try:
        return store.hard_state.load()
    finally:
        store.close()


def run(*words: object, answer: str = "") -> Result:
    """The command."""
    return CliRunner().invoke(main, ["restore-vote", *map(str, words)], input=answer)


def test_it_shows_what_is_there_and_asks(base_dir: Path) -> None:
    """Nothing is changed without consent."""
    refused = run(base_dir / "dledger-n0", answer="n\n")

    assert refused.exit_code == 1
    assert "entries 0 to 1, the last of term 2" in refused.output
    assert "doubtful: its disk was set back" in refused.output
    assert saved(base_dir) == DOUBTFUL


def test_with_consent_the_vote_counts(base_dir: Path) -> None:
    """Term and vote stay, so that it cannot vote twice in its term; a second time changes nothing."""
    given = run(base_dir, answer="y\n")
    again = run(base_dir)

    assert (given.exit_code, again.exit_code) == (0, 0), given.output
    assert saved(base_dir) == HardState(Term(3), NodeId("n1"), Standing.FULL)
    assert "counts already" in again.output


def test_a_person_may_lift_a_fence(base_dir: Path) -> None:
    """Where the others' history is the wrong one, and only a person knows."""
    store = open_store(base_dir)
    store.hard_state.save(DOUBTFUL.fence("n1, n2 committed different entries than this member"))
    store.close()

    given = run(base_dir, answer="y\n")

    assert "doubtful, fenced: n1, n2 committed different entries" in given.output
    assert saved(base_dir) == HardState(Term(3), NodeId("n1"), Standing.FULL)


def test_the_term_can_be_set_but_not_before_the_log(base_dir: Path) -> None:
    """A group whose terms came apart can be brought together; no entry may be newer than its holder's term."""
    early = run(base_dir, "--yes", "--term", 1)
    given = run(base_dir, "--yes", "--term", 2)

    assert early.exit_code == 2
    assert "older than the log's last entry" in early.output
    assert given.exit_code == 0, given.output
    assert saved(base_dir) == HardState(Term(2), None, Standing.FULL)


def test_a_directory_in_use_or_of_nobody_is_left_alone(base_dir: Path, tmp_path: Path) -> None:
    """The node must be stopped, and the directory its own."""
    store = open_store(base_dir)
    try:
        used = run(base_dir / "dledger-n0", "--yes")
    finally:
        store.close()
    (base_dir / "dledger-n0").rename(base_dir / "dledger-n7")
    renamed = run(base_dir / "dledger-n7", "--yes")

    assert used.exit_code == 1
    assert "is in use by process" in used.output
    assert renamed.exit_code == 2
    assert "is not a node's directory" in renamed.output


def test_a_copy_that_is_vouched_for_before_its_first_start_is_believed(base_dir: Path, tmp_path: Path) -> None:
    """A moved node: its doubt is found and settled by the command, and not found again by the next start."""
    with_vote = run(base_dir, "--yes")
    moved = tmp_path / "moved"
    shutil.copytree(base_dir / "dledger-n0", moved / "dledger-n0")

    given = run(moved / "dledger-n0", "--yes")

    assert (with_vote.exit_code, given.exit_code) == (0, 0), given.output
    assert "was copied or restored" in given.output
    assert saved(moved).standing is Standing.FULL


def test_what_is_remembered_of_others_is_forgotten(base_dir: Path) -> None:
    """Else it would make the new disk doubt that is vouched for beside it; also where the vote counts already.

    And so is its own uid: the group knows the member under that of the disk that is lost (M11).
    """
    for index in (1, 2):
        before = MembersFile(FileSystem(), base_dir / "dledger-n0", "n0")
        before.remember({NodeId("n1"): EntryId(Term(1), LogIndex(index))})

        assert run(base_dir, "--yes").exit_code == 0

        after = MembersFile(FileSystem(), base_dir / "dledger-n0", "n0").saved
        assert (after.remembered, after.uid) == ({}, 0)
