"""The requests of a name server: access, effect on the tables, and answers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from ipaddress import ip_address
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from dledger import properties
from dledger.access.addresses import AddressPattern, any_matches, plain_host
from dledger.errors import ConfigError
from dledger.records import record
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from dledger.remoting.server import Handler, Handlers, RemotingServer
from dledger.values import parse_address, parse_boolean
from rocketstore.nameserver.settings import NameServerConfig, shown
from rocketstore.nameserver.tables import (
    ORDER_TOPICS,
    SYS_FLAG_UNIT,
    SYS_FLAG_UNIT_SUB,
    BrokerRegistration,
    KvConfig,
    RouteTables,
)
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import (
    AddedAnswer,
    BrokerHeader,
    BrokerNameHeader,
    ClusterHeader,
    DataVersionAnswer,
    KeyHeader,
    KeyValueHeader,
    NamespaceHeader,
    RegisterBrokerAnswer,
    RegisterBrokerHeader,
    RouteHeader,
    TopicHeader,
    ValueAnswer,
    WipedAnswer,
    read_header,
    write_header,
)
from rocketstore.remoting.topics import (
    ClusterInfo,
    DataVersion,
    KVTable,
    QueueData,
    RegisterBrokerBody,
    TopicConfigData,
    TopicList,
)

_LOG = logging.getLogger(__name__)

NAME_CHARS_MAX: Final = 255
"""The limit of names of clusters, brokers and topics; RocketMQ's is 127 for topics, and 255 for retry topics."""
QUEUES_MAX: Final = 65_536
"""Queues of a topic at one broker: clients remember each."""
VERSION_BYTES_MAX: Final = 4096
"""The limit of a body with a version."""
DECODED_AT_ONCE_BYTES_MAX: Final = 64 * 1024
"""Larger registrations, and compressed ones, are decoded by another thread: 10,000 topics take 0.1 s."""
TOLD_MAX: Final = 1024
"""The limit of refused registrations that are remembered, to log each once."""
_BROKER_ID_MIN: Final = -1
"""The id of members of a Java group without a leader."""
_CHANGEABLE: Final = "orderMessageEnable"
_BY_CLUSTER: Final = RequestCode.GET_TOPICS_BY_CLUSTER
LISTS_MAX: Final = 16
"""Lists that are kept: one of each kind, and those of some clusters."""

_Answering = Callable[[RemotingConnection, Frame], Frame]
_Awaiting = Callable[[RemotingConnection, Frame], Awaitable[Frame]]


@record(frozen=True, slots=True)
class NameServerMeasurements:
    """The state of a name server, and what it has counted since it started."""

    brokers: int
    """Names."""
    without_master: int
    addresses: int
    topics: int
    places: int
    """Pairs of topic and broker."""
    values: int
    connections: int
    requests_under_way: int
    requests: Mapping[tuple[int, int], int]
    """By the codes of request and answer."""
    outdated: int
    """Registrations ignored because a newer master is known."""
    expired: int
    """Addresses removed because they did not register in time."""
    master_changes: int


