"""Access control over remoting: who is refused what, and that nothing happens before."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pytest

from dledger.access.rules import parse_rules
from dledger.config import AccessConfig
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import ACCESS_KEY, SIGNATURE, Frame, HeaderForm, signed
from dledger.remoting.log_codec import JavaCode, LogCode
from rocketstore.broker.mastership import Mastership
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_remoting.requests import REQUESTS
from rocketstore.message.batch import encode_batch
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.message import Message
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import (
    CommitGroupOffsets,
    CommitPosition,
    FetchOffsets,
    NumberedMessage,
    NumberedSend,
    encode_name,
)
from rocketstore.remoting.groups import (
    CheckClientBody,
    ConsumerData,
    ConsumeStats,
    GroupList,
    HeartbeatData,
    LockQueuesBody,
    ProducerData,
    ProducersByGroup,
    SubscriptionData,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
)
from rocketstore.remoting.pop import (
    BatchAckBody,
    HandleEntry,
    QueryAssignmentBody,
    RequestModesBody,
    SetRequestModeBody,
)
from rocketstore.remoting.topics import MessageQueue, TopicConfigTable, TopicList
from rocketstore.state.attributes import TopicRequestMode
from rocketstore.state.changes import GroupConfig, TopicConfig
from rocketstore.types import SCHEDULE_TOPIC, RequestMode
from tests.support.remoting import RemotingSocket, pull_fields, send_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN

ALICE, ROOT = ("alice", "alice-secret"), ("root", "root-secret")
RULES_TEXT = """\
{more}
accounts:
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - T=PUB|SUB
  groupPerms:
  - g=SUB
- accessKey: near
  secretKey: near-secret
  whiteRemoteAddress: {near}
  topicPerms:
  - T=PUB
