"""Turned bytes of consume queues and index files: every way of reading gives what was put, or an error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from dledger.clock import Clock
from dledger.errors import DLedgerError
from dledger.monitoring import ConditionKind, Conditions
from dledger.server import DLedgerServer
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.port import CommitLog
from rocketstore.commit_log.replicated import MESSAGES, ReplicatedCommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.consume_queue.queue_check import QueueCheck
from rocketstore.index.service import IndexDamagedError
from rocketstore.message.message import DelayLevels, Message
from rocketstore.message.properties import tags_code
from rocketstore.message.record import decode_record
from rocketstore.store.message_store import MessageStore
from rocketstore.types import GetMessageStatus, ScannedRecords
from tests.support.damage import turn
from tests.support.sweeps import thinned
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import FOREVER_MS, WAIT_S, UnsyncedFs, small_config
from tests.unit.rocketstore.commit_log.replicas import members_of, node_config
from tests.unit.rocketstore.store.test_message_store_replicated import promote

BEGIN_MS = 1_700_000_000_000
STEP_MS = 700
QUEUES = 2
TAGS = ("a", "b", "c")


class SteppingClock(Clock):
    """Wall time moves when it is told to."""

    def __init__(self) -> None:
        self.now_ms = BEGIN_MS

    def wall_ms(self) -> int:
        return self.now_ms


@dataclass(slots=True)
class Bench:
    """A store with messages, of which number n is in queue n % 2."""

    store: MessageStore
    clock: SteppingClock
    conditions: Conditions
    offsets: list[int]

    def put(self, count: int) -> None:
        """Put so many more."""
        for _ in range(count):
            number = len(self.offsets)
            self.clock.now_ms = BEGIN_MS + number * STEP_MS
            properties = {"KEYS": f"k{number % 7} n{number}", "TAGS": TAGS[number % len(TAGS)]}
            stored = self.store.put(Message("T", b"%d" % number, number % QUEUES, properties)).stored
            assert stored is not None
            self.offsets.append(stored.offset)
        assert self.store.wait_dispatched(WAIT_S)

    def problems(self) -> list[str]:
        """What a reader is told wrongly, and what it is refused."""
        count = len(self.offsets)
        checks: list[tuple[Callable[[], object], object]] = []
        for queue in range(QUEUES):
            numbers = list(range(queue, count, QUEUES))
            checks.append((partial(self._walk, queue, None), numbers))
            checks.append((partial(self._bounds, queue), (0, len(numbers))))
            for tag in TAGS:
                tagged = [one for one in numbers if TAGS[one % len(TAGS)] == tag]
                checks.append((partial(self._walk, queue, tag), tagged))
        for number in range(0, count, 3):
            checks += [
                (partial(self._by_time, number), number // QUEUES),
                (partial(self._stored, number), BEGIN_MS + number * STEP_MS),
                (partial(self._by_position, number), number // QUEUES),
                (partial(self._by_key, f"n{number}"), [number]),
            ]
        checks += [(partial(self._by_key, f"k{key}"), list(range(key, count, 7))) for key in range(7)]
        problems = []
        for look, expected in checks:
            try:
                found = look()
            except DLedgerError as error:
                problems.append(f"{look}: {error}")
                continue
            assert found == expected, look
        return problems

    def _walk(self, queue: int, tag: str | None) -> list[int]:
        found: list[int] = []
        at, code = 0, tags_code(tag) if tag is not None else 0
        while at < self.store.max_offset("T", queue):
            matches = None if tag is None else lambda one: one == code
            result = self.store.get("T", queue, at, max_count=16, matches_tags=matches)
            assert result.status in (GetMessageStatus.FOUND, GetMessageStatus.NO_MATCHED_MESSAGE), result
            assert result.next_offset > at
            found += [int(decode_record(one).body) for one in result.records]
            at = result.next_offset
        return found

    def _bounds(self, queue: int) -> tuple[int, int]:
        return self.store.min_offset("T", queue), self.store.max_offset("T", queue)

    def _by_time(self, number: int) -> int:
        return self.store.offset_by_time("T", number % QUEUES, BEGIN_MS + number * STEP_MS)

    def _stored(self, number: int) -> int:
        return self.store.store_time("T", number % QUEUES, number // QUEUES)

    def _by_position(self, number: int) -> int:
        return self.store.offset_by_position("T", number % QUEUES, self.offsets[number])

    def _by_key(self, key: str) -> list[int]:
        return [int(decode_record(one).body) for one in self.store.query("T", key, 64, 0, FOREVER_MS)]


@contextmanager
def opened(config: MessageStoreConfig, offsets: list[int]) -> Iterator[Bench]:
    """The store of a directory, running."""
    clock, fs = SteppingClock(), UnsyncedFs()
    conditions = Conditions("store", clock)
    clock.now_ms = BEGIN_MS + len(offsets) * STEP_MS
    log: CommitLog
    if config.enable_dledger_commit_log:
        config.store_path_root_dir.mkdir(exist_ok=True)
        node = node_config(config.store_path_root_dir, members_of(1))
        log = ReplicatedCommitLog(DLedgerServer(node, bodies=MESSAGES), config, clock=clock)
    else:
        log = PlainCommitLog(config, clock=clock, fs=fs)
    store = MessageStore(config, log, clock=clock, fs=fs, conditions=conditions)
    try:
        store.load()
        store.start()
        if log.is_replicated:
            promote(store)
        yield Bench(store, clock, conditions, offsets)
    finally:
        store.shutdown()


def derived_files(root: Path) -> list[Path]:
    """All files of queues and index."""
    return sorted([*root.glob("consumequeue/T/*/*"), *root.glob("index/*")])


def config_of(root: Path, scrub_bytes_per_s: int = 0) -> MessageStoreConfig:
    """Several files of each kind."""
    return small_config(root, max_index_num=150, max_hash_slot_num=1100, derived_scrub_bytes_per_s=scrub_bytes_per_s)


@pytest.mark.sweep
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("seed", thinned(range(18), 6))
def test_a_turned_byte_makes_no_answer_wrong(tmp_path: Path, seed: int, *, replicated: bool) -> None:
    """While stopped, after a crash, or while running; then all is mended, and goes on."""
    random, offsets = Random(seed), list[int]()
    config = replace(config_of(tmp_path / "store"), enable_dledger_commit_log=replicated)
    how = ("stopped", "running", "killed")[seed % 3]
    with opened(config, offsets) as bench:
        bench.put(90)
        if how == "running":
            damage(config.store_path_root_dir, random)
            healed(bench)
        elif how == "killed":
            bench.store.flush()
            bench.put(10)
            shutil.copytree(config.store_path_root_dir, tmp_path / "killed", ignore=shutil.ignore_patterns("*.tmp"))
            config = replace(config, store_path_root_dir=tmp_path / "killed")
    if how != "running":
        damage(config.store_path_root_dir, random)
    with opened(config, offsets) as bench:
        healed(bench)
        bench.put(30)
        healed(bench)


def damage(root: Path, random: Random) -> None:
    """Turn bits of three bytes somewhere."""
    files = derived_files(root)
    for _ in range(3):
        path = random.choice(files)
        turn(path, random.randrange(path.stat().st_size), random.randrange(1, 256))


def healed(bench: Bench) -> None:
    """No answer is wrong, and soon none is refused."""
    wait_until(lambda: not bench.problems(), "everything can be read again", poll_s=0.1)


def unit_at(root: Path, queue: int, number: int) -> tuple[Path, int]:
    """The file and the place of a unit."""
    files = sorted((root / "consumequeue" / "T" / str(queue)).iterdir())
    return files[number // 20], number % 20 * 20


@pytest.mark.parametrize("number", [12, 28, 30])
def test_a_last_unit_that_was_turned_upwards_lets_no_message_out(tmp_path: Path, number: int) -> None:
    """What follows it must be dispatched again, though it says that its record ends behind theirs."""
    config, offsets = config_of(tmp_path / "store"), list[int]()
    with opened(config, offsets) as bench:
        bench.put(80)
    path, at = unit_at(config.store_path_root_dir, 0, number)
    with path.open("r+b") as file:  # leads behind the records of the units after it, which are lost
        file.seek(at)
        file.write(offsets[78].to_bytes(8, "big"))
        file.seek(at + 20)
        file.write(bytes(400 - at - 20))
    for later in sorted(path.parent.iterdir()):
        if later > path:
            later.unlink()
    with opened(config, offsets) as bench:
        healed(bench)


def _swap_directories(root: Path) -> None:
    """The files keep their times."""
    queues = root / "consumequeue" / "T"
    (queues / "0").rename(queues / "x")
    (queues / "1").rename(queues / "0")
    (queues / "x").rename(queues / "1")


def _swap_contents(root: Path) -> None:
    """As far as both have a file of that name."""
    queues = root / "consumequeue" / "T"
    for path in sorted((queues / "0").iterdir()):
        other = queues / "1" / path.name
        if other.exists():
            first, second = path.read_bytes(), other.read_bytes()
            path.write_bytes(second)
            other.write_bytes(first)


def _copy_of_the_other(root: Path) -> None:
    queues = root / "consumequeue" / "T"
    shutil.rmtree(queues / "1")
    shutil.copytree(queues / "0", queues / "1")


def _last_unit_of_the_other(root: Path) -> None:
    """Only one unit is wrong, and it is one too many."""
    path, at = unit_at(root, 0, 14)
    source = path.read_bytes()[at : at + 20]
    path, at = unit_at(root, 1, 14)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(source)


def _first_file_again(root: Path) -> None:
    """As an older copy would have it."""
    path, at = unit_at(root, 1, 10)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(400 - at))


def _overwrite_the_end_and_keep_the_time(root: Path) -> None:
    """What a disk does that mixes up sectors: neither size nor time says so."""
    path, _ = unit_at(root, 1, 14)
    times = path.stat()
    _last_unit_of_the_other(root)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        _swap_directories,
        _swap_contents,
        _copy_of_the_other,
        _last_unit_of_the_other,
        _first_file_again,
        _overwrite_the_end_and_keep_the_time,
    ],
)
@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize(("count", "replicated"), [(29, False), (29, True), (89, False)])
def test_files_that_are_another_queues_hide_nothing_and_give_no_offset_twice(
    tmp_path: Path, change: Callable[[Path], None], how: str, count: int, *, replicated: bool
) -> None:
    """The end of a queue is its own last message, whatever its files are; of two queues of unlike lengths."""
    config, offsets = replace(config_of(tmp_path / "store"), enable_dledger_commit_log=replicated), list[int]()
    with opened(config, offsets) as bench:
        bench.put(count)
        if how == "killed":
            bench.store.flush()
            shutil.copytree(config.store_path_root_dir, tmp_path / "killed", ignore=shutil.ignore_patterns("*.tmp"))
            config = replace(config, store_path_root_dir=tmp_path / "killed")
    change(config.store_path_root_dir)
    for _ in range(2):
        with opened(config, offsets) as bench:
            healed(bench)
            bench.put(5)
            healed(bench)


def test_a_last_unit_that_lost_its_sector_is_mended_at_the_start(tmp_path: Path) -> None:
    """After a clean stop, too, and although neither size nor time of the file has changed; nobody need read it."""
    config, offsets = config_of(tmp_path / "store"), list[int]()
    with opened(config, offsets) as bench:
        bench.put(30)
    path, at = unit_at(config.store_path_root_dir, 1, 14)
    sound, times = path.read_bytes(), path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(sound[:20])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    with opened(config, offsets):
        assert path.read_bytes() == sound


def test_an_index_file_that_is_another_one_is_made_again(tmp_path: Path) -> None:
    """Each file's header is compared with what was flushed."""
    config, offsets = config_of(tmp_path / "store"), list[int]()
    with opened(config, offsets) as bench:
        bench.put(89)
    first, second = sorted(config.index_dir.iterdir())[:2]
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    with opened(config, offsets) as bench:
        healed(bench)
        bench.put(5)
        healed(bench)


