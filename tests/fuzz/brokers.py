"""Brokers with small files, made as ``dledger broker`` makes them: from settings."""

from __future__ import annotations

from pathlib import Path

from dledger_cli.local.group import free_ports
from rocketstore.broker_config import BrokerConfig
from rocketstore.settings import load_broker_settings

SETTINGS = {
    "mappedFileSizeCommitLog": "16k",
    "mappedFileSizeConsumeQueue": "400",
    "maxHashSlotNum": "20",
    "maxIndexNum": "64",
    "maxMessageSize": "4096",
    "deleteWhen": "",
    "diskMaxUsedSpaceRatio": "100",
    "diskSpaceWarningLevelRatio": "100",
    "diskSpaceCleanForciblyRatio": "100",
    "vipPort": "0",
}


def _plain(root: Path) -> BrokerConfig:
    return load_broker_settings(None, {}, {**SETTINGS, "storePathRootDir": str(root), "listenPort": "0"})[0]


def _replicated(root: Path, others: int = 0) -> BrokerConfig:
    listen, *peers = free_ports(2 + others)  # at once: they must differ
    flags = {
        "storePathRootDir": str(root),
        "enableDLegerCommitLog": "true",
        "dLegerGroup": "G",
        "dLegerSelfId": "n0",
        "dLegerPeers": ";".join(f"n{number}-127.0.0.1:{port}" for number, port in enumerate(peers)),
        "cluster_id": "C",
        "listenPort": str(listen),
        "index_segment_bytes": "1600",
        "max_entry_bytes": "8192",
        "warm_bytes": "0",
    }
    return load_broker_settings(None, {}, SETTINGS | flags)[0]


def _member(root: Path) -> BrokerConfig:
    """The others do not run."""
    return _replicated(root, others=2)


CONFIGS = {"plain": _plain, "alone": _replicated, "member": _member}
