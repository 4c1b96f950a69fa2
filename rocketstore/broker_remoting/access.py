"""Access control over remoting: nothing is done with a request before its signature and its permissions are checked.

Each request is checked anew, by the current rules. Remembered are only who asked last on a connection, until the rules
change, and whom to hang up on when its key is revoked or its group withdrawn.

A request that a member of the group has passed on counts as coming from where that member says, and a white list must
include the member's own address too: anybody on a member's machine could say the same.

Passed on is what only the master may do (``Forwarding``). A client learns of a new master when it next asks a name
server, by default every 30 s. Until then it talks to the old one, if that still runs, and gets the new one's answers
from there. Nothing is passed on twice, and nothing while no master is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from dledger.access.guard import AccessGuard, Caller, ResourceKind, quota_at
from dledger.access.quota import HostQuota, Quota
from dledger.access.rules import AccessRules, Account
from dledger.core.noop_payload import own_name
from dledger.errors import AccessDeniedError
from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import AnswerCode, FrameError, RequestError
from dledger.remoting.connection import DisconnectedError, Place, RemotingConnection, TooManyCallsError
from dledger.remoting.frame import ACCESS_KEY, FLAG_ONEWAY, Frame, is_signed
from dledger.remoting.server import LITTLE, Answer, Direct, Handler
from dledger.types import TlsServerMode
from dledger.values import parse_address
from rocketstore.broker import permissions
from rocketstore.broker.broker import Broker
from rocketstore.broker.permissions import PUB, SUB, require, require_on_message
from rocketstore.broker.sending import NOTHING_DENIED
from rocketstore.broker.transactions.halves import real_topic
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_remoting.requests import IN_BODY, RECORDS, REQUESTS, BodyDecoder, action_of, resource_of
from rocketstore.message.checks import NO_SEND_TOPICS
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import ConsumeStats, GroupList, ProducersByGroup, SubscriptionGroupTable
from rocketstore.remoting.pop import RequestModesBody
from rocketstore.remoting.topics import TopicConfigTable, TopicList
from rocketstore.types import PutResult

FORWARDED: Final = frozenset(
    {
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.END_TRANSACTION,
        RequestCode.RECALL_MESSAGE,
        RequestCode.UPDATE_CONSUMER_OFFSET,
        RequestCode.LOCK_BATCH_MQ,
        RequestCode.UNLOCK_BATCH_MQ,
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        RequestCode.CLONE_GROUP_OFFSET,
        RequestCode.POP_MESSAGE,
        RequestCode.PEEK_MESSAGE,
        RequestCode.NOTIFICATION,
        RequestCode.ACK_MESSAGE,
        RequestCode.BATCH_ACK_MESSAGE,
        RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
    }
)
_WAITING: Final = frozenset({RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION})
"""Requests that may wait for messages: for ``pollTime`` ms."""
BORN_HOST: Final = "_bornHost"
"""Ours, in a request that was passed on: where it came from. Believed of members of the group only."""
TIMEOUT_S: Final = 2.8
"""Clients give up after 3 s."""
POLL_S_MAX: Final = 30.0
"""How much longer the master may wait for messages."""
UNDER_WAY_MAX: Final = 4096
"""Of all clients together; one host may have ``account_share_percent`` of them."""


class Forwarding:
    """On the loop."""

    def __init__(self, broker: Broker, client: RemotingClient) -> None:
        """``client`` checks the names of those it dials, if it uses TLS."""
        self._broker = broker
        self._is_masters_name_checked = broker.store.log.is_replicated or broker.config.effective_security.has_tls
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()
        self._quota = HostQuota(UNDER_WAY_MAX, UNDER_WAY_MAX * broker.config.access.account_share_percent // 100)
        if broker.store.log.is_replicated:
            broker.member_hosts.start()

    def direct(self, take: Direct) -> Direct:
        """``take``, at the master."""

        def take_or_forward(connection: RemotingConnection, frame: Frame) -> None:
            if self._master_for(frame):
                task = asyncio.get_running_loop().create_task(self._forward_direct(connection, frame))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                take(connection, frame)

        return take_or_forward

    def awaited(self, handler: Handler) -> Handler:
        """``handler``, at the master."""

        async def handle_or_forward(connection: RemotingConnection, frame: Frame) -> Answer:
            if self._master_for(frame):
                return await self._forward(connection, frame)
            return await handler(connection, frame)

        return handle_or_forward

    def origin_of(self, connection: RemotingConnection, frame: Frame) -> Place:
        """Where a request came from, also if another member has passed it on."""
        text = frame.fields.get(BORN_HOST)
        if text is None or connection.place.host not in self._broker.member_hosts.known:
            return connection.place
        try:
            return Place(*parse_address(text))
        except ValueError:
            return connection.place

    async def close(self) -> None:
        """Give up on what is under way."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _master_for(self, frame: Frame) -> str:
        """The master's address if this is for it and not for us; empty otherwise."""
        broker = self._broker
        if broker.mastership.is_master or frame.code not in FORWARDED:
            return ""
        if BORN_HOST in frame.fields:
            return ""  # it was passed on already
        view = broker.mastership.view()
        return view.leader_address if view.leader != broker.config.node_id else ""

    async def _forward_direct(self, connection: RemotingConnection, frame: Frame) -> None:
        answer: Answer = None
        try:
            answer = await self._forward(connection, frame)
        except asyncio.CancelledError:
            answer = frame.answer(AnswerCode.SYSTEM_ERROR, "this broker is stopping: the request may still be done")
            raise
        finally:
            connection.done(frame, answer)

    async def _forward(self, connection: RemotingConnection, frame: Frame) -> Answer:
        master, host = self._master_for(frame), connection.counted_as
        refusal = ""
        if not master:
            refusal = "the master is unknown"
        elif ACCESS_KEY in frame.fields and not self._is_masters_name_checked:
            refusal = "does not pass on signed requests to an address of which only a name server says that it is the "
            refusal += "master: send to the master, or use TLS"
        elif not self._quota.has_room(host, little=connection.under_way <= LITTLE):
            refusal = "too many requests to the master are in progress, or too many of your host"
        if refusal:
            return frame.answer(AnswerCode.SERVICE_NOT_AVAILABLE, f"this broker is a slave, and {refusal}")
        self._quota.change(host, 1)
        try:
            return await self._ask_master(master, connection, frame)
        finally:
            self._quota.change(host, -1)

    async def _ask_master(self, master: str, connection: RemotingConnection, frame: Frame) -> Answer:
        timeout_s = TIMEOUT_S + (_poll_s(frame) if frame.code in _WAITING else 0.0)
        fields: Mapping[str, str] = {**frame.fields, BORN_HOST: str(connection.place)}
        request = frame._replace(fields=fields)
        try:
            if frame.flag & FLAG_ONEWAY:
                await self._client.tell(master, request)
                return None
            found = await self._client.call(master, request, timeout_s)
        except (UnreachableError, TooManyCallsError, FrameError) as error:
            return frame.answer(AnswerCode.SERVICE_NOT_AVAILABLE, f"this broker is a slave: {error}")
        except (DisconnectedError, TimeoutError) as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            return frame.answer(AnswerCode.SYSTEM_ERROR, f"the master may have done it, or not: {reason}")
        return found._replace(opaque=frame.opaque, form=frame.form)


