"""What an image is made of, and when it is made anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster.containers import image
from cluster.containers.image import PROJECT
from cluster.containers.requirements import requirements


def test_requirements_are_the_projects_own() -> None:
    """Those of the core and of the extras that the image has: the same that the Dockerfile asks for."""
    found = requirements(PROJECT / "pyproject.toml", list(image.EXTRAS))

    names = {line.partition(">")[0] for line in found}
    assert {"grpcio", "click", "cryptography", "uvicorn"} <= names
    assert "selenium" not in names
    dockerfile = (PROJECT / image.DOCKERFILE).read_text(encoding="utf-8")
    assert f"requirements.py pyproject.toml {' '.join(image.EXTRAS)} " in dockerfile


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
