"""Values that RocketMQ takes otherwise than they are written: the same here, but aloud; and what stops a broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.config import StoreConfig
from dledger.errors import ConfigError
from rocketstore.broker_config import BrokerConfig
from rocketstore.settings import load_broker_settings

GROUP = "enableDLegerCommitLog=true\ndLegerGroup=g\ndLegerSelfId=n0\ndLegerPeers=n0-127.0.0.1:40911\n"


def load(tmp_path: Path, text: str) -> tuple[BrokerConfig, tuple[str, ...]]:
    """The configuration of a conf file, and its warnings."""
    (tmp_path / "b.conf").write_text(text)
    return load_broker_settings(tmp_path / "b.conf", {}, {})


def ratios(config: BrokerConfig) -> tuple[int, int, int]:
    """From the mildest to the harshest measure."""
    store = config.store
    return store.disk_max_used_space_ratio, store.disk_space_clean_forcibly_ratio, store.disk_space_warning_level_ratio


@pytest.mark.parametrize(
    ("text", "found", "told"),
    [
        ("diskMaxUsedSpaceRatio=85", (85, 85, 90), []),
        ("diskMaxUsedSpaceRatio=88", (85, 85, 90), ["diskMaxUsedSpaceRatio=88 ({}:1) counts as 85, the limit"]),
        ("diskMaxUsedSpaceRatio=5", (10, 85, 90), ["diskMaxUsedSpaceRatio=5 ({}:1) counts as 10, RocketMQ's limit"]),
        ("diskMaxUsedSpaceRatio=88\ndiskSpaceCleanForciblyRatio=89\ncleanFileForciblyEnable=true", (88, 89, 90), []),
        ("diskSpaceCleanForciblyRatio=80\ncleanFileForciblyEnable=false", (75, 80, 90), []),
        (
            "diskSpaceCleanForciblyRatio=80",
            (75, 80, 90),
            ["diskSpaceCleanForciblyRatio=80 ({}:1) removes nothing without cleanFileForciblyEnable=true"],
        ),
        (
            "diskSpaceCleanForciblyRatio=92\ncleanFileForciblyEnable=true",
            (75, 90, 90),
            ["diskSpaceCleanForciblyRatio=92 ({}:1) counts as 90, above"],
        ),
        (
            "diskSpaceCleanForciblyRatio=0\ncleanFileForciblyEnable=true",
            (30, 30, 90),
            ["diskSpaceCleanForciblyRatio=0 ({}:1) counts as 30, RocketMQ"],
        ),
        ("diskSpaceWarningLevelRatio=101", (75, 85, 90), ["diskSpaceWarningLevelRatio=101 ({}:1) counts as 90, Rock"]),
        (
            "diskSpaceWarningLevelRatio=80\ndiskMaxUsedSpaceRatio=82",
            (80, 80, 80),
            [
                "diskSpaceWarningLevelRatio=80 ({}:1): disk_space_clean_forcibly_ratio counts as 80, above",
                "diskMaxUsedSpaceRatio=82 ({}:2) counts as 80, the limit that diskSpaceCleanForciblyRatio sets",
            ],
        ),
    ],
)
def test_disk_ratios_are_put_in_order_in_both_modes(
    tmp_path: Path, text: str, found: tuple[int, int, int], told: list[str]
) -> None:
    """Cleaning never begins above the harsher measure, and each change is told with its line."""
    plain, warnings = load(tmp_path, text + "\n")
    member, also = load(tmp_path, text + "\n" + GROUP)

    check, clean, full = ratios(plain)
    assert (min(check, clean), clean, full) == (min(found[0], found[1]), *found[1:])
    assert check == found[0] or "diskMaxUsedSpaceRatio" not in text
    assert [
        one.partition(told_one)[1] for one, told_one in zip(warnings, _texts(tmp_path, told), strict=True)
    ] == _texts(tmp_path, told)
    assert warnings == also
    assert member.dledger is not None
    store: StoreConfig = member.dledger.store
    assert (store.disk_check_ratio, store.disk_clean_ratio, store.disk_full_ratio) == (
        min(check, clean) / 100,
        clean / 100,
        full / 100,
    )


def _texts(tmp_path: Path, told: list[str]) -> list[str]:
    return [one.format(tmp_path / "b.conf") for one in told]


@pytest.mark.parametrize(("text", "value"), [("5000", 10_000), ("10000", 10_000), ("1h", 60_000)])
def test_the_period_of_registrations_is_limited_as_in_rocketmq(tmp_path: Path, text: str, value: int) -> None:
    """From 10 to 60 s."""
    config, warnings = load(tmp_path, f"registerNameServerPeriod={text}\n")

    assert config.register_name_server_period == value
    assert bool(warnings) == (text != "10000")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("enableControllerMode=true\nbrokerId=-1\nbrokerRole=SLAVE\n", "set enableDLegerCommitLog=true"),
        ("brokerConfigPaths=/a.conf:/b.conf\n", "dledger broker -c FILE"),
    ],
)
def test_a_file_of_another_kind_of_broker_is_refused_with_the_way_out(tmp_path: Path, text: str, words: str) -> None:
    """Two masters of one name, or an empty broker instead of two, would be worse than no start."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)

    (problem,) = caught.value.problems
    assert problem.startswith(f"{tmp_path / 'b.conf'}:1: {text.partition(chr(10))[0]}: ")
    assert words in problem


@pytest.mark.parametrize(
    "text",
    [
        "enableControllerMode=false\n",
        "enableControllerMode= FALSE\n",
        "brokerConfigPaths=\n",
        f"enableControllerMode=true\n{GROUP}",
    ],
)
def test_it_is_not_refused_when_it_means_nothing(tmp_path: Path, text: str) -> None:
    """Switched off, or in a group, whose master is the leader in RocketMQ, too."""
    _, warnings = load(tmp_path, text)

    assert len(warnings) == 1
