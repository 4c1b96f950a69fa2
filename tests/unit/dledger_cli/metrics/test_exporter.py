"""A real node and a real plain broker, and what their endpoint tells."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.blocking_remoting import BlockingRemotingClient
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.errors import DLedgerError
from dledger.monitoring import ConditionKind
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from dledger.server import DLedgerServer
from dledger.types import AppendedBatch, NodeId
from dledger_cli.local.group import free_ports
from dledger_cli.metrics import metered
from dledger_cli.metrics.catalog import BROKER_SPECS, NAME_SERVER_SPECS, NODE_SPECS, SPECS
from dledger_cli.metrics.collectors import Families, add_replication
from dledger_cli.metrics.exporter import Exporter
from rocketstore.broker_config import BrokerConfig
from rocketstore.client import Admin
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.nameserver.server import NameServer
from rocketstore.nameserver.settings import NameServerConfig
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.runtime import FollowerFacts, HaFacts
from rocketstore.remoting.topics import DataVersion, RegisterBrokerBody, TopicConfigData, TopicConfigTable
from rocketstore.server import BrokerServer, BrokersServer
from rocketstore.settings import load_broker_settings
from tests.support.waiting import wait_until

N0 = NodeId("n0")
PROCESS = "process_"


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    """An endpoint of nobody yet."""
    with Exporter("127.0.0.1", 0) as exporter:
        yield exporter


@pytest.fixture
def node(tmp_path: Path, exporter: Exporter) -> Iterator[DLedgerServer]:
    """A group of one, watched."""
    (port,) = free_ports(1)
    store = StoreConfig(tmp_path, segment_bytes=1 << 20, index_segment_bytes=1 << 16)
    config = ServerConfig(node_id=N0, members=(Member(N0, "127.0.0.1", port),), client_port=0, store=store)
    server = DLedgerServer(config, instruments=exporter.instruments)
    exporter.watch_node(server)
    server.start()
    yield server
    server.stop(graceful=False)


@pytest.fixture
def broker(tmp_path: Path, exporter: Exporter) -> Iterator[BrokerServer]:
    """A plain broker, watched; two topics get figures of their own."""
    store = MessageStoreConfig(store_path_root_dir=tmp_path, mapped_file_size_commit_log=1 << 20)
    config = BrokerConfig(store=store, listen_port=0, metrics_topics_max=2)
    broker = BrokerServer(config, instruments=exporter.instruments)
    exporter.watch_broker(broker)
    broker.start()
    yield broker
    broker.stop(graceful=False)


def page(exporter: Exporter, path: str) -> tuple[int, str]:
    """Status and body of a path."""
    try:
        with urlopen(f"http://127.0.0.1:{exporter.port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(exporter: Exporter) -> Samples:
    """Everything told, by name and labels."""
    text = page(exporter, "/metrics")[1]
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    """The one sample of this name that has these labels, whatever other labels it has."""
    fitting = [value for (one, has), value in found.items() if one == name and set(labels.items()) <= has]
    assert len(fitting) == 1, (name, labels, len(fitting))
    return fitting[0]


def append(server: DLedgerServer, *bodies: bytes) -> AppendedBatch | DLedgerError:
    """Append a batch and wait for its outcome."""
    done = threading.Event()
    outcome: list[AppendedBatch | DLedgerError] = []

    def answer(result: AppendedBatch | DLedgerError) -> None:
        outcome.append(result)
        done.set()

    server.submit_append(bodies, answer)
    assert done.wait(60)
    return outcome[0]


def test_a_node_tells_where_it_is_and_what_it_did(exporter: Exporter, node: DLedgerServer) -> None:
    """Indexes, role and term are those of its status; batches and flushes are counted as they come."""
    wait_until(lambda: ("leader", "elected") in exporter.instruments.role_changes(), "it leads itself and says so")
    assert isinstance(append(node, b"a" * 100, b"b" * 100, b"c" * 100), AppendedBatch)
    assert isinstance(append(node, b"d" * 100), AppendedBatch)
    assert isinstance(append(node), DLedgerError)  # an empty batch

    found = samples(exporter)

    assert value(found, "dledger_role", role="leader", node="n0", group="default") == 1
    assert value(found, "dledger_members", role="voter") == 1
    assert value(found, "dledger_members", role="learner") == 0
    assert value(found, "dledger_configuration_index") == -1
    assert value(found, "dledger_role", role="follower") == 0
    assert value(found, "dledger_leader_info", leader="n0") == 1
    assert value(found, "dledger_term") == node.status().term == 1
    for name in ("end", "committed", "flushed", "applied"):
        assert value(found, f"dledger_{name}_index") == 4
    assert value(found, "dledger_begin_index") == 0
    assert value(found, "dledger_entries") == 5
    assert value(found, "dledger_end_position_bytes") == node.log.end_position
    assert value(found, "dledger_appended_entries_total") == 5  # the leader's own first entry is one
    assert value(found, "dledger_append_batch_entries_count") == 3
    assert value(found, "dledger_append_latency_seconds_count") == 2
    assert value(found, "dledger_append_latency_seconds_sum") > 0
    assert sum(count for (name, _), count in found.items() if name == "dledger_append_failures_total") == 1
    assert value(found, "dledger_flush_latency_seconds_count") >= 2
    assert value(found, "dledger_flush_bytes_sum") == node.log.end_position
    assert value(found, "dledger_elections_total") == 1
    assert value(found, "dledger_role_changes_total", role="leader", reason="elected") == 1
    assert 0 < value(found, "dledger_disk_used_ratio") < 1


def test_a_condition_is_1_while_it_holds_and_0_afterwards(
    exporter: Exporter, node: DLedgerServer, tmp_path: Path
) -> None:
    """Of a node, and of a plain broker by its name."""
    node.conditions.set(ConditionKind.DAMAGED, "a", subject="one")
    node.conditions.set(ConditionKind.DAMAGED, "b", subject="other")
    assert value(samples(exporter), "dledger_condition", kind="damaged", node="n0", group="default") == 1
    assert value(samples(exporter), "dledger_condition", kind="fenced") == 0

    for subject in ("one", "other"):
        node.conditions.clear(ConditionKind.DAMAGED, subject)
    assert value(samples(exporter), "dledger_condition", kind="damaged") == 0


def test_a_plain_broker_tells_its_conditions_by_its_name(exporter: Exporter, broker: BrokerServer) -> None:
    """The same metric as a node's, so that the same alerts serve; and in its status."""
    broker.conditions.set(ConditionKind.AT_LIMIT, "too many", subject="topics")

    assert value(samples(exporter), "dledger_condition", kind="at_limit", group=broker.config.name) == 1
    with Admin(broker.address) as admin:
        (told,) = admin.status(broker.address).runtime.problems
    assert (told.kind, told.subject) == ("at_limit", "topics")


