"""Settings from flags, environment and files: precedence, names, values and the report of everything that is wrong."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

from dledger import settings
from dledger.config import (
    AccessConfig,
    BulkReadConfig,
    ClientAuth,
    ConnectionLimits,
    ElectionConfig,
    FlushMode,
    Member,
    ReplicationConfig,
    SecurityConfig,
    ServerConfig,
    SnapshotConfig,
    StoreConfig,
)
from dledger.errors import ConfigError
from dledger.java_names import ALIASES, UNUSED
from dledger.types import NodeId
from dledger.values import is_loopback, limits_of
from rocketstore.nameserver.settings import load_name_server_settings
from rocketstore.settings import load_broker_settings

ROCKETMQ_CONF = """\
brokerClusterName=RaftCluster
brokerName=RaftNode00
listenPort=30911
namesrvAddr=127.0.0.1:9876
storePathRootDir=/tmp/rmqstore/node00
storePathCommitLog=/tmp/rmqstore/node00/commitlog
enableDLegerCommitLog=true
dLegerGroup=RaftNode00
dLegerPeers=n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913
## must be unique
dLegerSelfId=n1
sendMessageThreadPoolNums=16
"""


_TLS = "tls.server.certPath=/n0.crt\ntls.server.keyPath=/n0.key\ntls_trust_cert_path=/ca.crt\n"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """The path of the conf file of a test."""
    return tmp_path / "broker.conf"


def problems_of(file: Path | None = None, **sources: dict[str, str]) -> tuple[str, ...]:
    """What ``load`` complains about."""
    with pytest.raises(ConfigError) as caught:
        settings.load(file, sources.get("environ", {}), sources.get("flags", {}))
    return caught.value.problems


def from_file(conf: Path, text: str) -> ServerConfig:
    """The configuration that a conf file gives."""
    conf.write_text(text)
    return settings.load(conf, {}, {}).config


def test_without_sources_the_defaults_hold() -> None:
    """Nothing given: one node with the defaults of ``ServerConfig``."""
    loaded = settings.load(None, {}, {})

    assert loaded == settings.Settings(ServerConfig())


def test_rocketmq_quick_start_conf_is_read_as_it_is(conf: Path) -> None:
    """The broker-n1.conf of RocketMQ's DLedger quick start needs no edit; what does not apply is listed."""
    conf.write_text(ROCKETMQ_CONF)

    loaded = settings.load(conf, {}, {})

    assert loaded.config.group == "RaftNode00"
    assert loaded.config.node_id == "n1"
    assert loaded.config.client_port == 30911
    assert [member.port for member in loaded.config.members] == [40911, 40912, 40913]
    assert loaded.config.store.base_dir == Path("/tmp/rmqstore/node00")
    assert loaded.config.election == ElectionConfig()
    assert loaded.warnings == (
        "settings that change nothing here: brokerClusterName, brokerName, namesrvAddr, storePathCommitLog (of "
        "brokers), sendMessageThreadPoolNums (no thread pools)",
    )


def test_flags_beat_the_environment_which_beats_the_file(conf: Path) -> None:
    """Precedence: flags > environment > file > defaults, per setting."""
    conf.write_text("dLegerGroup=file\nflush_interval_ms=20\nclean_interval_ms=30\n")
    environ = {"DLEDGER_GROUP": "environment", "DLEDGER_FLUSH_INTERVAL_MS": "21", "HOME": "/root"}

    config = settings.load(conf, environ, {"group": "flag"}).config

    assert config.group == "flag"
    assert config.store.flush_interval_ms == 21
    assert config.store.clean_interval_ms == 30


