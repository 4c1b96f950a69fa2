"""The rules file: read safely, and reloaded when it changes.

It holds secrets, so nobody else may have access: a file that others may read, or that its group may write, is refused
instead of only causing a warning, because a warning at a server's start is read when it is too late. Its group may read
it, which is how Kubernetes provides secrets (``fsGroup``, ``defaultMode: 0440``).
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from dledger.access.audit import AuditLog
from dledger.access.rules import AccessRules, parse_rules
from dledger.errors import ConfigError, told

_log = logging.getLogger("dledger.access")

FILE_BYTES_MAX: Final = 8 << 20
PROBLEMS_MAX: Final = 50
"""The limit of problems reported per file."""
INTERVAL_S: Final = 1.0
_FORBIDDEN: Final = stat.S_IRWXO | stat.S_IWGRP
_Stamp = tuple[int, int, int, int]
MakeThread = Callable[[str, Callable[[], None]], threading.Thread]
"""Creates a supervised thread of that name: without supervision, withdrawn rights could stay in force unnoticed."""


def load_rules(file: Path) -> AccessRules:
    """Raises ``ConfigError`` with all problems of the file."""
    return _load(file)[0]


def _load(file: Path) -> tuple[AccessRules, _Stamp]:
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            raw = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError([f"{file}: cannot read the access rules: {error.strerror}"]) from error
    problems = []
    if not stat.S_ISREG(status.st_mode):
        problems.append(f"{file}: not a regular file")
    if status.st_mode & _FORBIDDEN:
        mode = stat.S_IMODE(status.st_mode)
        problems.append(
            f"{file}: mode {mode:04o} exposes its secrets to others: run `chmod 600 {file}` (0640 and 0440 are "
            "also accepted)"
        )
    if len(raw) > FILE_BYTES_MAX:
        problems.append(f"{file}: more than {FILE_BYTES_MAX} bytes")
    if problems:
        raise ConfigError(problems)
    try:
        rules = parse_rules(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file}: not valid UTF-8: {error.reason} at byte {error.start}"]) from None
    except ConfigError as error:
        raise ConfigError(_bounded(file, error.problems)) from None
    return rules, _stamp(status)


def _bounded(file: Path, problems: Sequence[str]) -> list[str]:
    """Problems quote the file, and a large one may have a million of them."""
    shown = [f"{file}: {told(problem)}" for problem in problems[:PROBLEMS_MAX]]
    if len(problems) > PROBLEMS_MAX:
        shown.append(f"{file}: {len(problems) - PROBLEMS_MAX} more problems")
    return shown


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode


class RulesFile:
    """Reads the file on creation (raising ``ConfigError``); from ``start`` to ``close`` a thread reports new rules.

    Problems of new rules are logged, each once per change, and the old rules stay. The thread reads the file itself,
    because a disk may keep it waiting.
    """

    def __init__(self, file: Path, *, interval_s: float = INTERVAL_S) -> None:
        self.rules, self._loaded = _load(file)
        self._file = file
        self._interval_s = interval_s
        self._told: _Stamp | str = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, thread: MakeThread, name: str, changed: Callable[[AccessRules], None], audit: AuditLog) -> None:
        """Call ``changed`` on the thread for every good change from now on; has the audit log write its counts."""
        self._thread = thread(f"dledger-access-{name}", partial(self._run, changed, audit))
        self._thread.daemon = True
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, changed: Callable[[AccessRules], None], audit: AuditLog) -> None:
        while not self._stop.wait(self._interval_s):
            if self.look():
                changed(self.rules)
            audit.flush()
        audit.flush()

    def look(self) -> bool:
        """Read the file if it differs from the one in force; returns whether ``rules`` are new."""
        try:
            stamp = _stamp(self._file.stat())
            if stamp in (self._loaded, self._told):
                return False
            rules, loaded = _load(self._file)
        except (OSError, ConfigError) as error:
            self._complain(error)
            return False
        self.rules, self._loaded, self._told = rules, loaded, ""
        _log.info("%s: reloaded access rules: %d accounts", self._file, len(rules.accounts))
        return True

    def _complain(self, error: OSError | ConfigError) -> None:
        try:
            told: _Stamp | str = _stamp(self._file.stat())
        except OSError as missing:
            told = str(missing)
        if told == self._told:
            return
        self._told = told
        problems = error.problems if isinstance(error, ConfigError) else (f"{self._file}: {error.strerror}",)
        for problem in problems:
            _log.error("cannot reload access rules, keeping the old ones: %s", problem)
