"""Who belongs to the group, and whose memory a directory is, survive a restart and every crash."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger.errors import DiskError, DiskFullError
from dledger.store.fs import FileSystem
from dledger.store.identity import IDENTITY_FILE, MEMBERS_FILE, MembersFile, SavedMembers, create_members, read_members
from dledger.store.quarantine import set_aside_damaged
from dledger.types import (
    NO_INDEX,
    Boundary,
    ClusterMember,
    Configuration,
    EntryId,
    HardState,
    LogIndex,
    MemberRole,
    NodeId,
    Position,
    Standing,
    Term,
)
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs, RecordingFs, crash_states
from tests.unit.dledger.store.support import fill, open_store, small_config

HELD = {NodeId("n1"): EntryId(Term(3), LogIndex(70)), NodeId("n2"): EntryId(Term(2), LogIndex(9))}


def configuration(index: int, *, change_id: int = 0) -> Configuration:
    """A configuration with everything that a member can have."""
    members = (
        ClusterMember(NodeId("n1"), "10.0.0.1", 30911, number=0, uid=(1 << 64) - 1),
        ClusterMember(NodeId("n4"), "::1", 30911, MemberRole.LEARNER, 3, promote=True, replaces="n1"),
        ClusterMember(NodeId("n5"), "h", 1, MemberRole.LEARNER, 4, promote=True),
        ClusterMember(NodeId("n6"), "h", 2, number=5, uid=1, replaces="n1"),
    )
    return Configuration(members, LogIndex(index), Term(2), 6, change_id)


def of_n0(uid: int, *parts: Any, lost: bool = False) -> SavedMembers:  # noqa: ANN401  # its fields in their order
    """Content of the file of n0."""
    return replace(SavedMembers(uid, *parts), lost=lost, owner="n0")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    create_members(FileSystem(), tmp_path, "n0")
    return tmp_path


def opened(directory: Path) -> SavedMembers:
    return MembersFile(FileSystem(), directory, "n0").saved


def test_a_new_directory_is_a_new_memory_without_a_configuration(tmp_path: Path) -> None:
    """M11: the uid stays as long as the directory; two directories never share one."""
    first, second = open_store(small_config(tmp_path / "a")), open_store(small_config(tmp_path / "b"))
    saved = first.members.saved
    first.close()
    second.close()

    again = open_store(small_config(tmp_path / "a"))
    again.close()

    assert saved == of_n0(saved.uid) == again.members.saved
    assert 0 < saved.uid != second.members.uid > 0


def test_configurations_are_looked_for_in_what_replaces_lost_entries(tmp_path: Path) -> None:
    """M3: with ``flush_mode=async``, a power cut takes entries that were committed; others come in their place."""
    with closing(open_store(small_config(tmp_path))) as store:
        fill(store, 3)
        store.members.save_committed(None, LogIndex(1000))
        committed = store.committed_index
        directory = store.directory

    with closing(open_store(small_config(tmp_path))) as again:
        assert again.members.saved.clear_to == committed
    assert opened(directory).clear_to == committed


def test_on_a_full_disk_the_next_save_tells_where_configurations_are_looked_for(directory: Path) -> None:
    """M3: a node starts there, too."""
    create = MembersFile(FileSystem(), directory, "n0")
    create.save_committed(None, LogIndex(1000))
    fs = FailingFs(lambda call, _path: NO_SPACE if call == "write" else None)
    file = MembersFile(fs, directory, "n0")

    file.hold_to(LogIndex(5))
    assert (file.saved.clear_to, opened(directory).clear_to) == (5, 1000)
    fs.fails = lambda _call, _path: None
    file.remember({})

    assert opened(directory).clear_to == 5


def test_what_was_saved_is_read(directory: Path) -> None:
    """All of it, and the uid with it."""
    file = MembersFile(FileSystem(), directory, "n0")

    file.save_committed(configuration(7, change_id=(1 << 64) - 1), LogIndex(9))
    file.remember(HELD)

    assert opened(directory) == file.saved
    assert file.saved == of_n0(file.uid, configuration(7, change_id=(1 << 64) - 1), LogIndex(9), HELD)


def test_a_copy_for_another_node_is_not_that_one_s_memory(directory: Path) -> None:
    """M11: nor is it another one that the group may know of: which one it is, is not known. All else is the group's."""
    file = MembersFile(FileSystem(), directory, "n0")
    file.save_all(configuration(7), LogIndex(9), HELD)

    seeded = MembersFile(FileSystem(), directory, "n1").saved

    assert seeded == SavedMembers(0, configuration(7), LogIndex(9), HELD, owner="n1")
    assert MembersFile(FileSystem(), directory, "n1").saved == seeded


