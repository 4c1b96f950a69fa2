"""The threads that ask the application about open transactions. ``aio_checks`` has the tasks that do the same."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from dledger.client.discovery import Directory
from dledger.client.security import ClientSecurity
from rocketstore.client.transactions import CheckMember
from rocketstore.pb import broker_pb2 as pb

_log = logging.getLogger(__name__)
WORKERS: Final = 1


class CheckWorkers:
    """Calls ``handle`` with every check. Its errors are logged: the group is asked again."""

    def __init__(
        self,
        directory: Directory,
        group: str,
        handle: Callable[[pb.TransactionCheck], None],
        *,
        timeout_s: float,
        security: ClientSecurity | None,
        workers: int = WORKERS,
    ) -> None:
        self._changed = threading.Condition()
        self._member = CheckMember(directory, group, self._news, timeout_s=timeout_s, security=security)
        self.new_transaction_id: Final = self._member.ids.next
        self._handle = handle
        self._count = workers
        self._workers: list[threading.Thread] = []
        self._joined = False  # once
        self._closed = False

    def start(self) -> None:
        """Begin, and wait until the master knows this member. Raises what keeps it from joining."""
        self.begin()
        if not self._joined:
            self._member.wait_joined()
            self._joined = True

    def begin(self) -> None:
        """Begin to join, and to answer. Raises ``UnavailableError`` when closed. May be called again."""
        if self._workers and not self._closed:
            return
        self._member.begin()
        with self._changed:
            while len(self._workers) < self._count and not self._closed:
                name = f"rocketstore-check-{self._member.group}-{len(self._workers)}"
                worker = threading.Thread(target=self._work, name=name, daemon=True)
                worker.start()  # before anybody may join it
                self._workers.append(worker)

    def close(self) -> None:
        """Wait for what the application is doing, then leave the group. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._workers:
            if thread is not threading.current_thread():
                thread.join()
        self._member.close()

    def _news(self) -> None:
        with self._changed:
            self._changed.notify()

    def _next(self) -> pb.TransactionCheck | None:
        with self._changed:
            while not self._closed:
                check = self._member.pending.pop()
                if check is not None:
                    return check
                self._changed.wait()
        return None

    def _work(self) -> None:
        while (check := self._next()) is not None:
            try:
                self._handle(check)
            except BaseException as error:  # noqa: BLE001  # also SystemExit: whatever it is, the group is asked again
                _log.warning("producer group %s: a check failed", self._member.group, exc_info=error)
            finally:
                self._member.pending.done(check)
