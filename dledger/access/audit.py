"""The audit log (logger ``dledger.audit``): who requested what, from where, and whether it was allowed.

It records every change allowed to administrators, and refusals. A repeated refusal is written once per second, with the
number of repetitions. Of different ones each source may have a few lines per second, and all together not many more, so
that a client that makes up keys does not fill the disk; the others are counted. A source is an authenticated account,
or an address. Text from clients is quoted as JSON, so that no line can be forged. Secrets and signatures never get
here.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Final

_log = logging.getLogger("dledger.audit")

SOURCE_LINES_MAX: Final = 10
"""Different refusals of one source written per second."""
LINES_MAX: Final = 100
"""The same for all sources together."""
SOURCES_MAX: Final = 32
"""Sources whose further refusals are counted separately; the rest are counted together."""
_OTHERS: Final = "elsewhere"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:%|/@+?\[\]-]+")


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """A request. ``resource`` is empty where the action suffices; an unauthenticated ``caller`` ends in ``?``."""

    caller: str
    peer: str
    action: str
    resource: str
    reason: str = ""


class AuditLog:
    """Thread-safe. ``flush``, once per second, writes the counts of what was left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below, which cover the current second
        self._repeated: dict[AuditEvent, int] = {}
        self._lines: Counter[str] = Counter()  # by source
        self._left_out: Counter[str] = Counter()  # by address

    def allowed(self, event: AuditEvent) -> None:
        """Record a change allowed to an administrator."""
        _log.info("%s", _text(event, "allowed"), extra=_facts(event, "allowed"))

    def denied(self, event: AuditEvent) -> None:
        # A peer's port changes with every connection; the address does not.
        host = event.peer.rpartition(":")[0]
        alike = AuditEvent(event.caller, host, event.action, event.resource, event.reason)
        source = f"{event.caller}@" if event.caller and not event.caller.endswith("?") else host
        with self._lock:
            if alike in self._repeated:
                self._repeated[alike] += 1
                return
            if len(self._repeated) >= LINES_MAX or self._lines[source] >= SOURCE_LINES_MAX:
                self._left_out[host if host in self._left_out or len(self._left_out) < SOURCES_MAX else _OTHERS] += 1
                return
            self._lines[source] += 1
            self._repeated[alike] = 0
        _log.warning("%s", _text(event, "denied"), extra=_facts(event, "denied"))

    def flush(self) -> None:
        """Write how often refusals were repeated since the last call."""
        with self._lock:
            repeated, self._repeated = self._repeated, {}
            left_out, self._left_out = self._left_out, Counter()
            self._lines.clear()
        for event, times in repeated.items():
            if times:
                facts = _facts(event, "denied") | {"repeated": times}
                _log.warning("%s repeated=%d", _text(event, "denied"), times, extra=facts)
        for host, times in left_out.items():
            event = AuditEvent("", host, "", "", "too many distinct refusals to log each one")
            facts = _facts(event, "denied") | {"others": times}
            _log.warning("%s others=%d", _text(event, "denied"), times, extra=facts)


def _text(event: AuditEvent, result: str) -> str:
    return " ".join(f"{name}={_quoted(text)}" for name, text in _words(event, result).items() if text)


def _facts(event: AuditEvent, result: str) -> dict[str, object]:
    """The same as fields of the log record, for logs in JSON."""
    return {"event": "audit", **_words(event, result)}


def _words(event: AuditEvent, result: str) -> dict[str, str]:
    return {
        "result": result,
        "action": event.action,
        "resource": event.resource,
        "caller": event.caller,
        "from": event.peer,
        "reason": event.reason,
    }


def _quoted(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