@pytest.mark.parametrize("kind", ["node", "broker", "name server"])
def test_a_tilde_is_a_home_directory_in_every_path(kind: str, conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in lists, and in RocketMQ's texts: nothing is written into a directory that is called ``~``."""
    monkeypatch.setenv("HOME", "/home/me")
    home = Path("/home/me")
    tls = "tls_cert_path=~/a.crt\ntls_key_path=~/a.key\ntls_trust_cert_path=~/ca.crt\n"
    if kind == "node":
        conf.write_text(f"{tls}base_dir=~/base\ndata_dirs=~/one, ~/two\nread_only_data_dirs=~/old\n")
        node = settings.load(conf, {}, {}).config
        store = node.store
        assert (store.base_dir, store.data_dirs) == (home / "base", (home / "one", home / "two"))
        assert store.read_only_data_dirs == (home / "old",)
        security = node.security
    elif kind == "broker":
        conf.write_text(
            f"{tls}storePathRootDir=~/store\nstorePathCommitLog=~/one,~/two\nreadOnlyCommitLogStorePaths=~/old\n"
        )
        broker = load_broker_settings(conf, {}, {})[0]
        assert broker.store.store_path_root_dir == home / "store"
        assert broker.store.commit_log_dirs == (home / "one", home / "two")
        assert broker.store.read_only_commit_log_dirs == (home / "old",)
        security = broker.security
    else:
        conf.write_text(f"{tls}kvConfigPath=~/kv.json\n")
        name_server = load_name_server_settings(conf, {}, {})[0]
        assert name_server.kv_config_path == home / "kv.json"
        security = name_server.security
    assert security.tls_cert_path == home / "a.crt"


@pytest.mark.parametrize("name", ["storePathRootDir", "storePathCommitLog", "tls_cert_path", "data_dirs"])
def test_the_home_of_nobody_is_a_problem_of_its_line(name: str, conf: Path) -> None:
    """Beside all others, and no traceback."""
    conf.write_text(f"{name}=~no-such-user/x\nlisten_port=x\n")

    with pytest.raises(ConfigError) as caught:
        load_broker_settings(conf, {}, {})

    assert caught.value.problems[0] == (
        f"{conf}:1: {name}: '~no-such-user/x': there is no such home directory: write the whole path"
    )
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("line", "section", "name", "value"),
    [
        ("storePathDLedgerCommitLog=/a,/b", "store", "data_dirs", (Path("/a"), Path("/b"))),
        ("readOnlyCommitLogStorePaths=/c", "store", "read_only_data_dirs", (Path("/c"),)),
        ("mappedFileSizeCommitLog=1048576", "store", "segment_bytes", 1 << 20),
        ("segment_bytes=2g", "store", "segment_bytes", 2 << 30),
        ("segment_bytes=64 KiB", "store", "segment_bytes", 64 << 10),
        ("push_bytes_max=512k", "replication", "push_bytes_max", 512 << 10),
        ("deleteWhen=04;16", "store", "delete_hour", (4, 16)),
        ("fileReservedTime=48", "store", "retention_hours", 48.0),
        ("fileReservedHours=.5", "store", "retention_hours", 0.5),
        ("cleanFileForciblyEnable=false", "store", "force_clean", False),
        ("import_unchecked=yes", "store", "import_unchecked", True),
        ("diskMaxUsedSpaceRatio=75", "store", "disk_check_ratio", 0.75),
        ("flushDiskType=ASYNC_FLUSH", "store", "flush_mode", FlushMode.ASYNC),
        ("flushDiskType=SYNC_FLUSH", "store", "flush_mode", FlushMode.SYNC),
        ("flush_mode=async", "store", "flush_mode", FlushMode.ASYNC),
        ("preferredLeaderIds=n0", "election", "preferred_leaders", (NodeId("n0"),)),
        ("insecure=true", "security", "insecure", True),
        (_TLS, "security", "tls_cert_path", Path("/n0.crt")),
        (_TLS, "security", "tls_key_path", Path("/n0.key")),
        (_TLS, "security", "tls_trust_cert_path", Path("/ca.crt")),
        (f"{_TLS}tls_client_trust_cert_path=/c.crt", "security", "tls_client_trust_cert_path", Path("/c.crt")),
        (f"{_TLS}tls.server.need.client.auth=none", "security", "tls_client_auth", ClientAuth.NONE),
        (f"{_TLS}tls.server.authClient=true", "security", "tls_client_auth", ClientAuth.REQUIRE),
        ("maxPendingRequestsNum=7", "replication", "pending_entries_max", 7),
        ("heartbeat_interval_ms=50", "election", "heartbeat_interval_ms", 50),
        ("heartBeatTimeIntervalMs=0.1s", "election", "heartbeat_interval_ms", 100),
        ("producer_expiry_ms=7d", "replication", "producer_expiry_ms", 604_800_000),
        ("scrub_bytes_per_s=2MiB", "store", "scrub_bytes_per_s", 2 << 20),
    ],
)
def test_a_line_sets_its_field(conf: Path, line: str, section: str, name: str, value: object) -> None:
    """RocketMQ's, DLedger's and our names reach the field that they mean, with their own units."""
    config = from_file(conf, line)

    assert getattr(getattr(config, section), name) == value


