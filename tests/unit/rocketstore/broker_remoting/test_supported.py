"""The table of requests says what the servers do."""

from __future__ import annotations

from pathlib import Path

from rocketstore.broker_remoting import service
from rocketstore.nameserver.service import NameService
from rocketstore.nameserver.settings import NameServerConfig
from rocketstore.nameserver.tables import KvConfig, RouteTables
from rocketstore.remoting.codes import OwnCode, RequestCode
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.nameserver.support import LIMITS
from tools.docs_reference.supported import CODES, AnsweredBy, Support

CODE_3 = frozenset(
    {
        RequestCode.UPDATE_AND_CREATE_ACL_CONFIG,
        RequestCode.DELETE_ACL_CONFIG,
        RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG,
    }
)
"""Handlers that say why they do nothing."""


def _said(receiver: AnsweredBy) -> set[RequestCode]:
    receivers = {receiver} if receiver is AnsweredBy.CLIENT else {receiver, AnsweredBy.BOTH}
    return {code for code, one in CODES.items() if one.receiver in receivers and one.support is not Support.NO}


def test_every_request_is_in_the_table() -> None:
    assert set(CODES) == set(RequestCode)


def test_the_broker_answers_what_the_table_says(broker: RemotingHarness) -> None:
    assert broker.remoting.server.codes - CODE_3 - set(OwnCode) == _said(AnsweredBy.BROKER)


def test_clients_are_asked_what_the_table_says() -> None:
    package = Path(service.__file__).parent
    sources = "".join(path.read_text("utf-8") for path in package.glob("*.py"))
    asked = {code for code, one in CODES.items() if one.receiver is AnsweredBy.CLIENT}
    assert {code for code in asked if f"RequestCode.{code.name}," in sources} == _said(AnsweredBy.CLIENT)


def test_the_name_server_answers_what_the_table_says(tmp_path: Path) -> None:
    tables = RouteTables(LIMITS)
    server = NameService(NameServerConfig(), tables, KvConfig(tmp_path / "kv.json", entries_max=1, bytes_max=1))
    try:
        handlers = server.handlers()
        assert handlers.direct.keys() | handlers.awaited.keys() | handlers.prompt.keys() == _said(
            AnsweredBy.NAME_SERVER
        )
    finally:
        server.close()