"""
CODE: Final = RequestCode


def text(more: str = "", near: str = "192.0.2.1") -> str:
    return RULES_TEXT.format(more=more, near=near)


def harness(rules: str = "", config: BrokerConfig | None = None) -> RemotingHarness:
    topics = (TopicConfig("T", 4, 4), TopicConfig("hidden", 4, 4), TopicConfig(SCHEDULE_TOPIC, 18, 18))
    return RemotingHarness(config, *topics, rules=parse_rules(rules or text()))


@pytest.fixture
def broker() -> Iterator[RemotingHarness]:
    """With the topics T and hidden."""
    with harness() as made:
        yield made


@pytest.fixture
def alice(broker: RemotingHarness) -> Iterator[RemotingSocket]:
    """She may do everything with T, and consume in g."""
    with broker.dial(ALICE) as dialled:
        yield dialled


@pytest.fixture
def root(broker: RemotingHarness) -> Iterator[RemotingSocket]:
    with broker.dial(ROOT) as dialled:
        yield dialled


def change(broker: RemotingHarness, rules: str) -> None:
    """Put other rules into force."""
    guard = broker.guard
    assert guard is not None
    parsed = parse_rules(rules)
    broker.bridge.post(lambda: guard.apply(parsed))
    wait_until(lambda: guard.rules is parsed, "the new rules are in force")


def is_refused(answer: Frame) -> bool:
    return answer.code == AnswerCode.SYSTEM_ERROR and answer.remark.startswith("AclException: ")


# -- each code ---------------------------------------------------------------------------------------------------------


LONG_NAMES: Final = (
    "producerGroup",
    "topic",
    "defaultTopic",
    "defaultTopicQueueNums",
    "queueId",
    "sysFlag",
    "bornTimestamp",
    "flag",
    "properties",
)


class Asked(NamedTuple):
    fields: Mapping[str, object] = {}
    body: bytes = b""


class Case(NamedTuple):
    """A request that alice may make (None: only an administrator may), one that she may not, and why."""

    allowed: Asked | None
    denied: Asked
    reason: str


def topic(name: str, **more: object) -> Asked:
    return Asked({"topic": name, "queueId": 0} | more)


def group(field: str, name: str, **more: object) -> Asked:
    return Asked({field: name} | more)


def sent(name: str, *, short: bool = True, body: bytes = b"x", properties: str = "") -> Asked:
    fields = send_fields(name, properties=properties)
    return Asked(fields if short else dict(zip(LONG_NAMES, fields.values(), strict=False)), body)


def numbered(name: str) -> Asked:
    return Asked({}, NumberedSend("p", 0, [NumberedMessage(name, 0, 0, 0, 1, b"", b"x")]).encode())


def recalled(name: str) -> Asked:
    return Asked({"topic": name, "recallHandle": "x", "producerGroup": "p"})


def beat(name: str, consumed: str) -> Asked:
    consumer = ConsumerData(name, subscription_data_set=(SubscriptionData(consumed),))
    return Asked({}, HeartbeatData("c1", (ProducerData("p"),), (consumer,)).encode())


def locks(name: str, locked: str) -> Asked:
    return Asked({}, LockQueuesBody("c1", name, (MessageQueue(locked, "b", 0),)).encode())


def a_case(make: Any, reason: str, allowed: tuple[str, ...], denied: tuple[str, ...]) -> Case:  # noqa: ANN401  # above
    return Case(make(*allowed), make(*denied), reason)


def _consumed(name: str, of: str, **more: object) -> Asked:
    return topic(of, consumerGroup=name, **more)


def _admin(**fields: object) -> Case:
    return Case(None, Asked(fields), "requires an account with admin: true")


ON_HIDDEN, ON_OTHER = "needs SUB on topic hidden", "needs SUB on group other"
BATCH: Final = encode_batch([Message("T", b"1", 0), Message("T", b"2", 0)])
REPLY: Final = "REPLY_TO_CLIENT\x01c1\x02"


def _popping(group_name: str, topic_name: str) -> Asked:
    """Whatever requests of pop have in their headers."""
    numbers = {"queueId": -1, "maxMsgNums": 1, "invisibleTime": 60_000, "pollTime": 0, "offset": 0}
    names = {"consumerGroup": group_name, "topic": topic_name, "extraInfo": "0 1 60000 0 0 b 0 0 handle"}
    return Asked({**numbers, **names})


def _acked(group_name: str, topic_name: str) -> Asked:
    return Asked({}, BatchAckBody((), (HandleEntry(group_name, topic_name, ("handle",)),)).encode())


CASES_OF_OTHERS: Final[Mapping[int, Case]] = {
    CODE.SEND_MESSAGE: Case(sent("T", short=False), sent("hidden", short=False), "needs PUB on topic hidden"),
    CODE.SEND_MESSAGE_V2: Case(sent("T"), sent("hidden"), "needs PUB on topic hidden"),
    CODE.SEND_BATCH_MESSAGE: Case(sent("T", body=BATCH), sent("hidden", body=BATCH), "needs PUB on topic hidden"),
    CODE.SEND_REPLY_MESSAGE: Case(
        sent("T", short=False, properties=REPLY), sent("hidden", short=False), "needs PUB on topic hidden"
    ),
    CODE.SEND_REPLY_MESSAGE_V2: Case(sent("T", properties=REPLY), sent("hidden"), "needs PUB on topic hidden"),
    OwnCode.SEND_NUMBERED: a_case(numbered, "needs PUB on topic hidden", ("T",), ("hidden",)),
    CODE.RECALL_MESSAGE: a_case(recalled, "needs PUB on topic hidden", ("T",), ("hidden",)),
    OwnCode.NEXT_NUMBER: Case(Asked({}, encode_name("p")), Asked({}, encode_name("p")), ""),
    CODE.PULL_MESSAGE: Case(
        Asked(pull_fields("g", "T", sysFlag=4)), Asked(pull_fields("g", "hidden", sysFlag=4)), ON_HIDDEN
    ),
    CODE.LITE_PULL_MESSAGE: Case(
        Asked(pull_fields("g", "T", sysFlag=20)), Asked(pull_fields("g", "hidden", sysFlag=20)), ON_HIDDEN
    ),
    CODE.POP_MESSAGE: a_case(_popping, ON_HIDDEN, ("g", "T"), ("g", "hidden")),
    CODE.PEEK_MESSAGE: a_case(_popping, ON_OTHER, ("g", "T"), ("other", "T")),
    CODE.NOTIFICATION: a_case(_popping, ON_HIDDEN, ("g", "T"), ("g", "hidden")),
    CODE.POLLING_INFO: a_case(_popping, ON_OTHER, ("g", "T"), ("other", "T")),
    CODE.ACK_MESSAGE: a_case(_popping, ON_HIDDEN, ("g", "%RETRY%g_T"), ("g", "%RETRY%g_hidden")),
    CODE.CHANGE_MESSAGE_INVISIBLETIME: a_case(_popping, ON_OTHER, ("g", "T"), ("other", "T")),
    CODE.BATCH_ACK_MESSAGE: a_case(_acked, ON_HIDDEN, ("g", "T"), ("g", "hidden")),
    CODE.QUERY_ASSIGNMENT: Case(
        Asked({}, QueryAssignmentBody("T", "g").encode()),
        Asked({}, QueryAssignmentBody("T", "other").encode()),
        ON_OTHER,
    ),
    CODE.GET_TOPIC_CONFIG: a_case(topic, ON_HIDDEN, ("T",), ("hidden",)),
    CODE.GET_SUBSCRIPTIONGROUP_CONFIG: a_case(group, ON_OTHER, ("group", "g"), ("group", "other")),
    CODE.GET_BROKER_HA_STATUS: Case(Asked(), Asked(), ""),
    CODE.QUERY_CONSUMER_OFFSET: a_case(_consumed, ON_OTHER, ("g", "T"), ("other", "T")),
    CODE.UPDATE_CONSUMER_OFFSET: Case(
        _consumed("g", "T", commitOffset=0), _consumed("g", "hidden", commitOffset=0), ON_HIDDEN
    ),
    CODE.SEARCH_OFFSET_BY_TIMESTAMP: Case(topic("T", timestamp=1), topic("hidden", timestamp=1), ON_HIDDEN),
    CODE.GET_MAX_OFFSET: a_case(topic, ON_HIDDEN, ("T",), ("hidden",)),
    CODE.GET_MIN_OFFSET: a_case(topic, ON_HIDDEN, ("T",), ("hidden",)),
    CODE.GET_EARLIEST_MSG_STORETIME: a_case(topic, ON_HIDDEN, ("T",), ("hidden",)),
    CODE.HEART_BEAT: a_case(beat, ON_HIDDEN, ("g", "T"), ("g", "hidden")),
    CODE.UNREGISTER_CLIENT: Case(
        group("consumerGroup", "g", clientID="c1"), group("consumerGroup", "other", clientID="c1"), ON_OTHER
    ),
    CODE.CONSUMER_SEND_MSG_BACK: Case(
        group("group", "g", offset=0, delayLevel=0), group("group", "other", offset=0, delayLevel=0), ON_OTHER
    ),
    CODE.END_TRANSACTION: Case(
        group("producerGroup", "p", tranStateTableOffset=0, commitLogOffset=0, commitOrRollback=8, msgId="x"),
        group("producerGroup", "p", tranStateTableOffset=0, commitLogOffset=1, commitOrRollback=8, msgId="x"),
        "look message by offset failed",
    ),
    CODE.GET_CONSUMER_LIST_BY_GROUP: a_case(group, ON_OTHER, ("consumerGroup", "g"), ("consumerGroup", "other")),
    CODE.LOCK_BATCH_MQ: a_case(locks, ON_HIDDEN, ("g", "T"), ("g", "hidden")),
    CODE.UNLOCK_BATCH_MQ: a_case(locks, ON_OTHER, ("g", "T"), ("other", "T")),
    OwnCode.FETCH_OFFSETS: Case(
        Asked({}, FetchOffsets("g", [("T", 0)]).encode()),
        Asked({}, FetchOffsets("g", [("hidden", 0)]).encode()),
        ON_HIDDEN,
    ),
    OwnCode.COMMIT_OFFSETS: Case(
        Asked({}, CommitGroupOffsets("g", [("T", 0, 0)]).encode()),
        Asked({}, CommitGroupOffsets("other", [("T", 0, 0)]).encode()),
        ON_OTHER,
    ),
    OwnCode.COMMIT_POSITION: Case(
        Asked({}, CommitPosition("g", 0, ["T"]).encode()),
        Asked({}, CommitPosition("g", 0, ["T", "hidden"]).encode()),
        ON_HIDDEN,
    ),
    CODE.CHECK_CLIENT_CONFIG: Case(
        Asked({}, CheckClientBody("c1", "g", SubscriptionData("T")).encode()),
        Asked({}, CheckClientBody("c1", "g", SubscriptionData("hidden")).encode()),
        ON_HIDDEN,
    ),
    CODE.QUERY_MESSAGE: Case(
        topic("T", key="k", maxNum=1, beginTimestamp=0, endTimestamp=9),
        topic("hidden", key="k", maxNum=1, beginTimestamp=0, endTimestamp=9),
        ON_HIDDEN,
    ),
    CODE.VIEW_MESSAGE_BY_ID: Case(Asked({"offset": 0}), Asked({"offset": -1}), "can not find message"),
    CODE.GET_TOPIC_STATS_INFO: a_case(topic, ON_HIDDEN, ("T",), ("hidden",)),
    CODE.QUERY_TOPIC_CONSUME_BY_WHO: a_case(topic, ON_HIDDEN, ("T",), ("hidden",)),
    CODE.GET_CONSUMER_CONNECTION_LIST: a_case(group, ON_OTHER, ("consumerGroup", "g"), ("consumerGroup", "other")),
    CODE.GET_PRODUCER_CONNECTION_LIST: a_case(group, ON_OTHER, ("producerGroup", "g"), ("producerGroup", "other")),
    CODE.GET_CONSUMER_RUNNING_INFO: Case(
        group("consumerGroup", "g", clientId="c1"), group("consumerGroup", "other", clientId="c1"), ON_OTHER
    ),
    CODE.GET_CONSUME_STATS: a_case(group, ON_OTHER, ("consumerGroup", "g"), ("consumerGroup", "other")),
    CODE.QUERY_CONSUME_TIME_SPAN: Case(topic("T", group="g"), topic("T", group="other"), ON_OTHER),
    CODE.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: Case(topic("T", group="g"), topic("T", group="other"), ON_OTHER),
    CODE.QUERY_CONSUME_QUEUE: Case(topic("T", index=0, count=1), topic("hidden", index=0, count=1), ON_HIDDEN),
    CODE.GET_ALL_TOPIC_CONFIG: Case(Asked(), Asked(), ""),
    CODE.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: Case(Asked(), Asked(), ""),
    CODE.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: Case(Asked(), Asked(), ""),
    CODE.GET_ALL_MESSAGE_REQUEST_MODE: Case(Asked(), Asked(), ""),
    CODE.GET_ALL_PRODUCER_INFO: Case(Asked(), Asked(), ""),
    CODE.GET_BROKER_RUNTIME_INFO: Case(Asked(), Asked(), ""),
    CODE.GET_ROUTEINFO_BY_TOPIC: Case(topic("T"), topic("T"), ""),
    CODE.GET_BROKER_CLUSTER_INFO: Case(Asked(), Asked(), ""),
    CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: Case(
        None, Asked({}, SubscriptionGroupConfig("g").encode()), "requires an account with admin: true"
    ),
    CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: Case(None, Asked({}, b"{}"), "requires an account with admin: true"),
    CODE.SET_MESSAGE_REQUEST_MODE: Case(
        None, Asked({}, SetRequestModeBody("T", "g").encode()), "requires an account with admin: true"
    ),
    CODE.UPDATE_AND_CREATE_TOPIC_LIST: Case(None, Asked({}, b"{}"), "requires an account with admin: true"),
}
CASES: Final[Mapping[int, Case]] = {
    **{code: _admin(topic="T", group="g", consumerGroup="g") for code, rule in REQUESTS.items() if rule.rule.admin},
    **CASES_OF_OTHERS,
}
"""Of each code that a broker may serve."""


def test_each_code_has_its_case() -> None:
    assert CASES.keys() == REQUESTS.keys()


@pytest.fixture(scope="module")
def shared() -> Iterator[RemotingHarness]:
    with harness() as made:
        yield made


@pytest.mark.parametrize(
    ("code", "form"),
    [(code, form) for code in CASES for form in HeaderForm if form is HeaderForm.JSON or code < 1 << 15],
)
def test_each_code_is_for_those_who_may(shared: RemotingHarness, code: int, form: HeaderForm) -> None:
    """With a valid key, an unknown one, a signature of another secret, none at all; in both forms of a header."""
    case = CASES[code]
    with RemotingSocket(shared.remoting_port, form) as client:

        def ask(asked: Asked, key: tuple[str, str] | None) -> Frame:
            client.key = key
            return client.ask(code, asked.fields, asked.body)

        asked = case.allowed or case.denied
        for unknown in (("nobody", "alice-secret"), ("alice", "another-secret")):
            answer = ask(asked, unknown)
            assert is_refused(answer)
            assert "unknown access key, or the signature does not match its secret" in answer.remark
        answer = ask(asked, None)
        assert is_refused(answer)
        assert "requires an access key" in answer.remark
        if case.allowed is not None:
            assert not is_refused(ask(case.allowed, ALICE)), "she may"
        if case.reason:
            answer = ask(case.denied, ALICE)
            assert case.reason in answer.remark
        if case.allowed is None:
            assert not is_refused(ask(case.denied, ROOT)), "an administrator may"


def test_a_code_without_a_rule_is_denied_and_without_a_key_not_even_told(
    broker: RemotingHarness, root: RemotingSocket
) -> None:
    """Also to administrators: nobody knows what it would do."""
    assert "request 9999 has no rule" in root.ask(9999).remark
    with broker.dial() as stranger:
        assert "requires an access key" in stranger.ask(9999).remark
    assert "REGISTER_BROKER has no rule" in root.ask(CODE.REGISTER_BROKER).remark


@pytest.mark.parametrize("code", [*JavaCode, *LogCode])
def test_requests_of_a_log_do_not_exist_at_a_broker_without_one(
    broker: RemotingHarness, root: RemotingSocket, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """A client that finds out what it talks to is not told, and logged, as one that may not ask."""
    with caplog.at_level(logging.INFO, "dledger.audit"):
        assert root.ask(code).code == AnswerCode.REQUEST_CODE_NOT_SUPPORTED
    assert not [one for one in caplog.records if one.name == "dledger.audit"]


# -- nothing happens before --------------------------------------------------------------------------------------------


def test_what_is_refused_has_not_been_done(broker: RemotingHarness) -> None:
    with broker.dial(("alice", "another-secret")) as client:
        assert is_refused(client.send())
        client.tell(CODE.SEND_MESSAGE_V2, send_fields("T"), b"x")
        assert is_refused(client.subscribe("g", "T"))
        assert is_refused(client.ask(CODE.UPDATE_CONSUMER_OFFSET, _consumed("g", "T", commitOffset=0).fields))
    with broker.dial(ALICE) as alice:
        assert is_refused(alice.subscribe("g", "hidden"))
        assert is_refused(alice.send("new"))
        assert is_refused(alice.ask(CODE.DELETE_TOPIC_IN_BROKER, {"topic": "T"}))
        assert alice.ask(CODE.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"}).remark.startswith("no consumer")
    assert not broker.store.log.records
    assert not broker.state.committed
    assert sorted(broker.state.table) == [SCHEDULE_TOPIC, "T", "hidden"]


@pytest.mark.parametrize("name", ["b", "i", "e", ACCESS_KEY, SIGNATURE])
def test_each_field_is_signed(broker: RemotingHarness, name: str) -> None:
    """And the body."""
    texts = {key: str(value) for key, value in send_fields("T").items()}
    fields = signed(texts, b"x", *ALICE)
    with broker.dial() as client:
        assert is_refused(client.ask(CODE.SEND_MESSAGE_V2, {**fields, name: f"{fields[name]}1"}, b"x"))
        assert is_refused(client.ask(CODE.SEND_MESSAGE_V2, {**fields, "more": "1"}, b"x"))
        assert is_refused(client.ask(CODE.SEND_MESSAGE_V2, fields, b"y"))
        assert client.ask(CODE.SEND_MESSAGE_V2, fields, b"x").code == 0


def test_what_mqadmin_signed_is_taken() -> None:
    """With the key of its tools.yml; also with the field that Java's own brokers stumble over (F62)."""
    rules = "accounts:\n- accessKey: rocketmq2\n  secretKey: 12345678\n  admin: true\n"
    with harness(rules) as broker, broker.dial() as client:
        for name in ("F57", "F60", "F62", "F64"):
            frame = GOLDEN[name].frame
            assert not is_refused(client.ask(frame.code, frame.fields, frame.body))
        frame = GOLDEN["F60"].frame
        assert is_refused(client.ask(frame.code, {**frame.fields, "perm": "7"}, frame.body))