class NameService:
    """The handlers of one name server, on the loop's thread; values are written and topics decoded by others."""

    def __init__(self, config: NameServerConfig, tables: RouteTables, kv: KvConfig) -> None:
        self._config = config
        self._tables = tables
        self._kv = kv
        self._brokers = config.brokers
        self._admins = config.admins
        self._orders = config.order_message_enable
        self._writer = ThreadPoolExecutor(1, "dledger-nameserver-kv")  # one: changes have an order
        self._decoder = ThreadPoolExecutor(1, "dledger-nameserver-decode")
        self._hosts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._turns: WeakKeyDictionary[RemotingConnection, asyncio.Lock] = WeakKeyDictionary()
        self._told: set[tuple[str, str, int | None]] = set()
        self._answers: Counter[tuple[int, int]] = Counter()  # by the codes of request and answer
        self._outdated = self._expired = self._master_changes = 0
        self._lists: dict[tuple[int, str], bytes] = {}  # answers as long as the tables are the same
        self._lists_at = -1

    def handlers(self) -> Handlers:
        """Return the handlers by request code."""
        lists: Mapping[int, _Answering] = {
            RequestCode.GET_BROKER_CLUSTER_INFO: self._clusters,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._topics,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics_by_cluster,
            RequestCode.GET_UNIT_TOPIC_LIST: partial(self._topics_with, SYS_FLAG_UNIT, 0),
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: partial(self._topics_with, SYS_FLAG_UNIT_SUB, 0),
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: partial(
                self._topics_with, SYS_FLAG_UNIT_SUB, SYS_FLAG_UNIT
            ),
        }
        questions: Mapping[int, _Answering] = {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_KV_CONFIG: self._get_value,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._get_values,
            RequestCode.GET_NAMESRV_CONFIG: self._get_config,
        } | {code: partial(self._listed, handler) for code, handler in lists.items()}
        direct: Mapping[int, _Answering] = {
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self._wipe_write,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self._add_write,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RequestCode.UPDATE_NAMESRV_CONFIG: self._update_config,
        }
        awaited: Mapping[int, _Awaiting] = {
            RequestCode.REGISTER_BROKER: partial(self._in_turn, self._register),
            RequestCode.UNREGISTER_BROKER: partial(self._in_turn, self._unregister),
            RequestCode.QUERY_DATA_VERSION: partial(self._in_turn, self._query_version),
            RequestCode.PUT_KV_CONFIG: self._put_value,
            RequestCode.DELETE_KV_CONFIG: self._delete_value,
        }
        at_once = {code: partial(self._at_once, handler) for code, handler in direct.items()}
        later: Mapping[int, Handler] = {code: partial(self._later, handler) for code, handler in awaited.items()}
        in_turns = {code: partial(self._in_turns, handler) for code, handler in questions.items()}
        return Handlers(at_once, later, self._closed, lambda _: None, prompt=in_turns)

    def _in_turns(self, handler: _Answering, connection: RemotingConnection, frame: Frame) -> None:
        """Answer a question: some take milliseconds, and who asks many must not keep the others waiting."""
        if frame.is_oneway:  # nobody hears the answer
            self._answers[frame.code, AnswerCode.SYSTEM_ERROR] += 1
            return
        answer = handler(connection, frame)
        self._answers[frame.code, answer.code] += 1
        connection.answer(frame, answer)

    def _listed(self, handler: _Answering, connection: RemotingConnection, frame: Frame) -> Frame:
        """Answer with the same bytes as long as the tables are the same: to make them takes the longest."""
        changes = self._tables.changes
        if self._lists_at != changes:
            self._lists.clear()
            self._lists_at = changes
        key = frame.code, frame.fields.get("cluster", "") if frame.code == _BY_CLUSTER else ""
        body = self._lists.get(key)
        if body is None:
            if len(self._lists) >= LISTS_MAX:
                self._lists.clear()
            body = self._lists[key] = handler(connection, frame).body
        return frame.answer(body=body)

    def _at_once(self, handler: _Answering, connection: RemotingConnection, frame: Frame) -> None:
        answer = handler(connection, frame)
        self._answers[frame.code, answer.code] += 1
        connection.done(frame, answer)

    async def _later(self, handler: _Awaiting, connection: RemotingConnection, frame: Frame) -> Frame:
        answer = await handler(connection, frame)
        self._answers[frame.code, answer.code] += 1
        return answer

    def measure(self, server: RemotingServer) -> NameServerMeasurements:
        """The figures for metrics."""
        brokers, addresses, topics, places = self._tables.sizes()
        return NameServerMeasurements(
            brokers=brokers,
            without_master=self._tables.without_master(),
            addresses=addresses,
            topics=topics,
            places=places,
            values=len(self._kv),
            connections=server.connections,
            requests_under_way=server.requests_under_way,
            requests=self._answers + server.refusals,
            outdated=self._outdated,
            expired=self._expired,
            master_changes=self._master_changes,
        )

    def expire(self) -> None:
        """Remove the brokers that have not registered in time, and close their connections."""
        for address, link in self._tables.expire(_now_ms()):
            self._expired += 1
            _LOG.warning("broker address %s has not registered for 120 s and is removed", address)
            if isinstance(link, RemotingConnection):
                link.close(f"broker address {address} has not registered for 120 s")

    def close(self) -> None:
        """Wait for the threads. Idempotent."""
        self._writer.shutdown()
        self._decoder.shutdown(cancel_futures=True)

    # -- brokers -------------------------------------------------------------------------------------------------------

    async def _in_turn(self, handler: _Awaiting, connection: RemotingConnection, frame: Frame) -> Frame:
        """Handle the requests of one broker in their order, although some take longer."""
        async with self._turns.setdefault(connection, asyncio.Lock()):
            return await handler(connection, frame)

    async def _register(self, connection: RemotingConnection, frame: Frame) -> Frame:
        self._allow(connection, self._brokers, "register brokers")
        one = await self._registration(connection, read_header(RegisterBrokerHeader, frame.fields), frame)
        if connection.is_closed:
            raise RequestError(f"{one.address} disconnected before its registration was decoded")
        before = self._tables.master(one.broker)
        taken, master, master_ha = self._tables.register(one, connection, _now_ms(), connection.counted_as)
        if not taken:
            self._outdated += 1
            self._tell_outdated(one, master)
        elif (after := self._tables.master(one.broker)) != before:
            self._master_changes += 1
            _LOG.info("broker %s: master changed from %s to %s", one.broker, before or "-", after or "-")
        orders = self._kv.table(ORDER_TOPICS)
        answer = RegisterBrokerAnswer(master_ha, master)
        return frame.answer(fields=write_header(answer), body=KVTable(orders).encode() if orders else b"")

    async def _registration(
        self, connection: RemotingConnection, header: RegisterBrokerHeader, frame: Frame
    ) -> BrokerRegistration:
        """Decode a registration, unless it repeats the last one."""
        digest = blake2b(frame.body, digest_size=16, person=b"Z" if header.compressed else b"").digest()
        version = self._tables.repeated(header.broker_name, header.broker_id, header.broker_addr, digest)
        if version is not None:
            return replace(_registration(header, version, {}, digest), is_complete=False)
        decode = partial(_decode, header, frame, digest)
        if len(frame.body) <= DECODED_AT_ONCE_BYTES_MAX and not header.compressed:
            return decode()
        host = self._hosts.get(connection.counted_as)
        if host is None:
            host = self._hosts[connection.counted_as] = asyncio.Lock()
        async with host:  # one of each host waits for the thread
            return await asyncio.get_running_loop().run_in_executor(self._decoder, decode)

    def _tell_outdated(self, one: BrokerRegistration, master: str) -> None:
        key = one.broker, one.address, one.term
        if key in self._told:
            return
        if len(self._told) >= TOLD_MAX:
            self._told.clear()
        self._told.add(key)
        _LOG.warning(
            "broker %s: registration of %s as id %d in term %s ignored: the master is %s in term %s",
            one.broker,
            one.address,
            one.broker_id,
            one.term,
            master or "-",
            self._tables.term_of(one.broker, _now_ms()),
        )

    async def _unregister(self, connection: RemotingConnection, frame: Frame) -> Frame:
        self._allow(connection, self._brokers, "unregister brokers")
        header = read_header(BrokerHeader, frame.fields)
        if self._tables.unregister(header.broker_name, header.broker_id, header.broker_addr):
            _LOG.info("broker %s: %s unregistered", header.broker_name, header.broker_addr)
        return frame.answer()

    async def _query_version(self, connection: RemotingConnection, frame: Frame) -> Frame:
        self._allow(connection, self._brokers, "register brokers")
        header = read_header(BrokerHeader, frame.fields)
        if len(frame.body) > VERSION_BYTES_MAX:
            raise RequestError(f"a version of {len(frame.body)} bytes: at most {VERSION_BYTES_MAX} are allowed")
        asked = DataVersion.decode(frame.body)
        changed, known = self._tables.renew(header.broker_addr, asked, _now_ms())
        body = known.encode() if known is not None else b""
        return frame.answer(fields=write_header(DataVersionAnswer(changed)), body=body)

    def _closed(self, connection: RemotingConnection) -> None:
        for address in self._tables.closed(connection):
            _LOG.info("broker address %s disconnected and is removed", address)

    # -- clients -------------------------------------------------------------------------------------------------------

    def _route(self, _: RemotingConnection, frame: Frame) -> Frame:
        topic = read_header(RouteHeader, frame.fields).topic
        route = self._tables.route(topic)
        if route is None:
            remark = f"No topic route info in name server for the topic: {topic}"
            return frame.answer(AnswerCode.TOPIC_NOT_EXIST, remark)
        if self._orders:
            route = replace(route, order_topic_conf=self._kv.get(ORDER_TOPICS, topic) or "")
        return frame.answer(body=route.encode())

    def _clusters(self, _: RemotingConnection, frame: Frame) -> Frame:
        brokers = self._tables.brokers()
        clusters: dict[str, tuple[str, ...]] = {}
        for one in brokers:
            clusters[one.cluster] = (*clusters.get(one.cluster, ()), one.broker_name)
        return frame.answer(body=ClusterInfo({one.broker_name: one for one in brokers}, clusters).encode())

    def _topics(self, _: RemotingConnection, frame: Frame) -> Frame:
        return _topic_list(frame, self._tables.topics())

    def _topics_by_cluster(self, _: RemotingConnection, frame: Frame) -> Frame:
        return _topic_list(frame, self._tables.topics_of_cluster(read_header(ClusterHeader, frame.fields).cluster))

    def _topics_with(self, sys_flag: int, without: int, _: RemotingConnection, frame: Frame) -> Frame:
        return _topic_list(frame, self._tables.topics_with(sys_flag, without))

    def _system_topics(self, _: RemotingConnection, frame: Frame) -> Frame:
        """Clusters and brokers have topics of their names; the other system topics are known to any broker."""
        brokers = self._tables.brokers()
        names = {one.cluster for one in brokers} | {one.broker_name for one in brokers}
        address = next((one for broker in brokers for one in broker.broker_addrs.values()), "")
        return _topic_list(frame, tuple(sorted(names)), address)

    # -- administrators ------------------------------------------------------------------------------------------------

    def _wipe_write(self, connection: RemotingConnection, frame: Frame) -> Frame:
        self._allow_admin(connection)
        name = read_header(BrokerNameHeader, frame.fields).broker_name
        count = self._tables.wipe_write(name)
        _LOG.info("broker %s: write permission of %d topics removed by %s", name, count, connection.place)
        return frame.answer(fields=write_header(WipedAnswer(count)))

    def _add_write(self, connection: RemotingConnection, frame: Frame) -> Frame:
        self._allow_admin(connection)
        name = read_header(BrokerNameHeader, frame.fields).broker_name
        count = self._tables.add_write(name)
        _LOG.info("broker %s: write permission of %d topics restored by %s", name, count, connection.place)
        return frame.answer(fields=write_header(AddedAnswer(count)))

    def _delete_topic(self, connection: RemotingConnection, frame: Frame) -> Frame:
        self._allow_admin(connection)
        header = read_header(TopicHeader, frame.fields)
        self._tables.delete_topic(header.topic, header.cluster_name)
        _LOG.info("topic %s deleted by %s", header.topic, connection.place)
        return frame.answer()

    def _get_value(self, _: RemotingConnection, frame: Frame) -> Frame:
        header = read_header(KeyHeader, frame.fields)
        value = self._kv.get(header.namespace, header.key)
        if value is None:
            remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
            return frame.answer(AnswerCode.QUERY_NOT_FOUND, remark)
        return frame.answer(fields=write_header(ValueAnswer(value)))

    def _get_values(self, _: RemotingConnection, frame: Frame) -> Frame:
        namespace = read_header(NamespaceHeader, frame.fields).namespace
        table = self._kv.table(namespace)
        if table is None:
            return frame.answer(AnswerCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return frame.answer(body=KVTable(table).encode())

    async def _put_value(self, connection: RemotingConnection, frame: Frame) -> Frame:
        self._allow_admin(connection)
        header = read_header(KeyValueHeader, frame.fields)
        _check_printable("namespace", header.namespace)
        _check_printable("key", header.key)
        write = partial(self._kv.put, header.namespace, header.key, header.value)
        await asyncio.get_running_loop().run_in_executor(self._writer, write)
        _LOG.info("value %s of namespace %s set by %s", header.key, header.namespace, connection.place)
        return frame.answer()

    async def _delete_value(self, connection: RemotingConnection, frame: Frame) -> Frame:
        self._allow_admin(connection)
        header = read_header(KeyHeader, frame.fields)
        write = partial(self._kv.delete, header.namespace, header.key)
        await asyncio.get_running_loop().run_in_executor(self._writer, write)
        _LOG.info("value %s of namespace %s deleted by %s", header.key, header.namespace, connection.place)
        return frame.answer()

    def _get_config(self, _: RemotingConnection, frame: Frame) -> Frame:
        lines = shown(replace(self._config, order_message_enable=self._orders))
        return frame.answer(body="".join(f"{name}={value}\n" for name, value in lines).encode())

    def _update_config(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """One setting can change while running; the others are read at start."""
        self._allow_admin(connection)
        try:
            given = {one.key: one.value for one in properties.parse(properties.decode(frame.body))}
            others = sorted(given.keys() - {_CHANGEABLE})
            if others:
                raise RequestError(
                    f"{', '.join(others)[:NAME_CHARS_MAX]}: only {_CHANGEABLE} can change without a restart: "
                    "change the others in the name server's configuration",
                    AnswerCode.NO_PERMISSION,
                )
            if _CHANGEABLE in given:
                self._orders = parse_boolean(given[_CHANGEABLE])
                _LOG.info("%s=%s until the next start, by %s", _CHANGEABLE, self._orders, connection.place)
        except (ConfigError, ValueError) as error:
            raise RequestError(f"malformed settings: {error}") from error
        return frame.answer()

    # -- access --------------------------------------------------------------------------------------------------------

    def _allow_admin(self, connection: RemotingConnection) -> None:
        self._allow(connection, self._admins, "change anything")

    def _allow(self, connection: RemotingConnection, patterns: tuple[AddressPattern, ...], what: str) -> None:
        if patterns and not any_matches(patterns, ip_address(plain_host(connection.place.host))):
            raise RequestError(f"{connection.place.host} may not {what}", AnswerCode.NO_PERMISSION)


def _now_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


def _topic_list(frame: Frame, topics: tuple[str, ...], address: str = "") -> Frame:
    return frame.answer(body=TopicList(topics, address).encode())


def _decode(header: RegisterBrokerHeader, frame: Frame, digest: bytes) -> BrokerRegistration:
    """Raises ``RequestError``."""
    body = RegisterBrokerBody.of_request(
        frame.body, compressed=header.compressed, version=frame.version, crc32=header.body_crc32
    )
    return _registration(header, body.topics.data_version, body.topics.topic_config_table, digest)


def _registration(
    header: RegisterBrokerHeader, version: DataVersion, table: Mapping[str, TopicConfigData], digest: bytes
) -> BrokerRegistration:
    """Raises ``RequestError`` for an invalid name or address."""
    for what, name in (("brokerName", header.broker_name), ("clusterName", header.cluster_name)):
        _check_name(what, name)
    try:
        parse_address(header.broker_addr)
    except ValueError as error:
        raise RequestError(f"brokerAddr: {error}") from error
    if len(header.ha_server_addr) > NAME_CHARS_MAX:
        raise RequestError(
            f"haServerAddr has {len(header.ha_server_addr)} characters: at most {NAME_CHARS_MAX} are allowed"
        )
    _check_printable("haServerAddr", header.ha_server_addr)
    _check_printable("brokerAddr", header.broker_addr)
    if header.broker_id < _BROKER_ID_MIN:
        raise RequestError(f"brokerId={header.broker_id} must be at least {_BROKER_ID_MIN}")
    topics: dict[str, QueueData] = {}
    for name, one in table.items():
        _check_name("a topic", name)
        if (
            not 0
            <= min(one.read_queue_nums, one.write_queue_nums)
            <= max(one.read_queue_nums, one.write_queue_nums)
            <= (QUEUES_MAX)
        ):
            raise RequestError(f"a topic must have 0 to {QUEUES_MAX} queues, and {name} has not")
        topics[name] = QueueData(
            header.broker_name, one.read_queue_nums, one.write_queue_nums, one.perm, one.topic_sys_flag
        )
    return BrokerRegistration(
        header.cluster_name,
        header.broker_name,
        header.broker_id,
        header.broker_addr,
        header.ha_server_addr,
        version,
        topics,
        header.dledger_term if header.dledger_term >= 0 else None,
        digest,
        header.dledger_all_topics,
    )


def _check_name(what: str, name: str) -> None:
    if not name.strip() or len(name) > NAME_CHARS_MAX:
        raise RequestError(f"{what} must have 1 to {NAME_CHARS_MAX} characters, not {len(name)}")
    _check_printable(what, name)


def _check_printable(what: str, name: str) -> None:
    """Raise ``RequestError`` for what would end a line of a log, or move the cursor of who reads it."""
    if not name.isprintable():
        raise RequestError(f"{what} must have printable characters only, not {name[:NAME_CHARS_MAX]!a}")
