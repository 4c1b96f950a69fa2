"""A broker's settings: RocketMQ's own conf files, both modes, precedence, and the report of all that is wrong."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from dledger import settings as node_settings
from dledger.config import AccessConfig, ConnectionLimits, FlushMode, SecurityConfig
from dledger.errors import ConfigError
from dledger.java_names import UNUSED, family_of
from dledger.values import limits_of
from rocketstore import settings
from rocketstore.broker_config import BrokerConfig
from rocketstore.config import MIB, MessageStoreConfig
from rocketstore.nameserver.settings import load_name_server_settings
from rocketstore.settings import load_broker_settings
from rocketstore.types import BrokerRole, FlushDiskType

QUICK_START = """\
brokerClusterName = RaftCluster
brokerName=RaftNode00
listenPort={listen_port}
namesrvAddr=127.0.0.1:9876
storePathRootDir=/tmp/rmqstore/node0{number}
storePathCommitLog=/tmp/rmqstore/node0{number}/commitlog
enableDLegerCommitLog=true
dLegerGroup=RaftNode00
dLegerPeers=n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913
## must be unique
dLegerSelfId=n{number}
sendMessageThreadPoolNums=16
"""


def load(tmp_path: Path, text: str, **sources: dict[str, str]) -> BrokerConfig:
    """The configuration that a conf file gives, with whatever else is given."""
    file = tmp_path / "broker.conf"
    file.write_text(text)
    return load_broker_settings(file, sources.get("environ", {}), sources.get("flags", {}))[0]


def problems_of(tmp_path: Path, text: str, **sources: dict[str, str]) -> tuple[str, ...]:
    """What is wrong with a conf file."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, **sources)
    return caught.value.problems


def test_no_settings_make_a_plain_broker_of_one_directory() -> None:
    """Nothing given: a plain broker on loopback with RocketMQ's port and defaults."""
    config, warnings = load_broker_settings(None, {}, {})

    assert (config, warnings) == (BrokerConfig(), ())
    assert config.dledger is None
    assert (config.bind_host, config.listen_port, config.name, config.node_id) == ("127.0.0.1", 10911, "broker-a", "0")


@pytest.mark.parametrize(("number", "listen_port"), [(0, 30911), (1, 30921), (2, 30931)])
def test_the_quick_start_files_of_rocketmq_describe_a_group_unchanged(
    tmp_path: Path, number: int, listen_port: int
) -> None:
    """The three broker-n*.conf of RocketMQ's DLedger quick start (broker-ha.md section 5)."""
    file = tmp_path / "broker.conf"
    file.write_text(QUICK_START.format(number=number, listen_port=listen_port))

    config, warnings = load_broker_settings(file, {}, {})

    dledger = config.dledger
    assert dledger is not None
    assert (config.cluster_name, config.name, config.node_id) == ("RaftCluster", "RaftNode00", f"n{number}")
    assert config.address(config.listen_port) == f"127.0.0.1:{listen_port}"
    assert (dledger.group, dledger.client_port, dledger.client_appends) == ("RaftNode00", listen_port, False)
    assert [member.port for member in dledger.members] == [40911, 40912, 40913]
    assert dledger.advertised_client_address == f"127.0.0.1:{listen_port}"
    assert dledger.store.base_dir == config.store.store_path_root_dir == Path(f"/tmp/rmqstore/node0{number}")
    assert dledger.store.flush_mode is FlushMode.SYNC
    assert dledger.store.max_entry_bytes > config.store.max_message_size
    assert warnings == (
        f"settings that change nothing with enableDLegerCommitLog=true: storePathCommitLog ({file}:6)",
        "settings that change nothing here: sendMessageThreadPoolNums (no thread pools)",
    )


