"""Finds Compose: Docker's plugin, or Debian's docker-compose 1.29."""

from __future__ import annotations

import shutil
import subprocess


def compose_command() -> list[str] | None:
    """The command that starts Compose; None if there is none."""
    if shutil.which("docker") is not None:
        asked = subprocess.run(["docker", "compose", "version"], check=False, capture_output=True)
        if asked.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") is not None else None