def test_metrics_go_by_rocketmqs_names_too(conf: Path) -> None:
    """Off unless a port is given; a port that is none is refused."""
    found = from_file(conf, "metricsPromExporterPort=5557\nmetricsPromExporterHost=0.0.0.0\n")
    assert (found.metrics_port, found.metrics_host) == (5557, "0.0.0.0")
    assert ServerConfig().metrics_port == 0

    conf.write_text("metrics_port=70000\n")
    assert any("metrics_port=70000 must be between 0 and 65535" in one for one in problems_of(conf))


def test_dledgers_own_names_describe_a_node(conf: Path) -> None:
    """The configuration of a stand-alone DLedger server works as well."""
    config = from_file(conf, "group=g\nselfId=a\npeers=a-h1:1;b-h2:2\ninsecure=true\nstoreBaseDir=/data")

    assert (config.group, config.node_id, config.store.base_dir) == ("g", "a", Path("/data"))
    assert config.members == (Member(NodeId("a"), "h1", 1), Member(NodeId("b"), "h2", 2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("heartBeatTimeIntervalMs=2000", (2000, 6000, 6700)),
        ("heartBeatTimeIntervalMs=200\nmaxHeartBeatLeak=5", (200, 1000, 1700)),
        ("maxHeartBeatLeak=4\nminVoteIntervalMs=100\nmaxVoteIntervalMs=300", (100, 400, 600)),
        ("maxVoteIntervalMs=1300", (100, 500, 1500)),
        ("heartBeatTimeIntervalMs=200\nelection_timeout_ms_min=700\nelection_timeout_ms_max=900", (200, 700, 900)),
        ("heartbeat_interval_ms=150", (150, 500, 1000)),
    ],
)
def test_java_timers_become_election_timeouts(conf: Path, text: str, expected: tuple[int, int, int]) -> None:
    """DLedger waits leak x heartbeat and then a random span; that is our minimum and maximum (spec §3.1)."""
    election = from_file(conf, text).election

    found = (election.heartbeat_interval_ms, election.election_timeout_ms_min, election.election_timeout_ms_max)
    assert found == expected


def test_every_field_can_be_set_in_every_source() -> None:
    """No field of the configuration is out of reach of a file, a variable or a flag."""
    names = {
        field.name
        for record in (
            ServerConfig,
            ElectionConfig,
            ReplicationConfig,
            StoreConfig,
            AccessConfig,
            ConnectionLimits,
            SecurityConfig,
            BulkReadConfig,
            SnapshotConfig,
        )
        for field in fields(record)
        if limits_of(record)[field.name].is_setting
    } - {"election", "replication", "store", "access", "limits", "security", "bulk", "snapshots"}

    for name in names:
        text = "%%%"  # Good for a text, no number: either way the name was known.
        for sources in ({"environ": {f"DLEDGER_{name.upper()}": text}}, {"flags": {name: text}}):
            try:
                settings.load(None, sources.get("environ", {}), sources.get("flags", {}))
            except ConfigError as error:
                assert "unknown" not in str(error)  # noqa: PT017 - either outcome is fine, an unknown name is not
    assert set(ALIASES.values()) <= names
    assert not UNUSED & set(ALIASES)


