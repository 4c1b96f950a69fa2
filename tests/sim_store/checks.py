"""Reads a running broker from end to end and holds it against the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from rocketstore.index.service import IndexDamagedError
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.types import GetMessageStatus
from tests.sim_store.model import Model, Place, Sent, ViolationError, require
from tests.sim_store.popping import POP_GROUPS, is_of_pop
from tests.sim_store.threads import Scheduler
from tests.sim_store.timed import TIMED
from tests.sim_store.transactions import OWN_GROUPS, UNMODELLED

WAIT_S: Final = 60.0
"""Of virtual time, for what should come at once."""
FOREVER_MS: Final = 1 << 60
KEYS_CHECKED: Final = 12


def wait_until(scheduler: Scheduler, condition: Callable[[], bool], problem: str, *, wait_s: float = WAIT_S) -> None:
    """Let the others run until it holds. Raises ``ViolationError`` if it does not in time."""
    deadline_us = scheduler.now_us + int(wait_s * 1_000_000)
    while not condition():
        require(scheduler.now_us < deadline_us, problem)
        scheduler.sleep_us(20_000)


def read_queue(store: MessageStore, model: Model, place: Place) -> tuple[int, int, dict[int, Sent]]:
    """Where a queue begins and ends, and every message in it, each of which may be there."""
    begin, end = max(store.min_offset(*place), 0), store.max_offset(*place)
    found: dict[int, Sent] = {}
    at, moved = begin, 0
    while at < end:
        result = store.get(*place, at, max_count=32)
        if result.status in (GetMessageStatus.OFFSET_TOO_SMALL, GetMessageStatus.MESSAGE_WAS_REMOVING):
            moved += 1
            require(moved < 100, "a queue has messages that cannot be read", place, at, result)
            begin = at = max(store.min_offset(*place), at + (result.next_offset - at if result.next_offset > at else 0))
            continue
        if result.status is GetMessageStatus.NO_MATCHED_MESSAGE and result.next_offset > at:
            at = result.next_offset  # places that are known to stay empty
            continue
        require(result.status is GetMessageStatus.FOUND, "a queue cannot be read on", place, at, end, result)
        for record in result.records:
            message = decode_record(record)
            found[message.queue_offset] = model.found(place, message.queue_offset, message)
        at = result.next_offset
    return begin, end, found


def check_queues(store: MessageStore, model: Model, expired_to: int = 0) -> int:
    """Hold all queues against the model; gives how many messages there are. What lies before ``expired_to`` may go."""
    places = sorted({*store.queues(), *model.queues})
    count = 0
    places = [one for one in places if one[0] not in UNMODELLED | {TIMED} and not is_of_pop(one[0])]
    held = {place: read_queue(store, model, place) for place in places}
    log_begin = max(store.log.min_offset, expired_to)
    for place, (begin, end, found) in held.items():
        count += len(found)
        model.check_queue(place, begin, max(end, store.log.queue_offsets.get(place, 0)), found, log_begin)
        offsets = sorted(found)
        if offsets:
            require(offsets[-1] == end - 1, "a queue's end is not there", place, offsets[-1], end)
            whole = place[0] in model.deleted or offsets == list(
                range(offsets[0], end)
            )  # the numbering may go on higher
            require(whole, "a queue has a hole", place, offsets, begin, end)
    return count


def check_keys(store: MessageStore, model: Model, scheduler: Scheduler, expired_to: int = 0) -> None:
    """Some keys find what they must, and nothing else."""
    keys = sorted({(sent.place[0], key) for sent in model.sent.values() for key in sent.keys})
    for topic, key in scheduler.random.sample(keys, min(KEYS_CHECKED, len(keys))):
        records = patiently(scheduler, partial(store.query, topic, key, 64, 0, FOREVER_MS))
        messages = [decode_record(record) for record in records]
        found = {model.sent[message.body] for message in messages if _is_sent(model, message)}
        require(len({message.offset for message in messages}) == len(messages), "a query finds it twice", topic, key)
        for sent in found:
            require(key in sent.keys and sent.place[0] == topic, "a query finds another key's message", key, sent)
        log_begin = max(store.log.min_offset, expired_to)
        expected = sorted(model.expected_by_key(topic, key, log_begin), key=lambda sent: -sent.position)
        if len(records) < 64:
            missing = [sent for sent in expected if sent not in found]
            require(not missing, "a query by key misses a message", key, *missing[:3])


def patiently(scheduler: Scheduler, ask: Callable[[], list[bytes]]) -> list[bytes]:
    """Ask again while the index is being built again."""
    for _ in range(1000):
        try:
            return ask()
        except IndexDamagedError:
            scheduler.sleep_us(20_000)
    raise ViolationError("a damaged index is not built again")


def _is_sent(model: Model, message: Message) -> bool:
    require(message.body in model.sent, "a query finds what nobody sent", message.body[:40])
    return True


def check_consumers(state: BrokerState, store: MessageStore, model: Model) -> None:
    """Offsets are where they were, or further, and never beyond the queue's end."""
    for consumer in model.commits:
        group, topic, queue_id = consumer
        noted, least = state.offset(group, topic, queue_id), model.committed_offset(consumer)
        end = store.max_offset(topic, queue_id)
        require(noted >= least, "a consumer's offset went back", consumer, noted, least)
        require(noted <= end, "a consumer's offset lies beyond its queue's end", consumer, noted, end)
    for group in set(state.groups()) - OWN_GROUPS - POP_GROUPS:
        for topic, queue_id, offset in state.offsets(group):
            asked = model.asked.get((group, topic, queue_id), 0)
            require(offset <= asked, "a consumer's offset is further than anybody wanted", group, topic, offset, asked)
            end = store.max_offset(topic, queue_id)
            require(
                offset <= end, "a consumer's offset lies beyond its queue's end", group, topic, queue_id, offset, end
            )


def all_delivered(store: MessageStore, model: Model) -> bool:
    """Whether every delayed message that the log has was seen where it belongs; looks."""
    places = {sent.place for sent in model.undelivered(store.log.min_offset)}
    for place in sorted(places):
        read_queue(store, model, place)
    return not model.undelivered(store.log.min_offset)
