"""The command that installs the packages of an extra, from this installation's own metadata.

The project is not on PyPI, and an installation does not know where it came from. The packages of its extras are.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec


def problem(extra: str, needed_by: str, packages: Sequence[str]) -> str:
    """Which of these packages are missing and how to install them; empty if all are there."""
    missing = [name for name in packages if find_spec(name) is None]
    if not missing:
        return ""
    return f"{needed_by} requires {' and '.join(missing)}, not installed here: run {install_command(extra)}"


def install_command(extra: str) -> str:
    """``pip install 'starlette<1,>=0.47' …``; from uninstalled sources, the command for a clone."""
    try:
        requirements = requires("dledger") or []
    except PackageNotFoundError:
        requirements = []
    packages = [shlex.quote(one) for one in dict.fromkeys(_packages(extra, requirements))]
    return "pip install " + (" ".join(packages) or f"'.[{extra}]' in a clone of the project")


def _packages(extra: str, requirements: list[str]) -> Iterator[str]:
    for requirement in requirements:
        package, _, marker = (part.strip() for part in requirement.partition(";"))
        if marker.replace("'", '"').replace(" ", "") != f'extra=="{extra}"':
            continue
        if package.startswith("dledger["):
            for other in package[len("dledger[") : -1].split(","):
                yield from _packages(other.strip(), requirements)
        else:
            yield package
