"""Builds the image of the current sources in the Docker daemon: ``python -m cluster.image`` (``make image``).

If ``BASE_IMAGE`` is set, ``cluster/deploy/Dockerfile`` builds on it with packages from PyPI. Otherwise nothing is
pulled: the base is made of Debian packages (by ``apt-get``), and the dependencies are wheels that the machine's own pip
fetches for the base's Python. Both are kept under ``build/``, keyed by their inputs, so that they are made again only
when these change.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import click
import docker

from dledger.errors import DLedgerError

PROJECT: Final = Path(__file__).resolve().parents[1]
BUILD: Final = PROJECT / "build"
DEPLOY: Final = Path("cluster/deploy")
DOCKERFILE: Final = DEPLOY / "Dockerfile"
NAME: Final = "dledger"
LOCAL: Final = "local"
"""The tag used in compose.yaml."""
BASE_NAME: Final = "dledger-base"
BASE_PYTHON: Final = "3.11"
"""The Python version of the base built here: Debian 12's."""
_GLIBC_MINOR: Final = 36
"""Debian 12's: wheels for newer C libraries do not run there."""
LOCK: Final = DEPLOY / "requirements.lock"
"""The packages installed from PyPI: exact versions with hashes."""
_CONTEXT: Final = ("pyproject.toml", "README.md", "LICENSE", "dledger", "rocketstore", "dledger_cli", "cluster/deploy")
_KEY_LENGTH: Final = 12
REQUEST_TIMEOUT_S: Final = 300
"""For a request to the Docker daemon: a build is silent for a while."""
_log = logging.getLogger(__name__)


class ImageError(DLedgerError):
    """Raised when the image cannot be built; says what to do."""


def ensure_image(client: docker.DockerClient) -> str:
    """The tag of an image of the current sources, built if the daemon has none. Raises ``ImageError``."""
    if not (PROJECT / DOCKERFILE).exists():
        raise ImageError("building an image requires the project's sources, which an installed package lacks")
    base = os.environ.get("BASE_IMAGE", "")
    tag = f"{NAME}:{_image_key(base)}"
    with _locked(BUILD / "image"):
        if not _has(client, tag):
            _build(client, tag, base)
    return tag


def ensure_base(client: docker.DockerClient) -> str:
    """The tag of a base image of Debian packages, imported if the daemon has none. Raises ``ImageError``."""
    file = base_file()
    tag = file.name.removesuffix(".tar").removeprefix(f"{BASE_NAME}-")
    if not _has(client, f"{BASE_NAME}:{tag}"):
        client.api.import_image(str(file), repository=BASE_NAME, tag=tag)
    return f"{BASE_NAME}:{tag}"


def base_file() -> Path:
    """The base image of Debian packages as a file, made if there is none. Raises ``ImageError``."""
    script = PROJECT / DEPLOY / "image-base.sh"
    file = BUILD / "image" / f"{BASE_NAME}-{_digest([script.read_bytes()])}.tar"
    if file.exists():
        return file
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ImageError(
            "building a base image from Debian packages requires root and apt-get; where images can be pulled, "
            "set BASE_IMAGE=python:3.12-slim"
        )
    _log.info("building a base image from Debian packages")
    made = file.with_suffix(".part")
    file.parent.mkdir(parents=True, exist_ok=True)
    _run(["sh", str(script), str(made)])
    for old in file.parent.glob(f"{BASE_NAME}-*.tar"):
        old.unlink()
    made.rename(file)
    return file


def ensure_wheels() -> Path:
    """A directory with wheels of all dependencies, for the base built here."""
    target = BUILD / "wheelhouse"
    lock, build = PROJECT / LOCK, _build_requirements()
    key = _digest([lock.read_bytes(), *(line.encode() for line in (BASE_PYTHON, platform.machine(), *build))])
    marker = target / "key"
    if marker.exists() and marker.read_text() == key:
        return target
    _log.info("fetching wheels")
    fresh = BUILD / "wheelhouse.part"
    shutil.rmtree(fresh, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--dest", str(fresh), "--only-binary=:all:", "--implementation=cp", f"--python-version={BASE_PYTHON}"]
    command += [f"--platform=manylinux_2_{minor}_{platform.machine()}" for minor in range(_GLIBC_MINOR, 4, -1)]
    command += [f"--platform={name}_{platform.machine()}" for name in ("manylinux2014", "manylinux2010", "manylinux1")]
    _run([*command, "--require-hashes", "--requirement", str(lock)])
    _run([*command, *build])
    (fresh / "key").write_text(key)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return target


def _build_requirements() -> list[str]:
    """The project's build requirements."""
    import tomllib

    build: list[str] = tomllib.loads((PROJECT / "pyproject.toml").read_text())["build-system"]["requires"]
    return [*build, "pip"]


# --- building --------------------------------------------------------------------------------------------------------


def _build(client: docker.DockerClient, tag: str, base: str) -> None:
    arguments = {"BASE_IMAGE": base}
    if not base:
        with ThreadPoolExecutor(1, thread_name_prefix="wheels") as beside:
            wheels = beside.submit(ensure_wheels)
            arguments = {"BASE_IMAGE": ensure_base(client), "PIP_OPTIONS": "--no-index --find-links wheels"}
            wheels.result()
    _log.info("building %s", tag)
    try:
        client.images.build(
            path=str(PROJECT),
            dockerfile=str(DOCKERFILE),
            tag=tag,
            buildargs=arguments,
            network_mode=None if base else "none",
            rm=True,
            forcerm=True,
        )
    except docker.errors.BuildError as error:
        said = "".join(part.get("stream", "") for part in error.build_log if isinstance(part, dict))
        raise ImageError(f"cannot build the image: {error}\n{said[-4000:]}") from None


def _has(client: docker.DockerClient, tag: str) -> bool:
    try:
        client.images.get(tag)
    except docker.errors.ImageNotFound:
        return False
    return True


# --- keys, files -----------------------------------------------------------------------------------------------------


def _image_key(base: str) -> str:
    files = sorted(
        file
        for name in _CONTEXT
        for file in ((PROJECT / name).rglob("*") if (PROJECT / name).is_dir() else [PROJECT / name])
        if file.is_file() and "__pycache__" not in file.parts
    )
    parts = [base.encode(), BASE_PYTHON.encode()]
    for file in files:
        parts += [str(file.relative_to(PROJECT)).encode(), file.read_bytes()]
    return _digest(parts)


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()[:_KEY_LENGTH]


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lets one process at a time build; the others use its result."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise ImageError(f"{' '.join(command[:4])} … failed:\n{(done.stdout + done.stderr)[-2000:]}")


@click.command()
@click.option("--base", "only_base", is_flag=True, help="Only the base image from Debian packages, as a file.")
def main(only_base: bool) -> None:
    """Build the image of the current sources, and print its name."""
    logging.basicConfig(level="INFO", format="%(message)s")
    try:
        if only_base:
            click.echo(f"{base_file()} (docker import)")
            return
        with contextlib.closing(docker.from_env(timeout=REQUEST_TIMEOUT_S)) as client:
            tag = ensure_image(client)
            image = client.images.get(tag)
            image.tag(NAME, LOCAL)
    except (docker.errors.DockerException, ImageError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{tag}, also {NAME}:{LOCAL}: {image.attrs['Size'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
