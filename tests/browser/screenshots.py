"""The pictures of docs/monitoring.md, from a real group in a real browser: ``make screenshots``.

What they show is what happened while they were taken: a minute of load, a leader handed over, a leader killed.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from dledger_cli.console.server import ConsoleServer, ListenAddress, open_console, trading
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import HOST
from dledger_cli.targets import BrokerTarget, GroupTarget
from tests.browser.chromium import INSTALL, Page, browser, is_installed
from tests.support.runtime_broker import runtime_broker
from tests.unit.rocketstore.nameserver.wire import calling, config_in, running

BYTES_MAX = 200_000
LOAD_S = 45.0
WIDTH, HEIGHT = 1240, 1170
GROUPS = ("broker-a", "broker-b")


def keep(page: Page, into: Path, name: str) -> None:
    """Save a picture of the view. Raises ``SystemExit`` if it is too large."""
    file = into / f"console-{name}.png"
    page.save(file)
    size = file.stat().st_size
    print(f"{file}: {size:,} bytes")  # noqa: T201  # this is a command
    if size >= BYTES_MAX:
        raise SystemExit(f"{file} is too large for a repository: {size:,} bytes, {BYTES_MAX:,} are allowed")


def take(page: Page, brokers: LocalBrokers, url: str, into: Path) -> None:
    """One after the other, as somebody would see them who plays with it."""
    never = threading.Event()
    save = partial(keep, page, into)
    page.open(url, width=WIDTH, height=HEIGHT)
    never.wait(LOAD_S / 2)
    page.click(f"[data-node={page.leader()}] [data-action=transfer]")
    page.click("#confirm-yes")
    never.wait(LOAD_S / 2)
    page.js("document.activeElement.blur()")
    save("light")
    page.prefer("dark")
    page.click("#panel-topics .expander")
    never.wait(2)
    page.js("document.activeElement.blur()")
    save("dark")
    page.click("#panel-topics .expander")

    page.prefer("light")
    old = page.leader()
    page.click(f"[data-node={old}] [data-action=kill]")
    page.click("#confirm-yes")
    page.wait(lambda: page.leader() not in ("", old), "a successor leads")
    never.wait(5)
    page.js("document.activeElement.blur()")
    save("failover")
    page.click(f"[data-node={old}] [data-action=restart]")
    page.wait(lambda: page.state(old) == "follower", "it is back", 60)
    brokers.master()

    page.resize(WIDTH, 900)
    page.click("#tab-messages")
    page.wait(lambda: "The newest messages" in page.text("panel-messages"), "messages")
    page.click("#panel-messages td button")
    page.wait(lambda: page.js("return document.getElementById('detail').open"), "all of one")
    page.js("document.activeElement.blur(); document.getElementById('browser').scrollIntoView()")
    save("messages")

    take_reset(page, url, into)
    page.open(url, width=375, height=1180, theme="dark")
    never.wait(3)
    save("phone")


def take_reset(page: Page, url: str, into: Path) -> None:
    """What a reset of a group would do."""
    page.open(url, width=WIDTH, height=760)
    page.click("#tab-groups")
    page.click("tr[data-row=audit] .expander")
    page.click("[aria-label='Reset the offsets of audit']")
    page.click("#form-content button[type=submit]")
    page.wait(lambda: "connected" in page.text("form-content"), "the plan")
    page.js("document.activeElement.blur(); document.getElementById('browser').scrollIntoView()")
    keep(page, into, "reset")


def take_cluster(page: Page, root: Path, into: Path) -> None:
    """Two groups behind a name server, one of which has lost a broker, and a stand-in for two of RocketMQ's own."""
    with ExitStack() as stack:
        server = stack.enter_context(running(config_in(root)))
        settings = {"namesrvAddr": server.address, "mappedFileSizeCommitLog": "16m"}
        a, b = [stack.enter_context(LocalBrokers(root / name, name=name, settings=settings)) for name in GROUPS]
        caller = stack.enter_context(calling(server))
        for number in range(2):
            broker = stack.enter_context(runtime_broker())
            caller.register(
                number, broker.address, name="legacy", cluster="DefaultCluster", topics=("invoices", "orders")
            )
        for brokers, per_s in ((a, 30), (b, 12)):
            brokers.master()
            stack.enter_context(trading(brokers, per_s))
        target = GroupTarget(("127.0.0.1:1",), "", 5.0)
        known = BrokerTarget(target.bootstrap, 5.0, name_servers=(server.address,))
        console = stack.enter_context(ConsoleServer(target, known, place=ListenAddress(port=0)))
        page.open(console.url, width=WIDTH, height=960)
        page.wait(lambda: page.text("figure-brokers") == "8 of 8", "all answer", 60)
        threading.Event().wait(LOAD_S / 3)
        b.kill(next(node for node in b.nodes if node != b.master()))
        page.wait(lambda: page.text("verdict") == "broker-b: a member is missing", "it is missed")
        threading.Event().wait(3)
        keep(page, into, "cluster")
        page.leave()


def main(into: Path) -> None:
    """Take all of them."""
    if not is_installed():
        raise SystemExit(f"no pictures without a browser: {INSTALL}")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dledger-pictures-") as directory:
        root = Path(directory)
        with (
            LocalBrokers(root / "brokers", name="orders-group") as brokers,
            browser(root / "profile") as page,
            open_console(brokers, port=0) as console,
        ):
            brokers.master()
            with trading(brokers):
                take(page, brokers, f"http://{HOST}:{console.port}/", into)
        with browser(root / "another profile") as page:
            take_cluster(page, root, into)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
