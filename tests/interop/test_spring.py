"""Spring's starter for RocketMQ, unmodified, with our broker and our name server: ``make interop``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop import java, rocketmq
from tests.interop.test_rocketmq_5 import ours
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop


def test_an_application_sends_and_consumes(tmp_path: Path) -> None:
    java.build()
    with running(config_in(tmp_path)) as names, ours(tmp_path / "store", namesrvAddr=names.address):
        told = rocketmq.spring_application(tmp_path / "home", names.address, "FromSpring")

    assert told.count("got hello") == 1, told
    assert {one for one in told if one != "got hello"} == {"sent SEND_OK"}
