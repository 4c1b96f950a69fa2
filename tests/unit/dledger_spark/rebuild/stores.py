"""Stores with messages of every kind, and what is derived from their logs without Spark."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from dledger_spark.directory import SplitSizes, open_directory, plan_splits
from dledger_spark.rebuild.derive import Details, as_units, keys_of, records_of, runs, unit_columns
from dledger_spark.rebuild.rows import IndexWriter, QueueWriter
from rocketstore.config import MessageStoreConfig
from rocketstore.index.file import IndexShape
from rocketstore.index.format import TopicHashes
from rocketstore.message.message import DelayLevels, HostAddress, Message
from rocketstore.store.message_store import MessageStore
from tests.unit.rocketstore.bench import WAIT_S

PREPARED = 0x4
ROLLED_BACK = 0xC
BORN_V6 = 0x10


def messages(count: int, first: int = 0) -> Iterator[Message]:
    """Messages of every kind in turn; number n is the same each time."""
    kinds = itertools.cycle(range(9))
    for number, kind in zip(range(first, first + count), kinds, strict=False):
        body = str(number).encode().ljust(number % 80, b".")
        properties = {"KEYS": f"k{number} all", "TAGS": f"t{number % 5}", "UNIQ_KEY": f"{number:032X}"}
        message = Message(f"Topic-{number % 3}", body, number % 4, properties)
        match kind:
            case 1:
                message.properties = {"TAGS": "ünï", "KEYS": "schlüssel Größe", "a": "b"}
            case 2:
                message.properties = {}
            case 3:
                message.properties = {"DELAY": str(number % 20), "TAGS": "later", "KEYS": f"d{number}"}
            case 4:
                message.sys_flag = PREPARED
            case 5:
                message.sys_flag = ROLLED_BACK
            case 6:
                message.sys_flag = BORN_V6
                message.born_host = HostAddress(bytes(range(16)), 1234)
            case 7:
                message.properties = {"KEYS": " ".join(f"m{one}" for one in range(number % 12)), "X": "TAGS"}
        yield message


def put_all(store: MessageStore, count: int, first: int = 0) -> None:
    """Put ``messages`` and wait until they are dispatched."""
    for message in messages(count, first):
        result = store.put(message)
        assert result.ok, result
    assert store.wait_dispatched(WAIT_S)


def rebuild_here(config: MessageStoreConfig, target: Path, split_bytes: int = 8192) -> None:
    """Derive everything of a store into ``target``, split by split, in this process."""
    log = open_directory(config.store_path_root_dir)
    levels, topics = DelayLevels.parse(config.message_delay_level), TopicHashes()
    writers: dict[tuple[str, int], QueueWriter] = {}
    index = IndexWriter(target / "index", IndexShape(config.max_hash_slot_num, config.max_index_num))
    (target / "consumequeue").mkdir()
    for split in plan_splits(log, log.begin, log.end, SplitSizes(split_bytes)):
        for records in records_of(split):
            details = Details(records)
            for run in runs(unit_columns(details, levels)):
                if run[:2] not in writers:
                    directory = target / "consumequeue" / run.topic / str(run.queue_id)
                    writers[run[:2]] = QueueWriter(directory, config.consume_queue_file_bytes)
                writers[run[:2]].append(run.numbers, as_units(run.units))
            index.append(keys_of(details, topics))
    for writer in writers.values():
        writer.close()
    index.close()


def queue_files(directory: Path) -> dict[str, bytes]:
    """All files below, by their names."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def index_files(directory: Path) -> list[bytes]:
    """The contents of index files in order; their names are the times at which they were made."""
    return [path.read_bytes() for path in sorted(directory.iterdir())]
