"""Notices about settings that were read and change nothing: alarms first, then a line per subject."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from dledger.java_names import ALARMS, SWITCHED_OFF, Idleness, Risk, family_of
from dledger.setting_sources import Given

_NAMES_MAX: Final = 8
"""Names in one line; the debug log has all of them."""

logger = logging.getLogger(__name__)


def notices(unused: Iterable[Given]) -> tuple[str, ...]:
    """Warnings about known settings without effect: a line per alarm, a line per unsupported subject, one for the rest.

    An unsupported setting that is only switched off belongs to the rest. The debug log gets every setting with its
    value, its place and what it means.
    """
    alarms: list[str] = []
    unsupported: dict[str, list[Given]] = {}
    idle: dict[str, list[Given]] = {}
    for given in unused:
        family, value = family_of(given.name), given.text.strip()
        logger.debug("%s=%s (%s): %s: %s", given.name, value, given.source, family.idleness, _plain(family.means))
        wanted = value.lower() not in SWITCHED_OFF
        alarm = ALARMS.get(given.name)
        if alarm is not None and wanted:
            alarms.append(f"{alarm.risk.upper()}: {given.name}={value} ({given.source}) {alarm.means}")
        elif family.idleness is Idleness.UNSUPPORTED and wanted:
            unsupported.setdefault(family.subject, []).append(given)
        else:
            idle.setdefault(family.subject, []).append(given)
    lines = [_unsupported_line(some) for some in unsupported.values()]
    if idle:
        parts = (f"{_names(some)} ({subject})" for subject, some in idle.items())
        lines.append(f"settings that change nothing here: {', '.join(parts)}")
    return (*alarms, *lines)


def alarms_first(warnings: Iterable[str]) -> tuple[str, ...]:
    """The same warnings, in the order in which people should read them."""
    marks = tuple(f"{risk.upper()}: " for risk in Risk)
    return tuple(sorted(warnings, key=lambda one: not one.startswith(marks)))


def _unsupported_line(some: Sequence[Given]) -> str:
    family = family_of(some[0].name)
    return f"{family.subject}: not supported: {_names(some)} ({places(some)}). {_plain(family.means)}"


def _names(some: Sequence[Given]) -> str:
    names = list(dict.fromkeys(one.name for one in some))
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def places(some: Iterable[Given]) -> str:
    """Where settings were given; lines of one file follow its name once."""
    found: dict[str, list[str]] = {}
    for one in some:
        file, _, line = one.source.rpartition(":")
        if not line.isdigit():
            file, line = one.source, ""
        lines = found.setdefault(file, [])
        if line and line not in lines:
            lines.append(line)
    return "; ".join(file + (":" + ",".join(lines) if lines else "") for file, lines in found.items())


def _plain(means: str) -> str:
    """For a terminal: without the marks of the reference."""
    return means.replace("`", "").removesuffix(".")
