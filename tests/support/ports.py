"""Free TCP ports of this machine."""

from __future__ import annotations

from cluster.local_group import free_ports

__all__ = ["free_ports"]
