"""The audit log (logger ``dledger.audit``): who asked for what, from where, and whether it was allowed.

Every refusal, and every change that an administrator may make. A refusal that repeats itself is written once per
second, with how many were left out: a client that goes on sending must not fill the disk. What clients say stands in
quotes as JSON, so that no line can be forged. Secrets and signatures never get here.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from dataclasses import dataclass
from typing import Final

_log = logging.getLogger("dledger.audit")

REPEATED_MAX: Final = 1024
"""Different refusals that are counted at once; further ones are written one by one."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:%|/@+?\[\]-]+")


@dataclass(frozen=True, slots=True)
class Event:
    """What was asked for. ``resource`` is empty where the action says it all; an unproved ``caller`` ends in ``?``."""

    caller: str
    peer: str
    action: str
    resource: str
    reason: str = ""


class AuditLog:
    """Thread-safe. ``flush`` once per second writes what was left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _repeated
        self._repeated: dict[Event, int] = {}

    def allowed(self, event: Event) -> None:
        """An administrator's change was let through."""
        _log.info("%s", _text(event, "allowed"), extra=_facts(event, "allowed"))

    def denied(self, event: Event) -> None:
        """Something was refused."""
        # A peer's port changes with every connection; the address does not.
        alike = Event(event.caller, event.peer.rpartition(":")[0], event.action, event.resource, event.reason)
        with self._lock:
            if alike in self._repeated:
                self._repeated[alike] += 1
                return
            if len(self._repeated) < REPEATED_MAX:
                self._repeated[alike] = 0
        _log.warning("%s", _text(event, "denied"), extra=_facts(event, "denied"))

    def flush(self) -> None:
        """Write how often refusals were repeated since the last time."""
        with self._lock:
            repeated, self._repeated = self._repeated, {}
        for event, times in repeated.items():
            if times:
                facts = _facts(event, "denied") | {"repeated": times}
                _log.warning("%s repeated=%d", _text(event, "denied"), times, extra=facts)


def _text(event: Event, result: str) -> str:
    return " ".join(f"{name}={_quoted(text)}" for name, text in _words(event, result).items() if text)


def _facts(event: Event, result: str) -> dict[str, object]:
    """The same as fields of the log record, for logs as JSON."""
    return {"event": "audit", **_words(event, result)}


def _words(event: Event, result: str) -> dict[str, str]:
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
