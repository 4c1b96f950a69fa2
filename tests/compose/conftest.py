"""Tests with real containers: they share one Docker daemon and one image, on one worker.

Without root or Docker they are skipped (see ``tests/support/lacking.py``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from cluster.image import REQUEST_TIMEOUT_S, ensure_image
from tests.support.lacking import lacks

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[docker.DockerClient]:
    """The Docker daemon that answers."""
    client, why = None, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Docker's library leaks the socket of a failed connection
        try:
            client = docker.from_env(timeout=REQUEST_TIMEOUT_S)
        except docker.errors.DockerException as error:
            why = str(error)
        gc.collect()
    if client is None:
        lacks("Docker", f"tools/with-dockerd.sh COMMAND starts a daemon: {why}")
    with contextlib.closing(client):
        yield client


@pytest.fixture(scope="session")
def image(docker_engine: docker.DockerClient) -> str:
    """An image of the present sources.

    Its base, if it must be made, takes minutes of unpacking packages: no reason to dump every thread's stack.
    """
    faulthandler.cancel_dump_traceback_later()
    return ensure_image(docker_engine)