def test_without_access_control_whatever_is_signed_is_no_matter() -> None:
    """C++ signs always, with an empty key (F76)."""
    with RemotingHarness() as broker, broker.dial() as client:
        frame = GOLDEN["F76"].frame
        assert frame.fields[ACCESS_KEY] == ""
        assert client.ask(frame.code, {**frame.fields, "topic": "T"}, frame.body).code == 0
        client.key = ("nobody", "whatever")
        assert client.send().code == 0


# -- messages and lists ------------------------------------------------------------------------------------------------


def test_an_id_opens_no_topic_that_one_may_not_read(
    broker: RemotingHarness, alice: RemotingSocket, root: RemotingSocket
) -> None:
    """And its topic is not told either."""
    assert root.send("hidden").code == root.send("T").code == 0
    hidden, own = (str(one.head.offset) for one in broker.store.log.records)
    refused = alice.ask(CODE.VIEW_MESSAGE_BY_ID, {"offset": hidden})
    assert is_refused(refused)
    assert "VIEW_MESSAGE_BY_ID needs SUB on the topic of that message" in refused.remark
    assert "hidden" not in refused.remark
    assert not refused.body
    assert alice.ask(CODE.VIEW_MESSAGE_BY_ID, {"offset": own}).code == 0
    assert root.ask(CODE.VIEW_MESSAGE_BY_ID, {"offset": hidden}).code == 0


