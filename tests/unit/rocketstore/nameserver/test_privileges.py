"""Who may ask a name server what, by address: every code. One that is added without a line here fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from dledger.remoting.codes import AnswerCode
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.codes import RequestCode
from tests.unit.rocketstore.nameserver.wire import calling, config_in, running

ANYBODY, BROKERS, ADMINS = "anybody", "brokers", "admins"
HOSTS: Final = {"client": "127.0.0.1", "broker": "127.0.0.2", "admin": "127.0.0.3"}
MAY: Final = {ANYBODY: {"client", "broker", "admin"}, BROKERS: {"broker"}, ADMINS: {"admin"}}
CODE: Final = RequestCode
PRIVILEGES: Final = {
    CODE.GET_ROUTEINFO_BY_TOPIC: ANYBODY,
    CODE.GET_BROKER_CLUSTER_INFO: ANYBODY,
    CODE.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: ANYBODY,
    CODE.GET_SYSTEM_TOPIC_LIST_FROM_NS: ANYBODY,
    CODE.GET_TOPICS_BY_CLUSTER: ANYBODY,
    CODE.GET_UNIT_TOPIC_LIST: ANYBODY,
    CODE.GET_HAS_UNIT_SUB_TOPIC_LIST: ANYBODY,
    CODE.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: ANYBODY,
    CODE.GET_KV_CONFIG: ANYBODY,
    CODE.GET_KVLIST_BY_NAMESPACE: ANYBODY,
    CODE.GET_NAMESRV_CONFIG: ANYBODY,
    CODE.REGISTER_BROKER: BROKERS,
    CODE.UNREGISTER_BROKER: BROKERS,
    CODE.QUERY_DATA_VERSION: BROKERS,
    CODE.WIPE_WRITE_PERM_OF_BROKER: ADMINS,
    CODE.ADD_WRITE_PERM_OF_BROKER: ADMINS,
    CODE.DELETE_TOPIC_IN_NAMESRV: ADMINS,
    CODE.PUT_KV_CONFIG: ADMINS,
    CODE.DELETE_KV_CONFIG: ADMINS,
    CODE.UPDATE_NAMESRV_CONFIG: ADMINS,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NameServer]:
    """One that knows its brokers and administrators by their addresses."""
    config = config_in(tmp_path_factory.mktemp("names"), allowed_brokers=HOSTS["broker"], allowed_admins=HOSTS["admin"])
    with running(config) as started:
        yield started


def test_every_code_has_a_line(server: NameServer) -> None:
    """Whoever adds one says who may ask it."""
    assert server._server is not None
    assert PRIVILEGES.keys() == server._server.codes


@pytest.mark.parametrize("who", HOSTS)
@pytest.mark.parametrize("code", PRIVILEGES, ids=lambda code: code.name)
def test_each_code_is_for_those_who_may(server: NameServer, code: RequestCode, who: str) -> None:
    """By the address of the connection; what is allowed may still be malformed."""
    with calling(server, HOSTS[who]) as caller:
        answer = caller.ask(
            code,
            b"{}",
            topic="T",
            cluster="c",
            clusterName="c",
            brokerName="g",
            brokerAddr="a:1",
            brokerId="0",
            haServerAddr="h:1",
            namespace="n",
            key="k",
            value="v",
        )
    refused = answer.code == AnswerCode.NO_PERMISSION and " may not " in answer.remark
    assert refused == (who not in MAY[PRIVILEGES[code]])