def test_what_a_node_tells_is_what_the_catalog_names(exporter: Exporter, node: DLedgerServer) -> None:
    """Peers and failures apart, which a healthy node alone does not have, nothing is missing and nothing is new."""
    wait_until(lambda: ("leader", "elected") in exporter.instruments.role_changes(), "it leads itself and says so")

    text = page(exporter, "/metrics")[1]

    told = {
        f"{family.name}_total" if family.type == "counter" else family.name: family
        for family in text_string_to_metric_families(text)
        if not family.name.startswith(PROCESS)
    }
    conditional = {spec.name for spec in NODE_SPECS if "peer" in spec.labels}
    conditional |= {"dledger_append_failures_total", "dledger_member_changes_total"}
    conditional |= {name for name, spec in SPECS.items() if spec.meaning.startswith("State machine only:")}
    assert set(told) == {spec.name for spec in NODE_SPECS} - conditional
    for name, family in told.items():
        assert (family.type, family.documentation) == (SPECS[name].kind, SPECS[name].meaning)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(SPECS[name].all_labels)


def test_probes_follow_the_node_through_its_life(exporter: Exporter, tmp_path: Path) -> None:
    """It lives while it recovers, is ready once it knows a leader, and not any more once it has stopped."""
    assert page(exporter, "/healthz") == (200, "starting\n")
    assert page(exporter, "/readyz") == (503, "starting\n")
    assert page(exporter, "/metrics")[0] == 200  # those of the process
    (port,) = free_ports(1)
    config = ServerConfig(
        node_id=N0, members=(Member(N0, "127.0.0.1", port),), client_port=0, store=StoreConfig(tmp_path)
    )
    node = DLedgerServer(config, instruments=exporter.instruments)
    exporter.watch_node(node)
    assert page(exporter, "/readyz") == (503, "no known leader\n")
    node.start()
    try:
        wait_until(lambda: page(exporter, "/readyz") == (200, "ready\n"), "it knows a leader")
        assert page(exporter, "/healthz") == (200, "alive\n")
        node._supervisor.report(RuntimeError("a thread died"))
        assert page(exporter, "/healthz") == (503, "failed: a thread died\n")
        assert page(exporter, "/readyz")[0] == 503
    finally:
        node.stop(graceful=False)


def test_a_stopped_node_is_no_error(exporter: Exporter, node: DLedgerServer) -> None:
    """Prometheus may ask while the process ends: it hears that, and no traceback."""
    node.stop(graceful=False)

    status, text = page(exporter, "/metrics")

    assert status in (200, 503), text
    assert "Traceback" not in text


