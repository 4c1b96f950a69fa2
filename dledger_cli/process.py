"""Runs a server as a process, from its command line to its exit code, and logs to standard error.

A log's lines are text, or one JSON object each. Both contain the same events; in JSON, an event's facts (``extra`` of
the record) are separate fields next to the message, and every line names its node and its group, unless it is about a
process of several groups as a whole. In text, lines of a process of several groups name their group. Secrets are never
passed to a logger, so nothing is masked.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Final, Protocol, TypeVar

import click

from dledger.log_output import speaking_group
from dledger_cli.terminal import escaped, escaped_json

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")
_TEXT: Final = "%(asctime)s %(levelname)s %(threadName)s %(name)s %(message)s"
_GRPC_LOGGER: Final = "grpc._cython.cygrpc"
_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
"""Attributes of every record; all others come from ``extra``."""


class TextFormatter(logging.Formatter):
    """One line per event; what strangers have written in it begins no other line, and does nothing to a terminal."""

    def __init__(self) -> None:
        super().__init__(_TEXT)
        self.names_groups = False
        """Whether messages begin with the group that they are about."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        """The line without its traceback."""
        group = speaking_group()
        if self.names_groups and group and not record.message.startswith(f"{group}/"):
            record.message = f"{group}: {record.message}"
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: ANN401, N802  # logging's
        """The traceback, whose lines stay lines."""
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), level, logger, thread, message, the speaker, then the event's facts."""

    def __init__(self) -> None:
        super().__init__()
        self.who: dict[str, str] = {}
        """Fields of every line, such as the node."""

    def format(self, record: logging.LogRecord) -> str:
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{now}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
            **self.who,
            **({"group": group} if (group := speaking_group()) else {}),
            **{name: value for name, value in vars(record).items() if name not in _PLAIN},
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = repr(record.exc_info[1])
            fields["stack"] = self.formatException(record.exc_info)
        return escaped_json(json.dumps(fields, ensure_ascii=False, default=_plainly))


def to_stderr(level: str, form: str = "text") -> None:
    """Log from ``level`` on; call once per process. ``form`` is one of ``FORMATS``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger(_GRPC_LOGGER).addFilter(is_no_lost_client)


def name_speaker(**who: str) -> None:
    """Add fields that identify the speaker to every JSON line from now on: ``node``, and ``group`` if it has one only.

    Without ``group``, text lines name theirs.
    """
    for formatter in _formatters():
        if isinstance(formatter, JsonFormatter):
            formatter.who.update(who)
        elif isinstance(formatter, TextFormatter):
            formatter.names_groups = "group" not in who


def announcement(text: str, event: str) -> str:
    """A line for standard output in the format of the log."""
    for formatter in _formatters():
        if isinstance(formatter, JsonFormatter):
            record = logging.makeLogRecord({"name": "dledger", "levelname": "INFO", "msg": text, "event": event})
            return formatter.format(record)
    return text


def _formatters() -> list[logging.Formatter | None]:
    return [handler.formatter for handler in logging.getLogger().handlers]


def _plainly(value: object) -> object:
    """Converts values that JSON lacks: paths and other objects to text, tuples element by element."""
    return str(value) if isinstance(value, PurePath) else repr(value)


def is_no_lost_client(record: logging.LogRecord) -> bool:
    """Filters out gRPC's error and traceback for a client that disconnected before its response was written."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


_log = logging.getLogger("dledger")
_DESCRIPTORS: Final = 65_536
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Server(Protocol):
    """A server that runs until it is stopped."""

    def start(self) -> object:
        """Start serving."""

    def stop(self) -> None:
        """Stop gracefully."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit status once it has ended; None on timeout."""

    @property
    def fatal(self) -> BaseException | None:
        """The error that made it stop itself."""


ServerT = TypeVar("ServerT", bound=Server)


FC = TypeVar("FC", bound=Callable[..., Any])  # Any: a command's parameters


def conf_files_option(text: str) -> Callable[[FC], FC]:
    """``--config``, once for each group of the process, passed as ``config_files``."""
    kind = click.Path(path_type=Path)
    return click.option(
        "-c", "--config", "config_files", envvar="DLEDGER_CONFIG", type=kind, metavar="FILE", multiple=True, help=text
    )


def refuse_flags_of_one(named: Mapping[str, str | None], of_one: Mapping[str, str], files: Sequence[Path]) -> None:
    """Raise ``click.UsageError`` for flags of one group if there are several, because they would precede every file.

    ``of_one``: settings, and their flags' names.
    """
    if len(files) > 1 and (given := [flag for name, flag in of_one.items() if named.get(name) is not None]):
        told = ", ".join(f"--{flag}" for flag in given)
        raise click.UsageError(f"{told} cannot be given for several groups: write it into each file")


def conf_option(text: str) -> Callable[[FC], FC]:
    """``--config``, passed as ``config_file``."""
    kind = click.Path(path_type=Path)
    return click.option("-c", "--config", "config_file", envvar="DLEDGER_CONFIG", type=kind, metavar="FILE", help=text)


