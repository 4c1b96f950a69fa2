"""A broker's configuration while it runs: a few settings can change, until the next start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from dledger.errors import InvalidRequestError
from rocketstore.broker_config import BrokerConfig
from rocketstore.settings import TARGETS

_CHANGEABLE: Final = frozenset(
    {
        "auto_create_subscription_group",
        "auto_create_topic_enable",
        "broker_permission",
        "default_topic_queue_nums",
        "enable_property_filter",
        "pull_bytes_max",
        "reject_transaction_message",
        "slave_read_enable",
    }
)
"""Settings that can change; everything else is read at the start, by something."""


class FixedSettingError(InvalidRequestError):
    """Raised for a setting that cannot change while the broker runs."""


class LiveConfig:
    """``now`` may be read on any thread, and at each use: it changes. ``change`` is for the loop's."""

    def __init__(self, config: BrokerConfig) -> None:
        self.now = config
        self.changes = 0
        """How often it has changed."""

    def change(self, given: Mapping[str, str]) -> dict[str, str]:
        """Change all of these settings, by any of their names, or none; returns what was changed, for people.

        Raises ``InvalidRequestError``.
        """
        wanted: dict[str, Any] = {}  # Any: each value has the type of its own setting
        problems: list[str] = []
        for name, text in given.items():
            target = TARGETS.get(name)
            if target is None:
                problems.append(f"there is no setting {name[:64]!r}")
            elif target.setting in _CHANGEABLE:
                try:
                    wanted[target.setting] = target.parse(text)
                except ValueError as error:
                    problems.append(f"{name}: {error}")
        if problems:
            raise InvalidRequestError("; ".join(problems))
        fixed = sorted(name for name in given if TARGETS[name].setting not in _CHANGEABLE)
        if fixed:
            can = ", ".join(sorted(_CHANGEABLE))
            raise FixedSettingError(
                f"{', '.join(fixed)} can only be changed in the conf file, for the next start; while a broker runs, "
                f"these can change: {can}"
            )
        changed = {name: value for name, value in wanted.items() if getattr(self.now, name) != value}
        if changed:
            self._adopt(replace(self.now, **changed))
        return {name: str(value) for name, value in changed.items()}

    def _adopt(self, config: BrokerConfig) -> None:
        if problems := config.problems():
            raise InvalidRequestError("; ".join(problems))
        self.now = config
        self.changes += 1
