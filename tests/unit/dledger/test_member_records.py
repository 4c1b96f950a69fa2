"""What a node knows of its group's members when it starts, after every crash and with every file that may be lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dledger.config import Member, ServerConfig
from dledger.core.membership import Membership, encode_configuration
from dledger.errors import CorruptLogError
from dledger.group_members import MemberRecords, had_peers
from dledger.maintenance import Retention
from dledger.store.file_store import FileStore
from dledger.store.fs import FileSystem
from dledger.store.identity import MEMBERS_FILE, read_members
from dledger.types import (
    NO_INDEX,
    Boundary,
    ClusterMember,
    Configuration,
    HardState,
    LogIndex,
    Magic,
    NodeId,
    Position,
    Standing,
    Term,
)
from tests.crash.crash_fs import RecordingFs, crash_states
from tests.support.solo import Solo
from tests.support.sweeps import thinned
from tests.unit.dledger.store.support import FakeClock, fill, open_store, small_config

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
ROOMY: dict[str, Any] = {
    "retention_hours": 0,
    "delete_hour": tuple(range(24)),
    "disk_check_ratio": 1.0,
    "recovery_verify_bytes": 1 << 20,
}


def config_of(path: Path, *, join: bool = False, alone: bool = False) -> ServerConfig:
    """n0's, which names n1."""
    members = (Member(N0, "h", 1), *(() if alone else (Member(N1, "h", 2),)))
    return ServerConfig(node_id=N0, members=members, join=join, store=small_config(path, **ROOMY))


def opened(config: ServerConfig, fs: FileSystem | None = None) -> FileStore:
    return open_store(config.store, fs, FakeClock(4_000_000_000_000))  # everything is old


def remembers(log: FileStore) -> None:
    """It has been a member that counts."""
    log.hard_state.save(HardState(Term(1), standing=Standing.FULL))


def append(log: FileStore, *ids: str) -> Configuration:
    """Put a configuration of these in force."""
    members = tuple(ClusterMember(NodeId(one), "h", number) for number, one in enumerate(ids, 1))
    batch = log.append_as_leader(Term(1), [encode_configuration(Configuration(members))], Magic.NOOP)
    return Configuration(members, batch.first_index, Term(1))


def found(config: ServerConfig) -> Membership:
    """What a start finds."""
    with closing(opened(config)) as log:
        return MemberRecords(config, log).find()


def looking_at(membership: Membership, commit_index: int = NO_INDEX) -> Any:  # noqa: ANN401  # a node's, as far as it is looked at
    """A node whose members these are."""
    state = SimpleNamespace(membership=membership, commit_index=LogIndex(commit_index), remembered={})
    return lambda query: query(SimpleNamespace(state=state))


def test_a_new_node_has_the_configured_members(tmp_path: Path) -> None:
    """Until the first change."""
    membership = found(config_of(tmp_path))

    assert membership.voters == {N0, N1}
    assert (membership.is_voter, membership.current.index) == (True, NO_INDEX)


def test_a_node_that_joins_has_none_until_it_is_told(tmp_path: Path) -> None:
    """M12: not even when it has fetched entries from before the first configuration; and then it stays a member."""
    config = config_of(tmp_path, join=True)
    with closing(opened(config)) as log:
        fill(log, 5)
    before = found(config)
    with closing(opened(config)) as log:
        told = append(log, "n0", "n1", "n2")

    assert (before.peers, before.is_voter) == ((), False)
    assert found(config).current == told


def test_a_node_that_has_standing_has_not_yet_to_join(tmp_path: Path) -> None:
    """M12: else a group all of whose settings say that its members join would wait for itself after a restart."""
    config = config_of(tmp_path, join=True)
    with closing(opened(config)) as log:
        fill(log, 5)
        remembers(log)

    assert found(config).voters == {N0, N1}


def test_configurations_above_the_file_are_found_in_the_log(tmp_path: Path) -> None:
    """M3: the file is older than the log after every crash; a committed one counts as such."""
    config = config_of(tmp_path)
    with closing(opened(config)) as log:
        fill(log, 30)
        first = append(log, "n0", "n1")
        fill(log, 30)
        second = append(log, "n0", "n2")
        log.flush()
        log.set_committed(first.index)

    membership = found(config)

    assert (membership.committed, membership.current) == (first, second)


def test_a_file_that_is_newer_than_the_log_counts(tmp_path: Path) -> None:
    """M10: an INSTALL brought it, or the log lost its end. What the log says on the way up to it is past."""
    config = config_of(tmp_path)
    newest = Configuration((ClusterMember(N2, "h", 3), ClusterMember(N0, "h", 1)), LogIndex(90), Term(3))
    with closing(opened(config)) as log:
        log.reset(Boundary(LogIndex(40), Term(1), Position(8192), 7), newest)
        fill(log, 3)
        append(log, "n0", "n1")
        log.flush()

    membership = found(config)

    assert (membership.committed, membership.current) == (newest, newest)


