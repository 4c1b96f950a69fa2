"""What one name server, ours or RocketMQ's, knows at this moment: each call asks it anew."""

from __future__ import annotations

from collections.abc import Mapping

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from dledger.values import parse_address
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import RouteHeader, write_header
from rocketstore.remoting.topics import ClusterInfo, TopicList, TopicRouteData
from tests.support.remoting import RemotingSocket


def brokers(name_server: str) -> dict[str, dict[int, str]]:
    """The addresses of all brokers by name and id; nothing while it does not answer."""
    try:
        answer = _ask(name_server, RequestCode.GET_BROKER_CLUSTER_INFO)
    except (OSError, EOFError):
        return {}
    table = ClusterInfo.decode(answer.body or b"{}").broker_addr_table
    return {name: dict(one.broker_addrs) for name, one in table.items()}


def route(name_server: str, topic: str) -> TopicRouteData | None:
    """Where a topic is; None for one that it does not know. Raises ``OSError`` if it cannot be reached."""
    answer = _ask(name_server, RequestCode.GET_ROUTEINFO_BY_TOPIC, write_header(RouteHeader(topic, True)))
    return None if answer.code == AnswerCode.TOPIC_NOT_EXIST else TopicRouteData.decode(answer.body)


def topics(name_server: str) -> tuple[str, ...]:
    """The names of all topics."""
    return TopicList.decode(_ask(name_server, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body).topic_list


def _ask(name_server: str, code: int, fields: Mapping[str, object] | None = None) -> Frame:
    host, port = parse_address(name_server)
    assert host == "127.0.0.1", host
    with RemotingSocket(port) as asking:
        return asking.ask(code, fields)
