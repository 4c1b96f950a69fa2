"""Clients at this broker: their connections, requests of theirs, and requests to them.

Of theirs: heartbeats, members of a group, locks on queues, retries, and answers to messages that asked for one (these
go straight to the producer that asked, and are not stored). To them, for administrators: a client's progress, to
consume one message, to go back. And lists of who is connected: the consumers and producers of groups, the groups of a
topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from dledger.remoting.codes import AnswerCode, FrameError, Language, RequestError
from dledger.remoting.connection import DisconnectedError, RemotingConnection, TooManyCallsError
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import (
    Client,
    ClientLink,
    ClientTables,
    ConsumerGroup,
    ConsumingClient,
    HalfCheck,
    Heartbeat,
    Subscription,
)
from rocketstore.broker.groups import LOCKED_AT_ONCE, Groups
from rocketstore.broker.mastership import host_text
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker_remoting.access import QuotaOf
from rocketstore.broker_remoting.administration import Administration, Queries
from rocketstore.broker_remoting.requests import BodyDecoder
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.properties import decode_properties
from rocketstore.remoting.codes import VERSION_SEND_BACK_MAX, RequestCode
from rocketstore.remoting.groups import (
    CheckClientBody,
    ClientConnection,
    ConsumerConnectionList,
    ConsumerData,
    ConsumerIdList,
    ConsumerStatusBody,
    GroupList,
    HeartbeatData,
    LockedQueuesBody,
    LockQueuesBody,
    ProducerConnectionList,
    ProducerInfo,
    ProducersByGroup,
    QueueOffsetForC,
    ResetOffsetBody,
    ResetOffsetBodyForC,
    SubscriptionData,
)
from rocketstore.remoting.headers import (
    CheckTransactionHeader,
    ConsumeDirectlyHeader,
    ConsumerStatusHeader,
    GroupHeader,
    ProducerGroupHeader,
    PushReplyHeader,
    ResetClientOffsetHeader,
    RunningInfoHeader,
    SendAnswer,
    SendBackHeader,
    SendHeader,
    TopicHeader,
    UnregisterClientHeader,
    read_header,
    write_header,
)
from rocketstore.remoting.topics import MessageQueue


class RemotingLink(NamedTuple):
    """Made anew for each request: links of one connection are equal."""

    connection: RemotingConnection
    is_sender: Callable[[RemotingConnection, str], bool]
    """Whether an account that uses this connection may send to a topic."""

    @property
    def host(self) -> str:
        """The client's IP address."""
        return self.connection.place.host

    @property
    def address(self) -> str:
        """The client's address."""
        return str(self.connection.place)

    def may_send(self, topic: str) -> bool:
        """Whether an account that uses it may send to a topic."""
        return self.is_sender(self.connection, topic)

    def members_changed(self, group: str) -> bool:
        """NOTIFY_CONSUMER_IDS_CHANGED."""
        return self.connection.tell(_notice(group))

    def check_half(self, check: HalfCheck) -> bool:
        """CHECK_TRANSACTION_STATE."""
        unique = check.unique_id
        header = CheckTransactionHeader(check.queue_offset, check.offset, unique, unique, check.message_id)
        return self.connection.tell(Frame(RequestCode.CHECK_TRANSACTION_STATE, 0, write_header(header), check.record))

    def close(self, reason: str) -> None:
        """Hang up."""
        self.connection.close(reason)


def connection_of(link: ClientLink) -> RemotingConnection:
    """The connection by which a client can be asked anything. Raises ``DisconnectedError`` if it uses gRPC."""
    if isinstance(link, RemotingLink):
        return link.connection
    raise DisconnectedError(f"the client at {link.address} uses gRPC and answers no requests of RocketMQ's brokers")


@lru_cache(maxsize=64)
def _notice(group: str) -> Frame:
    return Frame(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, 0, write_header(GroupHeader(group)))


HEARTBEAT_BYTES_MAX: Final = 1024 * 1024
"""A thousand subscriptions take a fifth of it, a thousand with five tags each a third."""