def test_brokers_of_one_process_are_told_apart_and_a_failed_one_hides_no_other(
    exporter: Exporter, tmp_path: Path
) -> None:
    """Each family once, with samples of each; the process is not ready until it is started again."""
    peer_port, *listen_ports = free_ports(3)
    named = []
    for group, port in zip("ab", listen_ports, strict=True):
        given = {
            "enableDLegerCommitLog": "true",
            "dLegerGroup": group,
            "dLegerSelfId": "n0",
            "dLegerPeers": f"n0-127.0.0.1:{peer_port}",
            "listenPort": str(port),
            "storePathRootDir": str(tmp_path / group),
            "mappedFileSizeCommitLog": "1m",
            "index_segment_bytes": "32000",
        }
        named.append((f"{group}.conf", load_broker_settings(None, {}, given)[0]))
    server = BrokersServer(named, instruments=exporter.instruments_of)
    exporter.watch_brokers(server)
    try:
        server.start()
        wait_until(lambda: page(exporter, "/readyz") == (200, "ready\n"), "both are masters")
        found = samples(exporter)
        assert [value(found, "dledger_leader_known", group=group) for group in "ab"] == [1, 1]
        assert [value(found, "rocketmq_master", broker=group) for group in "ab"] == [1, 1]

        server.servers["a"].fail(OSError("its disk broke"))

        wait_until(lambda: server.servers["a"].wait(0) is not None, "it has ended")
        assert page(exporter, "/readyz") == (503, "group a has failed: its disk broke\n")
        assert page(exporter, "/healthz") == (200, "alive\n")
        assert value(samples(exporter), "rocketmq_master", broker="b") == 1
    finally:
        server.stop(graceful=False)


def test_a_broker_tells_of_topics_groups_and_its_store(exporter: Exporter, broker: BrokerServer) -> None:
    """Arrivals per topic and gets per group, the rest of many as one; hidden topics are nobody's business."""
    store = broker.store
    for topic, count in (("one", 3), ("two", 2), ("three", 1), ("four", 1)):
        for _ in range(count):
            assert store.put(Message(topic, b"x" * 100)).ok
    store.wait_dispatched(60)
    store.get("one", 0, 0, max_count=2, group="readers")
    store.get("one", 0, 3, max_count=2, group="readers")
    store.flush()

    found = samples(exporter)

    arrived = {
        dict(labels)["topic"]: count for (name, labels), count in found.items() if name == "rocketmq_messages_in_total"
    }
    assert arrived == {"one": 3, "two": 2, "(others)": 2}
    assert value(found, "rocketmq_throughput_in_bytes_total", topic="one") > 300
    assert value(found, "rocketmq_messages_out_total", topic="one", consumer_group="readers") == 2
    assert value(found, "rocketmq_throughput_out_bytes_total", consumer_group="readers") > 200
    assert value(found, "rocketmq_puts_total", broker="broker-a", node="0", cluster="DefaultCluster") == 7
    assert value(found, "rocketmq_put_latency_seconds_count") == 7
    assert value(found, "rocketmq_gets_total", result="found") >= 1
    assert value(found, "rocketmq_gets_total", result="missed") >= 1
    assert value(found, "rocketmq_flush_latency_seconds_count") >= 1
    assert value(found, "rocketmq_storage_flush_behind_bytes") == 0
    assert value(found, "rocketmq_master") == 1
    assert value(found, "rocketmq_storage_dispatch_behind_bytes") == 0
    assert value(found, "rocketmq_storage_size_bytes") > 700
    assert 0 <= value(found, "rocketmq_storage_message_age_seconds") < 60
    assert page(exporter, "/readyz") == (200, "ready\n")


def test_what_a_broker_tells_is_what_the_catalog_names(exporter: Exporter, broker: BrokerServer) -> None:
    """Topics and groups apart, of which there are none yet."""
    told = {name for name, _ in samples(exporter) if name.startswith("rocketmq_")}
    told = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in told}

    conditional = {
        spec.name
        for spec in BROKER_SPECS
        if {"topic", "slave"} & set(spec.labels) or spec.meaning.startswith("Slave only")
    }
    assert told == {spec.name for spec in BROKER_SPECS} - conditional


