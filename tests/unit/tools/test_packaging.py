"""What is installed must do without what is only in the repository."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from glob import glob
from pathlib import Path
from typing import Final

import dledger

ROOT: Final = Path(__file__).parents[3]
REPOSITORY_ONLY: Final = frozenset({"benchmarks", "cluster", "examples", "tests", "tools"})
_PAGES: Final = (".css", ".html", ".js")


def packages() -> list[Path]:
    """Directories at the root that are installed, as pyproject.toml says."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    tops = [path for path in ROOT.iterdir() if (path / "__init__.py").is_file()]
    return [path for path in tops if any(fnmatch(path.name, pattern) for pattern in found)]


def imported(path: Path) -> Iterator[str]:
    """The top of every module that this one imports, anywhere in it, by statement or by name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            is_name = "." in node.value and " " not in node.value and not node.value.endswith(_PAGES)
            yield node.value.partition(".")[0] if is_name else ""


def test_nothing_that_is_installed_needs_the_repository() -> None:
    """An import there would work for us, and for nobody who has installed the packages."""
    modules = [module for package in packages() for module in package.rglob("*.py")]

    wrong = {
        str(module.relative_to(ROOT)): sorted(found)
        for module in modules
        if (found := REPOSITORY_ONLY.intersection(imported(module)))
    }

    assert len(modules) > 300
    assert wrong == {}
    assert REPOSITORY_ONLY.isdisjoint(package.name for package in packages())


def test_every_file_of_a_package_is_installed() -> None:
    """Pages, styles and deployment files, too: a wheel without them fails where nobody here looks."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    data = [
        path
        for package in packages()
        for directory, _, names in os.walk(package, followlinks=True)
        for path in (Path(directory) / name for name in names)
        if path.suffix not in (".py", ".pyi", ".pyc")
    ]
    installed = {
        path
        for package, of_package in patterns.items()
        for pattern in of_package
        for path in map(
            Path,
            glob(
                f"{ROOT}/{package}/{pattern}/*" if pattern.endswith("**") else f"{ROOT}/{package}/{pattern}",
                recursive=True,
            ),
        )
    }

    assert ROOT / "dledger_cli" / "deploy" / "systemd" / "dledger.service" in data
    assert {path for path in data if path not in installed} == set()


def test_the_source_distribution_holds_the_whole_repository() -> None:
    """Also the tests, documents and deployment files that are not installed."""
    manifest = (ROOT / "MANIFEST.in").read_text().split()

    for directory in (*REPOSITORY_ONLY, ".ci", "cluster", "docs", "proto"):
        assert (ROOT / directory).is_dir()
        assert directory in manifest
    for file in ROOT.iterdir():
        known = file.name in ("pyproject.toml", "MANIFEST.in") or any(fnmatch(file.name, one) for one in manifest)
        assert known or not file.is_file() or file.name.startswith(".git") or file.name.startswith(".coverage"), file


def test_the_version_is_the_packages_own() -> None:
    """``dledger.__version__``, which setuptools reads without importing anything."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "dledger.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", dledger.__version__)