def test_nobody_has_others_messages_sent_back_to_himself(
    broker: RemotingHarness, alice: RemotingSocket, root: RemotingSocket
) -> None:
    """The offset is the client's word, in whatever form."""
    assert root.send("hidden", properties="REAL_TOPIC\x01T").code == root.send("T").code == 0
    hidden, own = (one.head.offset for one in broker.store.log.records)
    for offset in (f"{hidden}", f"+{hidden}", f"0{hidden}"):
        back = {"offset": offset, "group": "g", "delayLevel": 0, "originTopic": "T"}
        refused = alice.ask(CODE.CONSUMER_SEND_MSG_BACK, back)
        assert is_refused(refused)
        assert "needs SUB on the topic of that message" in refused.remark
    assert len(broker.store.log.records) == 2
    assert alice.ask(CODE.CONSUMER_SEND_MSG_BACK, {"offset": own, "group": "g", "delayLevel": 0}).code == 0
    assert len(broker.store.log.records) == 3


def test_nobody_is_remembered_who_has_hung_up(broker: RemotingHarness) -> None:
    for _ in range(3):
        with broker.dial(ALICE) as client:
            assert client.send("T").code == 0
    access = broker.remoting.access
    wait_until(lambda: not access._known and not access._callers, "all have been forgotten")