def test_all_problems_are_reported_at_once_with_their_places(conf: Path) -> None:
    """Unknown, unreadable and contradicting settings of all sources come in one report."""
    conf.write_text("dLegerGruop=g\nlistenPort=many\nselfId=n0\ndLegerSelfId=n1\n")

    found = problems_of(
        conf,
        environ={"DLEDGER_MEMBRES": "x", "DLEDGER_FORCE_CLEAN": "perhaps"},
        flags={"segmnt_bytes": "1", "peers": "?"},
    )

    assert found == (
        f"{conf}:1: unknown setting 'dLegerGruop': did you mean dLegerGroup?",
        "environment variable DLEDGER_MEMBRES: unknown setting: did you mean DLEDGER_MEMBERS?",
        "flag segmnt_bytes: unknown setting: did you mean segment_bytes?",
        f"{conf}:2: listenPort: invalid whole number 'many'",
        f"{conf}:4: dLegerSelfId=n1 contradicts selfId=n0 ({conf}:3): keep one of them",
        "environment variable DLEDGER_FORCE_CLEAN: force_clean: invalid boolean 'perhaps': use true or false",
        "flag peers: peers: member '?' must have the form id-host:port, for example n0-127.0.0.1:20911",
    )


@pytest.mark.parametrize(
    "content",
    [
        "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\nAgEGCCqGSM49AwEH==\n-----END PRIVATE KEY-----\n",
        "MIGHAgEAMBMGByqGSM49\n",
        "AgEGCCqGSM49AwEH/MIGHAgEAMBMGByqGSM49=x\n",
        "group=g\ns3cr3t-MIGHAgEAMBMGByqGSM49\n",
        "MIGHAgEAMBMGByqGSM49\\u00x\n",
        '{"secret": "MIGHAgEAMBMGByqGSM49"}\n',
        "",
    ],
)
@pytest.mark.parametrize("kind", ["node", "broker", "name server"])
def test_what_is_no_setting_is_not_quoted(conf: Path, content: str, kind: str) -> None:
    """A private key given as the conf file would be in the log."""
    conf.write_text(content)
    load = {"node": settings.load, "broker": load_broker_settings, "name server": load_name_server_settings}[kind]
    with pytest.raises(ConfigError) if content else suppress(ConfigError) as refused:
        load(conf, {}, {})  # type: ignore[operator]  # three functions of one kind
    said = str(getattr(refused, "value", ""))
    assert not any(part in said for part in ("MIGH", "AgEG", "s3cr3t"))
    if content:
        assert f"{conf}" in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("segment_bytes=big", "invalid size 'big'"),
        ("retention_hours=three", "invalid number 'three'"),
        ("flush_mode=maybe", "invalid flush mode 'maybe'"),
        ("deleteWhen=four", "invalid whole number 'four'"),
        ("enableDLegerCommitLog=false", "plain commit log"),
        ("zzzzzzzzzzzzqqqq=1", "unknown setting 'zzzzzzzzzzzzqqqq'"),
        ("group=\\u00", "four hexadecimal digits"),
    ],
)
def test_a_bad_line_is_named(conf: Path, line: str, words: str) -> None:
    """The report starts with the file and names the line."""
    conf.write_text(line)

    (problem,) = problems_of(conf)

    assert problem.startswith(str(conf))
    assert words in problem


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("producer_expiry_ms=-1", "producer_expiry_ms=-1 must be at least 1"),
        ("max_producers=70000", "max_producers=70000 must be between 1 and 65536"),
        ("answer_bytes_max=5k", "answer_bytes_max=5120 must be between 1 MiB and 1 TiB"),
        ("fetch_rate_bytes_max=5", "fetch_rate_bytes_max=5 must be 0 or at least 1 MiB"),
        ("index_segment_bytes=100", "index_segment_bytes=100 must be at least 32 and a multiple of 32"),
        ("delete_hour=4;24", "delete_hour=4;24 must be between 0 and 23"),
        ("client_port=-1", "client_port=-1 must be between 0 and 65535"),
        ("warm_bytes=-1", "warm_bytes=-1 must be at least 0"),
    ],
)
def test_a_value_out_of_range_is_told_with_what_is_allowed_and_where_it_stands(
    conf: Path, line: str, problem: str
) -> None:
    """Name, value and limits, from the field itself."""
    conf.write_text(line)

    name = line.partition("=")[0]
    assert problems_of(conf) == (f"{problem} [{name} from {conf}:1]",)


