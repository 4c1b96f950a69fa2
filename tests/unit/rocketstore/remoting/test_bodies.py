"""Bodies that no captured frame holds, as Java writes them; its order of members is the alphabet's."""

from __future__ import annotations

import pytest

from dledger.remoting.codes import Language, RequestError
from rocketstore.remoting.body import Body
from rocketstore.remoting.groups import (
    CLIENT_BYTES_MAX,
    GROUPS_MAX,
    SUBSCRIPTIONS_MAX,
    TAGS_MAX,
    BrokerStatsData,
    BrokerStatsItem,
    CheckClientBody,
    ClientConnection,
    ConsumeOffset,
    ConsumeQueueBody,
    ConsumeQueueData,
    ConsumerConnectionList,
    ConsumerStatusBody,
    ConsumeStats,
    ConsumeStatsList,
    ConsumeTimeSpans,
    CorrectionOffsets,
    GroupList,
    HeartbeatData,
    LockQueuesBody,
    ProducerConnectionList,
    ProducerInfo,
    ProducersByGroup,
    QueueOffsetForC,
    QueueTimeSpan,
    ResetOffsetBody,
    ResetOffsetBodyForC,
    SubscriptionData,
    SubscriptionGroupConfig,
)
from rocketstore.remoting.topics import DataVersion, MessageQueue, TopicList
from rocketstore.types import ConsumeType, MessageModel

MQ = '{"brokerName":"b","queueId":1,"topic":"t"}'
QUEUE = MessageQueue("t", "b", 1)
SUBSCRIPTION = (
    '{"classFilterMode":false,"codeSet":[65],"expressionType":"TAG","subString":"A","subVersion":5,"tagsSet":["A"],'
    '"topic":"t"}'
)
SUBSCRIBED = SubscriptionData("t", "A", ("A",), (65,), 5)
CONNECTION = '{"clientAddr":"1.2.3.4:5","clientId":"c","language":"JAVA","version":409}'
CONNECTED = ClientConnection("c", "1.2.3.4:5", Language.JAVA, 409)
ITEM = '{"avgpt":0.5,"sum":3,"tps":0.05}'
UNIT = '{"eval":true,"physicOffset":100,"physicSize":200,"tagsCode":65}'