def server_options(*, repair: str = "") -> Callable[[FC], FC]:
    """The options of every server, for ``begin`` and ``run``; ``repair``: what that option does, if there is one."""
    option = click.option
    level: dict[str, Any] = {"default": "info", "show_default": True, "type": click.Choice(LEVELS)}  # Any: mixed
    options = [
        option("--insecure", is_flag=True, help="Serve plaintext to other machines too; see the settings tls_…."),
        option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other setting; may be repeated."),
        option("--repair", is_flag=True, help=repair),
        option("--log-level", envvar="DLEDGER_LOG_LEVEL", help="Log messages of this level and above.", **level),
        option(
            "--log-format",
            envvar="DLEDGER_LOG_FORMAT",
            type=click.Choice(FORMATS),
            default="text",
            show_default=True,
            help="Log as plain text, or as one JSON object per line.",
        ),
        option("--until-stdin-closes", is_flag=True, hidden=True, help="Stop when the parent process exits."),
    ]
    if not repair:
        del options[2]

    def decorate(command: FC) -> FC:
        for one in reversed(options):
            command = one(command)
        return command

    return decorate


def begin(
    named: Mapping[str, str | None], assignments: Sequence[str], *, insecure: bool, log_level: str, log_format: str
) -> dict[str, str]:
    """Log as the command line says; returns the settings that it gives. Raises ``click.UsageError``."""
    to_stderr(log_level, log_format)
    flags = {name: text for name, text in named.items() if text is not None}
    if insecure:
        flags["insecure"] = "true"
    return flags | assigned(assignments, flags)


def warn(warnings: Iterable[str]) -> None:
    """Log what is strange in the settings."""
    for warning in warnings:
        _log.warning("%s", warning)


def assigned(assignments: Sequence[str], flags: Mapping[str, str]) -> dict[str, str]:
    """The settings from ``--set NAME=VALUE``. Raises ``click.UsageError``, also for duplicates of ``flags``."""
    found: dict[str, str] = {}
    for one in assignments:
        name, equals, text = one.partition("=")
        name = name.strip()
        if not equals or not name:
            raise click.UsageError(f"invalid --set {one!r}: use --set NAME=VALUE")
        if name in found or name in flags:
            raise click.UsageError(f"--set {one!r}: {name} appears more than once")
        found[name] = text
    return found


def run(make: Callable[[], ServerT], ready: Callable[[ServerT], str], *, until_stdin_closes: bool) -> int:
    """Create and start a server, print that it is ready, and wait for its end; returns the exit code."""
    signals = _catch_signals()
    _allow_descriptors()
    server = make()
    _watch("dledger-signals", lambda: _on_signals(signals, server.stop))
    server.start()
    if until_stdin_closes:
        _watch("dledger-stdin", lambda: _on_end_of_stdin(server.stop))
    if server.wait(0) is None:  # otherwise a signal arrived during recovery
        click.echo(announcement(ready(server), "started"))
        sys.stdout.flush()
    code = server.wait() or 0
    if code:
        # A failed node must exit at once: its other threads may be waiting for a disk that never responds.
        _log.critical("exiting immediately with code %d: %s", code, server.fatal, extra={"event": "failed"})
        logging.shutdown()
        os._exit(code)
    _log.info("stopped", extra={"event": "stopped"})
    return code


def _allow_descriptors() -> None:
    """Raise the soft limit of open files to the hard one: the usual 1024 are fewer than the connections it accepts.

    Without a free descriptor no segment can be created, and the node stops.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _watch(name: str, wait_and_act: Callable[[], None]) -> None:
    """A daemon thread, because it may wait forever and must not keep a stopped node alive."""
    threading.Thread(target=wait_and_act, name=name, daemon=True).start()


def _catch_signals() -> int:
    """Have every stop signal write a byte to a pipe; returns the end to read from.

    Not by blocking the signals for a waiting thread: libraries such as numpy may have started threads that do not block
    them, and the signal would end the process there. Not in a handler either: it runs between two bytecodes of the main
    thread, which may hold the lock that stopping needs. Python requires one, so it does nothing.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for one in _STOP_SIGNALS:
        signal.signal(one, lambda _number, _frame: None)
    return reading


def _on_signals(signals: int, stop: Callable[[], None]) -> None:
    """The first signal stops gracefully, a second one at once, which the log tolerates."""
    name = signal.Signals(_next_signal(signals)).name
    _log.info("stopping because of %s", name, extra={"event": "stopping", "reason": name})
    threading.Thread(target=stop, name="dledger-stop").start()
    os._exit(128 + _next_signal(signals))


def _next_signal(signals: int) -> int:
    while (number := os.read(signals, 1)[0]) not in _STOP_SIGNALS:
        pass
    return number


def _on_end_of_stdin(stop: Callable[[], None]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop()
