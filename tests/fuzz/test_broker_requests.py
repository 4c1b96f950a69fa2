"""A broker's remoting port: requests of every kind with whatever fields and bodies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocketstore.remoting import headers
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import CheckClientBody, LockQueuesBody, SubscriptionData, SubscriptionGroupConfig
from rocketstore.remoting.topics import MessageQueue
from rocketstore.server import BrokerServer
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.test_server import plain
from tools.docs_reference.supported import CODES, AnsweredBy

_WAITING: Final = {RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE}
"""May wait for a minute, as asked."""
_ASKED: Final = sorted(
    code for code, one in CODES.items() if one.receiver in (AnsweredBy.BROKER, AnsweredBy.BOTH) and code not in _WAITING
)
_VALID: Final[Mapping[str, str]] = {
    "topic": "T",
    "group": "g",
    "consumerGroup": "g",
    "groupName": "g",
    "srcGroup": "g",
    "destGroup": "h",
    "compareGroup": "g",
    "key": "k",
    "maxNum": "5",
    "beginTimestamp": "0",
    "endTimestamp": str((1 << 63) - 1),
    "queueId": "0",
    "offset": "0",
    "index": "0",
    "count": "3",
    "timestamp": "0",
    "isForce": "true",
    "isOrder": "false",
    "readQueueNums": "2",
    "writeQueueNums": "2",
    "perm": "6",
    "order": "false",
    "topicFilterType": "SINGLE_TAG",
    "defaultTopic": "TBW102",
    "statsName": "TOPIC_PUT_NUMS",
    "statsKey": "T",
}
_NAMES: Final = sorted(
    {
        headers.camel(one.name)
        for kind in vars(headers).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        for one in dataclasses.fields(kind)
    }
    | set("abcdefghijklm")
    | {"_UNIQUE_KEY_QUERY", "_bornHost"}
)
_NUMBERS: Final = ("", "0", "1", "-1", "-2", "1025", str(1 << 62), "9" * 30)
_WORDS: Final = ("x", "T", "g", "\x00", "ü" * 300, "true", "TBW102", "RMQ_SYS_BROKER_STATE", "%RETRY%g", "A || B")
_IDS: Final = ("0" * 32, "7F00000100002A9F0000000000000000")
_PROPERTIES: Final = (
    "KEYS\x01k\x02TAGS\x01A",
    "REPLY_TO_CLIENT\x01nobody",
    "TRAN_MSG\x01true\x02PGROUP\x01g",
    "DELAY\x013",
)
_TEXTS: Final = st.sampled_from([*_NUMBERS, *_WORDS, *_IDS, *_PROPERTIES])
_BODIES: Final = st.one_of(
    st.sampled_from(
        [
            b"",
            b"{}",
            b"[]",
            b"null",
            b"\xff",
            b"brokerPermission=6\nenablePropertyFilter=x",
            SubscriptionGroupConfig("g").encode(),
            SubscriptionGroupConfig("g", retry_queue_nums=-1).encode(),
            CheckClientBody("c", "g", SubscriptionData("T", "A || ")).encode(),
            LockQueuesBody("c", "g", (MessageQueue("T", "b", 0),)).encode(),
        ]
    ),
    st.binary(max_size=40),
)
_REQUESTS: Final = st.lists(
    st.tuples(
        st.sampled_from(_ASKED),
        st.dictionaries(st.sampled_from(_NAMES), _TEXTS, max_size=4),
        st.sets(st.sampled_from(sorted(_VALID)), max_size=2),
        _BODIES,
    ),
    max_size=8,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A broker's port."""
    broker = BrokerServer(plain(tmp_path_factory.mktemp("broker"))).start()
    try:
        with RemotingSocket(broker.port) as client:
            for _ in range(3):
                assert client.send("T", properties="KEYS\x01k\x02TAGS\x01A").code == 0
            committed = {"consumerGroup": "g", "topic": "T", "queueId": 0, "commitOffset": 1}
            assert client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, committed).code == 0
        yield broker.port
    finally:
        broker.stop()


@given(requests=_REQUESTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_request_is_answered_as_foreseen(
    served: int, requests: list[tuple[int, dict[str, str], set[str], bytes]]
) -> None:
    """An answer that points to the log would be an error of the broker's."""
    with RemotingSocket(served) as client:
        asked = []
        for code, changed, left_out, body in requests:
            fields = {name: text for name, text in _VALID.items() if name not in left_out} | changed
            asked.append((code, fields, body, client.begin(code, fields, body)))
        for code, fields, body, opaque in asked:
            answer = client.answer_to(opaque)
            assert "see the log" not in answer.remark, (code, fields, body)
