"""Administration of subscription groups: create, change, delete, list."""

from __future__ import annotations

import threading

from rocketstore.broker.parts import BrokerParts
from rocketstore.broker.remoting.administration import Administration
from rocketstore.remoting.bodies.groups import SubscriptionGroupConfig, SubscriptionGroupTable
from rocketstore.remoting.bodies.topics import DataVersion
from rocketstore.remoting.connection import RemotingConnection
from rocketstore.remoting.frame import Frame
from rocketstore.remoting.headers import DeleteGroupHeader, read_header
from rocketstore.state.changes import GroupConfig


class Groups:
    """On the loop."""

    def __init__(self, parts: BrokerParts, admin: Administration) -> None:
        self._parts = parts
        self._admin = admin
        self._lock = threading.Lock()  # guards the last list: lists are made on several threads
        self._listed: dict[str, SubscriptionGroupConfig] = {}
        self._version = DataVersion()

    async def put(self, _: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP."""
        self._admin.check_master()
        group = _config_of(SubscriptionGroupConfig.decode(frame.body))
        await self._admin.change(lambda done: self._parts.state.put_group(group, done))
        return frame.answer()

    async def delete(self, _: RemotingConnection, frame: Frame) -> Frame:
        """DELETE_SUBSCRIPTIONGROUP: an unknown group counts as deleted.

        A group exists as long as it has offsets, so it keeps them, with the default settings, unless the request says
        to remove them: then what it has to try again and its dead letters are removed, too.
        """
        header = read_header(DeleteGroupHeader, frame.fields)
        self._admin.check_master()
        state, name = self._parts.state, header.group_name
        if not state.has_group(name):
            return frame.answer()
        if header.remove_offset or not state.offsets(name):
            await self._admin.change(lambda done: state.delete_group(name, done))
            self._parts.topics.news.tell()
            return frame.answer()
        await self._admin.change(lambda done: state.put_group(GroupConfig(name), done))
        return frame.answer(remark=f"the offsets of {name} stay, and so does the group, with the default settings")

    async def all(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""
        return frame.answer(body=await self._admin.read(self._encoded))

    def _encoded(self) -> bytes:
        state = self._parts.state
        with self._lock:
            table = {name: _data_of(state.group(name)) for name in state.groups()}
            if table != self._listed:  # others only compare versions for equality
                self._listed = table
                self._version = DataVersion(self._version.counter + 1, self._parts.clock.wall_ms())
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
    )