def test_settings_of_the_store_mean_the_same_in_a_dledger_broker(tmp_path: Path) -> None:
    """Segment size, retention, disk limits and flush reach the replicated log; dledger's own names win over them."""
    text = QUICK_START.format(number=0, listen_port=30911) + (
        "mappedFileSizeCommitLog=1048576\ndeleteWhen=03;15\nfileReservedTime=48\ndiskMaxUsedSpaceRatio=60\n"
        "cleanFileForciblyEnable=false\nflushDiskType=ASYNC_FLUSH\nmaxMessageSize=1m\nreadOnlyCommitLogStorePaths=/a,/b\n"
        "retention_hours=12.5\nheartbeat_interval_ms=50\nstorePathDLedgerCommitLog=/fast\npreferredLeaderId=n1\n"
    )

    config = load(tmp_path, text)

    assert config.dledger is not None
    store = config.dledger.store
    assert (store.segment_bytes, store.delete_hour, store.retention_hours) == (MIB, (3, 15), 12.5)
    assert (store.disk_check_ratio, store.force_clean, store.flush_mode) == (0.6, False, FlushMode.ASYNC)
    assert (store.read_only_data_dirs, store.data_dirs) == ((Path("/a"), Path("/b")), (Path("/fast"),))
    assert 4 * MIB < store.max_entry_bytes < 5 * MIB, "a message that waits may be of the size that was allowed before"
    assert config.dledger.election.heartbeat_interval_ms == 50
    assert config.dledger.election.preferred_leaders == ("n1",)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("storePathRootDir=/x", "store_path_root_dir", Path("/x")),
        ("storeBaseDir=/x", "store_path_root_dir", Path("/x")),
        ("storePathCommitLog=/x,/y", "commit_log_dirs", (Path("/x"), Path("/y"))),
        ("flushDiskType=SYNC_FLUSH", "flush_disk_type", FlushDiskType.SYNC_FLUSH),
        ("flush_disk_type=sync", "flush_disk_type", FlushDiskType.SYNC_FLUSH),
        ("brokerRole=sync_master", "broker_role", BrokerRole.SYNC_MASTER),
        ("checkCRCOnRecover=false", "check_crc_on_recover", False),
        ("osPageCacheBusyTimeOutMills=5", "os_page_cache_busy_timeout_mills", 5),
        ("mappedFileSizeConsumeQueue=1000", "consume_queue_file_bytes", 1000),
        ("maxMessageSize=64k", "max_message_size", 65536),
        ("messageDelayLevel=1s 1d", "message_delay_level", "1s 1d"),
        ("deleteWhen=04;16", "delete_when", "04;16"),
    ],
)
def test_a_line_sets_its_field_of_the_store(tmp_path: Path, line: str, name: str, value: object) -> None:
    """RocketMQ's names, oddities of spelling included, and ours."""
    assert getattr(load(tmp_path, line).store, name) == value


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("brokerId=2\nbrokerRole=SLAVE\nhaMasterAddress=h:1", "node_id", "2"),
        ("brokerId=2", "broker_id", 0),
        ("brokerIP1=10.0.0.7\ninsecure=true", "bind_host", "0.0.0.0"),
        ("listenHost=::1", "bind_host", "::1"),
        ("autoCreateTopicEnable=false", "auto_create_topic_enable", False),
        ("defaultTopicQueueNums=4", "default_topic_queue_nums", 4),
        ("brokerPermission=4", "broker_permission", 4),
        ("send_pending_bytes_max=16m", "send_pending_bytes_max", 16 * MIB),
        ("enablePropertyFilter=false", "enable_property_filter", False),
        ("metricsPromExporterPort=5557", "metrics_port", 5557),
        ("metricsPromExporterHost=::1", "metrics_host", "::1"),
        ("metricsTopicsMax=5", "metrics_topics_max", 5),
    ],
)
def test_a_line_sets_its_field_of_the_broker(tmp_path: Path, text: str, name: str, value: object) -> None:
    """RocketMQ's BrokerConfig and this broker's own limits."""
    assert getattr(load(tmp_path, text), name) == value


def test_one_answer_may_hold_many_messages_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    """RocketMQ's limits of one get are for its own clients; given in a file, they hold."""
    config = load(tmp_path, "maxTransferCountOnMessageInMemory=32")

    assert config.store.max_transfer_count_on_message_in_memory == 32
    assert config.store.max_transfer_bytes_on_message_in_memory == MIB
    assert BrokerConfig().store.max_transfer_count_on_message_in_memory == 4096


