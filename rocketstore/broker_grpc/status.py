"""A broker's status over gRPC."""

from __future__ import annotations

import platform
from collections.abc import Callable

from dledger import __version__
from rocketstore.broker.broker import Broker
from rocketstore.broker.status import broker_id
from rocketstore.pb import broker_pb2 as pb


class StatusReport:
    """Builds the response; may wait for a disk (free space) and for the node's lock, so not on the event loop."""

    def __init__(self, broker: Broker, extra: Callable[[], dict[str, str]]) -> None:
        """``extra``: what is to be told besides."""
        self._broker = broker
        self._extra = extra
        self._version = __version__

    def encode(self) -> bytes:
        """The response to a status request."""
        config, store = self._broker.config, self._broker.store
        group, role, log = self._broker.mastership.view(), store.role, store.log
        runtime = store.runtime_info() | self._extra()
        stats = store.stats
        return pb.StatusResponse(
            cluster=config.cluster_name,
            broker_name=config.name,
            node_id=config.node_id,
            broker_role=role,
            broker_id=broker_id(config, role, group),
            replicated=log.is_replicated,
            raft_role=group.role,
            term=group.term,
            leader=group.leader,
            leader_address=group.leader_address,
            members=group.members,
            min_offset=log.min_offset,
            max_offset=log.max_offset,
            end_offset=log.end_offset,
            dispatch_behind_bytes=store.dispatch_behind_bytes,
            put_tps=stats.put_tps(),
            get_tps=stats.get_tps(),
            disk_ratio=float(runtime.get("commitLogDiskRatio", "-1")),
            put_total=stats.arrived,
            get_total=stats.transferred,
            earliest_message_ms=store.earliest_message_time(),
            version=self._version,
            boot_ms=stats.boot_ms,
            runtime=runtime | {"brokerVersionDesc": self._version, "pythonVersion": platform.python_version()},
            conditions=[
                pb.Condition(kind=one.kind, message=one.message, since_ms=one.since_ms, subject=one.subject)
                for one in self._broker.loop.conditions.now()
            ],
        ).SerializeToString()
