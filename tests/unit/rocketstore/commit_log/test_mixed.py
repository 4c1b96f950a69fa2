"""A group's log that continues a plain one: reading across the boundary, and what expires when."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.errors import ConfigError, CorruptLogError
from dledger.server import DLedgerServer
from dledger.store.fs import FileSystem
from dledger.store.identity import layout_of
from dledger.types import why_apart
from rocketstore.commit_log import base_log
from rocketstore.commit_log.base_log import OLD_LOG_FILE
from rocketstore.commit_log.mixed import MixedCommitLog
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.replicated import MESSAGES, ReplicatedCommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.message.record import decode_record
from rocketstore.store.takeover import SealedLog, take_over
from rocketstore.types import RecordHead
from tests.support.damage import turn
from tests.support.waiting import wait_until
from tests.unit.rocketstore.commit_log.replicas import SEGMENT_BYTES, Replica, members_of, message, node_config
from tests.unit.rocketstore.commit_log.support import open_log, put, small_config

LATER_MS = 1 << 50
COUNT = 300


class MixedReplica(Replica):
    """A group of one that continues a plain log."""

    log: MixedCommitLog  # type: ignore[assignment]  # in the place of the one whose node it has

    def __init__(self, config: MessageStoreConfig, old: SealedLog, node: ServerConfig | None = None) -> None:
        node = node or node_config(config.store_path_root_dir, members_of(1))
        self.server = DLedgerServer(node, bodies=MESSAGES, base_log=old.now)
        self.new = ReplicatedCommitLog(self.server, config)
        self.log = MixedCommitLog(old.files, self.new, old.record, old.expired)

    def lead(self) -> MixedReplica:
        wait_until(lambda: self.leads, "it leads")
        self.new.open_term(self.server.status().term)
        return self


def config_of(root: Path, **changes: Any) -> MessageStoreConfig:  # noqa: ANN401 - one keyword per setting
    """Files as large as the replicated log's segments."""
    return small_config(root, **{"mapped_file_size_commit_log": SEGMENT_BYTES, **changes})


def plain_log(config: MessageStoreConfig, count: int = COUNT) -> int:
    """A stopped plain broker's log with that many messages; returns where it ends."""
    log = open_log(config)
    for number in range(count):
        put(log, message(b"%d" % number + bytes(100)))
    end = log.end_offset
    log.shutdown()
    return end


def taken_over(config: MessageStoreConfig) -> SealedLog:
    """What ``take_over`` finds."""
    node = node_config(config.store_path_root_dir, members_of(1))
    old = take_over(config, layout_of(node.store, "n0"), SEGMENT_BYTES, clock=Clock())
    assert old is not None
    return old


@contextmanager
def mixed(config: MessageStoreConfig) -> Iterator[MixedReplica]:
    """A running log."""
    replica = MixedReplica(config, taken_over(config))
    try:
        replica.start()
        yield replica.lead()
    finally:
        replica.stop()


def bodies(log: MixedCommitLog, heads: list[RecordHead]) -> list[int]:
    """The numbers in the records."""
    records = [log.read(head.offset, head.size) for head in heads]
    return [int(decode_record(one).body.rstrip(b"\0")) for one in records if one is not None]


def extend(replica: MixedReplica, count: int) -> None:
    """More messages, numbered on."""
    for number in range(COUNT, COUNT + count):
        (result,) = replica.put(message(b"%d" % number + bytes(100)))
        assert result.ok


def own_heads(replica: MixedReplica, bytes_max: int = 1 << 20) -> list[RecordHead]:
    """All messages' heads from the log's begin on."""
    return [head for head in replica.heads(replica.log.min_offset, bytes_max) if head.topic == "TopicTest"]