def test_nobody_ends_the_transactions_of_others_or_is_asked_about_them() -> None:
    """A producer group is only a name: what counts is who may send to the message's real topic."""
    config = BrokerConfig(transaction_check_interval=100, transaction_time_out=0)
    rules = text() + "- accessKey: mallory\n  secretKey: mallory-secret\n"
    properties = "TRAN_MSG\x01true\x02PGROUP\x01p"
    with (
        harness(rules, config) as broker,
        broker.dial(("mallory", "mallory-secret")) as mallory,
        broker.dial(ALICE) as alice,
    ):
        for client in (mallory, alice):
            assert client.ask(CODE.HEART_BEAT, None, HeartbeatData("c1", (ProducerData("p"),)).encode()).code == 0
        prepared = alice.send(properties=properties)
        _, offset = parse_offset_message_id(prepared.fields["msgId"])
        fields = {"producerGroup": "p", "tranStateTableOffset": 0, "commitLogOffset": offset, "msgId": "x"}
        for how in (8, 12):
            refused = mallory.ask(CODE.END_TRANSACTION, fields | {"commitOrRollback": how})
            assert is_refused(refused)
            assert "needs PUB on the topic of that message" in refused.remark
        for _ in range(3):
            alice.request(CODE.CHECK_TRANSACTION_STATE)
        assert mallory.ask(CODE.GET_ALL_TOPIC_CONFIG).code == 0
        assert [one.code for one in mallory.others if not one.is_response] == []
        assert alice.ask(CODE.END_TRANSACTION, fields | {"commitOrRollback": 8}).code == 0
        wait_until(lambda: "T" in [one.head.topic for one in broker.store.log.records], "it is committed")


