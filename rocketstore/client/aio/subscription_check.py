"""Looks, before a consumer starts, whether brokers filter by its conditions, and whether its group subscribes to
something else: then messages would be missed.

Members of a group divide its queues whatever they subscribe to, so all must subscribe to the same. A broker of RocketMQ
or of this project tells what its group subscribes to (GET_CONSUMER_CONNECTION_LIST): what the last heartbeat said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Final

from dledger.access.rules import RETRY_PREFIX
from dledger.errors import ConfigError
from dledger.remoting.codes import RequestError
from rocketstore.client.aio.broker_session import Subscriptions
from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.errors import ClientError, RefusedError, may_repeat
from rocketstore.client.aio.expressions import SQL92, TAG, tags_of_expression
from rocketstore.client.aio.queue_reader import TOOLS_GROUP
from rocketstore.remoting.bodies.clients import CheckClientBody, ConsumerConnectionList, SubscriptionData
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import GroupHeader
from rocketstore.types import MessageModel

_log = logging.getLogger(__name__)
ASK_S_MAX: Final = 1.0
"""How long one broker may take: the start waits for it."""
_ADVICE: Final = "Give each subscription a group of its own"


async def check_conditions(cluster: Cluster, subscriptions: Subscriptions) -> None:
    """Ask the masters whether they filter by this consumer's conditions, as Java's clients do (CHECK_CLIENT_CONFIG).

    Raises ``RefusedError`` if one does not; those that do not answer are not waited for.
    """
    checks: list[tuple[str, bytes]] = []
    for topic in subscriptions.expressions:
        wanted = subscriptions.wanted(topic)
        if wanted.kind == SQL92:
            group = subscriptions.group or TOOLS_GROUP
            body = CheckClientBody(subscriptions.client_id, group, wanted.subscription(topic)).encode()
            route = await cluster.route(topic, cluster.deadline())
            checks += [(name, body) for name in {one.broker for one in route.parts}]
    await asyncio.gather(*(_check(cluster, name, body) for name, body in checks))


async def _check(cluster: Cluster, name: str, body: bytes) -> None:
    try:
        await cluster.ask_master(name, RequestCode.CHECK_CLIENT_CONFIG, body=body, deadline=cluster.deadline(ASK_S_MAX))
    except ClientError as error:
        if isinstance(error, RefusedError) and not may_repeat(error, harmless=True):
            raise
        _log.debug("brokers %s: whether they filter by conditions is unknown: %s", name, error)


async def warn_of_others(cluster: Cluster, subscriptions: Subscriptions, names: Iterable[str]) -> None:
    """Log how this consumer differs from its group, asking the masters of these brokers; best effort."""
    for found in await asyncio.gather(*(_asked(cluster, subscriptions.group, one) for one in names)):
        if found is None or found.message_model is MessageModel.BROADCASTING:
            continue
        if problem := difference(subscriptions, found.subscription_table):
            _log.warning("%s", problem)
            return


def difference(subscriptions: Subscriptions, table: Mapping[str, SubscriptionData]) -> str:
    """How a consumer's subscriptions differ from its group's, for people; empty if they do not."""
    group, mine = subscriptions.group, subscriptions.expressions
    others = {topic: one for topic, one in table.items() if not topic.startswith(RETRY_PREFIX)}
    for topic in mine.keys() & others.keys():
        wanted = subscriptions.wanted(topic)
        if (wanted.kind, wanted.text if wanted.kind == SQL92 else wanted.tags) != _selected(others[topic]):
            return (
                f"other consumers of group {group} subscribe to topic {topic} with "
                f"{_shown(others[topic].expression_type, others[topic].sub_string)}, and this one with "
                f"{_shown(wanted.kind, wanted.text)}: each misses the messages in the other's queues. {_ADVICE}"
            )
    if not others or mine.keys() == others.keys():
        return ""
    only_mine, only_others = (", ".join(sorted(one)) for one in (mine.keys() - others.keys(), others.keys() - mine))
    if only_mine:
        who = f"this one to {only_mine}, and others do not"
    else:
        who = f"others to {only_others}, and this one does not"
    return (
        f"consumers of group {group} subscribe to different topics: {who}, so nobody reads the queues of that topic "
        f"that are their share. {_ADVICE}"
    )


def _shown(kind: str, text: str) -> str:
    return repr(text) if kind in ("", TAG) else f"{kind} {text!r}"


def _selected(one: SubscriptionData) -> tuple[str, frozenset[str] | str | None]:
    """The kind of filter, and the wanted tags (None for all) or the text of another one."""
    if one.expression_type not in ("", TAG):
        return one.expression_type, one.sub_string
    try:
        return TAG, frozenset(one.tags_set) or tags_of_expression(one.sub_string or "*")
    except ConfigError:
        return TAG, one.sub_string


async def _asked(cluster: Cluster, group: str, name: str) -> ConsumerConnectionList | None:
    try:
        answer = await cluster.ask_master(
            name,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            GroupHeader(group),
            deadline=cluster.deadline(ASK_S_MAX),
        )
        return ConsumerConnectionList.decode(answer.body or b"{}")
    except (ClientError, RequestError) as error:  # nobody of the group is connected there, or the broker is away
        _log.debug("group %s: its subscriptions at %s are unknown: %s", group, name, error)
        return None
