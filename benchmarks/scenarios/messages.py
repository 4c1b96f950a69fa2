"""The message store in this process: puts on a plain commit log, and how fast queues and index are rebuilt from one."""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.registry import Scenario, constant
from dledger.clock import Clock
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.port import PutDone
from rocketstore.config import MIB, MessageStoreConfig
from rocketstore.message.ids import unique_ids
from rocketstore.message.message import Message
from rocketstore.message.record import HEAD_V4, MESSAGE_MAGIC, encode_record
from rocketstore.store.message_store import MessageStore
from rocketstore.types import PutResult

BODY_BYTES: Final = 1024
QUEUES: Final = 8
BATCH_MESSAGES: Final = 64
PUT_BYTES_MAX: Final = 3072 * MIB
"""The maximum written in one round, so that it measures the store, not the kernel's throttling of dirty pages."""
REBUILD_BYTES: Final = 4096 * MIB
SCAN_BYTES: Final = MIB
BARE_PUT: Final = "bare pack+crc32+pwrite loop"
BARE_SCAN: Final = "scanning the records alone"
_LAG_S_MAX: Final = 30.0
_LAG_BYTES_MAX: Final = 1 << 40
_HEAD: Final = HEAD_V4.struct()
_HOST: Final = bytes((127, 0, 0, 1))


@contextmanager
def message_store(directory: Path) -> Iterator[MessageStore]:
    """A running store with a plain commit log and RocketMQ's defaults (ASYNC_FLUSH).

    Puts may outrun dispatch, which shares the interpreter, without limit: that is what is measured.
    """
    config = MessageStoreConfig(store_path_root_dir=directory, dispatch_behind_bytes_max=_LAG_BYTES_MAX)
    store = MessageStore(config, PlainCommitLog(config, clock=Clock()))
    try:
        store.load()
        store.start()
        yield store
    finally:
        store.shutdown()


def messages(count: int, *, keyed: bool) -> list[Message]:
    """Distinct messages of 1 KiB over all queues of one topic; ``keyed``: with a unique key and a business key."""
    return [
        Message(
            "bench",
            os.urandom(BODY_BYTES),
            number % QUEUES,
            {"UNIQ_KEY": unique_ids(1)[0], "KEYS": f"order-{number}"} if keyed else {},
        )
        for number in range(count)
    ]


def put_rate(
    context: Context, submit: Callable[[Sequence[Message], PutDone], None], *, batch: int, keyed: bool
) -> float:
    """Messages per second accepted by ``submit``, all answered PUT_OK."""
    some = messages(4 * BATCH_MESSAGES, keyed=keyed)
    batches = [some[at : at + batch] for at in range(0, len(some), batch)]
    limit = PUT_BYTES_MAX // len(encode_record(some[0]))
    refused: list[PutResult] = []

    def done(results: Sequence[PutResult]) -> None:
        refused.extend(result for result in results if not result.ok)

    count = 0
    started = time.perf_counter()
    deadline = started + context.settings.seconds
    while (now := time.perf_counter()) < deadline and count < limit:
        for one in batches:
            submit(one, done)
        count += len(some)
    if refused:
        raise RuntimeError(f"{len(refused)} puts were refused: {refused[0]}")
    return count / (now - started)


