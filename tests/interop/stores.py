"""Our own stores over both kinds of log, with the file sizes of the Java program's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dledger.clock import Clock
from dledger.config import ElectionConfig, FlushMode, Member, ServerConfig, StoreConfig
from dledger.server import DLedgerServer
from dledger.store.identity import layout_of
from dledger.types import NodeId, Role
from dledger_cli.local.group import free_ports
from rocketstore.commit_log.mixed import MixedCommitLog
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.replicated import MESSAGES, ReplicatedCommitLog, for_broker
from rocketstore.config import KIB, MessageStoreConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.store.takeover import take_over
from rocketstore.types import BrokerRole
from tests.support.waiting import wait_until

SEGMENT_BYTES = 16 * KIB
QUEUE_FILE_BYTES = 400
INDEX_SLOTS = 37
INDEX_ENTRIES = 100
WAIT_S = 20.0


def store_config(root: Path) -> MessageStoreConfig:
    """The sizes of ``Stores.java``; nothing expires."""
    return MessageStoreConfig(
        store_path_root_dir=root,
        mapped_file_size_commit_log=SEGMENT_BYTES,
        mapped_file_size_consume_queue=QUEUE_FILE_BYTES,
        max_hash_slot_num=INDEX_SLOTS,
        max_index_num=INDEX_ENTRIES,
        file_reserved_time=24 * 365 * 100,
        delete_when="",
        disk_max_used_space_ratio=95,
        disk_space_warning_level_ratio=100,
        disk_space_clean_forcibly_ratio=100,
    )


@contextmanager
def plain_store(root: Path, clock: Clock | None = None) -> Iterator[MessageStore]:
    """A running store on a plain log, with everything dispatched."""
    config = store_config(root)
    clock = clock or Clock()
    store = MessageStore(config, PlainCommitLog(config, clock=clock), clock=clock)
    try:
        store.load()
        store.start()
        assert store.wait_dispatched(WAIT_S)
        yield store
    finally:
        store.shutdown()


def node_config(root: Path, *, import_unchecked: bool) -> ServerConfig:
    """The only member of its group, as Java's is."""
    (port,) = free_ports(1)
    return for_broker(
        ServerConfig(
            group="interop",
            node_id=NodeId("n0"),
            members=(Member(NodeId("n0"), "127.0.0.1", port),),
            client_port=0,
            election=ElectionConfig(heartbeat_interval_ms=50, election_timeout_ms_min=200, election_timeout_ms_max=300),
            store=StoreConfig(
                root, segment_bytes=SEGMENT_BYTES, flush_mode=FlushMode.ASYNC, import_unchecked=import_unchecked
            ),
        )
    )


@contextmanager
def replicated_store(root: Path, *, import_unchecked: bool = False) -> Iterator[MessageStore]:
    """A running store on a replicated log of one node, which leads and is master, with everything dispatched.

    A plain log below ``root`` is continued.
    """
    config, node = store_config(root), node_config(root, import_unchecked=import_unchecked)
    old = take_over(config, layout_of(node.store, node.node_id), SEGMENT_BYTES, clock=Clock())
    server = DLedgerServer(node, bodies=MESSAGES, base_log=lambda: None if old is None else old.now())
    try:
        log = ReplicatedCommitLog(server, config)
        store = MessageStore(config, log if old is None else MixedCommitLog(old.files, log, old.record, old.expired))
        try:
            store.load()
            store.start()
            wait_until(lambda: server.status().role is Role.LEADER, "the node leads")
            wait_until(lambda: log.max_offset == log.end_offset, "everything is committed")
            assert store.wait_dispatched(WAIT_S)
            store.rebuild_queue_offsets()
            log.open_term(server.status().term)
            store.become_master(BrokerRole.SYNC_MASTER)
            yield store
        finally:
            store.shutdown()
    finally:
        server.stop()