@pytest.mark.parametrize("size", [0, 1 << 30])
def test_searches_by_time_and_place_believe_no_unit(tmp_path: Path, size: int) -> None:
    """Whatever unit they come by: one that is as if never written, or leads elsewhere."""
    config, offsets = config_of(tmp_path / "store"), list[int]()
    with opened(config, offsets) as bench:
        bench.put(80)
        for number in range(1, 40, 5):
            path, at = unit_at(config.store_path_root_dir, 1, number)
            with path.open("r+b") as file:
                file.seek(at)
                file.write(offsets[0].to_bytes(8, "big") + size.to_bytes(4, "big"))
        for number in range(1, 80, 2):
            assert bench.store.offset_by_time("T", 1, BEGIN_MS + number * STEP_MS) == number // 2
            assert bench.store.offset_by_position("T", 1, offsets[number]) == number // 2
        healed(bench)


@pytest.mark.sweep
@pytest.mark.parametrize("number", thinned(range(0, 40, 3), 4))
def test_a_turned_unit_does_not_make_a_queue_begin_too_late(tmp_path: Path, number: int) -> None:
    """It says that its record has expired, as others do whose records have."""
    config, offsets = config_of(tmp_path / "store"), list[int]()
    with opened(config, offsets) as bench:
        bench.put(80)
        path, at = unit_at(config.store_path_root_dir, 0, number)
        turn(path, at + 6, 0xFF)
        begin = offsets[33]
        bench.store._derived.queues.correct_min_offsets(begin)
        assert bench.store.min_offset("T", 0) == 17
        assert bench.store.min_offset("T", 1) == 16