class MemberRequests:
    """On the loop."""

    def __init__(
        self,
        groups: Groups,
        quota_of: QuotaOf,
        link_of: Callable[[RemotingConnection], RemotingLink],
        decoder: BodyDecoder,
        readers: ReadThreads,
    ) -> None:
        self._groups = groups
        self._quota_of = quota_of
        self._link_of = link_of
        self._decoder = decoder
        self._readers = readers
        self._encoded: WeakKeyDictionary[ConsumerGroup, tuple[tuple[str, ...], bytes]] = WeakKeyDictionary()

    async def heartbeat(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """HEART_BEAT."""
        if len(frame.body) > HEARTBEAT_BYTES_MAX:
            raise RequestError(f"a heartbeat of {len(frame.body)} bytes: at most {HEARTBEAT_BYTES_MAX} are allowed")
        beat = await self._decoder.run(connection, frame, _heartbeat, frame)
        if connection.is_closed:  # it would never be removed, and no other consumer would get its queues
            return frame.answer()
        await self._groups.join(self._link_of(connection), self._quota_of(connection, frame).owner, beat)
        return frame.answer()

    async def unregister(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """UNREGISTER_CLIENT."""
        header = read_header(UnregisterClientHeader, frame.fields)
        self._groups.clients.unregister(self._link_of(connection), header.producer_group, header.consumer_group)
        return frame.answer()

    async def consumer_ids(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_CONSUMER_LIST_BY_GROUP: clients use it to divide the queues among themselves."""
        name = read_header(GroupHeader, frame.fields).consumer_group
        group = self._groups.clients.consumers(name)
        if group is None:
            raise RequestError(f"no consumer for this group, {name}")
        known = self._encoded.get(group)
        if known is None or known[0] is not group.ids:
            self._encoded[group] = known = group.ids, ConsumerIdList(group.ids).encode()
        return frame.answer(body=known[1])

    async def lock(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """LOCK_BATCH_MQ: a queue is the same by whatever name of a broker."""
        wanted = await self._decoder.run(connection, frame, LockQueuesBody.decode, frame.body)
        owner = self._quota_of(connection, frame).owner
        queues = [(one.topic, one.queue_id) for one in wanted.mq_set]
        got = frozenset(await self._groups.lock(wanted.consumer_group, wanted.client_id, queues, owner))
        answer = LockedQueuesBody(tuple(one for one in wanted.mq_set if (one.topic, one.queue_id) in got))
        body = answer.encode() if len(got) <= LOCKED_AT_ONCE else await self._readers.run(answer.encode)
        return frame.answer(body=body)

    async def unlock(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """UNLOCK_BATCH_MQ."""
        unwanted = await self._decoder.run(connection, frame, LockQueuesBody.decode, frame.body)
        queues = [(one.topic, one.queue_id) for one in unwanted.mq_set]
        await self._groups.unlock(unwanted.consumer_group, unwanted.client_id, queues)
        return frame.answer()

    async def send_back(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """CONSUMER_SEND_MSG_BACK."""
        header = read_header(SendBackHeader, frame.fields)
        limited = frame.version >= VERSION_SEND_BACK_MAX and header.max_reconsume_times >= 0
        await self._groups.retries.put_back(
            header.group,
            header.offset,
            delay_level=header.delay_level,
            retries_max=header.max_reconsume_times if limited else None,
            quota=self._quota_of(connection, frame),
        )
        return frame.answer()


def data_of(one: Subscription) -> SubscriptionData:
    """A subscription as it is shown to RocketMQ's tools."""
    return SubscriptionData(one.topic, one.expression, one.tags, one.codes, one.version, one.kind, one.class_filter)


def _heartbeat(frame: Frame) -> Heartbeat:
    data = HeartbeatData.decode(frame.body)
    producers = tuple(one.group_name for one in data.producer_data_set)
    consumers = tuple(_consumer(one) for one in data.consumer_data_set)
    return Heartbeat(data.client_id, producers, consumers, frame.language, frame.version)


def _consumer(data: ConsumerData) -> ConsumingClient:
    subscriptions = tuple(
        Subscription(
            one.topic,
            one.sub_string,
            one.tags_set,
            one.code_set,
            one.sub_version,
            one.expression_type,
            one.class_filter_mode,
        )
        for one in data.subscription_data_set
    )
    return ConsumingClient(
        data.group_name, data.consume_type, data.message_model, data.consume_from_where, subscriptions
    )


class Connected:
    """On the loop."""

    def __init__(self, broker: Broker, admin: Administration, clients: ClientTables) -> None:
        self._broker = broker
        self._admin = admin
        self._clients = clients

    async def consumers(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_CONSUMER_CONNECTION_LIST."""
        name = read_header(GroupHeader, frame.fields).consumer_group
        group = self._clients.consumers(name)
        if group is None:
            raise RequestError(f"the consumer group[{name}] not online", AnswerCode.CONSUMER_NOT_ONLINE)
        body = ConsumerConnectionList(
            _connections(group.clients.values()),
            {topic: data_of(one) for topic, one in group.subscriptions.items()},
            group.consume_type,
            group.message_model,
            group.consume_from_where,
        )
        return frame.answer(body=await self._admin.read(body.encode))

    async def producers(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_PRODUCER_CONNECTION_LIST."""
        name = read_header(ProducerGroupHeader, frame.fields).producer_group
        connections = _connections(self._clients.producers(name))
        if not connections:
            raise RequestError(f"the producer group[{name}] not exist")
        return frame.answer(body=await self._admin.read(ProducerConnectionList(connections).encode))

    async def all_producers(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_PRODUCER_INFO."""
        clock_ms, now = self._broker.loop.clock.wall_ms(), asyncio.get_running_loop().time()
        body = ProducersByGroup(
            {
                group: tuple(
                    ProducerInfo(
                        one.client_id,
                        f"/{one.link.address}",
                        Language(one.language),
                        one.version,
                        clock_ms - int((now - one.heard_at) * 1000),
                    )
                    for one in self._clients.producers(group)
                )
                for group in self._clients.producer_groups()
            }
        )
        return frame.answer(body=await self._admin.read(body.encode))

    async def check_client(self, _: RemotingConnection, frame: Frame) -> Frame:
        """CHECK_CLIENT_CONFIG: whether a subscription can be served."""
        asked = (await self._admin.read(CheckClientBody.decode, frame.body)).subscription_data
        await self._broker.filters.of(asked.expression_type, asked.sub_string)
        return frame.answer()

    async def groups_of_topic(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_TOPIC_CONSUME_BY_WHO: groups that subscribe to a topic now, or have offsets in it."""
        topic = read_header(TopicHeader, frame.fields).topic
        here = [one for one in self._clients.consumer_groups() if self._subscribes(one, topic)]
        return frame.answer(body=await self._admin.read(self._groups, topic, here))

    def _subscribes(self, name: str, topic: str) -> bool:
        group = self._clients.consumers(name)
        return group is not None and topic in group.subscriptions

    def _groups(self, topic: str, here: list[str]) -> bytes:
        state = self._broker.state
        noted = [group for group in state.groups() if state.offsets(group, topic)]
        return GroupList(tuple(sorted({*here, *noted}))).encode()


def _connections(clients: Iterable[Client]) -> tuple[ClientConnection, ...]:
    return tuple(
        ClientConnection(one.client_id, one.link.address, Language(one.language), one.version) for one in clients
    )


PROPERTY_REPLY_TO: Final = "REPLY_TO_CLIENT"
PROPERTY_PUSHED_AT: Final = "PUSH_REPLY_TIME"
PUSH_S_MAX: Final = 2.5
"""A client that sends a reply hangs up after 3 s without an answer, and loses what else is under way."""
_SEPARATOR: Final = "\x02"
NO_ID: Final = "0"
"""In the place of the message's id, because it is not stored."""


class Replies:
    """On the loop."""

    def __init__(self, broker: Broker, clients: ClientTables) -> None:
        self._broker = broker
        self._clients = clients

    async def send(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """SEND_REPLY_MESSAGE and SEND_REPLY_MESSAGE_V2."""
        header = read_header(SendHeader, frame.fields, short=frame.code != RequestCode.SEND_REPLY_MESSAGE)
        asker_id = decode_properties(header.properties.encode()).get(PROPERTY_REPLY_TO)
        if not asker_id:
            raise RequestError(f"reply message properties[{PROPERTY_REPLY_TO}] is null")
        asker = self._clients.producer_by_id(asker_id)
        if asker is None:
            raise RequestError(f"push reply message fail, channel of <{asker_id}> not found.")
        try:
            answer = await connection_of(asker.link).call(self._pushed(connection, frame, header), PUSH_S_MAX)
        except (TimeoutError, DisconnectedError, TooManyCallsError, FrameError) as error:
            reason = str(error) or f"no answer within {PUSH_S_MAX:g} s"
            raise RequestError(f"push reply message to {asker_id} fail: {reason}") from error
        if answer.code:
            raise RequestError(f"push reply message to {asker_id} fail: {answer.remark}")
        return frame.answer(fields=write_header(SendAnswer(NO_ID, header.queue_id, 0)))

    def _pushed(self, connection: RemotingConnection, frame: Frame, header: SendHeader) -> Frame:
        now_ms = self._broker.loop.clock.wall_ms()
        push = PushReplyHeader(
            header.producer_group,
            header.topic,
            header.default_topic,
            header.default_topic_queue_nums,
            header.queue_id,
            header.sys_flag,
            header.born_timestamp,
            header.flag,
            str(connection.place),
            host_text(self._broker.store_host),
            now_ms,
            f"{header.properties.rstrip(_SEPARATOR)}{_SEPARATOR}{PROPERTY_PUSHED_AT}\x01{now_ms}",
            header.reconsume_times,
            header.unit_mode,
        )
        return Frame(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, 0, write_header(push), frame.body)


CALL_S_MAX: Final = 10.0
"""How long a client may take to answer; RocketMQ's."""
STATUS_S_MAX: Final = 5.0
CALLS_MAX: Final = 256
"""Calls to clients that may be under way."""
CLIENTS_MAX: Final = 1024
"""Of a group that is asked or told as a whole."""
ASKED_AT_ONCE: Final = 64
"""Clients of groups that are asked where they are."""


class ClientCalls:
    """On the loop."""

    def __init__(self, broker: Broker, admin: Administration, clients: ClientTables, queries: Queries) -> None:
        self._broker = broker
        self._admin = admin
        self._clients = clients
        self._queries = queries
        self._under_way = 0
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)

    async def running_info(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_CONSUMER_RUNNING_INFO."""
        header = read_header(RunningInfoHeader, frame.fields)
        client = self._client(header.consumer_group, header.client_id)
        return await self._pass_on(frame, client, Frame(frame.code, 0, write_header(header), frame.body))

    async def consume_directly(self, _: RemotingConnection, frame: Frame) -> Frame:
        """CONSUME_MESSAGE_DIRECTLY."""
        header = read_header(ConsumeDirectlyHeader, frame.fields)
        client = self._client(header.consumer_group, header.client_id)
        _host, offset = parse_offset_message_id(header.msg_id)
        record = await self._admin.read(self._queries.record_at, offset)
        if record is None:
            raise RequestError(f"can not find message by the id {header.msg_id}")
        named = ConsumeDirectlyHeader(header.consumer_group, header.client_id, header.msg_id, self._broker.config.name)
        return await self._pass_on(frame, client, Frame(frame.code, 0, write_header(named), record))

    async def status(self, _: RemotingConnection, frame: Frame) -> Frame:
        """INVOKE_BROKER_TO_GET_CONSUMER_STATUS: where each client of a group is, or the one that is named."""
        header = read_header(ConsumerStatusHeader, frame.fields)
        clients = [one for one in self._online(header.group) if header.client_addr in ("", one.client_id)]
        if not clients:
            who = f" with the id {header.client_addr}" if header.client_addr else ""
            raise RequestError(f"No Any Consumer online in the consumer group: [{header.group}]{who}")
        asked = ConsumerStatusHeader(header.topic, header.group)
        request = Frame(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, 0, write_header(asked))
        answers = await asyncio.gather(*(self._status_of(one, request) for one in clients))
        table = {one.client_id: found for one, found in zip(clients, answers, strict=True) if found is not None}
        silent = [one.client_id for one in clients if one.client_id not in table]
        if not table:
            raise RequestError(f"no consumer of {header.group} has answered: {', '.join(silent)}")
        remark = f"these have not answered: {', '.join(silent)}" if silent else ""
        return frame.answer(remark=remark, body=await self._admin.read(ConsumerStatusBody({}, table).encode))

    async def reset(self, _: RemotingConnection, frame: Frame) -> Frame:
        """INVOKE_BROKER_TO_RESET_OFFSET: the clients of the group go to a time, and commit where that is.

        Nothing changes here: the answer names clients that are offline, and mqadmin commits the offsets itself.
        """
        header = read_header(ResetClientOffsetHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        broker, topic = self._broker, self._broker.topics.require_seen(header.topic)
        targets = await self._admin.read(
            broker.stats.reset_targets, header.group, topic, header.timestamp, is_forced=header.is_force
        )
        table = {MessageQueue(topic.name, broker.config.name, queue_id): at for queue_id, at in targets.items()}
        clients = self._online(header.group)
        if not clients:
            reason = (
                f"Consumer not online, so can not reset offset, Group: {header.group} Topic: {header.topic} "
                f"Timestamp: {header.timestamp}"
            )
            raise RequestError(reason, AnswerCode.CONSUMER_NOT_ONLINE)
        body = ResetOffsetBody(table).encode()
        for_clients = _for_c(table) if frame.language == Language.CPP else body
        request = Frame(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, 0, write_header(header), for_clients)
        deaf = [one.client_id for one in clients if not _tell(one, request)]
        remark = f"these do not take what they are sent: {', '.join(deaf)}" if deaf else ""
        return frame.answer(remark=remark, body=body)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _client(self, group: str, client_id: str) -> Client:
        client = self._clients.consumer(group, client_id)
        if client is None:
            raise RequestError(f"The Consumer <{group}> <{client_id}> not online")
        return client

    def _online(self, group: str) -> list[Client]:
        found = self._clients.consumers(group)
        clients = [] if found is None else list(found.clients.values())
        if len(clients) > CLIENTS_MAX:
            raise RequestError(f"the group {group} has {len(clients)} clients here, more than {CLIENTS_MAX}")
        return clients

    async def _pass_on(self, frame: Frame, client: Client, request: Frame) -> Frame:
        """The client's answer as it is."""
        try:
            answer = await self._call(client, request, CALL_S_MAX)
        except TimeoutError as error:
            reason = f"consumer <{client.client_id}> has not answered within {CALL_S_MAX:g} s"
            raise RequestError(reason, AnswerCode.CONSUME_MSG_TIMEOUT) from error
        return frame.answer(answer.code, answer.remark, answer.fields, answer.body)

    async def _call(self, client: Client, request: Frame, timeout_s: float) -> Frame:
        if self._under_way >= CALLS_MAX:
            reason = f"[OVERLOAD] {self._under_way} clients have yet to answer, try again later"
            raise RequestError(reason, AnswerCode.SYSTEM_BUSY)
        self._under_way += 1
        try:
            return await connection_of(client.link).call(request, timeout_s)
        except (DisconnectedError, TooManyCallsError, FrameError) as error:
            raise RequestError(f"consumer <{client.client_id}>: {error}") from error
        finally:
            self._under_way -= 1

    async def _status_of(self, client: Client, request: Frame) -> dict[MessageQueue, int] | None:
        """None: no answer, or none that can be read."""
        try:
            async with self._asking:
                answer = await self._call(client, request, STATUS_S_MAX)
            if answer.code:
                return None
            found = await self._admin.read(ConsumerStatusBody.decode, answer.body)
        except (TimeoutError, RequestError):
            return None
        return dict(found.message_queue_table)


def _for_c(table: dict[MessageQueue, int]) -> bytes:
    places: Sequence[QueueOffsetForC] = [
        QueueOffsetForC(one.topic, one.broker_name, one.queue_id, offset) for one, offset in table.items()
    ]
    return ResetOffsetBodyForC(tuple(places)).encode()


def _tell(client: Client, request: Frame) -> bool:
    """Returns whether it could be sent; clients that use gRPC take no such requests."""
    return isinstance(client.link, RemotingLink) and client.link.connection.tell(request)
