"""What is derived from the log is what the broker has derived from it, byte for byte."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.records import ENTRY_HEADER_BYTES
from dledger_spark.errors import BrokenRecordError, PipelineError
from dledger_spark.rebuild.rows import QueueWriter
from rocketstore.config import MessageStoreConfig
from rocketstore.consume_queue.files import UNIT
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.message.record import PHYSICAL_OFFSET_AT
from tests.support.sweeps import fewer
from tests.unit.dledger_spark.rebuild.stores import index_files, put_all, queue_files, rebuild_here
from tests.unit.rocketstore.bench import UnsyncedFs, running, small_config
from tests.unit.rocketstore.heads import head
from tests.unit.rocketstore.store.test_message_store_replicated import master


def stored(config: MessageStoreConfig, count: int = 300) -> None:
    """A store with messages of every kind, cleanly stopped."""
    with master(config) if config.enable_dledger_commit_log else running(config) as store:
        put_all(store, count)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "replicated"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MessageStoreConfig:
    found = small_config(
        tmp_path_factory.mktemp("store") / "root", enable_dledger_commit_log=request.param, max_index_num=120
    )
    stored(found)
    return found


@pytest.mark.parametrize("split_bytes", [1024, 1 << 20])
def test_queues_and_index_are_the_brokers_byte_for_byte(
    config: MessageStoreConfig, tmp_path: Path, split_bytes: int
) -> None:
    """Tags, delayed messages, transactions, IPv6, several files, gaps, file sizes, index headers: all of it."""
    rebuild_here(config, tmp_path, split_bytes)

    root = config.store_path_root_dir
    ours, theirs = queue_files(tmp_path / "consumequeue"), queue_files(root / "consumequeue")
    assert ours.keys() == theirs.keys()
    assert [name for name, data in ours.items() if data != theirs[name]] == []
    assert "SCHEDULE_TOPIC_XXXX" in {name.split("/")[0] for name in ours}
    assert len(index_files(root / "index")) > 2
    assert index_files(tmp_path / "index") == index_files(root / "index")


def test_a_broken_record_stops_a_rebuild_as_it_stops_dispatch(config: MessageStoreConfig, tmp_path: Path) -> None:
    """Segment and offset are named, and what to do."""
    root = tmp_path / "copy"
    shutil.copytree(config.store_path_root_dir, root)
    data = min((root / ("dledger-n0/data" if config.enable_dledger_commit_log else "commitlog")).iterdir())
    with data.open("r+b") as file:
        head_bytes = ENTRY_HEADER_BYTES if config.enable_dledger_commit_log else 0
        first = int.from_bytes(data.read_bytes()[4:8] if head_bytes else data.read_bytes()[:4], "big")
        file.seek(first + head_bytes + PHYSICAL_OFFSET_AT)  # physical offset of the second record
        file.write(b"\x01")

    with pytest.raises(BrokenRecordError, match=f"segment {data.name}, offset {first}: .*repair"):
        rebuild_here(replace(config, store_path_root_dir=root), tmp_path)


@settings(max_examples=fewer(50, 4), deadline=None)
@given(
    steps=st.lists(st.integers(-3, 60), min_size=1, max_size=40),
    start=st.integers(0, 100),
    pieces=st.lists(st.integers(1, 10), min_size=40, max_size=40),
    per_file=st.integers(1, 25),
)
def test_any_sequence_of_queue_offsets_makes_the_brokers_files(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], start: int, pieces: list[int], per_file: int
) -> None:
    """Gaps, repeats, offsets that go back, first units in the middle of a file; in whatever pieces they come."""
    root = tmp_path_factory.mktemp("queues")
    offsets: list[int] = []
    for step in steps:
        offsets.append(max(0, (offsets[-1] if offsets else start) + 1 + (step if abs(step) > 1 else 0)))
    table = ConsumeQueueTable(root / "theirs", per_file * 20, UnsyncedFs())
    table.load()
    heads = [head(offset, number * 100) for number, offset in enumerate(offsets)]
    ours = QueueWriter(root / "ours" / "T" / "0", per_file * 20)
    units = np.array([(one.offset, one.size, one.tags_code) for one in heads], UNIT)
    refused = False
    at = 0
    for piece in pieces:
        part = slice(at, at + piece)
        at += piece
        if heads[part]:
            try:
                table.append(heads[part])
            except Exception:  # noqa: BLE001  # a gap beyond belief: both must say so
                refused = True
            if refused:
                with pytest.raises(PipelineError, match="damaged"):
                    ours.append(np.array(offsets[part], np.int64), units[part])
                break
            ours.append(np.array(offsets[part], np.int64), units[part])
    table.flush()
    ours.close()

    if not refused:
        assert queue_files(root / "ours") == queue_files(root / "theirs")
    shutil.rmtree(root)
