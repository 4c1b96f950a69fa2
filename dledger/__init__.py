"""A Raft-replicated commit log: what RocketMQ calls DLedger mode, with Raft's rules kept."""

__version__ = "0.1.0"
