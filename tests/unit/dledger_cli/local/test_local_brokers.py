"""The keeper of broker processes: what it writes and starts. ``test_local_group`` tries how it keeps processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dledger.types import NodeId
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.settings import load_broker_settings
from rocketstore.types import FlushDiskType

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
SERVING = "import sys; print('broker is ready: yes', flush=True); sys.stdin.read()"


class FakeBrokers(LocalBrokers):
    """Runs a line of Python instead of a broker."""

    def command(self, node: NodeId) -> list[str]:
        super().command(node)
        return [sys.executable, "-c", SERVING]


def test_the_conf_files_make_one_group(tmp_path: Path) -> None:
    """Each loads, all name the same members, each itself; ports and directories are nobody else's."""
    brokers = LocalBrokers(tmp_path, settings={"mappedFileSizeCommitLog": "1048576"})
    words = [brokers.command(node) for node in brokers.nodes]
    configs = [load_broker_settings(brokers.conf_file(node), {}, {})[0] for node in brokers.nodes]

    members = {config.dledger.members for config in configs if config.dledger is not None}
    ports = [config.listen_port for config in configs]
    ports += [member.port for member in next(iter(members))]
    ports += [config.grpc_bind_port or 0 for config in configs]
    assert [config.node_id for config in configs] == [N0, N1, N2]
    assert len(members) == 1
    assert len(set(ports)) == 9
    assert {config.name for config in configs} == {"RaftNode00"}
    assert {config.store.mapped_file_size_commit_log for config in configs} == {1 << 20}
    roots = [config.store.store_path_root_dir for config in configs]
    assert roots == [brokers.root_dir(node) for node in brokers.nodes]
    assert words[1][-4:] == ["broker", "-c", str(brokers.conf_file(N1)), "--until-stdin-closes"]


def test_there_is_nothing_in_the_conf_files_that_rocketmq_does_not_know(tmp_path: Path) -> None:
    """They are its own example, with other ports and paths, and how to flush.

    But none of them takes a further port next to its own: that could be another node's.
    """
    assert set(LocalBrokers(tmp_path).conf_lines(N0)) - {"vipPort"} == {
        "brokerClusterName",
        "brokerName",
        "listenPort",
        "storePathRootDir",
        "storePathCommitLog",
        "enableDLegerCommitLog",
        "dLegerGroup",
        "dLegerPeers",
        "dLegerSelfId",
        "sendMessageThreadPoolNums",
        "flushDiskType",
    }


@pytest.mark.parametrize(("flush", "meant"), [("sync", FlushDiskType.SYNC_FLUSH), ("async", FlushDiskType.ASYNC_FLUSH)])
def test_a_plain_broker_is_alone(tmp_path: Path, flush: str, meant: FlushDiskType) -> None:
    """No DLedger, one directory, and the flush that was asked for."""
    brokers = LocalBrokers(tmp_path, size=1, plain=True, flush=flush, detached=True)
    words = brokers.command(N0)

    config, _ = load_broker_settings(brokers.conf_file(N0), {}, {})

    assert config.dledger is None
    assert config.store.flush_disk_type is meant
    assert config.store.commit_log_dirs == (brokers.root_dir(N0) / "commitlog",)
    assert words[-1] == str(brokers.conf_file(N0))
    with pytest.raises(ValueError, match="alone, not as one of 3"):
        LocalBrokers(tmp_path, plain=True)


def test_brokers_that_do_not_answer_are_left_out(tmp_path: Path) -> None:
    """They run, they are ready, and they are no masters."""
    with FakeBrokers(tmp_path) as brokers:
        assert all(brokers.is_running(node) for node in brokers.nodes)
        assert brokers.broker_statuses() == {}

    assert not any(brokers.is_running(node) for node in brokers.nodes)
