"""Every oddity a directory can have at start: what is mended, what is refused, what is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from crc32c import crc32c

from dledger.config import StoreConfig
from dledger.errors import ConfigError, CorruptLogError, DirectoryLockedError, IdentityError
from dledger.store import format as records
from dledger.store.durable_state import decode_hard_state, encode_hard_state, read_hard_state
from dledger.store.file_store import FileStore
from dledger.store.inspect import problems
from dledger.store.java_files import IMPORTED_FILE
from dledger.store.quarantine import QUARANTINED_LOGS_MAX, set_aside_damaged
from dledger.types import HardState, LogIndex, NodeId, Standing, Term
from tests.unit.dledger.store.support import (
    FakeClock,
    UnsyncedFs,
    abandon,
    bodies_of,
    copy_log,
    fill,
    open_store,
    small_config,
)


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return small_config(tmp_path)


def _data(config: StoreConfig, number: int = 0) -> Path:
    return config.base_dir / "dledger-n0" / "data" / records.segment_name(number * config.segment_bytes)


def _index(config: StoreConfig, number: int = 0) -> Path:
    return config.base_dir / "dledger-n0" / "index" / records.segment_name(number * config.index_segment_bytes)


def _patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _filled(config: StoreConfig, *, clean: bool, unflushed: int = 0) -> list[bytes]:
    """100 flushed entries of 148 bytes (27 per segment), then unflushed ones; closed or killed."""
    store = open_store(config)
    bodies = fill(store, 100)
    store.flush()
    store.set_committed(LogIndex(60))
    store.sync_checkpoint()
    if unflushed:
        bodies += fill(store, unflushed)
    store.close() if clean else abandon(store)
    return bodies


@pytest.mark.parametrize("clean", [True, False])
def test_a_log_reopens_as_it_was(config: StoreConfig, clean: bool) -> None:
    """After a clean stop and after a kill; the commit index comes back too."""
    bodies = _filled(config, clean=clean, unflushed=7)

    store = open_store(config)

    assert bodies_of(store) == bodies
    assert store.committed_index == 60
    assert store.flushed.index == 106
    assert store.recovery_report.clean_stop is clean
    bodies += fill(store, 10)
    assert bodies_of(store) == bodies
    store.close()


@pytest.mark.parametrize("at", [0, 5, 30, 36, 41, 47, 48, 100])
def test_a_torn_tail_is_cut(config: StoreConfig, at: int) -> None:
    """A bad record above the flushed mark was never acknowledged."""
    bodies = _filled(config, clean=False, unflushed=5)
    offset = (103 % 27) * 148 + at
    original = _data(config, 3).read_bytes()[offset]
    _patch(_data(config, 3), offset, bytes([original ^ 1]))

    store = open_store(config)

    assert bodies_of(store) == bodies[:103]
    assert store.recovery_report.cut_at == 3 * config.segment_bytes + (103 % 27) * 148
    more = fill(store, 3)
    store.close()
    store = open_store(config)
    assert bodies_of(store) == bodies[:103] + more
    store.close()


def test_damage_below_the_mark_is_refused(config: StoreConfig) -> None:
    """The message names file, offset and what to do; nothing is changed by the attempt."""
    _filled(config, clean=False, unflushed=5)
    config = small_config(config.base_dir, recovery_verify_bytes=1 << 20)
    _patch(_data(config, 1), 148 * 3 + 60, b"!!!")
    before = _data(config, 1).read_bytes()

    for _ in range(2):
        with pytest.raises(CorruptLogError) as caught:
            open_store(config)
        assert caught.value.path == _data(config, 1)
        assert caught.value.offset == 148 * 3
        assert "bodyCrc of entry 30" in str(caught.value)
        assert "--repair" in str(caught.value)
    assert _data(config, 1).read_bytes() == before


def test_a_lost_tail_below_the_mark_is_refused(config: StoreConfig) -> None:
    """Zeros where flushed entries were: the log is shorter than its mark."""
    _filled(config, clean=True)
    _patch(_data(config, 3), 10 * 148, bytes(9 * 148))

    with pytest.raises(CorruptLogError, match="entries up to 99 were flushed, but the log ends at 90"):
        open_store(small_config(config.base_dir, recovery_verify_bytes=1 << 20))


def test_another_log_of_the_same_length_is_refused(config: StoreConfig, tmp_path: Path) -> None:
    """The mark remembers the chain CRC, so a swapped copy shows."""
    _filled(config, clean=True)
    other = small_config(tmp_path / "other")
    store = open_store(other)
    fill(store, 100, term=2)
    store.close()
    for number in range(4):
        _data(config, number).write_bytes(_data(other, number).read_bytes())

    with pytest.raises(CorruptLogError, match="entry 99 is not the one that was flushed"):
        open_store(small_config(config.base_dir, recovery_verify_bytes=1 << 20))


@pytest.mark.parametrize("length", [0, 100])
def test_a_short_last_file_is_dropped(config: StoreConfig, length: int) -> None:
    """Above the mark it can only be a remnant (rocketmq #6904: it must not block the start)."""
    bodies = _filled(config, clean=False)
    _data(config, 4).write_bytes(bytes(length))

    store = open_store(config)

    assert bodies_of(store) == bodies
    assert not _data(config, 4).exists()
    store.close()


def test_a_short_file_holding_flushed_entries_is_refused(config: StoreConfig) -> None:
    """Also when it is the last one."""
    _filled(config, clean=False)
    os.truncate(_data(config, 3), 1000)

    with pytest.raises(CorruptLogError, match="1000 bytes instead of 4096"):
        open_store(config)


@pytest.mark.parametrize("length", [0, 1000, 5000])
def test_a_misshapen_middle_file_is_refused(config: StoreConfig, length: int) -> None:
    """Files appear only when complete, so this is damage."""
    _filled(config, clean=True)
    os.truncate(_data(config, 1), length)

    with pytest.raises(CorruptLogError, match=f"{length} bytes instead of 4096"):
        open_store(config)


def test_a_missing_middle_file_is_refused(config: StoreConfig) -> None:
    """The missing file is named."""
    _filled(config, clean=True)
    _data(config, 1).unlink()

    with pytest.raises(CorruptLogError, match=r"0004096: damaged at offset 0: the segment is missing"):
        open_store(config)


def test_a_segment_below_the_scan_with_a_bad_head_is_refused(config: StoreConfig) -> None:
    """Every segment's first record is looked at, even those whose entries are not verified again."""
    _filled(config, clean=True)
    _patch(_data(config, 1), 0, bytes(48))

    with pytest.raises(CorruptLogError, match="does not start with a valid record"):
        open_store(config)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("change", ["missing", "short", "all missing", "garbage at start", "garbage in tail"])
def test_the_index_is_rebuilt_from_data(config: StoreConfig, clean: bool, change: str) -> None:
    """It is derived: whatever happens to it costs no entry (trap 13)."""
    bodies = _filled(config, clean=clean, unflushed=5)
    wanted = [path.read_bytes() for path in sorted(_index(config).parent.iterdir())]
    if change == "missing":
        _index(config, 4).unlink()
    elif change == "short":
        os.truncate(_index(config, 4), 10)
    elif change == "all missing":
        for path in _index(config).parent.iterdir():
            path.unlink()
    elif change == "garbage at start":
        _patch(_index(config, 0), 0, b"\x55" * 320)
    else:
        _patch(_index(config, 10), 33, b"\x55" * 99)

    store = open_store(small_config(config.base_dir, recovery_verify_bytes=1 << 20))

    assert bodies_of(store) == bodies
    store.close()
    assert [path.read_bytes() for path in sorted(_index(config).parent.iterdir())] == wanted
    assert not list(problems(config.base_dir / "dledger-n0"))


def test_a_prepared_segment_is_kept(config: StoreConfig) -> None:
    """An all-zero file behind the end waits to be used."""
    bodies = _filled(config, clean=False)
    _data(config, 4).write_bytes(bytes(config.segment_bytes))

    store = open_store(config)

    assert store.recovery_report.cut_at is None
    assert _data(config, 4).exists()
    bodies += fill(store, 40)
    assert bodies_of(store) == bodies
    store.close()


def test_foreign_files_are_left_alone_and_leftovers_removed(config: StoreConfig) -> None:
    """A name that is none of ours is listed; an unfinished creation goes."""
    _filled(config, clean=True)
    foreign = [_data(config).parent / name for name in ("README", "00000000000000000007", "x.tmp")]
    for path in foreign:
        path.write_text("not a segment")
    leftover = _data(config, 9).with_suffix(".tmp")
    leftover.write_bytes(b"half")

    store = open_store(config)

    assert sorted(store.foreign_files) == sorted(foreign)
    assert all(path.exists() for path in foreign)
    assert not leftover.exists()
    store.close()


def test_two_processes_cannot_share_a_directory(config: StoreConfig) -> None:
    """The second one is told who holds it (trap 15)."""
    store = open_store(config)

    with pytest.raises(DirectoryLockedError, match=str(os.getpid())):
        open_store(config)
    store.close()
    open_store(config).close()


def test_two_nodes_cannot_share_a_data_directory(tmp_path: Path) -> None:
    """Segments carry no node id, so a shared path would mix two logs."""
    store = open_store(small_config(tmp_path / "a", data_dirs=(tmp_path / "shared",)))

    with pytest.raises(DirectoryLockedError):
        open_store(small_config(tmp_path / "b", data_dirs=(tmp_path / "shared",)))
    store.close()


def test_another_identity_is_refused_naming_both(config: StoreConfig) -> None:
    """Cluster, group and sizes must agree with what made the directory (trap 31)."""
    open_store(config).close()

    def reopen(cluster_id: str = "c", group: str = "g", changed: StoreConfig = config) -> None:
        store = FileStore.open(
            changed, cluster_id=cluster_id, group=group, node_id="n0", clock=FakeClock(), fs=UnsyncedFs()
        )
        store.close()

    with pytest.raises(IdentityError, match="cluster_id is 'c' there and 'x' here"):
        reopen(cluster_id="x")
    with pytest.raises(IdentityError, match="group is 'g' there and 'x' here"):
        reopen(group="x")
    with pytest.raises(IdentityError, match="segment_bytes is 4096 there and 8192 here: start it with the settings"):
        reopen(changed=small_config(config.base_dir, segment_bytes=8192))
    reopen()
    for text in ("{", "[" * 100_000):
        (config.base_dir / "dledger-n0" / "identity").write_text(text)
        with pytest.raises(IdentityError, match="so nothing was changed"):
            reopen()


@pytest.mark.parametrize("name", ["checkpoint", "hard_state"])
@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_lost_evidence_is_refused(config: StoreConfig, name: str, damage: str) -> None:
    """Without marks or vote nothing is guessed."""
    _filled(config, clean=True)
    path = config.base_dir / "dledger-n0" / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"\x55" * path.stat().st_size)

    with pytest.raises(CorruptLogError, match="--repair"):
        open_store(config)


