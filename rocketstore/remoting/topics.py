"""Topics and their queues: a broker's topics, its registration with a name server, and the answers of name servers
(routes, clusters, lists of topics, key-value tables). JSON bodies; their fields' names are RocketMQ's.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, ClassVar, Final, Self

from dledger.records import record
from dledger.remoting.codes import RequestError
from dledger.remoting.fastjson import dumps, loads
from dledger.remoting.frame import FRAME_BYTES_MAX
from rocketstore.remoting.body import EMPTY_IS_NULL, ITEMS_MAX, AtMost, Body, NullableText, read
from rocketstore.remoting.codes import VERSION_REGISTER_BODY
from rocketstore.remoting.headers import Int32, Int64

FILTER_SERVERS_MAX: Final = 1024
"""Each is a separate process next to a broker; obsolete since RocketMQ 4.3."""
PUT_AT_ONCE_MAX: Final = 1024
"""Topics, or groups, that one request may create or change."""
PUT_BYTES_MAX: Final = 1024 * 1024
ATTRIBUTES_MAX: Final = 64
_LENGTH: Final = struct.Struct(">i")
_PARTS_OF_TOPIC: Final = 5
"""RocketMQ 5 adds the attributes, in JSON, which may contain blanks."""
_LEVEL: Final = 9
_CRC_MASK: Final = (1 << 31) - 1


@record(frozen=True, slots=True)
class DataVersion(Body):
    """Shows whether a table has changed; versions have no order."""

    counter: Int64 = 0
    timestamp: Int64 = 0


@record(frozen=True, slots=True)
class TopicConfigData(Body):
    """A topic's settings, as exchanged by brokers."""

    topic_name: str
    read_queue_nums: Int32 = 16
    write_queue_nums: Int32 = 16
    perm: Int32 = 6
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: Int32 = 0
    order: bool = False
    attributes: Annotated[Mapping[str, str], AtMost(ATTRIBUTES_MAX), EMPTY_IS_NULL] = field(default_factory=dict)
    """RocketMQ 5's. In a request to change a topic, names begin with ``+`` to set one and ``-`` to remove it."""


@record(frozen=True, slots=True)
class TopicConfigList(Body):
    """UPDATE_AND_CREATE_TOPIC_LIST."""

    bytes_max: ClassVar[int] = PUT_BYTES_MAX
    topic_config_list: Annotated[tuple[TopicConfigData, ...], AtMost(PUT_AT_ONCE_MAX)] = ()


@record(frozen=True, slots=True)
class TopicConfigTable(Body):
    """Answer to GET_ALL_TOPIC_CONFIG: all topics of a broker by name. A registration may contain only some of them."""

    data_version: DataVersion = DataVersion()
    topic_config_table: Mapping[str, TopicConfigData] = field(default_factory=dict)


@record(frozen=True, slots=True)
class _FilterServers(Body):
    filter_server_list: Annotated[tuple[str, ...], AtMost(FILTER_SERVERS_MAX)]


@record(frozen=True, slots=True)
class RegisterBrokerBody(Body):
    """The body of REGISTER_BROKER."""

    topic_config_serialize_wrapper: TopicConfigTable = TopicConfigTable()
    filter_server_list: Annotated[tuple[str, ...], AtMost(FILTER_SERVERS_MAX)] = ()

    @property
    def topics(self) -> TopicConfigTable:
        """The topics, under a shorter name."""
        return self.topic_config_serialize_wrapper

    @classmethod
    def of_request(cls, body: bytes, *, compressed: bool, version: int, crc32: int) -> Self:
        """Decode as stated by the header's ``compressed``, ``version`` and ``crc32``. Raises ``RequestError``."""
        if crc32 not in (0, body_crc32(body)):
            raise RequestError("crc32 not match")
        if not body:
            return cls()
        if version < VERSION_REGISTER_BODY:
            return cls(TopicConfigTable.decode(body))
        return cls.decode_compressed(body) if compressed else cls.decode(body)

    def encode_compressed(self) -> bytes:
        """RocketMQ 4's compact form, which lacks ``order``, ``topic_sys_flag`` and the attributes."""
        topics = self.topics.topic_config_table.values()
        parts = [
            _block(self.topics.data_version.encode()),
            _LENGTH.pack(len(topics)),
            *[_block(_line(topic).encode()) for topic in topics],
            _block(dumps(list(self.filter_server_list))),
        ]
        return zlib.compress(b"".join(parts), _LEVEL)

    @classmethod
    def decode_compressed(cls, data: bytes) -> Self:
        """Raises ``RequestError``."""
        blocks = _Blocks(_inflated(data))
        version = DataVersion.decode(blocks.block())
        count = blocks.number()
        if not 0 <= count <= ITEMS_MAX:
            raise RequestError(f"malformed registration: {count} topics, {ITEMS_MAX} are allowed")
        table = {topic.topic_name: topic for topic in blocks.topics(count)}
        filters = read(_FilterServers, {"filterServerList": loads(blocks.block())})
        return cls(TopicConfigTable(version, table), filters.filter_server_list)


