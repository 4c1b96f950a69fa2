"""A background load on the map of ``dledger kv``: puts, swaps and linearizable reads, all recorded."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from dledger.client import DLedgerClient
from dledger.errors import DLedgerError
from tests.support.map_history import Change, Look, MapHistory, Told

KEYS: Final = ("a", "b", "c", "d")
PAUSE_S: Final = 0.002
JOIN_TIMEOUT_S: Final = 120.0


class MapLoad:
    """Runs from entry to exit, with one client for each thread. Every value is put once."""

    def __init__(self, addresses: Sequence[str], history: MapHistory, *, clients: int, timeout_s: float = 5.0) -> None:
        self.history = history
        self._addresses = list(addresses)
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guard, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
            assert not thread.is_alive(), "a client's call does not end"
        if error is None and self._failures:
            raise self._failures[0]

    def _guard(self, number: int) -> None:
        try:
            self._run(number)
        except BaseException as error:  # noqa: BLE001 - raised again by __exit__
            self._failures.append(error)

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        known = dict.fromkeys(KEYS, 0)
        with DLedgerClient(self._addresses, timeout_s=self._timeout_s) as client:
            count = 0
            while not self._stopping.wait(PAUSE_S):
                key, count = chance.choice(KEYS), count + 1
                kind = chance.choice(("look", "put", "swap"))
                if kind == "look":
                    self._look(client, key, known)
                else:
                    self._change(client, key, f"{number}.{count}", known, swap=kind == "swap")

    def _look(self, client: DLedgerClient, key: str, known: dict[str, int]) -> None:
        began = time.monotonic()
        try:
            answer = client.query(json.dumps({"op": "get", "key": key}).encode())
        except DLedgerError:
            return
        ended = time.monotonic()
        items = json.loads(answer.result)["items"]
        value, known[key] = (items[0]["value"], items[0]["revision"]) if items else (None, 0)
        self.history.record(Look(key, value, known[key], answer.applied_index, began, ended))

    def _change(self, client: DLedgerClient, key: str, value: str, known: dict[str, int], *, swap: bool) -> None:
        wanted: dict[str, object] = {"op": "put", "key": key, "value": value}
        expected = known[key] if swap else None
        if expected is not None:
            wanted["if_revision"] = expected
        began = time.monotonic()
        try:
            result = json.loads(client.command(json.dumps(wanted).encode()))
        except DLedgerError as error:
            told = Told.REFUSED if error.outcome == "not_applied" else Told.UNKNOWN
            self.history.record(Change(key, value, began, time.monotonic(), told, expected))
            return
        ended = time.monotonic()
        told = Told.DONE if result["ok"] else Told.OTHER_REVISION
        former = result["previous"] if result["ok"] else result["value"]
        known[key] = result["revision"]
        self.history.record(Change(key, value, began, ended, told, expected, known[key], former))