def test_one_rotten_slot_loses_neither_vote_nor_marks(config: StoreConfig) -> None:
    """Two slots tell the truth about the vote; the checkpoint has older slots."""
    store = open_store(config)
    store.hard_state.save(HardState(Term(4), NodeId("n1"), standing=Standing.FULL))
    bodies = fill(store, 10)
    store.close()
    for number in range(4):
        path = config.base_dir / "dledger-n0" / "hard_state"
        original = path.read_bytes()
        _patch(path, number * 4096 + 22, b"\xff\xff")
        store = open_store(config)
        assert store.hard_state.load() == HardState(Term(4), NodeId("n1"), standing=Standing.FULL)
        assert bodies_of(store) == bodies
        store.close()
        path.write_bytes(original)
    assert (config.base_dir / "dledger-n0" / "currterm").read_text() == "voteLeader=n1\ncurrTerm=4\n"


def test_segments_without_identity_are_refused(config: StoreConfig) -> None:
    """A directory that lost its identity, or is another tool's, is not adopted silently."""
    _filled(config, clean=True)
    (config.base_dir / "dledger-n0" / "identity").unlink()

    with pytest.raises(IdentityError, match="import_unchecked"):
        open_store(config)


def test_a_log_of_the_java_line_can_be_imported(tmp_path: Path) -> None:
    """Zero CRC fields, no checkpoint, NOOP units with magic 1: opened on request, index mended, appended to."""
    config = small_config(tmp_path, import_unchecked=True)
    _data(config).parent.mkdir(parents=True)
    _index(config).parent.mkdir()
    data, units = bytearray(config.segment_bytes), bytearray(config.index_segment_bytes)
    for index in range(3):
        record, _ = records.encode_record(7, index, index * 50, b"ab", 0, magic=2 if index == 1 else 1)
        data[index * 50 : index * 50 + 50] = record[:36] + bytes(8) + record[44:]
        units[index * 32 : index * 32 + 32] = records.UNIT.pack(1, index * 50, 50, index, 7)
    _data(config).write_bytes(data)
    _index(config).write_bytes(units)

    store = open_store(config)

    assert store.last.index == 2
    assert store.hard_state.load().term == 7
    assert store.recovery_report.index_rewritten_from == 0
    assert bodies_of(store) == [b"ab"] * 3
    fill(store, 3, term=8)
    store.close()
    store = open_store(config)
    assert store.last.index == 5
    store.close()
    unasked = small_config(tmp_path, recovery_verify_bytes=1 << 20)
    store = open_store(unasked)  # it remembers that it was imported
    assert bodies_of(store)[:3] == [b"ab"] * 3
    store.close()
    (config.base_dir / "dledger-n0" / IMPORTED_FILE).unlink()
    with pytest.raises(IdentityError, match="import_unchecked=true"):
        open_store(unasked)


