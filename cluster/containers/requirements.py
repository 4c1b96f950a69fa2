"""Print what the project depends on, one requirement per line: ``requirements.py pyproject.toml EXTRA…``.

Needs nothing but Python, so that an image's dependencies can be a layer that only ``pyproject.toml`` changes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The project's requirements and those of some extras."""
    project = tomllib.loads(pyproject.read_text())["project"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in requirements(Path(sys.argv[1]), sys.argv[2:]))