def test_slaves_and_their_masters_tell_how_far_behind_they_are() -> None:
    """By broker id, or by host for those that do not tell it; one that is connected twice by the worse."""
    followers = (
        FollowerFacts(1, "h:1", 10, 90, 1500, in_sync=True),
        FollowerFacts(1, "h:2", 40, 60, 500, in_sync=True),
        FollowerFacts(-1, "j:1", 0, 100, 0, in_sync=False),
    )
    found = Families("c", "b", "0")
    add_replication(found, HaFacts(is_slave=False, epoch=2, followers=followers, copies=2, copies_wanted=3))
    told = {(one.name, one.labels.get("slave")): one.value for family in found.all() for one in family.samples}
    assert told[("rocketmq_ha_slave_lag_bytes", "1")] == 90
    assert told[("rocketmq_ha_slave_lag_seconds", "1")] == 1.5
    assert told[("rocketmq_ha_slave_lag_bytes", "j")] == 100
    assert (told[("rocketmq_ha_copies", None)], told[("rocketmq_ha_copies_wanted", None)]) == (2, 3)
    found = Families("c", "b", "1")
    add_replication(found, HaFacts(is_slave=True, is_connected=True, lag_bytes=5, lag_ms=2500))
    told = {(one.name, None): one.value for family in found.all() for one in family.samples}
    assert told[("rocketmq_ha_lag_bytes", None)] == 5
    assert told[("rocketmq_ha_lag_seconds", None)] == 2.5
    assert told[("rocketmq_ha_contact_seconds", None)] == -1


def test_without_a_port_nothing_is_measured() -> None:
    """The default: no thread, no port, no collector."""
    with metered("127.0.0.1", 0) as nothing:
        assert nothing is None


def test_the_port_is_closed_after_whatever_happened() -> None:
    """A server that could not be made leaves no thread behind."""
    with suppress(RuntimeError), Exporter("127.0.0.1", 0):
        raise RuntimeError("the store is damaged")

    assert not [one for one in threading.enumerate() if one.name == "dledger-metrics"]


def test_a_name_server_tells_what_it_knows_and_was_asked(exporter: Exporter, tmp_path: Path) -> None:
    """Every request counts once, whatever its answer; one that nobody knows under a name of its own."""
    server = NameServer(NameServerConfig(listen_port=0, kv_config_path=tmp_path / "kv.json"))
    exporter.watch_name_server(server)
    assert page(exporter, "/readyz")[0] == 503
    server.start()
    try:
        with closing(BlockingRemotingClient()) as frames:

            def ask(code: int, fields: dict[str, str], body: bytes = b"") -> int:
                return frames.call(server.address, Frame(code, 0, fields, body), 30).code

            body = RegisterBrokerBody(TopicConfigTable(DataVersion(1, 1), {"T": TopicConfigData("T", 4, 4)})).encode()
            for term, broker_id in ((2, 0), (1, 0), (2, 1)):
                header = {
                    "brokerName": "b",
                    "brokerAddr": f"10.0.0.{term}{broker_id}:1",
                    "clusterName": "c",
                    "haServerAddr": "",
                    "brokerId": str(broker_id),
                    "compressed": "false",
                    "bodyCrc32": "0",
                    "dledgerTerm": str(term),
                }
                assert ask(RequestCode.REGISTER_BROKER, header, body) == 0
            assert ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "T"}) == 0
            assert ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "U"}) == AnswerCode.TOPIC_NOT_EXIST
            assert ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {}) == AnswerCode.SYSTEM_ERROR
            assert ask(RequestCode.PUT_KV_CONFIG, {"namespace": "n", "key": "k", "value": "v"}) == 0
            assert ask(12345, {}) == AnswerCode.REQUEST_CODE_NOT_SUPPORTED
            assert page(exporter, "/readyz") == (200, "ready\n")
            assert page(exporter, "/healthz") == (200, "alive\n")
            found = samples(exporter)
        prefix = "rocketmq_namesrv_"
        told = {name.removeprefix(prefix): amount for (name, labels), amount in found.items() if not labels}
        assert (
            told
            | {
                "brokers": 1,
                "brokers_without_master": 0,
                "broker_addresses": 2,
                "topics": 1,
                "routes": 1,
                "values": 1,
                "connections": 1,
                "requests_under_way": 0,
                "outdated_registrations_total": 1,
                "expired_addresses_total": 0,
                "master_changes_total": 1,
            }
            == told
        )
        requests = {
            (labels["request"], int(labels["code"])): amount
            for (name, pairs), amount in found.items()
            if name == f"{prefix}requests_total"
            for labels in [dict(pairs)]
        }
        assert requests == {
            ("REGISTER_BROKER", 0): 3,
            ("GET_ROUTEINFO_BY_TOPIC", 0): 1,
            ("GET_ROUTEINFO_BY_TOPIC", AnswerCode.TOPIC_NOT_EXIST): 1,
            ("GET_ROUTEINFO_BY_TOPIC", AnswerCode.SYSTEM_ERROR): 1,
            ("PUT_KV_CONFIG", 0): 1,
            ("unknown", AnswerCode.REQUEST_CODE_NOT_SUPPORTED): 1,
        }
        names = {name for name, _ in found if name.startswith(prefix)}
        assert names == {spec.name for spec in NAME_SERVER_SPECS}
    finally:
        server.stop()
    assert page(exporter, "/readyz")[0] == 503
    assert page(exporter, "/metrics")[0] == 503