def log_put_rate(context: Context, *, batch: int, keyed: bool = False) -> float:
    """Puts on a commit log alone, like the end of RocketMQ's put path: encoded, placed, written."""
    directory = context.directory / "messages-log"
    config = MessageStoreConfig(store_path_root_dir=directory)
    log = PlainCommitLog(config, clock=Clock())
    directory.mkdir()
    try:
        log.load(clean_stop=True)
        log.start()
        return put_rate(context, log.submit, batch=batch, keyed=keyed)
    finally:
        log.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def store_put_rate(context: Context, *, batch: int) -> tuple[float, float]:
    """Puts on a complete store, with dispatch in the same process; and by how many seconds that is then behind."""
    directory = context.directory / "messages-store"
    try:
        with message_store(directory) as store:
            rate = put_rate(context, store.submit, batch=batch, keyed=True)
            started = time.perf_counter()
            if not store.wait_dispatched(_LAG_S_MAX):
                raise RuntimeError(f"dispatch is more than {_LAG_S_MAX} s behind")
            return rate, time.perf_counter() - started
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def bare_puts(context: Context) -> float:
    """Messages per second of the minimum work to write records to a file: pack, crc32 of the body, join, pwrite."""
    path = context.directory / "bare-messages"
    bodies = [os.urandom(BODY_BYTES) for _ in range(256)]
    tail = b"\x05bench" + b"\0\x40" + b"k" * 64
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, 1024 * MIB)
        offset = count = 0
        started = time.perf_counter()
        while offset < 1000 * MIB:
            for body in bodies:
                crc = zlib.crc32(body) & 0x7FFFFFFF
                size = _HEAD.size + len(body) + len(tail)
                head = _HEAD.pack(
                    size, MESSAGE_MAGIC, crc, 0, 0, count, offset, 0, 0, _HOST, 0, 0, _HOST, 0, 0, 0, len(body)
                )
                os.pwrite(descriptor, b"".join((head, body, tail)), offset)
                offset += size
                count += 1
        return count / (time.perf_counter() - started)
    finally:
        os.close(descriptor)
        path.unlink()


def rebuild(context: Context) -> tuple[float, float]:
    """Messages per second of a start without queues and index, and of reading the records alone."""
    directory = context.directory / "messages-rebuild"
    wanted = min(REBUILD_BYTES, int(context.settings.log_gib * 1024) * MIB)
    try:
        count = 0
        some = messages(4096, keyed=True)
        with message_store(directory) as store:
            while store.log.max_offset < wanted:
                for at in range(0, len(some), 512):
                    store.put_many(some[at : at + 512])
                count += len(some)
            store.wait_dispatched(_LAG_S_MAX)
        for derived in ("consumequeue", "index"):
            shutil.rmtree(directory / derived)
        config = MessageStoreConfig(store_path_root_dir=directory)
        store = MessageStore(config, PlainCommitLog(config, clock=Clock()))
        try:
            started = time.perf_counter()
            store.load()
            took = time.perf_counter() - started
            if sum(store.max_offset("bench", queue) for queue in range(QUEUES)) != count:
                raise RuntimeError("the rebuilt queues do not hold all messages")
            started = time.perf_counter()
            offset = store.log.min_offset
            while (scanned := store.log.scan(offset, SCAN_BYTES)).next_offset != offset:
                offset = scanned.next_offset
            scan_took = time.perf_counter() - started
        finally:
            store.shutdown()
        return count / took, count / scan_took
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Alternating rounds of ours and of the minimum work, so that noise affects both."""
    rounds = range(context.settings.rounds)
    for name, batch, keyed in (
        ("commitlog_put", 1, False),
        ("commitlog_put_keyed", 1, True),
        ("commitlog_put_batch", BATCH_MESSAGES, False),
    ):
        if name in names:
            ours, bare = [], []
            for _ in rounds:
                ours.append(log_put_rate(context, batch=batch, keyed=keyed))
                bare.append(bare_puts(context))
            yield Figure.median(name, ours, "messages/s", BARE_PUT, bare)
    if names & {"store_put", "store_put_batch", "dispatch_lag"}:
        lags = []
        bare_rate = bare_puts(context)
        for name, batch in (("store_put", 1), ("store_put_batch", BATCH_MESSAGES)):
            rate, lag = store_put_rate(context, batch=batch)
            lags.append(lag)
            if name in names:
                yield Figure(name, rate, "messages/s", BARE_PUT, bare_rate)
        if "dispatch_lag" in names:
            yield Figure("dispatch_lag", max(lags), "s", "how long the puts took", context.settings.seconds)
    if "dispatch_rebuild" in names:
        rate, scan = rebuild(context)
        yield Figure("dispatch_rebuild", rate, "messages/s", BARE_SCAN, scan)


SCENARIO: Final = Scenario(
    "the message store alone",
    (
        "commitlog_put",
        "commitlog_put_keyed",
        "commitlog_put_batch",
        "store_put",
        "store_put_batch",
        "dispatch_lag",
        "dispatch_rebuild",
    ),
    measure,
    constant(12),
)
