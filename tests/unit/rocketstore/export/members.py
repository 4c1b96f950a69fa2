"""Stopped members to export, and what an export holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dledger.store.verify import verify_node
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.types import HIDDEN_TOPICS, GetMessageStatus, PutResult
from rocketstore.upgrade.export import Choices, Exported, export_member
from tests.unit.rocketstore.bench import WAIT_S, running
from tests.unit.rocketstore.store.test_message_store_replicated import master

Place = tuple[str, int, int]
"""Topic, queue and queue offset."""


def export_of(config: MessageStoreConfig, target: Path, choices: Choices | None = None) -> Exported:
    """Export the only member below the root."""
    (directory,) = config.store_path_root_dir.glob("dledger-*")
    return export_member(config, verify_node(directory), target, choices)


def plain(config: MessageStoreConfig, target: Path) -> MessageStoreConfig:
    """The settings of a plain broker in the exported directory."""
    return replace(config, store_path_root_dir=target, enable_dledger_commit_log=False)


def messages_in(store: MessageStore) -> dict[Place, Message]:
    """Every message of every queue that a person may see."""
    found: dict[Place, Message] = {}
    for topic, queue_id in store.queues():
        at = max(0, store.min_offset(topic, queue_id))
        while topic not in HIDDEN_TOPICS:
            result = store.get(topic, queue_id, at, max_count=32)
            if result.status is not GetMessageStatus.FOUND:
                break
            for record in result.records:
                message = decode_record(record)
                found[topic, queue_id, message.queue_offset] = message
            at = result.next_offset
    return found


def in_place(message: Message) -> Message:
    """Without what names physical offsets."""
    return replace(message, offset=0, prepared_offset=0)


@contextmanager
def with_state(config: MessageStoreConfig) -> Iterator[tuple[MessageStore, BrokerState]]:
    """A master with its broker state; plain or the only member of its group."""
    opened = master(config) if config.enable_dledger_commit_log else running(config)
    with opened as store:
        state = BrokerState(store, config.config_dir)
        state.load()
        state.start()
        try:
            state.catch_up(WAIT_S)
            yield store, state
        finally:
            state.shutdown()


def answered(results: list[PutResult]) -> PutResult:
    """The only answer."""
    (result,) = results
    return result
