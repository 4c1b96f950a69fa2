"""The files of a broker's state, and the names in its conf file, with the classes of RocketMQ's own broker 4.9.7."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.errors import ConfigError
from dledger.store.fs import FileSystem
from rocketstore.settings import load_broker_settings
from rocketstore.state.changes import CommitOffsets, PutTopic, QueueOffset, SetDelayOffsets, TopicConfig
from rocketstore.state.rocketmq_files import RocketmqFiles, newer_changes
from rocketstore.state.tables import Tables
from tests.interop import java

pytestmark = pytest.mark.interop

KNOWN = (
    PutTopic(TopicConfig("Orders", 3, 4, 6)),
    CommitOffsets("readers", (QueueOffset("Orders", 0, 10), QueueOffset("Orders", 2, 7))),
    SetDelayOffsets(((2, 4),)),
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A directory with our files of what is known."""
    java.build()
    directory = tmp_path / "config"
    RocketmqFiles(FileSystem(), directory).write(Tables(KNOWN), 1000)
    return directory


def test_rocketmq_reads_what_we_write(config: Path) -> None:
    """Topics, offsets, groups and delay progress."""
    assert set(java.run_state("read", config)) == {
        "topic Orders 3 4 6",
        "offset Orders@readers 0 10",
        "offset Orders@readers 2 7",
        "group readers 16",
        "delay 2 4",
    }


def test_we_take_over_what_rocketmq_has_written_since(config: Path) -> None:
    """Its file has no mark of ours."""
    assert newer_changes(config, {}, KNOWN) is None

    java.run_state("commit", config)

    newer = newer_changes(config, {}, KNOWN)
    assert newer is not None
    assert Tables(newer.changes).groups == {"readers": {("Orders", 0): 12, ("Orders", 2): 7}}
    assert newer_changes(config, newer.sums, KNOWN) is None


@pytest.mark.parametrize("switch", ["", "enableDLegerCommitLog=true\n"])
def test_every_name_that_rocketmq_knows_is_known_here(tmp_path: Path, switch: str) -> None:
    """Its conf files start as they are; only a name that neither side knows is an error."""
    java.build()
    names = set(java.run_state("settings", tmp_path))
    assert len(names) > 150
    conf = tmp_path / "broker.conf"
    conf.write_text(switch + "".join(f"{name}=?\n" for name in sorted(names)))

    with pytest.raises(ConfigError) as refused:
        load_broker_settings(conf, {}, {})

    assert [one for one in refused.value.problems if "unknown setting" in one] == []