def _poll_s(frame: Frame) -> float:
    text = frame.fields.get("pollTime", "")
    return min(int(text) / 1000, POLL_S_MAX) if text.isascii() and text.isdecimal() and len(text) < 10 else 0.0


_LOG: Final = logging.getLogger("rocketstore")
DENIED: Final = "AclException: "
"""Before each refusal: RocketMQ's clients and their users look for it."""
_NOBODY: Final = "nobody"
"""In the place of an address that is not believed: no white list includes it."""
_ON_THE_WAY: Final = frozenset({BORN_HOST})
"""Fields that are not the client's."""
OriginOf = Callable[[RemotingConnection, Frame], Place]
"""Where a request came from, also if a member has passed it on."""
QuotaOf = Callable[[RemotingConnection, Frame], Quota]
"""The quota of a request's sender."""


class _Known(NamedTuple):
    """The account that asked last on a connection, and the rules that applied."""

    rules: AccessRules
    key: str
    caller: Caller
    secret: str


class RemotingAccess:
    """On the loop. Without a guard, everybody may do everything. ``groups_of`` a connection: in which it consumes."""

    def __init__(
        self,
        broker: Broker,
        origin_of: OriginOf,
        groups_of: Callable[[RemotingConnection], Iterable[str]],
        decoder: BodyDecoder,
    ) -> None:
        self._decoder = decoder
        self._broker = broker
        self._guard = broker.shares.guard
        self._origin_of = origin_of
        self._groups_of = groups_of
        self._callers: dict[RemotingConnection, dict[str, Caller]] = {}  # by access key
        self._known: dict[RemotingConnection, _Known] = {}
        if broker.shares.guard is not None and not _is_sealed(broker.config):
            _LOG.warning(
                "RocketMQ's clients may connect without TLS: their signatures hold neither time nor nonce, so who "
                "reads one request can send it again for ever; set tls_server_mode=enforcing"
            )

    @property
    def rules(self) -> AccessRules | None:
        """The current rules; others after each change."""
        return None if self._guard is None else self._guard.rules

    # -- before a request is handled -----------------------------------------------------------------------------------

    def admit(self, connection: RemotingConnection, frame: Frame) -> None:
        """Raises ``RequestError`` unless the caller may do this, as far as the header says what it is."""
        guard = self._guard
        if guard is None:
            return
        try:
            caller = self._caller(guard, connection, frame)
            request = REQUESTS.get(frame.code)
            if request is None:
                raise guard.denied(caller, action_of(frame), "", "has no rule")
            if request.rule.admin:
                guard.require_admin(caller, action_of(frame), resource_of(frame), changes=request.rule.changes)
            if frame.code not in IN_BODY:
                for need in request.needs(frame):
                    require(guard, caller, action_of(frame), need)
            self._stand(guard, connection, frame, caller)
        except AccessDeniedError as error:
            raise _refused(error) from None

    def admit_again(self, connection: RemotingConnection, frame: Frame, rules: AccessRules | None) -> None:
        """The same for a request that has waited, unless the ``rules`` that admitted it are still the current ones."""
        if self.rules is not rules:
            self.admit(connection, frame)

    def quota_of(self, connection: RemotingConnection, frame: Frame) -> Quota:
        """The quota of an admitted request's sender: its account's, or its address's if it has none."""
        quotas, origin = self._broker.shares.quotas, self._origin_of(connection, frame)
        rules = self.rules
        if rules is None and origin is connection.place:
            host = connection.counted_as
            return quotas.of(f"@{host}", host, str(origin))
        account = None if rules is None else rules.accounts.get(frame.fields.get(ACCESS_KEY, ""))
        if account is None:
            return quota_at(origin.host, str(origin), quotas)
        return quotas.of(account.access_key, account.access_key, str(origin))

    def denied_topics(
        self, connection: RemotingConnection, frame: Frame, messages: Iterable[Message]
    ) -> Mapping[str, PutResult]:
        """The topics of numbered messages that the sender may not send to, with the refusals of their messages."""
        guard = self._guard
        if guard is None:
            return NOTHING_DENIED
        caller, topics = self._caller(guard, connection, frame), {one.topic for one in messages}
        denied = permissions.denied_topics(guard, caller, action_of(frame), topics)
        return {name: one._replace(reason=f"{DENIED}{one.reason}") for name, one in denied.items()}

    def own_producer(self, connection: RemotingConnection, frame: Frame, name: str) -> str:
        """The account's name for a producer in the log, different from every other account's."""
        return name if self._guard is None else own_name(self._caller(self._guard, connection, frame).name, name)

    def _caller(self, guard: AccessGuard, connection: RemotingConnection, frame: Frame) -> Caller:
        """The caller's account. Each signature is verified; addresses once per connection, as long as the rules are the
        same."""
        fields, rules = frame.fields, guard.rules
        key, is_passed_on = fields.get(ACCESS_KEY, ""), BORN_HOST in fields
        known = self._known.get(connection)
        if (
            known is not None
            and not is_passed_on
            and known.rules is rules
            and known.key == key
            and (not known.caller.signed or is_signed(known.secret, fields, frame.body))
        ):
            return known.caller
        origin, place = self._origin_of(connection, frame), connection.place
        peers: tuple[str, ...] = (_peer(origin),)
        if is_passed_on:
            peers += (_NOBODY if origin is place else _peer(place),)

        def is_genuine(secret: bytes) -> bool:
            return is_signed(secret.decode(), fields, frame.body, without=_ON_THE_WAY)

        caller = guard.admit_signed(action_of(frame), key, peers, is_genuine, self._broker.shares.quotas)
        if not (is_passed_on or connection.is_closed):
            self._known[connection] = _Known(rules, key, caller, caller.account.secret.decode())
        return caller

    # -- connections ---------------------------------------------------------------------------------------------------

    def _stand(self, guard: AccessGuard, connection: RemotingConnection, frame: Frame, caller: Caller) -> None:
        """Remember whom to hang up on; not on a member that passes on what others ask."""
        if connection.is_closed:
            return
        here = self._callers.setdefault(connection, {})
        key = caller.account.access_key
        is_its_own = frame.code not in FORWARDED or self._origin_of(connection, frame) is connection.place
        if key not in here and is_its_own:
            here[key] = caller
            guard.enter(
                caller, partial(self._end, guard, connection, caller), partial(self._is_still_allowed, connection)
            )

    def _is_still_allowed(self, connection: RemotingConnection) -> bool:
        """Whether a client may still be in all groups that it said it consumes in."""
        callers = self._callers.get(connection, {}).values()
        return all(
            any(one.may(ResourceKind.GROUP, group, SUB) for one in callers) for group in self._groups_of(connection)
        )

    def _end(self, guard: AccessGuard, connection: RemotingConnection, caller: Caller, why: str) -> None:
        connection.close(str(guard.ended(caller, why)))

    def may_send(self, connection: RemotingConnection, topic: str) -> bool:
        """Whether an account that uses this connection may send to a topic, and so be asked about its transactions."""
        callers = self._callers.get(connection, {}).values()
        return self._guard is None or any(one.may(ResourceKind.TOPIC, topic, PUB) for one in callers)

    def closed(self, connection: RemotingConnection) -> None:
        """A client is gone."""
        self._known.pop(connection, None)
        for caller in self._callers.pop(connection, {}).values():
            if self._guard is not None:
                self._guard.leave(caller)

    # -- around handlers -----------------------------------------------------------------------------------------------

    def awaited(self, code: int, handler: Handler) -> Handler:
        """``handler`` with what can only be checked by a message, or by the answer."""
        guard = self._guard
        if guard is None:
            return handler
        if code in IN_BODY:
            return partial(self._named_in_body, guard, handler)
        if code in RECORDS:
            return partial(self._about_a_message, guard, handler)
        if code == RequestCode.VIEW_MESSAGE_BY_ID:
            return partial(self._readable_message, guard, handler)
        return partial(self._shown, guard, handler, _SHOWN[code]) if code in _SHOWN else handler

    async def _named_in_body(
        self, guard: AccessGuard, handler: Handler, connection: RemotingConnection, frame: Frame
    ) -> Answer:
        needs = await self._decoder.run(connection, frame, REQUESTS[frame.code].needs, frame)
        try:
            caller = self._caller(guard, connection, frame)
            for need in needs:
                require(guard, caller, action_of(frame), need)
        except AccessDeniedError as error:
            raise _refused(error) from None
        return await handler(connection, frame)

    async def _about_a_message(
        self, guard: AccessGuard, handler: Handler, connection: RemotingConnection, frame: Frame
    ) -> Answer:
        self._broker.mastership.require()  # a slave may not have the message yet, and passes the request on
        offset = RECORDS[frame.code](frame)
        record = await self._broker.records.at(offset)
        topic = None if record is None else real_topic(record)
        if topic is None:
            raise RequestError(f"look message by offset failed, {offset}")
        try:
            self._require_on_message(guard, connection, frame, topic)
        except AccessDeniedError as error:
            raise _refused(error) from None
        return await handler(connection, frame)

    async def _readable_message(
        self, guard: AccessGuard, handler: Handler, connection: RemotingConnection, frame: Frame
    ) -> Answer:
        answer = await handler(connection, frame)
        if answer is None or not answer.body:
            return answer
        try:
            topic = decode_record(answer.body, check_crc=False).topic
            self._require_on_message(guard, connection, frame, topic)
        except AccessDeniedError as error:
            raise _refused(error) from None
        return answer

    def _require_on_message(self, guard: AccessGuard, connection: RemotingConnection, frame: Frame, topic: str) -> None:
        caller = self._caller(guard, connection, frame)
        require_on_message(guard, caller, action_of(frame), REQUESTS[frame.code].operation, topic)

    async def _shown(
        self,
        guard: AccessGuard,
        handler: Handler,
        show: Callable[[Account, bytes], bytes],
        connection: RemotingConnection,
        frame: Frame,
    ) -> Answer:
        answer = await handler(connection, frame)
        if answer is None or not answer.body:
            return answer
        try:
            account = self._caller(guard, connection, frame).account
        except AccessDeniedError as error:
            raise _refused(error) from None
        if account.admin:
            return answer
        return answer._replace(body=await self._broker.loop.readers.run(show, account, answer.body))


