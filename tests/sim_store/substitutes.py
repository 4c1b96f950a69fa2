"""Puts ``tests.sim_store.threads`` in the place of Python's threads, clocks and randomness, in the product alone.

Whatever a module of the product knows as ``threading`` (or ``Lock``, ``monotonic``, …) is exchanged while a run lasts
and put back after it. Python's own modules, and everything else in the process, keep the real ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from dledger.host import ClientServer
from dledger.rpc.listening import listen
from dledger.rpc.loops import run as run_loop
from dledger.rpc.peers.exchanges import PeerLogClient
from dledger.rpc.peers.port import PeerPort
from dledger.rpc.peers.transport import PeerTransport
from dledger.store.fs import FileSystem
from tests.sim_store import links, loops, members, memory_transport, threads
from tests.sim_store.disk import SimFs
from tests.sim_store.threads import Scheduler

_PRODUCT: Final = ("dledger", "rocketstore")


def _fake_time(scheduler: Scheduler) -> SimpleNamespace:
    def wall_us() -> int:
        return threads.EPOCH_MS * 1000 + scheduler.now_us

    return SimpleNamespace(
        monotonic=lambda: scheduler.now_us / 1_000_000,
        monotonic_ns=lambda: scheduler.now_us * 1000,
        perf_counter=lambda: scheduler.now_us / 1_000_000,
        time=lambda: wall_us() / 1_000_000,
        time_ns=lambda: wall_us() * 1000,
        sleep=lambda seconds: scheduler.sleep_us(int(seconds * 1_000_000)),
        localtime=time.gmtime,
        gmtime=time.gmtime,
        strftime=time.strftime,
    )


def _fake_secrets(dice: random.Random) -> SimpleNamespace:
    return SimpleNamespace(
        randbits=dice.getrandbits,
        token_bytes=dice.randbytes,
        token_hex=lambda count=32: dice.randbytes(count).hex(),
        randbelow=dice.randrange,
    )


def _exchanges(scheduler: Scheduler) -> dict[int, Any]:
    """What takes the place of which object, by the object's id."""
    fake_time = _fake_time(scheduler)
    fake_threading = SimpleNamespace(
        Lock=threads.Lock,
        RLock=threads.RLock,
        Condition=threads.Condition,
        Event=threads.Event,
        Thread=threads.Thread,
        current_thread=threads.current_thread,
        get_ident=lambda: id(scheduler.current),
        TIMEOUT_MAX=threading.TIMEOUT_MAX,
    )
    fake_secrets = _fake_secrets(random.Random(scheduler.random.random()))
    return {
        id(threading): fake_threading,
        id(threading.Lock): threads.Lock,
        id(threading.Event): threads.Event,
        id(queue): SimpleNamespace(SimpleQueue=threads.SimpleQueue, Empty=queue.Empty),
        id(time): fake_time,
        id(time.monotonic): fake_time.monotonic,
        id(time.perf_counter): fake_time.perf_counter,
        id(queue.SimpleQueue): threads.SimpleQueue,
        id(ThreadPoolExecutor): threads.ThreadPoolExecutor,
        id(secrets): fake_secrets,
        id(FileSystem): own_fs,
        id(PeerTransport): members.SimTransport,
        id(ClientServer): members.NoClients,
        id(PeerPort): members.NoPort,
        id(PeerLogClient): members.PeerLogs,
        id(asyncio): loops.fake_asyncio(),
        id(run_loop): loops.run,
        id(listen): links.listen,
    }


def own_fs() -> FileSystem:
    """What the running process sees of its disk."""
    group = threads.running().current.group
    fs = None if group is None else group.fs
    if not isinstance(fs, SimFs):
        raise TypeError("no process of the simulation uses the machine's own disk")
    return fs


def _modules() -> list[ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if (name.partition(".")[0] in _PRODUCT or module is memory_transport) and isinstance(module, ModuleType)
    ]


def _exchange_defaults(kind: type, exchanges: dict[int, Any]) -> Iterator[Callable[[], None]]:
    """Records keep the makers of their fields' defaults in a closure."""
    for cell in getattr(vars(kind).get("__init__"), "__closure__", None) or ():
        value = cell.cell_contents
        if id(value) in exchanges:
            yield _put(cell, "cell_contents", exchanges[id(value)])


def _put(where: object, name: str, value: object) -> Callable[[], None]:
    """Exchange an attribute; gives what puts it back."""
    before = getattr(where, name)
    setattr(where, name, value)
    return lambda: setattr(where, name, before)


@contextmanager
def substitute(scheduler: Scheduler) -> Iterator[None]:
    """The product runs on ``scheduler`` within."""
    exchanges = _exchanges(scheduler)
    undo: list[Callable[[], None]] = []
    for module in _modules():
        for name, value in list(vars(module).items()):
            used_at_home = value is ClientServer or value is run_loop  # by the module that defines it, too
            if id(value) in exchanges and (used_at_home or module.__name__ != getattr(value, "__module__", "")):
                undo.append(_put(module, name, exchanges[id(value)]))
            elif isinstance(value, type) and value.__module__ == module.__name__ and dataclasses.is_dataclass(value):
                undo += _exchange_defaults(value, exchanges)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    threads.begin(scheduler)
    try:
        yield
    finally:
        threads.end(scheduler)
        threads.forget_threads()
        logging.disable(disabled)
        for one in reversed(undo):
            one()