def body_crc32(body: bytes) -> int:
    """The ``bodyCrc32`` of a registration's body, as sent."""
    return zlib.crc32(body) & _CRC_MASK


def _block(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _line(topic: TopicConfigData) -> str:
    numbers = f"{topic.read_queue_nums} {topic.write_queue_nums} {topic.perm}"
    return f"{topic.topic_name} {numbers} {topic.topic_filter_type}"


def _inflated(data: bytes) -> bytes:
    """Decompress at most as much as a frame may contain uncompressed."""
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, FRAME_BYTES_MAX)
    except zlib.error as error:
        raise RequestError("malformed registration: not zlib") from error
    if not inflater.eof:
        raise RequestError(f"malformed registration: cut short, or longer than {FRAME_BYTES_MAX} bytes uncompressed")
    return found


class _Blocks:
    """Numbers, and bytes preceded by their length."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self) -> int:
        return _LENGTH.unpack(self._take(_LENGTH.size))[0]  # type: ignore[no-any-return]  # struct says nothing

    def block(self) -> bytes:
        return self._take(self.number())

    def topics(self, count: int) -> Iterator[TopicConfigData]:
        for _ in range(count):
            try:
                parts = self.block().decode().split(" ", _PARTS_OF_TOPIC)
            except UnicodeDecodeError as error:
                raise RequestError("malformed registration: a topic that is not UTF-8") from error
            if len(parts) < _PARTS_OF_TOPIC:
                raise RequestError(f"malformed registration: a topic of {len(parts)} parts, not {_PARTS_OF_TOPIC}")
            yield _topic(parts)

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if count < 0 or end > len(self._data):
            raise RequestError(f"malformed registration: {count} bytes at {self._at} of {len(self._data)}")
        found = self._data[self._at : end]
        self._at = end
        return found


def _topic(parts: list[str]) -> TopicConfigData:
    name, read_queues, write_queues, perm, filter_type, *attributes = parts
    return read(
        TopicConfigData,
        {
            "topicName": name,
            "readQueueNums": read_queues,
            "writeQueueNums": write_queues,
            "perm": perm,
            "topicFilterType": filter_type,
            "attributes": loads(attributes[0].encode()) if attributes and attributes[0] else {},
        },
    )


MASTER_ID: Final = 0
"""The broker id of a master; those of its slaves are larger."""


@record(frozen=True, slots=True)
class BrokerData(Body):
    """A broker's addresses by broker id; 0 is the master."""

    cluster: str
    broker_name: str
    broker_addrs: Mapping[Int64, str]
    enable_acting_master: bool | None = None
    """Whether a slave acts for its master where that is gone. RocketMQ 5's, whose Rust client fails without it."""


@record(frozen=True, slots=True)
class QueueData(Body):
    """A topic's queues on one broker."""

    broker_name: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_sys_flag: Int32 = 0


@record(frozen=True, slots=True)
class TopicRouteData(Body):
    """Answer to GET_ROUTEINFO_BY_TOPIC.

    Always standard JSON: older clients, to which Java sends numeric keys without quotes, can read it, too.
    """

    queue_datas: tuple[QueueData, ...] = ()
    broker_datas: tuple[BrokerData, ...] = ()
    filter_server_table: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    order_topic_conf: NullableText = ""


@record(frozen=True, slots=True)
class ClusterInfo(Body):
    """Answer to GET_BROKER_CLUSTER_INFO: brokers by name, and names by cluster."""

    broker_addr_table: Mapping[str, BrokerData] = field(default_factory=dict)
    cluster_addr_table: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@record(frozen=True, slots=True)
class TopicList(Body):
    """Answer to all requests for a list of topics."""

    topic_list: tuple[str, ...] = ()
    broker_addr: NullableText = ""


@record(frozen=True, slots=True)
class KVTable(Body):
    """Answer to GET_BROKER_RUNTIME_INFO and GET_KVLIST_BY_NAMESPACE, and the order topics in a registration's."""

    table: Mapping[str, str] = field(default_factory=dict)


@record(frozen=True, slots=True)
class MessageQueue(Body):
    """One queue of a topic on one broker."""

    topic: str
    broker_name: str
    queue_id: Int32