def test_a_disk_ratio_above_the_one_for_forced_cleaning_is_lowered_aloud(conf: Path) -> None:
    """RocketMQ takes any up to 95."""
    conf.write_text("diskMaxUsedSpaceRatio=88")

    loaded = settings.load(conf, {}, {})

    assert loaded.config.store.disk_check_ratio == 0.85
    assert loaded.warnings == (
        f"diskMaxUsedSpaceRatio=88 ({conf}:1) counts as 85%, the limit that disk_clean_ratio sets",
    )


@pytest.mark.parametrize(("more", "told"), [("", True), ("enableDiskForceClean=true", False)])
def test_a_ratio_for_forced_cleaning_alone_is_not_taken_for_a_wish_to_lose_entries(
    conf: Path, more: str, told: bool
) -> None:
    """DLedger's own default would remove unexpired segments above it: here only if the file asks for that."""
    conf.write_text(f"diskSpaceRatioToForceClean=0.8\n{more}")

    loaded = settings.load(conf, {}, {})

    assert loaded.config.store.force_clean is not told
    assert any("removes nothing without enableDiskForceClean=true" in one for one in loaded.warnings) is told


def test_relations_are_checked_over_all_sources(conf: Path) -> None:
    """A contradiction between two sources names both."""
    conf.write_text("election_timeout_ms_min=200")

    (problem,) = problems_of(conf, environ={"DLEDGER_HEARTBEAT_INTERVAL_MS": "90"})

    assert "at least three times heartbeat_interval_ms" in problem
    assert f"election_timeout_ms_min from {conf}:1" in problem
    assert "heartbeat_interval_ms from environment variable DLEDGER_HEARTBEAT_INTERVAL_MS" in problem


def test_grpc_is_two_above_the_client_port_unless_said_otherwise(conf: Path) -> None:
    """0 stands for none; beside any free port it is any; a neighbour on the same host keeps its port."""

    def port(text: str) -> int | None:
        conf.write_text(text.replace("; ", "\n"))
        return settings.load(conf, {}, {}).config.grpc_bind_port

    assert port("") == 30913
    assert port("listenPort=5000") == 5002
    assert port("listenPort=5000; grpcServerPort=6000") == 6000
    assert port("grpc_server_port=0") is None
    assert port("client_port=0") == 0
    assert port("peers=n0-h:20911;n1-h:20912;n2-h:20913; selfId=n0; insecure=true") is None
    assert port("peers=n0-h:20911;n1-i:20912;n2-i:20913; selfId=n0; insecure=true") == 30913


@pytest.mark.parametrize(
    ("text", "who"),
    [
        ("grpcServerPort=30911", "=30911 is also the client port"),
        ("grpcServerPort=20911", "=20911 is also the peer port of n0"),
        ("metrics_port=30913", "=30913 (the client port + 2) is also the metrics port"),
        ("listenPort=65534", "=65536 (the client port + 2) is not a valid port"),
    ],
)
def test_a_port_of_grpc_that_is_taken_is_refused_with_a_way_out(conf: Path, text: str, who: str) -> None:
    """Else the port would be lost to whichever server starts last."""
    conf.write_text(text)

    (problem,) = problems_of(conf)

    assert f"grpc_server_port{who}: set grpc_server_port to another one, or to 0 for none" in problem


def test_a_foreign_node_id_names_where_it_was_given() -> None:
    """The most common mistake: an id that is not among the members."""
    (problem,) = problems_of(flags={"node_id": "n7"})

    assert "'n7' is not among the members (n0)" in problem
    assert "[node_id from flag node_id]" in problem


def test_a_member_id_leads_to_no_other_directory() -> None:
    """It is part of the name of the node's directory, which would lie anywhere."""
    (problem,) = problems_of(flags={"members": "../../etc-127.0.0.1:20911", "node_id": "../../etc"})

    assert "member id '../../etc' must not contain a slash" in problem


def test_a_missing_file_is_a_problem_like_others(tmp_path: Path) -> None:
    """The other sources are still checked."""
    found = problems_of(tmp_path / "no.conf", flags={"client_port": "x"})

    assert len(found) == 2
    assert found[0].endswith("no.conf: cannot be read: No such file or directory")


def test_repeating_the_same_value_is_no_contradiction(conf: Path) -> None:
    """``fileReservedTime`` and ``fileReservedHours`` may agree."""
    assert from_file(conf, "fileReservedTime=9\nfileReservedHours=9").store.retention_hours == 9