@pytest.mark.parametrize("at", [32, 33, 36])
@pytest.mark.parametrize("lost", [512, 4096])
def test_a_lost_sector_in_an_empty_entrys_header_is_no_java_node(tmp_path: Path, at: int, lost: int) -> None:
    """It takes the CRC fields, which Java leaves 0, and nothing else of an entry without a body, as each term begins
    with one. The advice to import unchecked entries would let damage in: it is refused, or fetched, as damage.
    """
    config = small_config(tmp_path, segment_bytes=1 << 16, index_segment_bytes=1 << 14, recovery_verify_bytes=1 << 20)
    store = open_store(config)
    store.append_as_leader(Term(1), [b"a" * (4096 - at - records.HEADER.size)])
    store.append_as_leader(Term(1), [b""])
    store.append_as_leader(Term(1), [b"c" * 100 for _ in range(80)])
    store.flush()
    store.set_committed(store.last.index)
    store.sync_checkpoint()
    store.close()
    with _data(config).open("r+b") as file:
        file.seek(4096)
        file.write(bytes(lost))

    with pytest.raises(CorruptLogError, match=r"\boffset\b") as caught:
        open_store(config)
    assert "import_unchecked" not in str(caught.value)
    mended = open_store(config, mend=True)
    assert mended.last.index < 2
    mended.close()