def test_a_slave_that_becomes_the_master_meanwhile_looks_at_the_message_first(
    broker: RemotingHarness, alice: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would do itself, unchecked, what it had left for the master to check."""
    broker.store.submit([Message("hidden", b"x")], lambda _: None)
    broker.view = replace(broker.view, leader_address="")
    looks = iter([False])
    monkeypatch.setattr(Mastership, "is_master", property(lambda _: next(looks, True)))
    offset = broker.store.log.records[0].head.offset
    refused = alice.ask(CODE.CONSUMER_SEND_MSG_BACK, {"offset": offset, "group": "g", "delayLevel": 0})
    assert is_refused(refused)
    assert len(broker.store.log.records) == 1


def test_a_message_is_looked_for_where_nothing_is(broker: RemotingHarness, alice: RemotingSocket) -> None:
    """Also before the beginning."""
    for offset in (5, -1):
        fields = {"producerGroup": "p", "tranStateTableOffset": 0, "commitLogOffset": offset, "msgId": "x"}
        answer = alice.ask(CODE.END_TRANSACTION, fields | {"commitOrRollback": 8})
        assert (answer.code, answer.remark) == (1, f"look message by offset failed, {offset}")


def test_request_modes_are_shown_of_what_one_may_use(
    broker: RemotingHarness, alice: RemotingSocket, root: RemotingSocket
) -> None:
    """Both the topic and the group: `dledger consumer settings` is for every account."""
    modes = [TopicRequestMode(topic, group, RequestMode.POP) for topic in ("T", "hidden") for group in ("g", "other")]
    broker.state.modes = {(one.topic, one.group): one for one in modes}

    def seen(client: RemotingSocket) -> set[tuple[str, str]]:
        found = RequestModesBody.decode(client.ask(CODE.GET_ALL_MESSAGE_REQUEST_MODE).body).message_request_mode_map
        return {(topic, group) for topic, groups in found.items() for group in groups}

    assert seen(alice) == {("T", "g")}
    assert len(seen(root)) == 4


def test_lists_show_what_one_may_use(broker: RemotingHarness, alice: RemotingSocket, root: RemotingSocket) -> None:
    """As over gRPC."""
    broker.state.configs = {name: GroupConfig(name) for name in ("g", "other")}
    broker.state.committed = {("g", "T", 0): 0, ("g", "hidden", 0): 0, ("other", "T", 0): 0}
    beats = tuple(ProducerData(name) for name in ("g", "other"))
    assert root.ask(CODE.HEART_BEAT, None, HeartbeatData("c", beats).encode()).code == 0

    def seen(client: RemotingSocket) -> tuple[set[str], set[str], set[str], set[str], set[str]]:
        topics = TopicConfigTable.decode(client.ask(CODE.GET_ALL_TOPIC_CONFIG).body)
        groups = SubscriptionGroupTable.decode(client.ask(CODE.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)
        of_topic = GroupList.decode(client.ask(CODE.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "T"}).body)
        stats = ConsumeStats.decode(client.ask(CODE.GET_CONSUME_STATS, {"consumerGroup": "g"}).body)
        producers = ProducersByGroup.decode(client.ask(CODE.GET_ALL_PRODUCER_INFO).body)
        return (
            set(topics.topic_config_table),
            set(groups.subscription_group_table),
            set(of_topic.group_list),
            {queue.topic for queue in stats.offset_table},
            set(producers.data),
        )

    assert seen(alice) == ({"T"}, {"g"}, {"g"}, {"T"}, {"g"})
    everything = seen(root)
    assert everything[0] >= {"T", "hidden", "TBW102"}
    assert everything[1:] == ({"g", "other"}, {"g", "other"}, {"T", "hidden"}, {"g", "other"})
    system = CODE.GET_SYSTEM_TOPIC_LIST_FROM_BROKER
    assert TopicList.decode(alice.ask(system).body).topic_list == ()
    assert "TBW102" in TopicList.decode(root.ask(system).body).topic_list


def test_a_groups_own_topics_belong_to_its_members(broker: RemotingHarness, alice: RemotingSocket) -> None:
    """They write to the one for retries, and read from both."""
    assert alice.send("%RETRY%g").code == 0
    assert alice.ask(CODE.GET_MAX_OFFSET, {"topic": "%DLQ%g", "queueId": 0}).code == 0
    for name in ("%RETRY%other", "%DLQ%other"):
        assert is_refused(alice.send(name))
        assert is_refused(alice.ask(CODE.GET_MAX_OFFSET, {"topic": name, "queueId": 0}))


def test_everybody_may_write_traces_and_nobody_read_the_brokers_own_topics() -> None:
    """Delayed messages of all topics wait in these."""
    rules = text() + "- accessKey: all\n  secretKey: all-secret\n  defaultTopicPerm: PUB|SUB\n"
    with harness(rules) as broker, broker.dial(ALICE) as alice, broker.dial(("all", "all-secret")) as everywhere:
        assert not is_refused(alice.send("RMQ_SYS_TRACE_TOPIC"))
        assert is_refused(alice.ask(CODE.GET_MAX_OFFSET, {"topic": "RMQ_SYS_TRACE_TOPIC", "queueId": 0}))
        refused = everywhere.ask(CODE.GET_MAX_OFFSET, {"topic": SCHEDULE_TOPIC, "queueId": 0})
        assert is_refused(refused)
        assert "requires an account with admin: true" in refused.remark


# -- rules that change -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["alice-secret", "accessKey: alice"])
def test_a_revoked_key_ends_its_connections(
    broker: RemotingHarness, alice: RemotingSocket, root: RemotingSocket, changed: str
) -> None:
    """Those that only wait for messages, too; others stay."""
    assert alice.subscribe("g", "T").code == 0
    assert root.send().code == 0
    change(broker, text().replace(changed, f"{changed}2"))
    assert alice.is_hung_up
    assert root.send().code == 0


def test_who_may_no_longer_be_in_its_group_is_hung_up_on(broker: RemotingHarness, alice: RemotingSocket) -> None:
    """Else it would go on counting as a member."""
    assert alice.subscribe("g", "T").code == 0
    change(broker, text().replace("- g=SUB", "- g2=SUB"))
    assert alice.is_hung_up


def test_other_changes_disturb_nobody(broker: RemotingHarness, alice: RemotingSocket) -> None:
    """They count at once: with the next request."""
    assert alice.subscribe("g", "T").code == 0
    change(broker, text().replace("- T=PUB|SUB", "- T=SUB"))
    assert is_refused(alice.send())
    change(broker, text())
    assert alice.send().code == 0


def test_nothing_of_older_rules_is_remembered_of_who_was_refused(
    broker: RemotingHarness, alice: RemotingSocket
) -> None:
    """It has done nothing yet that would keep its account up to date."""
    assert is_refused(alice.send("hidden"))
    change(broker, text().replace("- T=PUB|SUB", "- hidden=PUB"))
    assert alice.send("hidden").code == 0
    with broker.dial(ALICE) as other:
        assert is_refused(other.send("T"))
        change(broker, text().replace("alice-secret", "other-secret"))
        assert is_refused(other.send("T"))
        other.key = ("alice", "other-secret")
        assert other.send("T").code == 0


def test_a_permission_that_goes_while_a_pull_waits_hands_nothing_out(
    broker: RemotingHarness, alice: RemotingSocket, root: RemotingSocket
) -> None:
    """The message that ends the wait is not alice's any more."""
    fields = pull_fields("g", "T", sysFlag=6, suspendTimeoutMillis=20_000)
    pull = alice.begin(CODE.PULL_MESSAGE, fields)
    wait_until(lambda: broker.broker.counters().pulls_waiting == 1, "the pull waits")
    change(broker, text().replace("- T=PUB|SUB", "- T=PUB"))
    assert root.send().code == 0
    answer = alice.answer_to(pull)
    assert is_refused(answer)
    assert not answer.body


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_a_globally_white_listed_address_needs_nothing() -> None:
    """Neither a key nor a right one, as in RocketMQ."""
    with harness(text("globalWhiteRemoteAddresses:\n- 127.0.0.1")) as broker, broker.dial() as client:
        for key in (None, ("nobody", "whatever"), ("alice", "another-secret")):
            client.key = key
            assert client.send("hidden").code == 0
            assert client.ask(CODE.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).code == 0
        change(broker, text())
        assert client.is_hung_up


def test_an_accounts_white_listed_address_replaces_its_signature_only() -> None:
    """Not, as in RocketMQ, the permissions."""
    with harness(text(near="127.0.0.*")) as broker, broker.dial() as client:
        fields = {ACCESS_KEY: "near"}
        assert client.ask(CODE.SEND_MESSAGE_V2, send_fields("T") | fields, b"x").code == 0
        assert is_refused(client.ask(CODE.SEND_MESSAGE_V2, send_fields("hidden") | fields, b"x"))
        assert is_refused(client.ask(CODE.SEND_MESSAGE_V2, send_fields("T") | {ACCESS_KEY: "alice"}, b"x"))
        change(broker, text())
        assert client.is_hung_up


# -- limits and logs ---------------------------------------------------------------------------------------------------


def test_an_account_has_one_limit_for_all_its_connections() -> None:
    """Somebody else at the same address still may send."""
    config = BrokerConfig(send_pending_messages_max=8, access=AccessConfig(account_share_percent=50))
    with harness(config=config) as broker, broker.dial(ROOT) as root, broker.dial(ALICE) as one:
        assert root.send().code == 0
        broker.store.hold_results = True
        with broker.dial(ALICE) as other:
            for pending, client in enumerate((one, other, one, other), 1):
                client.begin(CODE.SEND_MESSAGE_V2, send_fields("T"), b"x")
                wait_until(lambda: broker.broker.counters().messages_pending == pending, "it is pending")  # noqa: B023
            refused = one.send()
            assert refused.code == AnswerCode.SYSTEM_BUSY
            assert "alice has 4 entries" in refused.remark
            taken = root.begin(CODE.SEND_MESSAGE_V2, send_fields("T"), b"x")
            wait_until(lambda: broker.broker.counters().messages_pending == 5, "somebody else's is taken")
            broker.store.release_results()
            assert root.answer_to(taken).code == 0


def test_refusals_are_audited_without_secrets(
    broker: RemotingHarness, alice: RemotingSocket, root: RemotingSocket, caplog: pytest.LogCaptureFixture
) -> None:
    """Changes of administrators, too."""
    with caplog.at_level(logging.INFO, "dledger.audit"):
        refused = alice.send("hidden")
        alice.key = ("alice", "another-secret")
        wrong = alice.send("T")
        assert root.ask(CODE.DELETE_TOPIC_IN_BROKER, {"topic": "hidden"}).code == 0
    lines = [one.getMessage() for one in caplog.records if one.name == "dledger.audit"]
    assert [" ".join(one.split(" from=")[0].split()) for one in lines] == [
        "result=denied action=SEND_MESSAGE_V2 resource=topic:hidden caller=alice",
        "result=denied action=SEND_MESSAGE_V2 caller=alice?",
        "result=allowed action=DELETE_TOPIC_IN_BROKER resource=topic:hidden caller=root",
    ]
    for leaked in ("secret", "Signature"):
        assert leaked not in " ".join(lines).replace("does not match its secret", "")
        assert leaked not in refused.remark + wrong.remark.replace("does not match its secret", "")


def test_refusals_without_end_do_not_fill_the_log(
    broker: RemotingHarness, alice: RemotingSocket, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dledger.audit"):
        for number in range(100):
            assert is_refused(alice.send(f"hidden{number}"))
    assert len([one for one in caplog.records if one.name == "dledger.audit"]) <= 10


def test_it_is_said_once_that_signatures_can_be_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    """They hold neither time nor nonce."""
    with caplog.at_level(logging.WARNING, "rocketstore"), harness() as broker, broker.dial(ALICE) as client:
        client.send()
        client.send()
    assert len([one for one in caplog.records if "without TLS" in one.getMessage()]) == 1
