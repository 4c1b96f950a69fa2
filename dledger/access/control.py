"""Access control of one server, built from its settings: the guard, and the rules file that it follows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from dledger.access.guard import AccessGuard
from dledger.access.rules import AccessRules
from dledger.access.rules_file import MakeThread, RulesFile
from dledger.clock import Clock
from dledger.config import AccessConfig

_log = logging.getLogger("dledger.access")


class AccessControl:
    """Created by ``of``; ``start`` it once there is an event loop, ``close`` ends its thread."""

    def __init__(self, file: RulesFile, guard: AccessGuard, name: str) -> None:
        self.guard = guard
        self._name = name
        self._file = file

    @classmethod
    def of(cls, config: AccessConfig, *, name: str, clock: Clock) -> AccessControl | None:
        """None if it is off.

        Raises ``ConfigError`` for rules that cannot be used: nothing may be open by mistake.
        """
        if not config.acl_enable or config.acl_file is None:
            if config.acl_file is not None:
                _log.warning(
                    "acl_file is set but acl_enable is not true: access control is off, every client may do everything"
                )
            return None
        file = RulesFile(config.acl_file)
        return cls(file, AccessGuard(file.rules, name=name, clock=clock), name)

    def start(self, post: Callable[[Callable[[], None]], None], thread: MakeThread) -> None:
        """Follow the file on a thread; ``post`` runs something on the guard's event loop."""

        def changed(rules: AccessRules) -> None:
            post(partial(self.guard.apply, rules))

        self._file.start(thread, self._name, changed, self.guard.audit)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._file.close()