@pytest.mark.parametrize("bytes_max", [100, 4096, 1 << 20])
def test_scanning_crosses_the_boundary(tmp_path: Path, bytes_max: int) -> None:
    """Without a gap or a repeat, wherever a scan stops; offsets never go back."""
    config = config_of(tmp_path)
    end = plain_log(config)
    with mixed(config) as replica:
        extend(replica, 50)
        log = replica.log
        assert end < log.divided == end - end % SEGMENT_BYTES + SEGMENT_BYTES
        heads = own_heads(replica, bytes_max)
        assert bodies(log, heads) == list(range(COUNT + 50))
        assert [head.offset for head in heads] == sorted(head.offset for head in heads)
        assert sum(head.offset < log.divided for head in heads) == COUNT


def test_records_are_read_from_the_log_they_are_in(tmp_path: Path) -> None:
    """Alone, and together in the order asked for, also where both logs are asked at once."""
    config = config_of(tmp_path)
    plain_log(config)
    with mixed(config) as replica:
        extend(replica, 20)
        log = replica.log
        places = [(head.offset, head.size) for head in own_heads(replica)]
        whole = [log.read(*place) for place in places]
        assert None not in whole
        assert [log.read_record(offset) for offset, _ in places] == whole
        for order in (places, places[::-1], places[COUNT - 5 : COUNT + 5]):
            wanted = [whole[places.index(place)] for place in order]
            assert log.read_together(order) == wanted
        across = places[COUNT - 2 : COUNT + 2]
        at_once = log.read_at_once(across)
        assert all(found in (None, whole[places.index(place)]) for found, place in zip(at_once, across, strict=True))
        assert log.read_record(log.divided) is None, "an entry's header is no record"
        assert log.next_file_offset(log.divided - 1) == log.divided
        assert log.next_file_offset(log.divided) == log.divided + SEGMENT_BYTES


def test_delete_expired_files(tmp_path: Path) -> None:
    """RocketMQ's testDeleteExpiredFiles: the old files go, the last one too, and the log begins where they ended."""
    config = config_of(tmp_path)
    plain_log(config)
    with mixed(config) as replica:
        extend(replica, 200)
        log, needed = replica.log, [0]
        log.keep_from(lambda: needed[0])
        end = log.max_offset
        assert log.delete_expired(now_ms=LATER_MS, immediately=False) == 0, "something still needs the old files"
        needed[0] = end
        first = log.earliest_message_time()
        while log.has_old_files:
            assert log.min_offset < log.divided
            assert log.delete_expired(now_ms=LATER_MS, immediately=False) > 0
        assert (log.min_offset, log.max_offset) == (log.divided, end)
        assert bodies(log, own_heads(replica)) == list(range(COUNT, COUNT + 200))
        assert log.earliest_message_time() >= first
        assert log.delete_expired(now_ms=LATER_MS, immediately=False) == 0
        assert not list(config.commit_log_dirs[0].iterdir())
        assert log.scan(0, 1 << 20).heads, "reading goes on where the log begins now"
        assert replica.server.status().begin_index == 0, "nothing of the replicated log has gone"
    with mixed(config) as again:
        assert again.log.min_offset == again.log.divided
        assert bodies(again.log, own_heads(again)) == list(range(COUNT, COUNT + 200))


def test_the_replicated_log_stays_while_old_files_do(tmp_path: Path) -> None:
    """The log has no gap, whatever the node's own retention finds."""
    config = config_of(tmp_path)
    plain_log(config)
    with mixed(config) as replica:
        asked: list[Callable[[], int | None]] = []
        server = replica.server
        server.keep_from = lambda wanted, held_back: asked.append(wanted)  # type: ignore[method-assign]  # noqa: ARG005
        replica.log.keep_from(lambda: None)
        (wanted,) = asked
        assert wanted() == replica.log.divided
        while replica.log.has_old_files:
            replica.log.delete_expired(now_ms=LATER_MS, immediately=True)
        assert wanted() is None


