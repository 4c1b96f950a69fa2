"""Responses of name servers: routes, clusters, lists of topics, key-value tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Final

from dledger.records import record
from rocketstore.remoting.body import Body, NullableText
from rocketstore.remoting.headers import Int32, Int64

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