def _is_sealed(config: BrokerConfig) -> bool:
    return config.effective_security.has_tls and config.tls_server_mode in (None, TlsServerMode.ENFORCING)


def _peer(place: Place) -> str:
    """As gRPC names it."""
    return f"ipv6:[{place.host}]:{place.port}" if ":" in place.host else f"ipv4:{place.host}:{place.port}"


def _refused(error: AccessDeniedError) -> RequestError:
    return RequestError(f"{DENIED}{error}", AnswerCode.SYSTEM_ERROR)


# -- answers without what the account may not use ----------------------------------------------------------------------


def _usable_topics(account: Account, body: bytes) -> bytes:
    table = TopicConfigTable.decode(body)
    kept = {name: one for name, one in table.topic_config_table.items() if account.topic(name)}
    return replace(table, topic_config_table=kept).encode()


def _usable_topic_names(account: Account, body: bytes) -> bytes:
    found = TopicList.decode(body)
    return replace(found, topic_list=tuple(one for one in found.topic_list if account.topic(one))).encode()


def _usable_groups(account: Account, body: bytes) -> bytes:
    table = SubscriptionGroupTable.decode(body)
    kept = {name: one for name, one in table.subscription_group_table.items() if account.group(name)}
    return replace(table, subscription_group_table=kept).encode()