def test_who_holds_old_files_back_is_told(tmp_path: Path) -> None:
    """As for segments of the replicated log: up to where the old one ends, as long as any of its files has to stay."""
    config = config_of(tmp_path)
    plain_log(config)
    with mixed(config) as replica:
        log, needed, told = replica.log, [0], list[int]()
        log.keep_from(lambda: needed[0], told.append)
        assert log.delete_expired(now_ms=LATER_MS, immediately=True) == 0
        assert told == [log.divided]
        needed[0] = log.max_offset
        while log.has_old_files:
            log.delete_expired(now_ms=LATER_MS, immediately=True)
        assert told == [log.divided]


def test_old_files_that_expire_before_the_first_entry_still_count(tmp_path: Path) -> None:
    """A member that has not followed yet, and has nothing left of the old log, begins where that ended, not at 0."""
    config = config_of(tmp_path)
    plain_log(config)
    sealed = taken_over(config)
    record, files = sealed.record, sealed.files
    files.load_sealed(record.end, record.begin, sealed.expired.note)
    while files.min_offset < record.end:
        assert files.delete_expired(now_ms=LATER_MS, immediately=True) > 0
    files.shutdown()
    assert not list(config.commit_log_dirs[0].iterdir())
    assert taken_over(config).record == record
    with mixed(config) as replica:
        assert replica.log.min_offset == replica.log.divided == record.end
        extend(replica, 3)
        assert bodies(replica.log, own_heads(replica)) == [COUNT, COUNT + 1, COUNT + 2]


def test_no_plain_log_no_old_log(tmp_path: Path) -> None:
    """A new broker's directory, and one whose plain broker never stored anything."""
    config = config_of(tmp_path)
    layout = layout_of(node_config(tmp_path, members_of(1)).store, "n0")
    assert take_over(config, layout, SEGMENT_BYTES, clock=Clock()) is None
    open_log(config).shutdown()
    assert take_over(config, layout, SEGMENT_BYTES, clock=Clock()) is None


def test_a_log_that_ends_with_its_file_needs_no_blank(tmp_path: Path) -> None:
    """The group goes on at once; taking over again finds the same."""
    config = config_of(tmp_path)
    plain_log(config)
    first = taken_over(config).record
    log = PlainCommitLog(config, clock=Clock())
    log.load(clean_stop=True)
    assert log.end_offset == first.end
    log.shutdown()
    assert taken_over(config).record == first


def test_a_plain_broker_that_goes_on_before_the_first_entry_is_continued_where_it_ends_then(tmp_path: Path) -> None:
    """Nothing of the group's is lost by that: it has nothing yet."""
    config = config_of(tmp_path)
    plain_log(config)
    before = taken_over(config)
    MixedReplica(config, before).server.stop()
    plain_log(config, 200)
    with mixed(config) as replica:
        assert replica.log.divided > before.record.end
        assert len(own_heads(replica)) == COUNT + 200
        extend(replica, 1)
        assert len(own_heads(replica)) == COUNT + 201


def test_what_a_plain_broker_wrote_later_is_not_hidden(tmp_path: Path) -> None:
    """RocketMQ's, for example, which knows nothing of our group."""
    config = config_of(tmp_path)
    plain_log(config)
    with mixed(config) as replica:
        extend(replica, 1)
    log = open_log(config)
    put(log, message(b"later"))
    log.shutdown()
    with pytest.raises(ConfigError, match="written by a plain broker after the group"):
        taken_over(config)


def test_damage_in_the_old_log_is_found_before_the_group_begins(tmp_path: Path) -> None:
    """Later, others could not say any more which copy is sound."""
    config = config_of(tmp_path)
    plain_log(config)
    turn(config.commit_log_dirs[0] / f"{0:020d}", 300)
    with pytest.raises(CorruptLogError) as caught:
        taken_over(config)
    assert caught.value.path.name == f"{0:020d}"


