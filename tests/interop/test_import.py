"""Logs that Java wrote or has written to in between: what is taken over, and what is refused rather than lost."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.errors import CorruptLogError, IdentityError
from dledger.store.file_store import FileStore
from dledger.store.java_files import IMPORTED_FILE
from dledger.types import HardState, LogIndex, NodeId, Standing, Term
from tests.interop.goldens import LEDGER, open_golden
from tests.interop.stores import SEGMENT_BYTES


class Ledger:
    """The golden log without a message store."""

    def __init__(self, directory: Path) -> None:
        self.root, lines = open_golden(LEDGER, directory)
        self.entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.directory = self.root / "dledger-n0"
        self.segments = sorted((self.directory / "data").iterdir())

    def open(self, *, import_unchecked: bool = True, mend: bool = False) -> FileStore:
        config = StoreConfig(
            self.root, segment_bytes=SEGMENT_BYTES, index_segment_bytes=32 * 64, import_unchecked=import_unchecked
        )
        return FileStore.open(config, cluster_id="interop", group="interop", node_id="n0", clock=Clock(), mend=mend)

    def check(self, log: FileStore) -> None:
        """The log holds what Java read, from its begin on."""
        begin = LogIndex(log.begin.index + 1)
        expected = [(one["index"], one["term"], one["magic"], one["pos"]) for one in self.entries[begin:]]
        found = [
            (one.index, one.term, int(one.magic), int(one.position))
            for one in log.read_range(begin, log.last.index, 1 << 24)
        ]
        assert found[: len(expected)] == expected


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


@pytest.mark.parametrize("index_too", [False, True])
def test_a_log_whose_oldest_segments_java_removed_begins_where_it_begins(ledger: Ledger, *, index_too: bool) -> None:
    for path in ledger.segments[:4]:
        path.unlink()
    if index_too:
        (ledger.directory / "index" / f"{0:020d}").unlink()
    first = next(one for one in ledger.entries if one["pos"] >= int(ledger.segments[4].name))
    with closing(ledger.open()) as log:
        assert (log.begin.index, log.begin.position) == (first["index"] - 1, first["pos"])
        assert log.last.index == ledger.entries[-1]["index"]
        ledger.check(log)
    with closing(ledger.open()) as log:
        ledger.check(log)


@pytest.mark.parametrize("segment", [0, 3])
def test_a_damaged_entry_in_the_middle_is_refused_and_nothing_is_removed(ledger: Ledger, segment: int) -> None:
    path = ledger.segments[segment]
    content = bytearray(path.read_bytes())
    content[:8] = bytes(8)
    path.write_bytes(content)
    with pytest.raises(CorruptLogError, match=path.name):
        ledger.open()
    assert all(path.exists() for path in ledger.segments)


def test_a_missing_segment_is_refused(ledger: Ledger) -> None:
    ledger.segments[2].unlink()
    with pytest.raises(CorruptLogError):
        ledger.open()
    assert all(path.exists() for path in ledger.segments[3:])


def test_javas_term_and_vote_are_kept_when_they_are_newer_than_the_log(ledger: Ledger) -> None:
    """Doubtful, not blank: what the group committed is in the logs of its members, who elect the longest together."""
    (ledger.directory / "currterm").write_text("voteLeader=n2\ncurrTerm=9\n")
    with closing(ledger.open()) as log:
        found = log.hard_state.load()
        assert (found.term, found.vote, found.standing) == (9, "n2", Standing.DOUBTFUL)
        assert "imported" in found.doubt


@pytest.mark.parametrize("line", ["old", "new"])
def test_a_log_that_java_has_used_in_between_is_imported_again_or_refused(ledger: Ledger, line: str) -> None:
    """The old line leaves its checkpoint in the place of ours, the new one only what it writes at an election."""
    with closing(ledger.open()) as log:
        log.append_as_leader(Term(5), [b"ours"])
        log.flush()
        last = log.last.index
    (ledger.directory / "currterm").write_text("voteLeader=n0\ncurrTerm=7\n")
    if line == "old":
        (ledger.directory / "checkpoint").write_text(f"committedIndex={last}\nendIndex={last}\n")
    else:
        (ledger.directory / "currterm.bak").write_text("voteLeader=n0\ncurrTerm=6\n")
    with pytest.raises(IdentityError, match="has since been used by a Java node"):
        ledger.open(import_unchecked=False)
    with closing(ledger.open()) as log:
        ledger.check(log)
        assert bytes(log.read(last).body) == b"ours"
        assert log.hard_state.load().term == 7


@pytest.mark.parametrize("line", ["old", "new"])
def test_a_member_that_java_has_run_in_between_is_in_doubt_again(ledger: Ledger, line: str) -> None:
    """What Java acknowledged it had not flushed, and its vote not synced, as before the first import."""
    with closing(ledger.open()) as log:
        log.hard_state.save(HardState(Term(5), NodeId("n0"), Standing.FULL))
        last = log.last.index
    with closing(ledger.open()) as log:
        assert log.hard_state.load().standing is Standing.FULL
    if line == "old":
        (ledger.directory / "checkpoint").write_text(f"committedIndex={last}\nendIndex={last}\n")
    else:
        (ledger.directory / "currterm.bak").write_text("voteLeader=n0\ncurrTerm=6\n")
    with closing(ledger.open()) as log:
        found = log.hard_state.load()
        assert found.standing is Standing.DOUBTFUL
        assert "imported" in found.doubt


def test_what_java_committed_must_be_there(ledger: Ledger) -> None:
    (ledger.directory / "checkpoint").write_text("committedIndex=1000\nendIndex=1000\n")
    with pytest.raises(CorruptLogError, match="1000 were committed"):
        ledger.open()


@pytest.mark.parametrize("mend", [False, True])
def test_an_imported_log_opens_without_being_told_again(ledger: Ledger, *, mend: bool) -> None:
    """Until Java's entries have expired; else every member would set them aside as damage, and nobody would have them.

    (A group of three was emptied like this.)
    """
    with closing(ledger.open()) as log:
        log.append_as_leader(Term(5), [b"ours"])
        log.flush()
        last = log.last.index
    assert (ledger.directory / IMPORTED_FILE).exists()
    with closing(ledger.open(import_unchecked=False, mend=mend)) as log:
        ledger.check(log)
        assert bytes(log.read(last).body) == b"ours"
    assert list(ledger.directory.glob("damaged-*")) == []


@pytest.mark.parametrize("mend", [False, True])
def test_entries_of_java_are_refused_and_never_set_aside(ledger: Ledger, *, mend: bool) -> None:
    """As imported by a version that did not remember it: what has no CRCs is no damage, and stays where it is."""
    with closing(ledger.open()) as log:
        log.flush()
    (ledger.directory / IMPORTED_FILE).unlink()
    before = {path.name: path.read_bytes() for path in ledger.segments}

    with pytest.raises(IdentityError, match="import_unchecked=true, on all members"):
        ledger.open(import_unchecked=False, mend=mend)

    assert {path.name: path.read_bytes() for path in ledger.segments} == before
    with closing(ledger.open()) as log:
        ledger.check(log)