def test_what_nobody_reads_is_verified_too(tmp_path: Path) -> None:
    """The store's own thread finds it, mends it and says so."""
    config, offsets = config_of(tmp_path / "store", scrub_bytes_per_s=1 << 30), list[int]()
    root = config.store_path_root_dir
    with opened(config, offsets) as bench:
        bench.put(80)
        bench.store.flush()
        sound = {path: path.read_bytes() for path in derived_files(root)}
        for path in sound:
            turn(path, 45, 0x11)
        wait_until(lambda: {path: path.read_bytes() for path in sound} == sound, "all files are as they were")
        wait_until(lambda: not bench.conditions.now(), "nothing is the matter any more")
        assert int(bench.store.runtime_info()["indexFilesRebuilt"]) == len(list(root.glob("index/*")))


def test_units_of_several_files_are_verified_as_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound ones are not looked for in the log: that would read all of it for each."""
    config = config_of(tmp_path / "store")
    with opened(config, []) as bench:
        bench.put(100)
        queue, log = bench.store._derived.queues.find("T", 0), bench.store.log
        assert queue is not None
        queue_check = QueueCheck(log, DelayLevels.parse(config.message_delay_level))
        monkeypatch.delattr(QueueCheck, "restore")

        units = queue_check.tagged_units(queue, 25, log.max_offset, 1 << 20)

        assert [unit.offset for unit in units] == bench.offsets[::2][25:]


def test_a_damaged_index_is_told(tmp_path: Path) -> None:
    """As a condition, while it cannot be built again."""
    config, offsets = config_of(tmp_path / "store"), list[int]()
    with opened(config, offsets) as bench:
        bench.put(80)
        bench.store._rounds.scrub.stop()
        path = min(config.index_dir.iterdir())
        turn(path, 45, 0x11)
        assert bench.problems()
        wait_until(lambda: [one.kind for one in bench.conditions.now()] == [ConditionKind.DAMAGED], "damage is told")
        assert str(path) in bench.conditions.now()[0].subject


@pytest.mark.parametrize("space", ["\t", "\n", "\u00a0", "\u3000", "\x1c"], ids=repr)
def test_only_a_blank_separates_keys(tmp_path: Path, space: str) -> None:
    """For the index as for whoever holds its answers against the log: else a sound index would count as damaged."""
    key = f"a{space}b"
    with opened(config_of(tmp_path / "store"), []) as bench:
        assert bench.store.put(Message("T", b"x", 0, {"KEYS": f"{key} other"})).ok
        assert bench.store.wait_dispatched(WAIT_S)

        for one in (key, "other"):
            assert len(bench.store.query("T", one, 10, 0, FOREVER_MS)) == 1


def test_a_damaged_index_waits_for_a_log_that_may_not_be_read_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store goes on meanwhile, and says what waits."""
    config = config_of(tmp_path / "store")
    with opened(config, list[int]()) as bench:
        bench.put(80)
        scan, end = bench.store.log.scan, bench.store.log.max_offset - 500

        def up_to_the_end(offset: int, bytes_max: int) -> ScannedRecords:
            return scan(offset, min(bytes_max, end - offset)) if offset < end else ScannedRecords([], offset)

        with monkeypatch.context() as patch:
            patch.setattr(bench.store.log, "scan", up_to_the_end)
            assert bench.store._derived.index is not None
            with pytest.raises(IndexDamagedError):
                bench.store._derived.index.contradicted(bench.offsets[-1])
            wait_until(
                lambda: any("cannot be read" in one.message for one in bench.conditions.now()), "it is told", WAIT_S
            )

        assert bench.store.failure is None
        bench.put(1)