def test_of_a_very_long_log_the_newest_files_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has as many digests as fit a handshake, and members relate them to the old log's end."""
    config = config_of(tmp_path)
    plain_log(config)
    whole = taken_over(config).record
    assert len(whole.digests) > 2
    monkeypatch.setattr(base_log, "DIGESTS_MAX", 2)
    record = taken_over(config).record
    assert record == replace(whole, digests=whole.digests[-2:])
    assert why_apart(whole, record, "n0", "n1") == ""


def test_a_missing_old_file_is_no_expired_one(tmp_path: Path) -> None:
    """Only the oldest expire."""
    config = config_of(tmp_path)
    plain_log(config)
    with mixed(config) as replica:
        extend(replica, 1)
    last = max(config.commit_log_dirs[0].iterdir())
    last.unlink()
    with pytest.raises(CorruptLogError, match="missing"), mixed(config):
        pass


@pytest.mark.parametrize("gone", [1, 2, None], ids=["the first", "two", "all"])
def test_old_files_that_did_not_expire_here_are_missing(tmp_path: Path, gone: int | None) -> None:
    """A disk that is not mounted has none, and consumers of a broker that took them for expired would skip them."""
    config = config_of(tmp_path)
    plain_log(config)
    with mixed(config) as replica:
        extend(replica, 1)
    for path in sorted(config.commit_log_dirs[0].iterdir())[:gone]:
        path.rename(tmp_path / path.name)
    with pytest.raises(CorruptLogError, match="missing") as caught, mixed(config):
        pass
    assert caught.value.path.name == f"{0:020d}"
    for path in tmp_path.glob("0*"):
        path.rename(config.commit_log_dirs[0] / path.name)
    with mixed(config) as again:
        assert bodies(again.log, own_heads(again)) == list(range(COUNT + 1))


def test_old_files_may_expire_in_steps(tmp_path: Path) -> None:
    """A restart finds those that are left; of these none may be missing."""
    config = config_of(tmp_path)
    plain_log(config)
    with mixed(config) as replica:
        extend(replica, 1)
        first, second = sorted(config.commit_log_dirs[0].iterdir())[:2]
        os.utime(first, (1, 1))
        replica.log.keep_from(lambda: None)
        now_ms = Clock().wall_ms()
        assert replica.log.delete_expired(now_ms=now_ms, immediately=False) == 1
        begin = replica.log.min_offset
    assert not first.exists()
    with mixed(config) as again:
        assert again.log.min_offset == begin == int(second.name)
    second.unlink()
    with pytest.raises(CorruptLogError, match="missing"), mixed(config):
        pass


def test_an_old_file_stays_until_its_end_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in between must not make the next start look for a file that was removed."""
    config = config_of(tmp_path)
    plain_log(config)

    def full_disk(_end: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with mixed(config) as replica:
        extend(replica, 1)
        replica.log.keep_from(lambda: None)
        with monkeypatch.context() as patched:
            patched.setattr(replica.log._old._queue, "before_delete", full_disk)
            assert replica.log.delete_expired(now_ms=LATER_MS, immediately=True) == 0
        assert replica.log.min_offset == 0
        assert min(config.commit_log_dirs[0].iterdir()).name == f"{0:020d}"
        assert replica.log.delete_expired(now_ms=LATER_MS, immediately=True) > 0, "later it succeeds"


def test_old_files_expire_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to be created for it: they are what makes room."""
    config = config_of(tmp_path)
    plain_log(config)

    create = FileSystem.create

    def full_disk(self: FileSystem, path: Path) -> int:
        if path.name.startswith(OLD_LOG_FILE):  # other threads have files of their own
            raise OSError(errno.ENOSPC, "no space")
        return create(self, path)

    with mixed(config) as replica:
        extend(replica, 1)
        replica.log.keep_from(lambda: None)
        with monkeypatch.context() as patched:
            patched.setattr(FileSystem, "create", full_disk)
            assert replica.log.delete_expired(now_ms=LATER_MS, immediately=True) > 0
        begin = replica.log.min_offset
    with mixed(config) as again:
        assert again.log.min_offset == begin > 0


