"""Administration of subscription groups: create, change, delete, list."""

from __future__ import annotations

import threading

from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker_remoting.administration import Administration
from rocketstore.remoting.bodies.groups import SubscriptionGroupConfig, SubscriptionGroupList, SubscriptionGroupTable
from rocketstore.remoting.bodies.pop import RequestModesBody, SetRequestModeBody
from rocketstore.remoting.bodies.topics import DataVersion
from rocketstore.remoting.headers import DeleteGroupHeader, GroupConfigHeader, read_header
from rocketstore.state.attributes import TopicRequestMode, body_of_policy, policy_of_body
from rocketstore.state.changes import GroupConfig


class GroupAdministration:
    """On the loop."""

    def __init__(self, broker: Broker, admin: Administration) -> None:
        self._broker = broker
        self._admin = admin
        self._lock = threading.Lock()  # guards the last list: lists are made on several threads
        self._listed: dict[str, SubscriptionGroupConfig] = {}
        self._version = DataVersion()

    async def put(self, _: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP."""
        self._broker.mastership.require()
        await self._broker.groups.put([_config_of(SubscriptionGroupConfig.decode(frame.body))])
        return frame.answer()

    async def put_all(self, _: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST."""
        self._broker.mastership.require()
        wanted = await self._admin.read(SubscriptionGroupList.decode, frame.body)
        await self._broker.groups.put([_config_of(one) for one in wanted.group_config_list])
        return frame.answer()

    async def one(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_SUBSCRIPTIONGROUP_CONFIG: where any group may consume, one that does not exist has the defaults."""
        name = read_header(GroupConfigHeader, frame.fields).group
        return frame.answer(body=_data_of(self._broker.groups.retries.group(name)).encode())

    async def delete(self, _: RemotingConnection, frame: Frame) -> Frame:
        """DELETE_SUBSCRIPTIONGROUP: an unknown group counts as deleted."""
        header = read_header(DeleteGroupHeader, frame.fields)
        with_offsets = header.remove_offset or header.clean_offset
        if await self._broker.groups.delete(header.group_name, with_offsets=with_offsets):
            return frame.answer()
        kept = f"the offsets of {header.group_name} stay, and so does the group, with the default settings"
        return frame.answer(remark=kept)

    async def all(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._encoded))

    async def set_request_mode(self, _: RemotingConnection, frame: Frame) -> Frame:
        """SET_MESSAGE_REQUEST_MODE."""
        self._broker.mastership.require()
        wanted = SetRequestModeBody.decode(frame.body)
        mode = TopicRequestMode(wanted.topic, wanted.consumer_group, wanted.mode, wanted.pop_share_queue_num)
        await self._broker.groups.set_request_mode(mode)
        return frame.answer()

    async def request_modes(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_MESSAGE_REQUEST_MODE."""
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._encoded_modes))

    def _encoded_modes(self) -> bytes:
        found: dict[str, dict[str, SetRequestModeBody]] = {}
        for one in self._broker.state.request_modes():
            found.setdefault(one.topic, {})[one.group] = SetRequestModeBody(
                one.topic, one.group, one.mode, one.share_queues
            )
        return RequestModesBody(found).encode()

    def _encoded(self) -> bytes:
        state = self._broker.state
        with self._lock:
            table = {name: _data_of(state.group(name)) for name in state.groups()}
            if table != self._listed:  # others only compare versions for equality
                self._listed = table
                self._version = DataVersion(self._version.counter + 1, self._broker.loop.clock.wall_ms())
            listed = SubscriptionGroupTable(self._version, table)
        return listed.encode()


def _config_of(data: SubscriptionGroupConfig) -> GroupConfig:
    return GroupConfig(
        data.group_name,
        data.consume_enable,
        data.consume_from_min_enable,
        data.consume_broadcast_enable,
        data.retry_queue_nums,
        data.retry_max_times,
        data.broker_id,
        data.which_broker_when_consume_slowly,
        data.notify_consumer_ids_changed_enable,
        data.consume_message_orderly,
        policy_of_body(data.group_retry_policy),
    )


def _data_of(group: GroupConfig) -> SubscriptionGroupConfig:
    return SubscriptionGroupConfig(
        group.name,
        group.consume_enable,
        group.consume_from_min_enable,
        group.consume_broadcast_enable,
        group.retry_queues,
        group.retry_times_max,
        group.broker_id,
        group.broker_id_when_slow,
        group.notify_changes,
        group.ordered,
        body_of_policy(group.retry_policy),
    )
