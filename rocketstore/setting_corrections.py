"""Settings that a broker corrects, as RocketMQ does, but aloud; and those of RocketMQ that it must not overlook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from dledger.java_names import SWITCHED_OFF
from dledger.setting_sources import Chosen, Given
from rocketstore.config import MessageStoreConfig

_CHECK: Final = "disk_max_used_space_ratio"
_CLEAN: Final = "disk_space_clean_forcibly_ratio"
_FULL: Final = "disk_space_warning_level_ratio"
_FORCED: Final = "clean_file_forcibly_enable"

_LIMITED: Final = {
    _CHECK: (10, 95, 10, 95),
    _CLEAN: (1, 100, 30, 85),
    _FULL: (1, 100, 35, 90),
    "register_name_server_period": (10_000, 60_000, 10_000, 60_000),
}
"""Lowest and highest value here, and RocketMQ's, which replace what lies outside."""

_REFUSED: Final = {
    "enableControllerMode": (
        "RocketMQ 5's controller, which chooses between master and slave, is not supported. For automatic failover "
        "remove it with controllerAddr, brokerId and brokerRole, and set enableDLegerCommitLog=true, dLegerGroup, "
        "dLegerPeers and dLegerSelfId; for a fixed role remove it and set brokerRole and brokerId"
    ),
    "brokerConfigPaths": (
        "the file describes a container of brokers, which are not supported: run `dledger broker -c FILE` for each file"
    ),
}
"""Settings of plain brokers without which a broker would be another one than its file describes."""


def refusals(unused: Iterable[Given]) -> list[str]:
    """Problems with settings that a broker cannot start without."""
    return [
        f"{one.source}: {one.name}={one.text.strip()}: {_REFUSED[one.name]}"
        for one in unused
        if one.name in _REFUSED and one.text.strip().lower() not in SWITCHED_OFF
    ]


def correct(chosen: dict[str, Chosen]) -> list[str]:
    """Replace values that RocketMQ replaces as well; returns a sentence about each."""
    told: list[str] = []
    for setting, (low, high, to_low, to_high) in _LIMITED.items():
        one = chosen.get(setting)
        if one is not None and isinstance(one.value, int) and not low <= one.value <= high:
            told.append(_replace(chosen, setting, one, to_low if one.value < low else to_high, "RocketMQ's limit"))
    if _CLEAN in chosen and _FORCED not in chosen:
        given = chosen[_CLEAN].given
        told.append(
            f"{given.name}={given.text} ({given.source}) removes nothing without cleanFileForciblyEnable=true: only "
            "expired files are removed, and a full disk refuses messages"
        )
    defaults = MessageStoreConfig()
    check, clean, full = (_number(chosen, setting, getattr(defaults, setting)) for setting in (_CHECK, _CLEAN, _FULL))
    if clean > full:
        one = chosen.get(_CLEAN) or chosen[_FULL]
        told.append(_replace(chosen, _CLEAN, one, full, "above which messages are refused"))
        clean = full
    if _CHECK in chosen and check > clean:
        told.append(_replace(chosen, _CHECK, chosen[_CHECK], clean, "the limit that diskSpaceCleanForciblyRatio sets"))
    return told


def _number(chosen: Mapping[str, Chosen], setting: str, default: int) -> int:
    value = chosen[setting].value if setting in chosen else default
    return value if isinstance(value, int) else default


def _replace(chosen: dict[str, Chosen], setting: str, one: Chosen, value: int, why: str) -> str:
    given = one.given
    subject = "" if chosen.get(setting) is one else f": {setting}"
    chosen[setting] = replace(one, value=value)
    return f"{given.name}={given.text} ({given.source}){subject} counts as {value}, {why}"