def _usable_modes(account: Account, body: bytes) -> bytes:
    found = RequestModesBody.decode(body).message_request_mode_map
    kept = {
        topic: {name: one for name, one in groups.items() if account.group(name)}
        for topic, groups in found.items()
        if account.topic(topic)
    }
    return RequestModesBody({topic: groups for topic, groups in kept.items() if groups}).encode()


def _usable_group_names(account: Account, body: bytes) -> bytes:
    return GroupList(tuple(one for one in GroupList.decode(body).group_list if account.group(one))).encode()


def _usable_producers(account: Account, body: bytes) -> bytes:
    found = ProducersByGroup.decode(body).data
    return ProducersByGroup({name: one for name, one in found.items() if account.group(name)}).encode()


def _may_read(account: Account, topic: str) -> bool:
    return bool(account.topic(topic) & SUB) and topic not in NO_SEND_TOPICS


def _readable_stats(account: Account, body: bytes) -> bytes:
    stats = ConsumeStats.decode(body)
    readable = {topic for topic in {queue.topic for queue in stats.offset_table} if _may_read(account, topic)}
    kept = {queue: one for queue, one in stats.offset_table.items() if queue.topic in readable}
    return replace(stats, offset_table=kept).encode()


_SHOWN: Final[Mapping[int, Callable[[Account, bytes], bytes]]] = {
    RequestCode.GET_ALL_TOPIC_CONFIG: _usable_topics,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _usable_topic_names,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _usable_groups,
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: _usable_modes,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: _usable_group_names,
    RequestCode.GET_ALL_PRODUCER_INFO: _usable_producers,
    RequestCode.GET_CONSUME_STATS: _readable_stats,
}
