"""A server's log on standard error: text lines, or one JSON object per line.

Both contain the same events; in JSON, an event's facts (``extra`` of the record) are separate fields next to the
message, and every line names its node and its group, unless it is about a process of several groups as a whole. In
text, lines of a process of several groups name their group. Secrets are never passed to a logger, so nothing is masked.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import PurePath
from typing import Any, Final

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
        """The line."""
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