CASES: dict[str, tuple[str, Body]] = {
    "consumer connections": (
        f'{{"connectionSet":[{CONNECTION}],"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET",'
        f'"consumeType":"CONSUME_ACTIVELY","messageModel":"BROADCASTING","subscriptionTable":{{"t":{SUBSCRIPTION}}}}}',
        ConsumerConnectionList(
            (CONNECTED,), {"t": SUBSCRIBED}, ConsumeType.CONSUME_ACTIVELY, MessageModel.BROADCASTING
        ),
    ),
    "producer connections": (f'{{"connectionSet":[{CONNECTION}]}}', ProducerConnectionList((CONNECTED,))),
    "producers": (
        '{"data":{"g":[{"clientId":"c","language":"GO","lastUpdateTimestamp":7,"remoteIP":"/1.2.3.4:5","version":317}]}}',
        ProducersByGroup({"g": (ProducerInfo("c", "/1.2.3.4:5", Language.GO, 317, 7),)}),
    ),
    "client's subscription": (
        f'{{"clientId":"c","group":"g","subscriptionData":{SUBSCRIPTION}}}',
        CheckClientBody("c", "g", SUBSCRIBED),
    ),
    "group": (
        '{"brokerId":0,"consumeBroadcastEnable":true,"consumeEnable":true,"consumeFromMinEnable":true,"groupName":"g",'
        '"notifyConsumerIdsChangedEnable":true,"retryMaxTimes":16,"retryQueueNums":1,"whichBrokerWhenConsumeSlowly":1}',
        SubscriptionGroupConfig("g"),
    ),
    "groups": ('{"groupList":["g"]}', GroupList(("g",))),
    "topics": ('{"topicList":["t"]}', TopicList(("t",))),
    "topics of the system": ('{"brokerAddr":"h:1","topicList":["t"]}', TopicList(("t",), "h:1")),
    "version": ('{"counter":1,"timestamp":2}', DataVersion(1, 2)),
    "correction": ('{"correctionOffsets":{"0":5}}', CorrectionOffsets({0: 5})),
    "reset": (f'{{"offsetTable":{{{MQ}:5}}}}', ResetOffsetBody({QUEUE: 5})),
    "reset for C++": (
        '{"offsetTable":[{"brokerName":"b","offset":5,"queueId":1,"topic":"t"}]}',
        ResetOffsetBodyForC((QueueOffsetForC("t", "b", 1, 5),)),
    ),
    "status": (
        f'{{"consumerTable":{{"c":{{{MQ}:5}}}},"messageQueueTable":{{{MQ}:5}}}}',
        ConsumerStatusBody({QUEUE: 5}, {"c": {QUEUE: 5}}),
    ),
    "times": (
        f'{{"consumeTimeSpanSet":[{{"consumeTimeStamp":3,"delayTime":4,"maxTimeStamp":2,"messageQueue":{MQ},'
        '"minTimeStamp":1}]}',
        ConsumeTimeSpans((QueueTimeSpan(QUEUE, 1, 2, 3, 4),)),
    ),
    "broker's consumption": (
        f'{{"brokerAddr":"h:1","consumeStatsList":[{{"g":[{{"consumeTps":0.5,"offsetTable":{{{MQ}:'
        '{"brokerOffset":1,"consumerOffset":2,"lastTimestamp":3,"pullOffset":4}}}]}],"totalDiff":-1}',
        ConsumeStatsList(({"g": (ConsumeStats({QUEUE: ConsumeOffset(1, 2, 3, 4)}, 0.5),)},), "h:1", -1),
    ),
    "statistics": (
        f'{{"statsDay":{ITEM},"statsHour":{ITEM},"statsMinute":{ITEM}}}',
        BrokerStatsData(*[BrokerStatsItem(3, 0.05, 0.5)] * 3),
    ),
    "consume queue": (
        f'{{"maxQueueIndex":9,"minQueueIndex":1,"queueData":[{UNIT}],"subscriptionData":{SUBSCRIPTION}}}',
        ConsumeQueueBody((ConsumeQueueData(100, 200, 65, eval=True),), 9, 1, SUBSCRIBED),
    ),
    "consume queue without subscription": (
        '{"filterData":"f","maxQueueIndex":0,"minQueueIndex":0,"queueData":[]}',
        ConsumeQueueBody(filter_data="f"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_body_as_java_writes_it(name: str) -> None:
    """Both ways."""
    text, body = CASES[name]
    assert body.encode() == text.encode()
    assert type(body).decode(text.encode()) == body


def _heartbeat(producers: int = 0, consumers: int = 0, subscriptions: int = 0, tags: int = 0) -> bytes:
    group = '{"groupName":"g"}'
    subscription = '{"topic":"t","tagsSet":[' + ",".join(['"a"'] * tags) + "]}"
    consumer = '{"groupName":"g","subscriptionDataSet":[' + ",".join([subscription] * subscriptions) + "]}"
    return (
        f'{{"clientID":"c","producerDataSet":[{",".join([group] * producers)}],'
        f'"consumerDataSet":[{",".join([consumer] * consumers)}]}}'
    ).encode()


@pytest.mark.parametrize(
    "most",
    [
        {"producers": GROUPS_MAX},
        {"consumers": GROUPS_MAX},
        {"consumers": 1, "subscriptions": SUBSCRIPTIONS_MAX},
        {"consumers": 1, "subscriptions": 1, "tags": TAGS_MAX},
    ],
)
def test_a_heartbeat_is_bounded(most: dict[str, int]) -> None:
    """In each list: brokers keep them."""
    assert HeartbeatData.decode(_heartbeat(**most))
    last = list(most)[-1]
    with pytest.raises(RequestError, match=r"a list of at most (1024|16384) items"):
        HeartbeatData.decode(_heartbeat(**{**most, last: most[last] + 1}))


@pytest.mark.parametrize("kind", [HeartbeatData, LockQueuesBody, CheckClientBody])
def test_what_any_client_may_send_is_shorter_than_a_frame(kind: type[Body]) -> None:
    """Told by its length, before anything of it is read."""
    with pytest.raises(RequestError, match=f"{CLIENT_BYTES_MAX + 1} bytes, at most {CLIENT_BYTES_MAX} are allowed"):
        kind.decode(b" " * (CLIENT_BYTES_MAX + 1))
    with pytest.raises(RequestError, match="not JSON"):
        kind.decode(b" " * CLIENT_BYTES_MAX)
