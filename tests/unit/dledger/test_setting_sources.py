"""Reading settings: which known name an unknown one resembles, and what is corrected rather than refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.setting_sources import Readings, SettingTarget, Vocabulary, read
from dledger.values import parse_integer

TARGETS = {
    "listen_port": SettingTarget("listen_port", parse_integer),
    "listenPort": SettingTarget("listen_port", parse_integer),
    "broker_name": SettingTarget("broker_name", str),
    "brokerName": SettingTarget("broker_name", str),
    "inSyncReplicas": SettingTarget("in_sync_replicas", parse_integer),
    "storePathRootDir": SettingTarget("store_path_root_dir", str),
    "tls.enable": SettingTarget("tls", str),
    "aclEnable": SettingTarget("acl", str),
}
VOCABULARY = Vocabulary(
    TARGETS,
    ("totalReplicas", "enableLmq", "listenPorts", "dataStorePath", "sendThreadNums"),
    ("listen_port", "broker_name"),
    (),
)


def from_file(tmp_path: Path, text: str) -> Readings:
    """What is read from a conf file."""
    (tmp_path / "b.conf").write_text(text)
    return read(VOCABULARY, tmp_path / "b.conf", {}, {})


@pytest.mark.parametrize(
    ("unknown", "known"),
    [
        ("listenPrt", "listenPort"),
        ("listen_prt", "listen_port"),
        ("replicas", "inSyncReplicas"),
        ("enableTLS", "tls.enable"),
        ("sslEnabled", "tls.enable"),
        ("enableAcl", "aclEnable"),
        ("storePath", "storePathRootDir"),
        ("sendThreadNum", "sendThreadNums"),
    ],
)
def test_an_unknown_name_is_answered_with_one_of_its_family(unknown: str, known: str) -> None:
    """The same words count in any order, names with an effect come first, and the nearest typing error still wins."""
    assert VOCABULARY.hint(unknown) == f": did you mean {known}?"


def test_what_resembles_nothing_gets_no_guess() -> None:
    """A hint that misleads is worse than none."""
    assert VOCABULARY.hint("zzzzqqqq") == ""


def test_an_empty_number_counts_as_not_set_and_an_empty_text_is_one(tmp_path: Path) -> None:
    """Templates have empty lines; RocketMQ takes the default without a word."""
    found = from_file(tmp_path, "listenPort=  \nbrokerName=\n")

    assert found.problems == []
    assert found.corrections == [f"listenPort ({tmp_path / 'b.conf'}:1) is empty and counts as not set"]
    assert {name: one.value for name, one in found.chosen.items()} == {"broker_name": ""}


def test_of_two_lines_with_one_name_the_last_counts_and_is_told(tmp_path: Path) -> None:
    """As in Java; the same value twice is worth no word, two names that disagree stay a problem."""
    conf = tmp_path / "b.conf"
    found = from_file(tmp_path, "listenPort=1\nlistenPort=2\nbrokerName=a\nbrokerName=a\n")
    assert found.chosen["listen_port"].value == 2
    assert (found.corrections, found.problems) == ([f"listenPort=2 ({conf}:2) replaces 1 ({conf}:1)"], [])

    found = from_file(tmp_path, "listenPort=1\nlisten_port=2\n")
    assert found.problems == [f"{conf}:2: listen_port=2 contradicts listenPort=1 ({conf}:1): keep one of them"]


def test_a_comment_behind_a_number_is_explained(tmp_path: Path) -> None:
    """Java reads it as part of the value, and RocketMQ then takes the default."""
    (problem,) = from_file(tmp_path, "listenPort=10911 # clients\n").problems

    assert problem.endswith("invalid whole number '10911 # clients' (a comment needs a line of its own)")
