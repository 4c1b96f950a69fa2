"""TLS: the files that hold certificates, and what gRPC makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from dledger.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: ``ca`` holds whom to trust; ``cert`` and ``key``, given both or neither, say who we are.

    ``cert`` begins with our own certificate; certificates between it and the CA's may follow.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError(["a TLS certificate and its key are given together: one of the two is missing"])


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """What a gRPC client shows and trusts. Raises ``ConfigError`` if a file cannot be read."""
    chain = None if files.cert is None else _read(files.cert)
    key = None if files.key is None else _read(files.key)
    return grpc.ssl_channel_credentials(_read(files.ca), key, chain)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