@pytest.mark.parametrize("how", ["missing", "damaged"])
@pytest.mark.parametrize("changed", [True, False])
def test_without_its_file_a_node_believes_a_log_that_goes_back_to_the_start(
    tmp_path: Path, *, how: str, changed: bool
) -> None:
    """M3: all configurations are in it; and at later starts, too, when its beginning may have expired."""
    config = config_of(tmp_path)
    with closing(opened(config)) as log:
        remembers(log)
        fill(log, 5)
        wanted = append(log, "n0", "n2") if changed else None
        log.flush()
        log.set_committed(log.last.index)
    spoil(log.directory / MEMBERS_FILE, how)

    first, second = found(config), found(config)

    for membership in (first, second):
        assert membership.voters == ({N0, N2} if changed else {N0, N1})
        assert wanted is None or membership.committed == wanted
    saved = read_members(log.directory)
    assert saved is not None
    assert not saved.lost


@pytest.mark.parametrize("alone", [False, True])
def test_damage_that_only_the_search_meets_is_left_to_its_repair(tmp_path: Path, *, alone: bool) -> None:
    """M3: in what the opening does not verify; a member with others starts, and counts once it is mended."""
    config = config_of(tmp_path, alone=alone)
    config = replace(config, store=replace(config.store, recovery_verify_bytes=1))
    with closing(opened(config)) as log:
        remembers(log)
        fill(log, 3)
        wanted = append(log, "n0", "n2")
        fill(log, 30)
        log.flush()
        path, at = _place(log, wanted.index)
        sound = path.read_bytes()
    path.write_bytes(sound[: at + 60] + b"\xff" + sound[at + 61 :])

    with closing(opened(config)) as log:
        assert log.damage_at_start == ()
        records = MemberRecords(config, log)
        if alone:
            with pytest.raises(CorruptLogError):
                records.find()
            return
        membership = records.find()
        assert membership.voters == {N0, N1}
        assert len(records.damage) == 1


@pytest.mark.parametrize("changed", [True, False])
def test_what_damage_hid_from_one_without_standing_and_file_waits_for_a_leader(
    tmp_path: Path, *, changed: bool
) -> None:
    """M10: it was catching up, so the last configuration in its log may be an old one. Where no member has ever been
    changed, no leader has one to tell.
    """
    config = config_of(tmp_path)
    config = replace(config, store=replace(config.store, recovery_verify_bytes=1))
    with closing(opened(config)) as log:
        fill(log, 3)
        if changed:
            append(log, "n0", "n2")
        else:
            log.append_as_leader(Term(1), [b""], Magic.NOOP)
        path, at = _place(log, log.last.index)
        fill(log, 30)
        log.flush()
        sound = path.read_bytes()
    spoil(log.directory / MEMBERS_FILE, "missing")
    path.write_bytes(sound[: at + 60] + b"\xff" + sound[at + 61 :])
    solo = Solo()

    with closing(opened(config)) as log:
        records = MemberRecords(config, log)
        solo.state.membership = records.find()
        assert len(records.damage or log.damage_at_start) == 1
        path.write_bytes(sound)
        assert records.read_on(solo.state)

    assert solo.state.membership.is_unsure is changed
    assert solo.state.membership.voters == (set() if changed else {N0, N1})


@pytest.mark.parametrize("counts", [True, False])
def test_only_a_memory_that_counts_takes_the_uid_that_the_log_tells(tmp_path: Path, *, counts: bool) -> None:
    """M11: one that was copied from another member has none, and is no memory of its own."""
    config = config_of(tmp_path)
    with closing(opened(config)) as log:
        if counts:
            remembers(log)
        members = (ClusterMember(N0, "h", 1, uid=77), ClusterMember(N1, "h", 2))
        log.append_as_leader(Term(1), [encode_configuration(Configuration(members))], Magic.NOOP)
        log.flush()
        log.members.vouch()

    with closing(opened(config)) as log:
        records = MemberRecords(config, log)
        records.find()
        assert records.uid == (77 if counts else 0)