def test_the_environment_knows_java_names_and_ignores_what_is_not_meant_for_it() -> None:
    """Empty variables, the command line's own and Kubernetes' service links are no settings."""
    environ = {
        "DLEDGER_PEERS": "n0-a:1;n1-b:2",
        "DLEDGER_INSECURE": "true",
        "DLEDGER_SELF_ID": "n1",
        "DLEDGER_GROUP": "",
        "DLEDGER_BOOTSTRAP": "127.0.0.1:1",
        "DLEDGER_SERVICE_HOST": "10.0.0.1",
        "DLEDGER_SERVICE_PORT_CLIENT": "20911",
        "DLEDGER_PORT": "tcp://10.0.0.1:20911",
        "DLEDGER_0_PORT_20911_TCP_ADDR": "10.0.0.1",
        "DLEDGER_BROKER_NAME": "x",
    }

    loaded = settings.load(None, environ, {})

    assert loaded.config.self_member == Member(NodeId("n1"), "b", 2)
    assert loaded.warnings == ("settings that change nothing here: brokerName (of brokers)",)


def test_a_variable_that_resembles_nothing_is_refused_without_a_guess() -> None:
    """A hint that is no hint is left out."""
    assert problems_of(environ={"DLEDGER_QQQQQQQQ": "1"}) == ("environment variable DLEDGER_QQQQQQQQ: unknown setting",)


# --- plaintext and TLS -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:1",
        "127.8.9.10:1",
        "[::1]:1",
        "[::1]",
        "::1",
        "localhost:1",
        "LOCALHOST.:1",
        "unix:/run/x",
    ],
)
def test_loopback_addresses_may_be_plaintext(address: str) -> None:
    """Nothing leaves the machine."""
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:20911",
        "0.0.0.0:1",
        "n0:20911",
        "[::]:1",
        "[2001:db8::1]:1",
        "::",
        "localhost.example:1",
        "",
        "n0.localhost:20911",
        "unix:20911",
        "127.0.0.1.:1",
        "127.1:1",
        "2130706433:1",
    ],
)
def test_other_addresses_are_not_this_machine(address: str) -> None:
    """A name that may lead anywhere counts as elsewhere, whatever it leads to today."""
    assert not is_loopback(address)


@pytest.mark.parametrize(
    "text",
    [
        "peers=n0-127.0.0.1:1;n1-10.0.0.2:1\nselfId=n0",
        "peers=n0-127.0.0.1:1\nselfId=n0\nclient_host=0.0.0.0",
    ],
)
def test_plaintext_for_other_machines_is_refused_with_both_ways_out(conf: Path, text: str) -> None:
    """Safe by default: whoever wants no protection says so, by any of the names."""
    conf.write_text(text)

    (problem,) = problems_of(conf)

    assert "plaintext is for loopback addresses" in problem
    assert "tls_cert_path, tls_key_path and tls_trust_cert_path" in problem
    assert "insecure=true" in problem
    assert settings.load(conf, {"DLEDGER_INSECURE": "true"}, {}).config.security.insecure
    assert settings.load(conf, {}, {"insecure": "yes"}).config.security.insecure
    assert from_file(conf, f"{text}\n{_TLS}").security.has_tls


@pytest.mark.parametrize("left_out", ["certPath", "keyPath", "trust_cert"])
def test_tls_settings_come_together(conf: Path, left_out: str) -> None:
    """A forgotten one does not mean plaintext."""
    conf.write_text("\n".join(line for line in _TLS.splitlines() if left_out not in line))

    (problem,) = problems_of(conf)

    assert problem.startswith("TLS requires a certificate, its key and the CA: also set tls_")


def test_a_trust_file_alone_is_no_tls(conf: Path) -> None:
    """It would be a node that seems protected."""
    conf.write_text("tls_client_trust_cert_path=/ca.crt")

    assert "TLS requires a certificate" in problems_of(conf)[0]


def test_clients_are_asked_for_certificates_or_not(conf: Path) -> None:
    """RocketMQ's third way, to take one if there is one, is not there."""
    conf.write_text(f"{_TLS}tls.server.need.client.auth=optional")

    assert "use require or none" in problems_of(conf)[0]
