"""What happens to consumers: one world for each thing that has gone wrong somewhere, and all of them at random."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.sim_consumer.broker import ModelBroker, ModelQueue, Place
from tests.sim_consumer.drivers import GROUP, RETRIES, TOPIC, Driver, fast
from tests.sim_consumer.oracle import Oracle
from tests.sim_consumer.remoting import ServerLoop

KINDS: Final = ("assigned", "member", "in_order")
WAIT_S: Final = 30.0
LOOK_S: Final = 0.01
QUEUES_MAX: Final = 5
HANG_S: Final = 1.0
"""Longer than ``CONSUME_TIMEOUT_S``."""
RETRY: Final = f"%RETRY%{GROUP}"


class StuckError(AssertionError):
    """Raised when what must happen does not."""


@dataclass
class Plan:
    """How handlers of one message behave at first."""

    what: str
    times: int


class Run:
    """One world: a broker, members, and what they have been told to do."""

    def __init__(self, kind: str, seed: int, *, queues: int = 2, start: str = "first") -> None:
        self.kind = kind
        self.is_alone = kind.endswith("assigned")
        """Whether it reads all queues, whoever else does."""
        self.servers = ServerLoop()
        self.random = random.Random(f"{kind} {seed}")
        self.start = start
        self.broker = ModelBroker()
        self.oracle = Oracle(self.broker)
        self.members: list[Driver] = []
        self.gone: list[threading.Thread] = []
        self.queues = self.queues_ever = queues
        self.story: list[str] = []
        self._plans: dict[bytes, Plan] = {}
        self._number = 0
        self.broker.put_topic(TOPIC, queues)

    def tell(self, what: str) -> None:
        """For whoever reads why it failed."""
        self.story.append(what)

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, count: int, queue_id: int | None = None, *, plan: Plan | None = None) -> list[bytes]:
        """Messages that are handled as planned."""
        bodies: list[bytes] = []
        for _ in range(count):
            place = self.random.randrange(self.queues) if queue_id is None else queue_id
            body = b"%d" % self._number
            self._number += 1
            with self.broker.changed:
                if TOPIC not in self.broker.topics:
                    return bodies
                self.oracle.sent[body] = (TOPIC, place)
                if plan is not None:
                    self._plans[body] = Plan(plan.what, plan.times)
                self.broker.send(TOPIC, place, body)
            bodies.append(body)
        return bodies

    def handle(self, driver: Driver, at: int, body: bytes, _tries: int) -> None:
        """What every handler does."""
        if driver.is_dead:
            raise RuntimeError("dead")
        self.oracle.begins(body)
        with self.broker.changed:
            plan = self._plans.get(body)
            what = "ok" if plan is None or plan.times <= 0 else plan.what
            if plan is not None:
                plan.times -= 1
        if what == "hang":
            until = time.monotonic() + HANG_S
            while time.monotonic() < until and not driver.is_dead:
                time.sleep(LOOK_S)
        elif what != "ok":
            raise {"raise": ValueError, "exit": SystemExit, "cancel": asyncio.CancelledError}[what]("planned")
        if not driver.is_dead:
            self.oracle.ends(at, body)

    # --- members ------------------------------------------------------------------------------------------------------

    def join(self, count: int = 1) -> None:
        self.oracle.disturbed()
        if not self.members and self.start == "last" and not self.broker.offsets:
            with self.broker.changed:
                self.oracle.excuse([one for queue in self.broker.queues.values() for one in queue.stored])
        for _ in range(count):
            pull_max = self.random.choice([1, 3, 100])
            driver = Driver(self.kind, self.broker, self.servers, self.handle, self.start, pull_max)
            self.members.append(driver)
            driver.start()

    def begin_at_the_end(self) -> None:
        """A new group, which has nothing more to do."""
        self.start = "last"
        self.join()
        self.begun()
        self.send(10)
        self.all_done()
        self.all_committed()

    def die_and_be_followed(self) -> None:
        """Killed as soon as it has a position in each queue: what is sent before the next one comes is not missed."""
        self.begun()
        self.part(killed=True)
        self.send(10)
        self.join()
        self.all_done()

    def part(self, *, killed: bool) -> None:
        """Whoever came last goes, in the background."""
        self.oracle.disturbed()
        driver = self.members.pop()
        thread = threading.Thread(target=driver.kill if killed else driver.stop, daemon=True)
        thread.start()
        self.gone.append(thread)
        if killed or self.is_alone:  # two consumers that read the same queues are another world
            thread.join(WAIT_S)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            if self.oracle.problems:
                raise StuckError(self.oracle.problems[0])
            if time.monotonic() > until:
                raise StuckError(f"not within {WAIT_S:g} s: {what}")
            time.sleep(LOOK_S)

    def stored(self) -> dict[Place, int]:
        with self.broker.changed:
            return {key[1:]: offset for key, offset in self.broker.offsets.items()}

    def begun(self) -> None:
        """Wait until the group has a position in each queue."""
        self.wait(lambda: {(TOPIC, one) for one in range(self.queues)} <= self.stored().keys(), "it begins")

    def all_done(self) -> None:
        self.wait(lambda: not self.oracle.left(), "all is handled")

    def all_committed(self) -> None:
        """Every position reaches its queue's end."""

        def reached() -> bool:
            with self.broker.changed:
                ends = {
                    place: queue.end
                    for place, queue in self.broker.queues.items()
                    if place[0] in self.broker.topics and place[1] < self.broker.topics[place[0]].queues and queue.end
                }
            stored = self.stored()
            return all(stored.get(place) == end for place, end in ends.items())

        self.wait(reached, "all is committed")

    # --- the broker and its administrators ----------------------------------------------------------------------------

    def set_queues(self, count: int, permission: int = 6) -> None:
        self.oracle.disturbed()
        self.queues = count
        self.queues_ever = max(self.queues_ever, count)
        self.broker.put_topic(TOPIC, count, permission)

    def delete_topic(self) -> None:
        self.oracle.disturbed()
        with self.broker.changed:
            self.oracle.excuse(
                [one for place, queue in self.broker.queues.items() if place[0] == TOPIC for one in queue.stored]
            )
            self.broker.delete_topic(TOPIC)

    def lose_everything(self) -> None:
        """No request reaches the new one that was meant for the old one."""
        self.oracle.disturbed()
        with self.broker.changed:
            self.oracle.may_go_back |= self.broker.queues.keys()
            self.oracle.excuse([one for queue in self.broker.queues.values() for one in queue.stored])
            self.broker.lose_everything()

    def lose_end(self, place: Place, count: int) -> None:
        self.oracle.disturbed()
        with self.broker.changed:
            self.oracle.may_go_back.add(place)
            self.oracle.excuse(self.broker.lose_end(place, count, commits=self.random.choice([0, 0, 1, 3])))

    def come_back_with_others(self, place: Place | None, lost: int, sent: int, after_s: float = 0.0) -> None:
        """Restart without the last messages of a queue, or without any, and with others in their places."""
        self.down(down=True)
        with self.broker.changed:
            if place is None:
                self.lose_everything()
            else:
                self.lose_end(place, lost)
            self.send(sent, None if place is None else place[1])
        time.sleep(after_s)
        self.down(down=False)

    def reset(self, place: Place, offset: int) -> None:
        self.oracle.disturbed()
        with self.broker.changed:
            queue = self.broker.queues.get(place, ModelQueue())
            offset = min(max(offset, queue.base), queue.end)
            self.oracle.excuse([one for one in queue.stored if one.offset < offset])
            self.broker.reset(GROUP, place, offset)

    def delete_group(self) -> None:
        self.oracle.disturbed()
        self.broker.delete_group(GROUP)

    def down(self, *, down: bool) -> None:
        self.oracle.disturbed()
        self.broker.set_down(down=down)

    def now(self, event: Callable[[], None]) -> None:
        event()

    def no_surprises(self) -> None:
        """Nothing happens during commits any more, and the broker is up."""
        with self.broker.changed:
            self.broker.at_commits.clear()
            self.broker.after_commits.clear()
            self.broker.set_down(down=False)

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything is well again: then all comes, all is committed, and nobody is silent."""
        self.tell("healed")
        self.oracle.disturbed()
        self.broker.takes_back = "yes"
        self.no_surprises()
        self.set_queues(self.queues_ever)
        if not self.members:
            self.join()
        self.all_done()
        for queue_id in range(self.queues):
            self.send(1, queue_id)
        self.all_done()
        self.all_committed()

    def close(self) -> None:
        for driver in self.members:
            driver.stop()
        for thread in self.gone:
            thread.join(WAIT_S)
        self.servers.close()


World = Callable[[Run], None]
WORLDS: Final[dict[str, World]] = {}


def world(make: World) -> World:
    """Register it under its name."""
    WORLDS[make.__name__] = make
    return make


@world
def calm(run: Run) -> None:
    """Nothing happens: nothing comes twice."""
    run.join()
    run.begun()
    run.oracle.disturbed_at = float("-inf")
    for _ in range(5):
        run.send(10)
        run.all_done()
    run.all_committed()
    if any(count > 1 for count in run.oracle.calls.values()):
        run.oracle.wrong("something came twice")


@world
def killed_before_its_first_commit(run: Run) -> None:
    run.start = "last"
    run.send(10)
    run.join()
    run.die_and_be_followed()


@world
def queues_are_added(run: Run) -> None:
    """While it runs, and while nobody does."""
    run.start = "last"
    run.join()
    run.begun()
    run.set_queues(4)
    run.send(20)
    run.all_done()
    run.part(killed=True)
    run.set_queues(5)
    run.send(10, 4)
    run.join()
    run.all_done()


@world
def the_topic_shrinks_and_grows(run: Run) -> None:
    run.set_queues(3)
    run.join()
    run.send(15)
    run.all_done()
    run.set_queues(1)
    run.send(5, 0)
    run.all_done()
    run.set_queues(3)
    run.send(15)
    run.all_done()


@world
def handlers_end_in_every_way(run: Run) -> None:
    run.join()
    for what in ("raise", "exit", "cancel", "hang"):
        run.send(4, plan=Plan(what, 1))
        run.send(10)
    run.all_done()
    run.all_committed()


@world
def nothing_is_taken_back_for_a_while(run: Run) -> None:
    run.broker.takes_back = "later"
    run.join()
    run.send(4, plan=Plan("raise", 1))
    good = run.send(12)  # less than the span that may be open
    run.wait(lambda: all(one in run.oracle.done for one in good), "the others go on")


@world
def nothing_is_ever_taken_back(run: Run) -> None:
    """Each is tried as often as allowed, and then no more."""
    run.join()
    run.begun()
    run.broker.takes_back = "never"
    failing = run.send(3, plan=Plan("raise", 2 if run.is_alone else 1000))
    run.oracle.may_be_given_up = dict.fromkeys(failing, RETRIES + 1)
    good = run.send(20)
    run.wait(lambda: all(one in run.oracle.done for one in good), "the others go on")
    run.all_committed()
    if not run.is_alone and any(run.oracle.calls[one] > RETRIES + 1 for one in failing):
        run.oracle.wrong("tried more often than allowed")


@world
def the_group_is_deleted_under_an_idle_member(run: Run) -> None:
    run.begin_at_the_end()
    run.delete_group()
    run.die_and_be_followed()


@world
def the_topic_is_made_anew_under_an_idle_member(run: Run) -> None:
    run.begin_at_the_end()
    run.delete_topic()
    time.sleep(run.random.choice([0.0, 0.2]))
    run.set_queues(run.queues)
    run.die_and_be_followed()


@world
def a_permission_is_taken_and_given_back(run: Run) -> None:
    run.join()
    for _ in range(3):
        run.send(5)
        run.set_queues(run.queues, permission=2)
        time.sleep(0.2)
        run.send(5)
        run.set_queues(run.queues)
    run.all_done()


@world
def the_broker_comes_back_empty(run: Run) -> None:
    """Its queues are shorter than the positions, or longer by then."""
    run.join()
    run.send(12)
    run.all_done()
    run.all_committed()
    run.down(down=True)
    run.lose_everything()
    run.send(run.random.choice([1, 6, 40]))
    run.down(down=False)
    run.all_done()


@world
def the_broker_loses_its_last_messages(run: Run) -> None:
    run.join()
    run.send(10, 0)
    run.all_done()
    run.all_committed()
    run.down(down=True)
    run.lose_end((TOPIC, 0), 5)
    run.send(run.random.choice([1, 3, 5, 12]), 0)
    run.down(down=False)
    run.all_done()


@world
def others_take_the_places_of_what_is_committed(run: Run) -> None:
    """The broker loses messages again and again, before, during and after commits, and takes others in their places."""
    run.join()
    for _ in range(8):
        run.send(6, 0)
        lost = partial(run.come_back_with_others, (TOPIC, 0), run.random.randrange(1, 8), run.random.randrange(10))
        run.random.choice([run.now, run.broker.at_commits.append, run.broker.after_commits.append])(lost)
        time.sleep(run.random.choice([0.0, 0.1, 0.2]))
    run.no_surprises()
    run.all_done()


@world
def positions_are_reset_while_it_runs(run: Run) -> None:
    run.join()
    for _ in range(6):
        run.send(10)
        time.sleep(run.random.random() * 0.1)
        run.reset((TOPIC, run.random.randrange(run.queues)), run.random.randrange(30))
    run.all_done()


@world
def something_happens_during_commits(run: Run) -> None:
    """Positions are reset between look and commit, answers are lost, the broker goes away."""

    def reset() -> None:
        run.reset((TOPIC, run.random.randrange(run.queues)), run.random.randrange(30))

    run.join()
    for _ in range(8):
        run.send(6)
        run.broker.at_commits.append(run.random.choice([reset, lambda: run.down(down=True), lambda: None]))
        run.broker.after_commits.append(run.random.choice([reset, lambda: run.down(down=True), lambda: None]))
        time.sleep(0.15)
        run.down(down=False)
    run.no_surprises()
    run.all_done()


@world
def members_come_and_go(run: Run) -> None:
    """Queues are lost and regained with messages in use, some of which fail."""
    run.set_queues(4)
    run.join()
    for _ in range(6):
        run.send(10, plan=Plan(run.random.choice(["raise", "ok"]), 1))
        if not run.is_alone and len(run.members) < 3 and run.random.random() < 0.6:
            run.join()
        elif len(run.members) > 1:
            run.part(killed=run.random.random() < 0.5)
        else:
            run.part(killed=run.random.random() < 0.5)
            run.join()
        time.sleep(run.random.choice([0.0, 0.1, 0.4]))
    run.all_done()


@world
def anything(run: Run) -> None:  # noqa: C901  # one branch per event
    """All of it at random."""
    draw = run.random
    run.join()
    for _ in range(draw.randrange(10, 25)):
        event = draw.choice(
            ["send"] * 6
            + ["fail"] * 2
            + [
                "queues",
                "permission",
                "topic",
                "group",
                "empty",
                "end",
                "end",
                "down",
                "reset",
                "commit",
                "kill",
                "leave",
                "back",
            ]
        )
        run.tell(event)
        if event == "send":
            run.send(draw.randrange(1, 12))
        elif event == "fail":
            run.send(2, plan=Plan(draw.choice(["raise", "exit", "cancel", "hang"]), draw.randrange(1, 3)))
        elif event == "queues":
            run.set_queues(draw.randrange(1, QUEUES_MAX))
        elif event == "permission":
            run.set_queues(run.queues, permission=draw.choice([2, 6]))
        elif event == "topic":
            run.delete_topic()
            time.sleep(draw.choice([0.0, 0.1]))
            run.set_queues(run.queues)
        elif event == "group":
            run.delete_group()
        elif event in ("empty", "end"):
            place = None if event == "empty" else (TOPIC, draw.randrange(run.queues))
            pause_s = draw.choice([0.0, draw.random() * 0.1])
            lost = partial(run.come_back_with_others, place, draw.randrange(1, 8), draw.randrange(12), pause_s)
            draw.choice([run.now, run.broker.at_commits.append, run.broker.after_commits.append])(lost)
        elif event == "down":
            run.down(down=True)
            run.send(draw.randrange(3))
            time.sleep(draw.random() * 0.2)
            run.down(down=False)
        elif event == "reset":
            run.reset((TOPIC, draw.randrange(run.queues)), draw.randrange(40))
        elif event == "commit":
            run.broker.after_commits.append(lambda: run.down(down=True))
            time.sleep(0.1)
            run.down(down=False)
        elif event == "back":
            run.broker.takes_back = draw.choice(["yes", "later"])
        elif event in ("kill", "leave"):
            run.part(killed=event == "kill")
            if not run.members:
                run.join()
        if not run.is_alone and len(run.members) < 3 and draw.random() < 0.1:
            run.tell("join")
            run.join()
        time.sleep(draw.choice([0.0, 0.0, 0.05, 0.2]))


def play(name: str, kind: str, seed: int) -> Run:
    """Raises ``AssertionError`` with what is wrong, and the story so far."""
    run = Run(kind, seed, queues=random.Random(seed).randrange(1, 4))
    with fast():
        try:
            WORLDS[name](run)
            run.finish()
        except StuckError as error:
            run.oracle.problems.append(str(error))
            left = [(one, run.oracle.sent[one], run.oracle.calls[one]) for one in run.oracle.left()[:5]]
            run.oracle.problems.append(f"left: {left}, positions {run.stored()}")
        finally:
            run.close()
    if run.oracle.problems:
        again = f"python -m tests.sim_consumer --world {name} --kind {kind} --seed {seed}"
        raise AssertionError(f"{again}: {'; '.join(run.oracle.problems[:4])}; {', '.join(run.story)}")
    return run