def test_what_damage_hid_is_in_force_above_what_a_leader_told_meanwhile(tmp_path: Path) -> None:
    """M2: also at one without standing whose file was lost and cannot be written again, on a full disk."""
    config = config_of(tmp_path)
    config = replace(config, store=replace(config.store, recovery_verify_bytes=1))
    with closing(opened(config)) as log:
        fill(log, 3)
        told = append(log, "n0", "n1", "n2")
        fill(log, 3)
        newest = append(log, "n0", "n2")
        path, at = _place(log, told.index)
        fill(log, 30)
        log.flush()
        sound = path.read_bytes()
    spoil(log.directory / MEMBERS_FILE, "missing")
    path.write_bytes(sound[: at + 60] + b"\xff" + sound[at + 61 :])
    solo = Solo()

    with closing(opened(config)) as log:
        records = MemberRecords(config, log)
        solo.state.membership = records.find()
        solo.state.install(told)
        path.write_bytes(sound)
        assert records.read_on(solo.state)

    membership = solo.state.membership
    assert (membership.committed, membership.current) == (told, newest)


@pytest.mark.parametrize("damaged", [False, True])
def test_what_waits_in_the_log_is_found_again_at_the_next_start(tmp_path: Path, *, damaged: bool) -> None:
    """M3: configurations that wait for a leader's word, or for their repair, are not known up to the commit index."""
    config = config_of(tmp_path)
    config = replace(config, store=replace(config.store, recovery_verify_bytes=1))
    with closing(opened(config)) as log:
        if damaged:
            remembers(log)
        fill(log, 3)
        wanted = append(log, "n0", "n2")
        fill(log, 30)
        log.flush()
        log.set_committed(log.last.index)
        path, at = _place(log, wanted.index)
        sound = path.read_bytes()
    if damaged:
        path.write_bytes(sound[: at + 60] + b"\xff" + sound[at + 61 :])
    else:
        spoil(log.directory / MEMBERS_FILE, "missing")

    for _ in range(2):
        with closing(opened(config)) as log:
            records = MemberRecords(config, log)
            membership = records.find()
            assert (membership.is_unsure, len(records.damage)) == (not damaged, damaged)
            records.keep(looking_at(membership, log.committed_index))

    if damaged:
        path.write_bytes(sound)
        assert found(config).committed == wanted


