"""The programs of ``docs/python.md`` at Apache RocketMQ's own brokers, 4.9 and 5.5: ``make interop``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from rocketstore.client import Admin, ClientError, TopicInfo
from tests.docs.test_python import CHECKS, HERE, NAME_SERVER, program_of_the_page
from tests.interop.test_python_consumer import apache
from tests.support.waiting import wait_until

pytestmark = pytest.mark.interop

TIMEOUT_S: Final = 180


@pytest.mark.parametrize("release", [4, 5])
def test_the_programs_of_the_page_do_what_it_says(release: int, tmp_path: Path) -> None:
    """The same lines, given the name servers: what it says is the same for both, but for what 4.9 does not have."""
    with apache(release, tmp_path, enablePropertyFilter="true") as address, Admin(name_servers=address) as admin:

        def has_topic() -> bool:
            try:
                admin.put_topic(TopicInfo("orders"))
            except ClientError:
                return False  # the broker is starting
            return True

        wait_until(has_topic, "the broker has registered", TIMEOUT_S)
        text = (
            program_of_the_page("One message at a time")
            .replace(f'"{HERE}"', f'name_servers="{address}"')
            .replace(NAME_SERVER, address)
        )
        program = tmp_path / "page.py"
        program.write_text(text + CHECKS)

        done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert done.returncode == 0, done.stderr
