"""Routes to this broker's own group, for clients that have no name server: as one would answer them."""

from __future__ import annotations

from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker_remoting.registration import MASTER_ID
from rocketstore.remoting.bodies.routes import BrokerData, ClusterInfo, QueueData, TopicRouteData
from rocketstore.remoting.headers import RouteHeader, read_header


class Routes:
    """On the loop. The master is whom this broker takes for it now; without one, broker id 0 is missing."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def of_topic(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ROUTEINFO_BY_TOPIC. Raises ``Refusal`` for a topic that does not exist."""
        topic = self._broker.topics.require_seen(read_header(RouteHeader, frame.fields).topic)
        group = self._group()
        queues = QueueData(group.broker_name, topic.read_queues, topic.write_queues, topic.permission, topic.sys_flag)
        return frame.answer(body=TopicRouteData((queues,), (group,)).encode())

    async def of_cluster(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_BROKER_CLUSTER_INFO."""
        group = self._group()
        info = ClusterInfo({group.broker_name: group}, {group.cluster: (group.broker_name,)})
        return frame.answer(body=info.encode())

    def _group(self) -> BrokerData:
        config, view = self._broker.config, self._broker.mastership.view()
        addresses = {MASTER_ID: view.leader_address} if view.leader_address else {}
        others = sorted((node, address) for node, address in view.members.items() if node not in view.learners)
        copies = [address for node, address in others if address and node != view.leader]
        addresses |= dict(enumerate(copies, MASTER_ID + 1))
        return BrokerData(config.cluster_name, config.name, addresses)