def test_an_imported_file_that_is_unreadable_is_named(config: StoreConfig) -> None:
    """It decides whether entries without CRCs are damage."""
    _filled(config, clean=True)
    path = config.base_dir / "dledger-n0" / IMPORTED_FILE
    path.write_text("{}")

    with pytest.raises(CorruptLogError, match="how far the log was imported"):
        open_store(config)


def test_a_damaged_follower_is_repaired_from_its_leader(config: StoreConfig, tmp_path: Path) -> None:
    """The bytes are kept, term and vote too, but the node may not vote until it has caught up (trap 6, 30)."""
    leader = open_store(small_config(tmp_path / "leader"))
    fill(leader, 50)
    store = open_store(config)
    copy_log(leader, store)
    store.hard_state.save(HardState(Term(3), NodeId("n2"), standing=Standing.FULL))
    with pytest.raises(DirectoryLockedError):
        set_aside_damaged(config, "n0")
    store.close()
    _patch(_data(config), 60, b"!!!")
    damaged = _data(config).read_bytes()

    aside = set_aside_damaged(config, "n0")

    assert aside.name == "damaged-1"
    assert (aside / "data" / _data(config).name).read_bytes() == damaged
    store = open_store(config)
    moved = f"its damaged log was moved to {aside}"
    assert store.hard_state.load() == HardState(Term(3), NodeId("n2"), Standing.BLANK, moved, lost=True)
    assert store.last.index == -1
    copy_log(leader, store)
    assert bodies_of(store) == bodies_of(leader)
    store.close()
    assert set_aside_damaged(config, "n0").name == "damaged-2"
    leader.close()