def test_a_read_only_directory_that_is_missing_is_not_an_empty_one(tmp_path: Path) -> None:
    """Its files have not expired."""
    config = config_of(tmp_path, store_path_commit_log=f"{tmp_path / 'one'},{tmp_path / 'two'}")
    plain_log(config)
    archive = tmp_path / "archive"
    archive.mkdir()
    first = tmp_path / "one" / f"{0:020d}"
    first.rename(archive / first.name)
    config = replace(config, read_only_commit_log_store_paths=str(archive))
    with mixed(config) as replica:
        extend(replica, 1)
    archive.rename(tmp_path / "unmounted")
    with pytest.raises(CorruptLogError, match="missing"), mixed(config):
        pass


def test_what_has_expired_here_is_not_forgotten_with_the_groups_log(tmp_path: Path) -> None:
    """Other members may have files left that have expired here: this member's log began where theirs did."""
    config = config_of(tmp_path)
    plain_log(config)
    before = taken_over(config).record
    with mixed(config) as replica:
        extend(replica, 1)
        replica.log.keep_from(lambda: None)
        os.utime(min(config.commit_log_dirs[0].iterdir()), (1, 1))
        assert replica.log.delete_expired(now_ms=Clock().wall_ms(), immediately=False) == 1
    for segment in (tmp_path / "dledger-n0" / "data").iterdir():
        segment.unlink()  # as a repair sets them aside
    assert taken_over(config).record == before


def test_a_record_that_was_changed_is_refused(tmp_path: Path) -> None:
    """Without it, the old files would be taken for nothing that belongs to the group."""
    config = config_of(tmp_path)
    plain_log(config)
    with mixed(config) as replica:
        extend(replica, 1)
    turn(tmp_path / "dledger-n0" / OLD_LOG_FILE, 40)
    with pytest.raises(CorruptLogError, match="record of the old log"):
        taken_over(config)


def test_files_of_another_size_than_the_segments_are_refused(tmp_path: Path) -> None:
    """The group's first segment could not begin where the old log ends."""
    config = config_of(tmp_path, mapped_file_size_commit_log=SEGMENT_BYTES // 2 + 8)
    plain_log(config, 60)
    with pytest.raises(ConfigError, match="mappedFileSizeCommitLog"):
        taken_over(config)


def test_a_group_does_not_share_the_plain_logs_directory(tmp_path: Path) -> None:
    """Its node would remove the plain log's files as left over from before its own log."""
    config = config_of(tmp_path)
    plain_log(config)
    node = node_config(tmp_path, members_of(1))
    shared = replace(node.store, data_dirs=config.commit_log_dirs)
    with pytest.raises(ConfigError, match="a directory of its own"):
        take_over(config, layout_of(shared, "n0"), SEGMENT_BYTES, clock=Clock())


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "with the node's"])
def test_read_only_directories_of_the_old_log(tmp_path: Path, *, shared: bool) -> None:
    """RocketMQ names those of the plain log and of the group's alike: each takes its own files."""
    config = config_of(tmp_path, store_path_commit_log=f"{tmp_path / 'one'},{tmp_path / 'two'}")
    plain_log(config)
    archive = tmp_path / "archive"
    archive.mkdir()
    first = tmp_path / "one" / f"{0:020d}"
    first.rename(archive / first.name)
    config = replace(config, read_only_commit_log_store_paths=str(archive))
    old = taken_over(config)
    node = node_config(tmp_path, members_of(1))
    if shared:
        node = replace(node, store=replace(node.store, read_only_data_dirs=(archive,)))
    replica = MixedReplica(config, old, node)
    try:
        replica.start()
        replica.lead()
        extend(replica, 5)
        assert bodies(replica.log, own_heads(replica)) == list(range(COUNT + 5))
    finally:
        replica.stop()
    assert (archive / first.name).exists()
