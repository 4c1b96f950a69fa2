"""What an image is made of, and when it is made anew."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cluster import image
from cluster.image import PROJECT


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        (image.LOCK, ["console"]),
        (Path("requirements-dev.lock"), ["dev", "console", "spark"]),
    ],
)
def test_locks_hold_what_the_project_asks_for(lock: Path, extras: list[str]) -> None:
    """Every requirement in a version that it allows, each by its hashes; ``make lock`` makes them anew."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    text = (PROJECT / lock).read_text()
    locked: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([a-z0-9.-]+)==([^ \\;]+)", text, flags=re.MULTILINE):
        locked.setdefault(name, []).append(version)

    for line in wanted:
        one = Requirement(line)
        if one.name != "dledger":  # its extras
            assert locked[one.name], line
            assert all(one.specifier.contains(version) for version in locked[one.name]), line
    assert len(re.findall(r"==", text)) <= text.count("--hash=sha256:")


def test_the_image_is_made_of_what_is_locked() -> None:
    """Nothing else comes from PyPI."""
    assert "--require-hashes -r requirements.lock" in (PROJECT / image.DOCKERFILE).read_text(encoding="utf-8")


def test_an_image_is_keyed_by_what_goes_into_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another base, or a changed byte of a source, is another image; what Python caches is nothing."""
    for name in image._CONTEXT:
        if (PROJECT / name).is_file():
            shutil.copy(PROJECT / name, tmp_path / name)
    for name in ("dledger", "rocketstore", "cluster"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.setattr(image, "PROJECT", tmp_path)
    key = image._image_key("")

    (tmp_path / "dledger" / "__pycache__").mkdir()
    (tmp_path / "dledger" / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert image._image_key("") == key
    assert image._image_key("python:3.12-slim") != key
    (tmp_path / "dledger" / "__init__.py").write_text("changed = True\n")
    assert image._image_key("") != key


def test_the_context_is_what_the_image_is_keyed_by() -> None:
    """``.dockerignore`` lets in what the Dockerfile copies, and nothing that the key does not know."""
    allowed = {
        line.removeprefix("!")
        for line in (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }

    assert allowed == {*image._CONTEXT, "build/wheelhouse/*.whl"}


def test_without_sources_there_is_no_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed package says so instead of failing somewhere inside."""
    monkeypatch.setattr(image, "PROJECT", tmp_path)

    with pytest.raises(image.ImageError, match="sources"):
        image.ensure_image(None)  # type: ignore[arg-type]  # it does not get that far