def test_no_more_logs_are_set_aside_than_people_have_looked_at(config: StoreConfig) -> None:
    """Each may hold what nobody else has any more: beyond a number none is moved, and none removed."""
    fill(store := open_store(config), 5)
    store.close()
    for number in range(1, QUARANTINED_LOGS_MAX + 1):
        assert set_aside_damaged(config, "n0").name == f"damaged-{number}"
    fill(store := open_store(config), 5)
    store.close()

    with pytest.raises(ConfigError, match=r"holds 8 logs set aside earlier \(damaged-1, damaged-2,"):
        set_aside_damaged(config, "n0")

    store = open_store(config)
    assert store.last.index == 4
    assert len(list(store.directory.glob("damaged-*"))) == QUARANTINED_LOGS_MAX
    store.close()


@pytest.mark.parametrize("reopen", ["clean", "killed"])
def test_truncated_and_smuggled_records_never_revive(config: StoreConfig, reopen: str) -> None:
    """Stale bytes that hold a perfect record at the new end are gone, not skipped over (trap 7)."""
    store = open_store(config)
    fill(store, 2)
    # Entry 2's body is, at its 52nd byte, a valid record of entry 3 as it would follow a shorter entry 2.
    kept, chain = records.encode_record(1, 2, store.end_position, b"abcd", store.last_chain_crc)
    forged, _ = records.encode_record(1, 3, store.end_position + len(kept), b"smuggled", chain)
    store.append_as_leader(Term(1), [b"abcd" + forged + b"more"])
    fill(store, 60)
    store.flush()

    store.truncate(LogIndex(2))
    store.append_as_leader(Term(1), [b"abcd"])
    assert store.last_chain_crc == chain
    store.flush()
    store.close() if reopen == "clean" else abandon(store)

    store = open_store(config)
    assert store.last.index == 2
    assert crc32c(b"abcd") == store.read(LogIndex(2)).body_crc
    store.close()


def test_segments_are_spread_over_data_directories(tmp_path: Path) -> None:
    """New segment k goes to writable path k mod n; read-only paths are read."""
    paths = tuple(tmp_path / name for name in ("b", "a", "c"))
    config = small_config(tmp_path / "base", data_dirs=paths)
    store = open_store(config)
    bodies = fill(store, 150)
    store.close()
    placed = {path.name: int(path.parent.name, 36) - 10 for one in paths for path in one.glob("0*")}
    assert placed == {records.segment_name(k * 4096): k % 3 for k in range(6)}

    read_only = small_config(tmp_path / "base", data_dirs=paths[:2], read_only_data_dirs=paths[2:])
    with pytest.raises(ConfigError, match="move it to a writable data directory"):
        open_store(read_only)
    store = open_store(config)
    bodies += fill(store, 20)
    store.close()
    store = open_store(read_only)
    bodies += fill(store, 100)
    assert bodies_of(store) == bodies
    assert len(list(paths[2].glob("0*"))) == 2
    store.close()
    with pytest.raises(ConfigError):
        open_store(small_config(tmp_path / "base", data_dirs=paths, read_only_data_dirs=paths))


def test_a_member_without_standing_is_no_voter_to_earlier_versions() -> None:
    """The byte they read is 0 without standing; what a voter or a new member saves is what they saved themselves."""
    vote, doubt = NodeId("n1"), "the disk was set back"
    plain = HardState(Term(7), vote, Standing.FULL)
    doubtful, founder = plain.doubted(doubt), HardState(Term(7), vote, Standing.FOUNDER)
    fenced = plain.fence("others committed something else")
    states = [plain, founder, doubtful, HardState(Term(7)), fenced, plain.after_loss("its disk is damaged")]

    saved = [encode_hard_state(one) for one in states]

    assert [one[8] for one in saved] == [1, 1, 0, 0, 0, 0]
    assert len(saved[0]) == 11 + len(vote)
    assert [decode_hard_state(one) for one in saved] == states


def test_a_long_doubt_is_cut_where_its_slot_ends() -> None:
    """A reason of any length and alphabet can be saved."""
    state = HardState(Term(7), NodeId("n" * 100), Standing.DOUBTFUL, "\u00e4" * 2000)

    again = decode_hard_state(encode_hard_state(state))

    assert again.standing is Standing.DOUBTFUL
    assert state.doubt.startswith(again.doubt)
    assert len(again.doubt) > 150