def test_nothing_goes_back(directory: Path) -> None:
    """Two threads save: one that comes late with what was true before must not undo what is known by now."""
    file = MembersFile(FileSystem(), directory, "n0")
    file.save_committed(configuration(7), LogIndex(9))

    file.save_committed(None, LogIndex(3))
    file.save_all(configuration(5), LogIndex(6), HELD)

    assert opened(directory) == of_n0(file.uid, configuration(7), LogIndex(9), HELD)


def test_what_has_not_changed_is_not_written_again(directory: Path) -> None:
    """An idle group costs no disk anything."""
    file = MembersFile(FileSystem(), directory, "n0")
    file.save_all(configuration(7), LogIndex(9), HELD)
    (directory / MEMBERS_FILE).unlink()

    file.save_all(configuration(7), LogIndex(9), dict(HELD))

    assert not (directory / MEMBERS_FILE).exists()


@pytest.mark.parametrize("at", range(0, 400, 41))
def test_a_damaged_file_is_lost_until_a_configuration_is_known(
    directory: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """M3: the configured peers may be long gone, so nothing is made up; and it is another memory from then on.

    That is so after the next start, too.
    """
    file = MembersFile(FileSystem(), directory, "n0")
    file.save_all(configuration(7), LogIndex(9), HELD)
    path = directory / MEMBERS_FILE
    raw = bytearray(path.read_bytes())
    raw[min(at, len(raw) - 1)] ^= 1
    path.write_bytes(raw)

    with caplog.at_level(logging.WARNING):
        found = MembersFile(FileSystem(), directory, "n0")

    assert found.saved == of_n0(found.uid, lost=True) == opened(directory)
    assert found.uid != file.uid
    assert "is damaged" in caplog.text
    found.save_all(None, LogIndex(12), HELD)
    assert opened(directory).lost
    found.save_committed(configuration(8), LogIndex(12))
    assert opened(directory) == of_n0(found.uid, configuration(8), LogIndex(12), HELD)


def test_a_lost_file_whose_log_told_everything_is_lost_no_more(directory: Path) -> None:
    """M3: nor at the next start, when the beginning of the log may have expired."""
    (directory / MEMBERS_FILE).unlink()
    file = MembersFile(FileSystem(), directory, "n0")
    assert opened(directory).lost

    file.settle()

    assert opened(directory) == SavedMembers(file.uid, owner="n0")


def test_a_missing_file_of_a_used_directory_is_lost(tmp_path: Path) -> None:
    """As a damaged one."""
    open_store(small_config(tmp_path)).close()
    directory = tmp_path / "dledger-n0"
    (directory / MEMBERS_FILE).unlink()

    store = open_store(small_config(tmp_path))
    store.close()

    assert store.members.saved.lost


def test_a_directory_of_another_node_is_left_alone(tmp_path: Path) -> None:
    """Whoever may not open it writes nothing into it."""
    open_store(small_config(tmp_path)).close()
    directory = tmp_path / "dledger-n0"
    (directory / MEMBERS_FILE).unlink()
    (directory / IDENTITY_FILE).write_text((directory / IDENTITY_FILE).read_text().replace("n0", "n1"))

    with pytest.raises(Exception, match="belongs to another node"):
        open_store(small_config(tmp_path))

    assert not (directory / MEMBERS_FILE).exists()


def test_a_disk_that_takes_nothing_stops_nobody_but_who_must_not_go_on(directory: Path) -> None:
    """What is remembered is tried again with the next save; a committed configuration has not been saved then (M3)."""
    fs = FailingFs()
    file = MembersFile(fs, directory, "n0")
    fs.fails = lambda call, _path: NO_SPACE if call == "write" else None

    file.save_all(configuration(7), LogIndex(9), HELD)
    with pytest.raises(OSError, match="No space left"):
        file.save_committed(configuration(7), LogIndex(9))
    assert file.saved == of_n0(file.uid) == opened(directory)

    fs.fails = lambda _call, _path: None
    file.save_all(configuration(7), LogIndex(9), HELD)
    assert opened(directory) == of_n0(file.uid, configuration(7), LogIndex(9), HELD)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_log_that_is_set_aside_takes_along_what_is_of_another_history(tmp_path: Path, *, fenced: bool) -> None:
    """Told to the group, it would take the standing of sound members, and its members may never have been ours.

    What is of the group's history stays: it is committed. But this memory is gone, and says so by its uid (M11).
    """
    store = open_store(small_config(tmp_path))
    state = HardState(Term(1), None, Standing.FULL)
    store.hard_state.save(state.fence("another history") if fenced else state)
    store.members.save_all(configuration(7), LogIndex(9), HELD)
    store.close()
    before = store.members.saved

    aside = set_aside_damaged(small_config(tmp_path), "n0")

    left = read_members(store.directory)
    if fenced:
        assert (left, read_members(aside)) == (None, before)
    else:
        assert left is not None
        assert left == of_n0(left.uid, configuration(7), LogIndex(9), HELD)
        assert left.uid != before.uid


BEGIN = Boundary(LogIndex(40), Term(2), Position(8192), 7)


@pytest.mark.parametrize("index", [30, 55])
def test_an_install_saves_its_configuration_before_it_drops_the_log(tmp_path: Path, index: int) -> None:
    """M10, at every crash: either the old log is there, or its successor and the members that came with it.

    They count above the new log's end, too.
    """
    source = tmp_path / "source"
    fs = RecordingFs()
    store = open_store(small_config(source), fs)
    fill(store, 20)
    store.flush()
    store.sync_checkpoint()
    begun = len(fs.changes)

    store.reset(BEGIN, configuration(index))
    store.flush()
    store.sync_checkpoint()

    outcomes = set()
    seen = set()
    for at in range(begun, len(fs.changes) + 1):
        for number, crash in enumerate(crash_states(fs.changes, at)):
            if crash.content in seen:
                continue
            seen.add(crash.content)
            crash.write_to(source, target := tmp_path / f"{at}-{number}")
            found = open_store(small_config(target), mend=True)
            saved, is_new = found.members.saved, found.begin == BEGIN
            committed = found.committed_index
            found.close()
            assert saved in (
                of_n0(store.members.uid),
                of_n0(store.members.uid, configuration(index), committed),
            )
            assert saved.configuration is not None or (found.last.index == 19 and not is_new)
            outcomes.add((saved.configuration is not None, is_new))
    store.close()
    assert outcomes == {(False, False), (True, False), (True, True)}


def test_an_install_that_finds_no_room_drops_nothing(tmp_path: Path) -> None:
    """M10: a member that forgot its group would be worse off than one that lags. Other errors are final."""
    fs = FailingFs()
    store = open_store(small_config(tmp_path), fs)
    fill(store, 20)
    fs.fails = lambda call, path: NO_SPACE if call == "write" and MEMBERS_FILE in path else None

    with pytest.raises(DiskFullError, match="recording the members"):
        store.reset(BEGIN, configuration(55))

    assert (store.begin.index, store.last.index, store.members.saved.configuration) == (NO_INDEX, 19, None)
    fs.fails = lambda call, path: IO_ERROR if call == "sync" and MEMBERS_FILE in path else None
    with pytest.raises(DiskError):
        store.reset(BEGIN, configuration(55))


@pytest.mark.parametrize("at", range(5))
def test_every_crash_of_a_save_leaves_the_old_file_or_the_new_one(tmp_path: Path, at: int) -> None:
    """Before, between and after its writes, whatever of them the disk has: never a torn or a missing one."""
    source = tmp_path / "source"
    source.mkdir()
    fs = RecordingFs()
    create_members(fs, source, "n0")
    begun = len(fs.changes)
    file = MembersFile(fs, source, "n0")
    before = file.saved

    file.save_all(configuration(7), LogIndex(9), HELD)

    assert len(fs.changes) == begun + 4 + 1
    for number, crash in enumerate(crash_states(fs.changes, begun + at + 1)):
        crash.write_to(source, target := tmp_path / str(number))
        assert read_members(target) in ((before, file.saved) if at < 4 else (file.saved,))
