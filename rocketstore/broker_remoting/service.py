"""The broker's handlers by request code, and the server of its remoting connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from dledger.errors import PendingFullError
from dledger.remoting.client import RemotingClient
from dledger.remoting.codes import ANNOUNCED
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import FRAME_BYTES_MAX, Frame
from dledger.remoting.log_codec import WAIT_MS_MAX, JavaCode, LogCode
from dledger.remoting.log_service import LogHandlers
from dledger.remoting.server import Direct, Handler, Handlers, Refused, RemotingServer, ServerLimits
from rocketstore.broker.broker import Broker
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.statistics import Statistics
from rocketstore.broker_remoting.access import FORWARDED, Forwarding, RemotingAccess
from rocketstore.broker_remoting.administration import (
    Administration,
    GroupAdministration,
    Queries,
    Routes,
    SlaveSource,
    TopicRequests,
)
from rocketstore.broker_remoting.clients import ClientCalls, Connected, MemberRequests, RemotingLink, Replies
from rocketstore.broker_remoting.pops import RemotingPops
from rocketstore.broker_remoting.pulls import OffsetRequests, Progress, RemotingPulls
from rocketstore.broker_remoting.requests import RECORDS, BodyDecoder, refusal_of
from rocketstore.broker_remoting.runtime import RunningBroker, StatsRequests
from rocketstore.broker_remoting.sends import RemotingSends, RemotingTimed, RemotingTransactions
from rocketstore.remoting.codes import OwnCode, RequestCode

RECEIVE_BYTES_MAX: Final = 16 * FRAME_BYTES_MAX
"""Received and not done with, of all connections together."""
UNSENT_BYTES_MAX: Final = 4 * FRAME_BYTES_MAX
"""Answered and not taken by slow readers, of all connections together, besides messages."""
REQUESTS_MAX: Final = 4096
"""Under way, besides sends and pulls that wait."""
EXPIRY_INTERVAL_S: Final = 10.0
_IN_TURN: Final = (
    RequestCode.HEART_BEAT,
    RequestCode.UNREGISTER_CLIENT,
    RequestCode.LOCK_BATCH_MQ,
    RequestCode.UNLOCK_BATCH_MQ,
)
"""Requests of which a later one takes back what an earlier one did."""
_LOG_CODES: Final = frozenset({*JavaCode, *LogCode})


async def tell_nobody() -> None:
    """In the place of an announcement, for a broker that registers nowhere."""


class RemotingService:
    """Create it on the loop's thread. ``client`` asks other programs.

    ``announce`` returns once name servers know of topics that changed, or soon. ``log``: of a replicated log, which is
    read here, too. ``member_calls``: handlers of other protocols' calls that members pass on, which check access.
    """

    def __init__(
        self,
        broker: Broker,
        client: RemotingClient,
        announce: Callable[[], Awaitable[None]] = tell_nobody,
        replication: Callable[[], dict[str, str]] = dict,
        log: LogHandlers | None = None,
        member_calls: Mapping[int, Handler] = MappingProxyType({}),
    ) -> None:
        self._log = log
        self._checked_by_others = _LOG_CODES | member_calls.keys()
        config, percent = broker.config, broker.config.access.account_share_percent
        self._conditions = broker.loop.conditions
        self._forwarding = forwarding = Forwarding(broker, client)
        decoder = BodyDecoder(broker.loop.readers)
        self.access: Final = RemotingAccess(broker, forwarding.origin_of, self._groups_of, decoder)
        access = self.access
        self._groups = groups = broker.groups
        members = MemberRequests(groups, access.quota_of, self._link_of, decoder, broker.loop.readers)
        offsets = OffsetRequests(broker.offsets, access.quota_of, decoder)
        self._statistics = Statistics(broker.live, broker.store, groups.retries, broker.loop.readers, broker.loop.clock)
        sends = RemotingSends(broker, forwarding.origin_of, access)
        self._pulls = RemotingPulls(broker, groups, access, self._link_of)
        self._pops = RemotingPops(broker, access)
        transactions = RemotingTransactions(broker)
        timed = RemotingTimed(broker)
        unsent = UNSENT_BYTES_MAX + config.effective_limits.answer_bytes_max
        requests = REQUESTS_MAX + config.pulls_waiting_max
        code = RequestCode
        direct: dict[int, Direct] = dict.fromkeys(
            (code.SEND_MESSAGE, code.SEND_MESSAGE_V2, code.SEND_BATCH_MESSAGE), sends.take
        )
        direct[OwnCode.SEND_NUMBERED] = sends.take_numbered
        awaited: dict[int, Handler] = {
            OwnCode.NEXT_NUMBER: sends.next_number,
            code.QUERY_CONSUMER_OFFSET: offsets.query,
            code.UPDATE_CONSUMER_OFFSET: offsets.update,
            OwnCode.FETCH_OFFSETS: offsets.fetch_many,
            OwnCode.COMMIT_OFFSETS: offsets.commit_many,
            OwnCode.COMMIT_POSITION: offsets.commit_position,
            code.SEARCH_OFFSET_BY_TIMESTAMP: offsets.by_time,
            code.GET_MAX_OFFSET: offsets.maximum,
            code.GET_MIN_OFFSET: offsets.minimum,
            code.GET_EARLIEST_MSG_STORETIME: offsets.earliest_time,
            code.HEART_BEAT: members.heartbeat,
            code.UNREGISTER_CLIENT: members.unregister,
            code.CONSUMER_SEND_MSG_BACK: members.send_back,
            code.GET_CONSUMER_LIST_BY_GROUP: members.consumer_ids,
            code.LOCK_BATCH_MQ: members.lock,
            code.UNLOCK_BATCH_MQ: members.unlock,
            code.END_TRANSACTION: transactions.end,
            code.RESUME_CHECK_HALF_MESSAGE: transactions.resume,
            code.RECALL_MESSAGE: timed.recall,
            OwnCode.LIST_TIMED: timed.list,
        }
        awaited |= self._pops.handlers
        awaited |= _administration(broker, self._statistics, announce, replication)
        allowed = {number: self._allowed(number, handler) for number, handler in awaited.items()}
        log_direct: Mapping[int, Direct] = {} if log is None else log.direct
        log_awaited: Mapping[int, Handler] = {} if log is None else log.awaited
        self.server = RemotingServer(
            f"broker {config.name}",
            Handlers(
                direct={number: forwarding.direct(take) for number, take in direct.items()} | dict(log_direct),
                awaited=allowed
                | {number: decoder.in_turn(allowed[number]) for number in _IN_TURN}
                | dict(log_awaited)
                | dict(member_calls),
                closed=self._closed,
                refusal_of=self._refusal_of,
                admit=self._admit,
                prompt=dict.fromkeys((code.PULL_MESSAGE, code.LITE_PULL_MESSAGE), self._pulls.pull),
            ),
            ServerLimits(
                connections_max=config.effective_limits.connections_max,
                host_connections_max=max(1, config.effective_limits.connections_max * percent // 100),
                requests_max=requests,
                host_requests_max=requests * percent // 100,
                request_s_max=(config.effective_limits.call_ms_max + max(config.pull_wait_ms_max, WAIT_MS_MAX)) / 1000,
                receive_bytes_max=RECEIVE_BYTES_MAX,
                host_receive_bytes_max=RECEIVE_BYTES_MAX * percent // 100,
                unsent_bytes_max=unsent,
                host_unsent_bytes_max=unsent * percent // 100,
            ),
            ANNOUNCED,
        )
        self._expiry = asyncio.get_running_loop().call_later(EXPIRY_INTERVAL_S, self._expire)
        self._statistics.start()

    async def close(self, grace_s: float) -> None:
        """Answer what is under way for ``grace_s``, then hang up on everybody."""
        self._expiry.cancel()
        self._statistics.close()
        await self.server.close(grace_s)
        await self._forwarding.close()

    def _allowed(self, code: int, handler: Handler) -> Handler:
        """With what access control checks besides the header, and passed on by a slave.

        The master, which carries it out, checks permissions that depend on the message, at the very end: otherwise a
        slave that becomes the master in between would not check them.
        """
        access, forwarding = self.access, self._forwarding
        if code not in FORWARDED:
            return access.awaited(code, handler)
        if code in RECORDS:
            return forwarding.awaited(access.awaited(code, handler))
        return access.awaited(code, forwarding.awaited(handler))

    def _admit(self, connection: RemotingConnection, frame: Frame) -> None:
        """Those of the log, and of other protocols, check for themselves who may do what; without a log, there is no
        such request.
        """
        if frame.code not in self._checked_by_others:
            self.access.admit(connection, frame)

    def _groups_of(self, connection: RemotingConnection) -> Iterable[str]:
        return self._groups.clients.groups_of(self._link_of(connection))

    def _link_of(self, connection: RemotingConnection) -> RemotingLink:
        return RemotingLink(connection, self.access.may_send)

    def _refusal_of(self, error: Exception) -> Refused | None:
        """The answer to an error; that a limit is reached is told to operators, too."""
        if isinstance(error, PendingFullError) or (isinstance(error, Refusal) and error.kind is RefusalKind.TOO_MANY):
            self._conditions.limit(str(error))
        return refusal_of(error)

    def _closed(self, connection: RemotingConnection) -> None:
        self._pulls.closed(connection)
        self._pops.closed(connection)
        self._groups.clients.closed(self._link_of(connection))
        self.access.closed(connection)
        if self._log is not None:
            self._log.closed(connection)

    def _expire(self) -> None:
        self._groups.hang_up_on_the_silent()
        self._expiry = asyncio.get_running_loop().call_later(EXPIRY_INTERVAL_S, self._expire)


def _administration(
    broker: Broker,
    statistics: Statistics,
    announce: Callable[[], Awaitable[None]],
    replication: Callable[[], dict[str, str]],
) -> dict[int, Handler]:
    """The handlers of queries, and of what administrators ask for."""
    code, admin, groups = RequestCode, Administration(broker), broker.groups
    clients = groups.clients
    topics = TopicRequests(broker, admin, announce)
    settings = GroupAdministration(broker, admin)
    queries = Queries(broker, admin)
    stats = StatsRequests(broker, admin, clients, statistics.get_tps)
    connected = Connected(broker, admin, clients)
    calls = ClientCalls(broker, admin, clients, queries)
    progress = Progress(broker, admin, clients)
    slaves = SlaveSource(broker, admin)
    running = RunningBroker(broker, admin, statistics, announce, replication)
    replies = Replies(broker, clients)
    routes = Routes(broker)
    asked: dict[int, Handler] = {
        code.UPDATE_AND_CREATE_TOPIC: topics.put,
        code.DELETE_TOPIC_IN_BROKER: topics.delete,
        code.UPDATE_AND_CREATE_TOPIC_LIST: topics.put_all,
        code.GET_TOPIC_CONFIG: topics.one,
        code.GET_ROUTEINFO_BY_TOPIC: routes.of_topic,
        code.GET_BROKER_CLUSTER_INFO: routes.of_cluster,
        code.GET_ALL_TOPIC_CONFIG: topics.all,
        code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: topics.of_the_system,
        code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: settings.put,
        code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: settings.put_all,
        code.DELETE_SUBSCRIPTIONGROUP: settings.delete,
        code.GET_SUBSCRIPTIONGROUP_CONFIG: settings.one,
        code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: settings.all,
        code.SET_MESSAGE_REQUEST_MODE: settings.set_request_mode,
        code.GET_ALL_MESSAGE_REQUEST_MODE: settings.request_modes,
        code.QUERY_MESSAGE: queries.by_key,
        code.VIEW_MESSAGE_BY_ID: queries.by_offset,
        code.GET_TOPIC_STATS_INFO: stats.of_topic,
        code.GET_CONSUME_STATS: stats.of_group,
        code.GET_BROKER_CONSUME_STATS: stats.of_all_groups,
        code.QUERY_CONSUME_TIME_SPAN: stats.time_spans,
        code.GET_CONSUMER_CONNECTION_LIST: connected.consumers,
        code.GET_PRODUCER_CONNECTION_LIST: connected.producers,
        code.GET_ALL_PRODUCER_INFO: connected.all_producers,
        code.QUERY_TOPIC_CONSUME_BY_WHO: connected.groups_of_topic,
        code.CHECK_CLIENT_CONFIG: connected.check_client,
        code.GET_CONSUMER_RUNNING_INFO: calls.running_info,
        code.CONSUME_MESSAGE_DIRECTLY: calls.consume_directly,
        code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: calls.status,
        code.INVOKE_BROKER_TO_RESET_OFFSET: calls.reset,
        code.CLONE_GROUP_OFFSET: progress.clone,
        code.QUERY_CORRECTION_OFFSET: progress.correction,
        code.QUERY_CONSUME_QUEUE: progress.units,
        code.GET_ALL_CONSUMER_OFFSET: slaves.offsets,
        code.GET_ALL_DELAY_OFFSET: slaves.delays,
        code.GET_BROKER_RUNTIME_INFO: running.info,
        code.GET_BROKER_HA_STATUS: running.ha_status,
        code.GET_BROKER_CONFIG: running.config,
        code.UPDATE_BROKER_CONFIG: running.change_config,
        code.DELETE_EXPIRED_COMMITLOG: running.clean_log,
        code.CLEAN_EXPIRED_CONSUMEQUEUE: running.clean_queues,
        code.CLEAN_UNUSED_TOPIC: running.clean_queues,
        code.GET_BROKER_CLUSTER_ACL_INFO: running.acl_version,
        code.UPDATE_AND_CREATE_ACL_CONFIG: running.no_acl_changes,
        code.DELETE_ACL_CONFIG: running.no_acl_changes,
        code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: running.no_acl_changes,
        code.VIEW_BROKER_STATS_DATA: running.stats_data,
    }
    return {number: admin.shared(handler) for number, handler in asked.items()} | dict.fromkeys(
        (code.SEND_REPLY_MESSAGE, code.SEND_REPLY_MESSAGE_V2), replies.send
    )