def test_a_doubt_found_at_the_start_is_durable(config: StoreConfig) -> None:
    """The member keeps the reason why it has no standing over restarts; one that had none keeps what it was."""
    store = open_store(config)
    store.hard_state.doubt("is blank anyway")
    blank = store.hard_state.load()
    store.hard_state.save(HardState(Term(3), None, Standing.FULL))
    store.hard_state.doubt("the log was cut")
    store.close()

    store = open_store(config)

    assert blank == HardState()
    assert store.hard_state.load() == HardState(Term(3), None, Standing.DOUBTFUL, "the log was cut")
    store.close()


def test_a_loss_is_durable_whatever_the_standing_was_except_of_a_fenced_member(config: StoreConfig) -> None:
    """One that is fenced stays so: nothing that it holds may be believed."""
    store = open_store(config)
    for state in (HardState(), HardState(Term(3)).after_loss("before"), HardState(Term(3)).fence("differs")):
        store.hard_state.save(state)
        store.hard_state.lose("its log was damaged")
        saved = read_hard_state(config.base_dir / "dledger-n0")
        assert saved == state.after_loss("its log was damaged")
        assert (saved.standing, saved.lost) == ((Standing.DOUBTFUL, False) if state.fenced else (Standing.BLANK, True))
    store.close()


@pytest.mark.parametrize("kill", [False, True])
def test_a_log_begins_where_an_older_one_ends(config: StoreConfig, *, kill: bool) -> None:
    """Its first entry is there, number 0; the positions before it are not its own."""
    first = 3 * config.segment_bytes
    store = open_store(config, first_position=first)
    assert (store.begin.position, store.end_position, store.committed_position, store.last.index) == (
        first, first, first, -1,
    )  # fmt: skip
    assert store.append_as_leader(Term(1), [b"one"]).positions == (first,)
    store.flush()
    abandon(store) if kill else store.close()

    again = open_store(config, first_position=first)

    assert bodies_of(again) == [b"one"]
    assert again.begin.position == first
    again.close()


@pytest.mark.parametrize("later", [0, 1, 5])
def test_an_empty_log_follows_the_older_one(config: StoreConfig, later: int) -> None:
    """Which went on, was replaced, or is gone."""
    store = open_store(config, first_position=3 * config.segment_bytes)
    store.warm()
    store.close()

    again = open_store(config, first_position=later * config.segment_bytes)

    assert again.append_as_leader(Term(1), [b"one"]).positions == (later * config.segment_bytes,)
    again.flush()
    again.close()
    assert bodies_of(open_store(config, first_position=later * config.segment_bytes)) == [b"one"]


def test_a_log_with_entries_does_not_move(config: StoreConfig) -> None:
    """The older log is not the one that it continues."""
    store = open_store(config, first_position=3 * config.segment_bytes)
    store.append_as_leader(Term(1), [b"one"])
    store.close()

    with pytest.raises(IdentityError, match="restore the older log"):
        open_store(config, first_position=4 * config.segment_bytes)


@pytest.mark.parametrize("later", [0, 3, 5])
def test_a_log_whose_segments_are_gone_is_not_an_empty_one(config: StoreConfig, later: int) -> None:
    """It is known to have had entries, which its member has acknowledged: wherever it would begin now."""
    store = open_store(config, first_position=3 * config.segment_bytes)
    store.append_as_leader(Term(1), [b"one"])
    store.flush()
    store.close()
    for segment in (store.directory / "data").iterdir():
        segment.unlink()

    with pytest.raises(CorruptLogError, match="the segment is missing"):
        open_store(config, first_position=later * config.segment_bytes)


def test_an_older_logs_files_in_a_read_only_directory_are_not_this_logs(tmp_path: Path) -> None:
    """Both logs may have their read-only files in one directory."""
    archive = tmp_path / "archive"
    archive.mkdir()
    config = small_config(tmp_path / "store", read_only_data_dirs=(archive,))
    old = archive / records.segment_name(0)
    old.write_bytes(b"older".ljust(config.segment_bytes, b"."))
    for _ in range(2):
        store = open_store(config, first_position=config.segment_bytes)
        store.append_as_leader(Term(1), [b"one"])
        store.close()
    assert old.read_bytes().startswith(b"older")
