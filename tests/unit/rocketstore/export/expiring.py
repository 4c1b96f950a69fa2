"""A member whose oldest messages have expired."""

from __future__ import annotations

from dataclasses import replace

from rocketstore.config import MessageStoreConfig
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import WAIT_S, fill
from tests.unit.rocketstore.commit_log.replicas import members_of, node_config
from tests.unit.rocketstore.store.test_message_store_replicated import opened, promote

OLD = 25


def make_expired(config: MessageStoreConfig, topic: str = "Old", later: str = "T") -> None:
    """All ``OLD`` messages of the topic are gone with the first segments; there are others of the topic ``later``."""
    config = replace(config, flush_interval_consume_queue=50)
    members = members_of(1)
    root = config.store_path_root_dir
    root.mkdir(exist_ok=True)
    node = node_config(root, members)
    expiring = replace(
        node.store,
        retention_hours=0,
        delete_hour=tuple(range(24)),
        clean_interval_ms=50,
        disk_full_ratio=1.0,
        disk_check_ratio=0.999,
        disk_clean_ratio=0.9995,
    )
    with opened(config, members, node=replace(node, store=expiring)) as store:
        promote(store)
        fill(store, OLD, topic=topic, queues=1)
        fill(store, 60, topic=later, size=900)
        wait_until(lambda: store.log.min_offset > 0, "the first segment is removed", WAIT_S)
