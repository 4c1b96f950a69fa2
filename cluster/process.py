"""A server as a process: from its command line to its exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import click

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Server(Protocol):
    """What runs until it is stopped."""

    def start(self) -> object:
        """Serve."""

    def stop(self) -> None:
        """End gracefully."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit status once it has ended, None on timeout."""

    @property
    def fatal(self) -> BaseException | None:
        """Why it stopped itself."""


ServerT = TypeVar("ServerT", bound=Server)


def log_to_stderr(level: str) -> None:
    """What a server has to say while it runs."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(threadName)s %(name)s %(message)s",
    )


def assigned(assignments: Sequence[str], flags: Mapping[str, str]) -> dict[str, str]:
    """The settings given by ``--set NAME=VALUE``. Raises ``click.UsageError``, also for what ``flags`` has already."""
    found: dict[str, str] = {}
    for one in assignments:
        name, equals, text = one.partition("=")
        name = name.strip()
        if not equals or not name:
            raise click.UsageError(f"--set {one!r}: write --set NAME=VALUE")
        if name in found or name in flags:
            raise click.UsageError(f"--set {one!r}: {name} is given more than once")
        found[name] = text
    return found


def run(make: Callable[[], ServerT], ready: Callable[[ServerT], str], *, until_stdin_closes: bool) -> int:
    """Make and start a server, say on standard output that it is ready, and wait for its end; gives the exit code."""
    # Blocked before any thread exists, so that every thread inherits it and only the waiting one takes the signals: a
    # handler would run between two byte codes of the main thread, which may hold the very lock that stopping needs.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    server = make()
    _watch("dledger-signals", lambda: _on_signals(server.stop))
    server.start()
    if until_stdin_closes:
        _watch("dledger-stdin", lambda: _on_end_of_stdin(server.stop))
    if server.wait(0) is None:  # else a signal came during the recovery
        click.echo(ready(server))
        sys.stdout.flush()
    code = server.wait() or 0
    if code:
        # A node that failed must be gone at once: its other threads may wait for a disk that never answers.
        logging.getLogger(__name__).critical("stopping at once with exit code %d: %s", code, server.fatal)
        logging.shutdown()
        os._exit(code)
    return code


def _watch(name: str, wait_and_act: Callable[[], None]) -> None:
    """A daemon, because it may wait for ever for something that never comes and must not keep a stopped node alive."""
    threading.Thread(target=wait_and_act, name=name, daemon=True).start()


def _on_signals(stop: Callable[[], None]) -> None:
    """The first signal stops gracefully, a second one at once (the log is made for that)."""
    signal.sigwait(_STOP_SIGNALS)
    threading.Thread(target=stop, name="dledger-stop").start()
    os._exit(128 + signal.sigwait(_STOP_SIGNALS))


def _on_end_of_stdin(stop: Callable[[], None]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop()