def test_every_field_can_be_set_by_our_name_and_by_rocketmqs() -> None:
    """Nothing is out of reach of a flag, and every name of ours has a form as a conf file spells it."""
    records = (MessageStoreConfig, BrokerConfig, AccessConfig, ConnectionLimits, SecurityConfig)
    names = {one.name for record in records for one in fields(record) if limits_of(record)[one.name].is_setting}
    names -= {"store", "dledger", "access", "limits", "security"}

    for name in sorted(names):
        try:
            load_broker_settings(None, {f"DLEDGER_{name.upper()}": "%%%"}, {name: "%%%"})
        except ConfigError as error:
            assert "unknown" not in str(error)  # noqa: PT017 - either outcome is fine, an unknown name is not


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    """Precedence, per setting, whatever the name used."""
    config = load(
        tmp_path,
        "listenPort=1\nbrokerName=file\nfileReservedTime=1\n",
        environ={"DLEDGER_LISTEN_PORT": "2", "DLEDGER_BROKER_NAME": "environment"},
        flags={"listen_port": "3"},
    )

    assert (config.listen_port, config.name, config.store.file_reserved_time) == (3, "environment", 1)


def test_all_problems_are_reported_at_once_with_their_places(tmp_path: Path) -> None:
    """Unknown, unreadable and contradicting settings of all sources come in one report."""
    found = problems_of(
        tmp_path,
        "listenPrt=1\nflushDiskType=never\nfileReservedTime=3\nfile_reserved_time=4\ndeleteWhen=25\n",
        environ={"DLEDGER_BROKER_NMAE": "x"},
        flags={"autoCreateTopicEnable": "perhaps"},
    )

    conf = tmp_path / "broker.conf"
    assert found == (
        f"{conf}:1: unknown setting 'listenPrt': did you mean listenPort?",
        "environment variable DLEDGER_BROKER_NMAE: unknown setting: did you mean DLEDGER_BROKER_NAME?",
        f"{conf}:2: flushDiskType: invalid value 'never': use one of SYNC_FLUSH, ASYNC_FLUSH",
        f"{conf}:4: file_reserved_time=4 contradicts fileReservedTime=3 ({conf}:3): keep one of them",
        f"{conf}:5: deleteWhen: 25 must be between 0 and 23",
        "flag autoCreateTopicEnable: autoCreateTopicEnable: invalid boolean 'perhaps': use true or false",
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("maxMessageSize=0", "max_message_size=0 must be at least 1"),
        ("fileReservedTime=-1", "file_reserved_time=-1 must be at least 0"),
        ("messageDelayLevel=1s soon", "invalid duration 'soon'"),
        ("listenPort=70000", "between 0 and 65535"),
        ("defaultTopicQueueNums=0", "default_topic_queue_nums=0 must be at least 1"),
        ("brokerPermission=9", "broker_permission=9 must be between 0 and 7"),
        ("brokerRole=SLAVE\nhaMasterAddress=h:1", "requires a broker_id"),
        ("brokerRole=SLAVE\nbrokerId=1", "requires ha_master_address"),
        ("haMasterAddress=nowhere", "ha_master_address"),
        ("minInSyncReplicas=3", "min_in_sync_replicas=3 is more than in_sync_replicas=2"),
        ("haTls=true", "requires a certificate"),
        ("haHandshake=perhaps", "use one of auto, required, off"),
        ("dLegerPeers=n0-h:1", "but enableDLegerCommitLog is not"),
        ("brokerRole=BOSS", "use one of ASYNC_MASTER, SYNC_MASTER, SLAVE"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_with_its_place(tmp_path: Path, line: str, words: str) -> None:
    """Ranges and relations; the message names the line."""
    (problem,) = problems_of(tmp_path, line)

    assert words in problem
    assert f"{tmp_path / 'broker.conf'}:1" in problem


def test_a_dledger_broker_needs_its_group(tmp_path: Path) -> None:
    """Members, own id and group have no sensible default in a replicated broker."""
    found = problems_of(tmp_path, "enableDLegerCommitLog=true")

    assert [problem.rpartition(" ")[2] for problem in found] == ["dLegerPeers", "dLegerSelfId", "dLegerGroup"]


@pytest.mark.parametrize(
    ("listen_port", "words"),
    [(40911, "also the peer port of n0"), (0, "for plain brokers")],
)
def test_the_ports_of_a_dledger_broker_differ(tmp_path: Path, listen_port: int, words: str) -> None:
    """Broker, peers and dledger's clients each listen on a port of their own, known before the start."""
    (problem,) = problems_of(tmp_path, QUICK_START.format(number=0, listen_port=listen_port))

    assert words in problem


def test_members_left_in_a_file_with_the_switch_off_are_a_warning(tmp_path: Path) -> None:
    """RocketMQ runs such a file as a plain broker, and so does this one, but says so."""
    file = tmp_path / "broker.conf"
    file.write_text("enableDLegerCommitLog=false\ndLegerPeers=n0-h:1\n")

    config, warnings = load_broker_settings(file, {}, {})

    assert config.dledger is None
    assert warnings == (
        f"DURABILITY: dLegerPeers ({file}:2) changes nothing: this broker is not replicated, because "
        "enableDLegerCommitLog is false",
    )


def test_a_master_with_a_slaves_number_gets_zero_and_is_told(tmp_path: Path) -> None:
    """RocketMQ does the same without a word."""
    file = tmp_path / "broker.conf"
    file.write_text("brokerRole=SYNC_MASTER\nbrokerId=3\n")

    config, warnings = load_broker_settings(file, {}, {})

    assert config.broker_id == 0
    assert warnings == (f"brokerId ({file}:2): a master has 0; set brokerRole=SLAVE for a slave",)


def test_a_plain_broker_is_not_told_that_its_tls_settings_change_nothing() -> None:
    """It serves TLS as a node does."""
    flags = dict.fromkeys(("tls_cert_path", "tls_key_path", "tls_trust_cert_path"), "one.pem")

    config, warnings = load_broker_settings(None, {}, flags)

    assert config.security.has_tls
    assert warnings == ()


def test_a_loopback_address_for_clients_is_the_one_listened_on(tmp_path: Path) -> None:
    """Nobody else could reach it; another one means every address, which plaintext forbids, naming what made it so."""
    assert load(tmp_path, "brokerIP1=127.0.0.1\n").bind_host == "127.0.0.1"
    assert load(tmp_path, "brokerIP1=192.0.2.1\ninsecure=true\n").bind_host == "0.0.0.0"
    with pytest.raises(ConfigError, match=r"broker_ip1=192\.0\.2\.1.*brokerIP1 from"):
        load(tmp_path, "brokerIP1=192.0.2.1\n")


def names_of_rocketmq() -> set[str]:
    """Every name that RocketMQ 4.9.0 to 5.3.3 reads from a conf file."""
    text = (Path(__file__).parent / "rocketmq_names.txt").read_text().partition("\n\n")[2]
    return {one for one in text.split() if not one.endswith(":")}


def test_every_name_that_rocketmq_reads_is_known_to_every_server() -> None:
    """Used, or in a family with a reason; so only what nobody knows is an error."""
    names = names_of_rocketmq()
    assert len(names) > 560

    assert names - set(settings.TARGETS) - settings.BROKER_UNUSED == set()
    assert names - set(node_settings.TARGETS) - UNUSED == set()
    for name in sorted(names):
        try:
            load_name_server_settings(None, {}, {name: "1"})
        except ConfigError as error:
            assert "unknown" not in str(error)  # noqa: PT017 - a wrong value is fine, an unknown name is not


def test_a_brokers_names_are_explained_to_servers_without_messages() -> None:
    """Their family is exactly what a broker reads and a node does not."""
    of_brokers = names_of_rocketmq() & set(settings.TARGETS) - set(node_settings.TARGETS)

    assert family_of("brokerName").names == of_brokers


def test_a_hint_for_the_environment_can_be_written_there() -> None:
    """A name with a dot cannot be a variable's."""
    with pytest.raises(ConfigError) as caught:
        load_broker_settings(None, {"DLEDGER_ENABLE_TLS": "1", "DLEDGER_TLS_SERVER_MOD": "x"}, {})

    hints = [one.rpartition(" ")[2] for one in caught.value.problems]
    assert hints[1] == "DLEDGER_TLS_SERVER_MODE?"
    assert all("." not in one for one in hints)


def test_names_of_rocketmq_5_for_settings_of_4_9_are_used(tmp_path: Path) -> None:
    """The address to listen on, and how far a slave may lag."""
    config = load(tmp_path, "bindAddress=127.0.0.1\nhaMaxGapNotInSync=1048576\n")

    assert (config.bind_host, config.store.ha_slave_fallbehind_max) == ("127.0.0.1", MIB)