def _place(log: FileStore, index: LogIndex) -> tuple[Path, int]:
    """The file of an entry, and where in it that begins."""
    position = log.positions(index, index)[0]
    paths = sorted((log.directory / "data").iterdir())
    size = paths[0].stat().st_size
    return paths[position // size], position % size


def spoil(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_without_its_file_and_the_begin_of_its_log_a_node_campaigns_for_nothing(tmp_path: Path, how: str) -> None:
    """M3: the configured members may be long gone, and their majority no majority. Newer entries end it, as any word
    of a leader's does.
    """
    config = config_of(tmp_path)
    with closing(opened(config)) as log:
        remembers(log)
        log.reset(Boundary(LogIndex(40), Term(1), Position(8192), 7))
        fill(log, 5)
    spoil(log.directory / MEMBERS_FILE, how)

    with closing(opened(config)) as log:
        records = MemberRecords(config, log)
        membership = records.find()
        assert "its file of them is lost" in records.problem
        records.keep(looking_at(membership, 45))
    assert (membership.peers, membership.is_voter, membership.voters) == ((), False, frozenset())
    assert found(config).voters == frozenset()

    with closing(opened(config)) as log:
        told = append(log, "n0", "n1")
        log.set_committed(told.index)
        records = MemberRecords(config, log)
        records.save(records.find())
        assert records.problem == ""
    assert found(config).committed == told


def test_the_entry_of_a_configuration_stays_until_the_file_has_it(tmp_path: Path) -> None:
    """M3: on a full disk the file cannot be replaced, and segments are removed all the same, but not that one."""
    config = config_of(tmp_path)
    with closing(opened(config)) as log:
        records = MemberRecords(config, log)
        membership = records.find()
        fill(log, 30)
        assert records.last_removable(_state(membership)) is None
        told = append(log, "n0", "n1")
        membership.adopt(told)
        assert records.last_removable(_state(membership)) is None  # it is not committed: nothing from there on goes
        membership.commit(told.index)
        assert records.last_removable(_state(membership)) == told.index - 1

        records.save(membership)

        assert records.last_removable(_state(membership)) is None


def _state(membership: Membership) -> Any:  # noqa: ANN401  # of a node, as far as it is looked at
    return SimpleNamespace(membership=membership)


def test_all_that_damage_hid_is_in_force_once_it_is_mended(tmp_path: Path) -> None:
    """M6: the voters before the last configuration count, too, where neither is known to be committed."""
    config = config_of(tmp_path)
    solo = Solo()
    with closing(opened(config)) as log:
        append(log, "n0", "n1", "n2", "n3")
        append(log, "n0", "n1", "n3")
        log.flush()
        records = MemberRecords(config, log)
        records._unread = True

        assert records.read_on(solo.state)

    assert solo.state.membership.voters == {N0, N1, "n3"}
    assert solo.state.membership.previous_voters == (N0, N1, N2, "n3")


def test_what_damage_hid_is_in_force_once_it_is_mended(tmp_path: Path) -> None:
    """M3: what is committed, and what is not."""
    config = config_of(tmp_path)
    solo = Solo()
    with closing(opened(config)) as log:
        fill(log, 3)
        first, second = append(log, "n0", "n1", "n2"), append(log, "n0", "n2")
        log.flush()
        log.set_committed(first.index)
        records = MemberRecords(config, log)
        records._unread = True

        assert records.read_on(solo.state)

    membership = solo.state.membership
    assert (membership.committed, membership.current) == (first, second)


def test_the_file_knows_of_nothing_that_may_be_undone(tmp_path: Path) -> None:
    """M3: what is committed alone, and up to where it is."""
    config = config_of(tmp_path)
    with closing(opened(config)) as log:
        fill(log, 3)
        first, second = append(log, "n0", "n1"), append(log, "n0")
        membership = Membership(N0, first)
        membership.adopt(second)

        MemberRecords(config, log).keep(looking_at(membership, first.index))

    saved = read_members(log.directory)
    assert saved is not None
    assert (saved.configuration, saved.clear_to) == (first, first.index)


def test_retention_keeps_what_the_file_does_not_know_yet() -> None:
    """M3: however old it is; and all may go of which the file knows."""
    node, records, asked = Solo().node, Mock(), []

    def retire(_protected: object, _room: object, may_go: Callable[[LogIndex], LogIndex], *_others: object) -> None:
        asked.append(may_go(LogIndex(80)))

    log, driver = Mock(committed_index=90, retire=retire), Mock(call=lambda action: action(0))
    retention = Retention(config_of(Path()), node, log, driver, records)
    retention._needed = LogIndex(90), None
    for known in (LogIndex(39), LogIndex(80), None):
        records.last_removable.return_value = known
        retention.clean()

    assert asked == [39, 80, 80]


def test_who_had_peers_may_be_repaired_by_them(tmp_path: Path) -> None:
    """A conf may name the node alone that once began the group, or others of a group that has shrunk since."""
    alone, named = config_of(tmp_path / "a", alone=True), config_of(tmp_path / "b")
    before = had_peers(alone), had_peers(named)
    for config, others in ((alone, ("n0", "n1")), (named, ("n0",))):
        with closing(opened(config)) as log:
            told = append(log, *others)
            log.members.save_committed(told, told.index)

    assert before == (False, True)
    assert (had_peers(alone), had_peers(named)) == (True, False)


def test_no_crash_takes_back_a_configuration_that_was_flushed(tmp_path: Path) -> None:
    """M3: whatever the file and the log have of it, with retention at work, before and after each write of either.

    So no two members ever count by configurations that are not neighbours.
    """
    config = config_of(tmp_path / "source")
    fs = RecordingFs()
    log = opened(config, fs)
    records = MemberRecords(config, log)
    membership = records.find()
    known: list[tuple[int, Configuration]] = [(len(fs.changes), membership.current)]
    begun = len(fs.changes)

    def change(*ids: str, save: bool) -> None:
        told = append(log, *ids)
        fill(log, 40)
        log.flush()
        known.append((len(fs.changes), told))
        membership.adopt(told)
        log.set_committed(log.last.index)
        membership.commit(log.last.index)
        if save:
            records.save(membership)

    def expire() -> None:
        def may_go(last: LogIndex) -> LogIndex:
            limit = records.last_removable(_state(membership))
            return last if limit is None else LogIndex(min(last, limit))

        log.sync_checkpoint()
        log.retire(log.last.index, log.measure_room(), may_go)
        log.remove_retired()

    fill(log, 40)
    change("n0", "n1", "n2", save=True)
    expire()
    change("n0", "n2", save=False)
    expire()  # not that one's entry
    assert log.begin.index < known[-1][1].index
    records.keep(looking_at(membership, log.committed_index))
    expire()
    assert log.begin.index > known[-1][1].index
    change("n0", "n1", save=False)
    change("n0", "n1", "n2", save=True)
    expire()
    ends = len(fs.changes)
    log.close()

    seen = set[bytes]()
    for at in thinned(range(begun, ends + 1), 25):
        newest = max(one.index for flushed_at, one in known if flushed_at <= at)
        for number, crash in enumerate(crash_states(fs.changes, at, 2)):
            if crash.content in seen:
                continue
            seen.add(crash.content)
            crash.write_to(tmp_path / "source", target := tmp_path / "crashed" / f"{at}-{number}")
            after = found(replace(config, store=replace(config.store, base_dir=target)))
            assert after.current.index >= newest
            assert after.current in [one for _, one in known]
    assert len(seen) > 10
