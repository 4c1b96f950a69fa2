"""What one seed decides before the run: the group, its timers and which kinds of faults may strike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Final

from dledger.config import (
    ElectionConfig,
    FlushMode,
    Member,
    ReplicationConfig,
    ServerConfig,
    SnapshotConfig,
    StoreConfig,
)
from dledger.types import NodeId

SWARM: Final = (
    "drop",
    "duplicate",
    "reorder",
    "spike",
    "partition",
    "one_way",
    "isolate_leader",
    "minority_leader",
    "bridge",
    "crash_one",
    "crash_leader",
    "crash_minority",
    "crash_majority",
    "crash_all",
    "crash_point",
    "harass_leader",
    "pause",
    "slow_flush",
    "slow_save",
    "slow_read",
    "transfer",
    "disk_full",
    "drift",
    "expire",
    "late_start",
    "wipe",
    "connection_lost",
    "corrupt",
    "set_back",
    "lose_kind",
    "hang_flush",
    "pause_leader",
    "come_back",
    "change_sides",
    "harass_commit",
    "crash_send",
    "stale",
    "stall",
    "clock_jump",
    "hang_read",
    "exhaust",
    "lost_end",
    "damage",
    "siege",
    "async_flush",
)
"""Every kind of fault; a seed switches a random part of them on."""
MEMBER_FAULTS: Final = (
    "add",
    "replace",
    "promote",
    "demote",
    "remove",
    "remove_leader",
    "update",
    "stale_client",
    "repeat_change",
    "again_with_old_disk",
    "wipe_learner",
    "old_life",
    "old_conf",
    "file_lost",
    "file_late",
    "harass_change",
    "learners_side",
    "leader_dies",
    "forgotten_vote",
)
"""What is done to a group by those who change its members, and to it meanwhile, from ``MEMBER_WORLDS`` on."""
MACHINE_FAULTS: Final = (
    "left_behind",
    "snapshot_asked",
    "snapshot_cut",
    "snapshot_damage",
    "slow_apply",
    "slow_snapshot",
    "slow_transfer",
)
"""What strikes state machines and their snapshots, from ``MACHINE_WORLDS`` on."""
_NO_MORE: Final = ""
"""The place of a kind that is no more: drawn as before, so that seeds keep their worlds."""
_FIRST: Final = SWARM.index("set_back")
NEW_WORLDS: Final = 100_000
"""From this seed on all kinds strike; those before stay the worlds in which something was found once."""

SENDER_WORLDS: Final = 200_000
"""From this seed on real clients send, too."""
SUSPICION_WORLDS: Final = 300_000
"""From this seed on members may hear at once that their leader is gone, or seems to be."""

MEMBER_WORLDS: Final = 400_000
"""From this seed on members come and go."""

MACHINE_WORLDS: Final = 500_000
"""From this seed on each member has a state machine."""

THEMES: Final[tuple[tuple[str, ...], ...]] = (
    ("harass_leader", "harass_commit", "crash_send", "change_sides", "slow_flush", "stale"),
    ("wipe", "set_back", "lost_end", "crash_send", "isolate_leader", "harass_commit", "pause_leader"),
    ("stale", "stall", "come_back", "change_sides", "harass_commit", "spike"),
    ("stall", "come_back", "crash_one"),
    ("stale", "change_sides", "pause_leader"),
    ("pause_leader", "come_back", "clock_jump", "drift", "stall", "one_way"),
    ("slow_flush", "hang_flush", "slow_save", "hang_read", "disk_full", "damage", "expire"),
    ("crash_one", "crash_leader", "crash_minority", "crash_majority", "crash_point", "crash_send", "async_flush"),
    ("lose_kind", "one_way", "bridge", "connection_lost", "exhaust", "partition"),
    ("drop", "duplicate", "reorder", "spike", "corrupt", "slow_save", "slow_read", "pause", "crash_all"),
    ("siege", "partition", "crash_one"),
    (_NO_MORE, "wipe", "crash_one", "async_flush", "transfer", "isolate_leader"),
)
"""Kinds that make each other worse, one theme per line: new and unfinished terms, lost memory, late messages, leaders
that do not know that they are over, disks, restarts, links, noise, and groups of unlike members."""


@dataclass(frozen=True, slots=True)
class Options:
    """One seed's world."""

    seed: int
    events: int
    size: int
    faults: tuple[str, ...]
    fault_interval_us: int
    think_us: int
    clients: int
    producers: int
    drop: float
    duplicate: float
    reorder: float
    spike: float
    segment_bytes: int
    election: ElectionConfig
    replication: ReplicationConfig
    tempo: int = 1000
    """How long the timers are, and with them what faults last, in thousandths: messages and disks stay as they are."""
    patient: bool = False
    """Clients ask only members that say that they lead: less time passes with refusals."""
    noise_us: int = 0
    """For how long the links lose, delay, double and reorder, and then do not, in turns; 0: always."""
    async_members: tuple[NodeId, ...] = ()
    """Members with ``flush_mode=async``: a power cut takes what they said to hold."""
    senders: int = 0
    """Real clients: windows of ``dledger.sending``."""
    told: float = 0.0
    """Which part of the others hears at once of a crash, and of broken connections."""
    false_alarm_us: int = 0
    """How often live leaders seem to be gone; 0: never."""
    spares: tuple[NodeId, ...] = ()
    """Who may become a member; the founders are ``names``."""
    change_interval_us: int = 0
    """How often somebody wants to change the members."""
    snapshot_entries: int = 0
    """After how many entries a state machine is saved; 0: there are none."""
    callers: int = 0
    """Clients of the state machine."""
    concurrent_queries: bool = False

    @property
    def is_new(self) -> bool:
        """Whether it is none of the worlds of before."""
        return self.seed >= NEW_WORLDS

    def has(self, fault: str) -> bool:
        """Whether this run has that kind of fault."""
        return fault in self.faults

    @property
    def names(self) -> tuple[NodeId, ...]:
        """The members, in order."""
        return tuple(NodeId(f"n{number}") for number in range(self.size))

    @property
    def is_changing(self) -> bool:
        """Whether members come and go."""
        return self.seed >= MEMBER_WORLDS

    @property
    def has_machines(self) -> bool:
        """Whether each member has a state machine."""
        return self.snapshot_entries > 0

    @property
    def everybody(self) -> tuple[NodeId, ...]:
        """The founders, and all that may join them."""
        return self.names + self.spares

    def config_of(self, name: NodeId) -> ServerConfig:
        """The configuration of one member: whoever joins knows the founders and itself."""
        known = self.names if name in self.names else (*self.names, name)
        members = tuple(Member(other, "127.0.0.1", 1 + self.everybody.index(other)) for other in known)
        snapshots = SnapshotConfig(snapshot_entries=max(1, self.snapshot_entries), snapshot_rate_bytes_max=0)
        return ServerConfig(
            node_id=name,
            members=members,
            election=self.election,
            replication=self.replication,
            snapshots=snapshots,
            store=StoreConfig(
                segment_bytes=self.segment_bytes,
                flush_mode=FlushMode.ASYNC if name in self.async_members else FlushMode.SYNC,
            ),
        ).check()


def choose(seed: int, events: int) -> Options:
    """Decide everything about a seed's world."""
    random = Random(f"options/{seed}")
    more = Random(f"more options/{seed}")  # drawn apart, so that seeds of before stay the same worlds
    density = random.choice((0.05, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9))
    faults = tuple(fault for fault in SWARM[:_FIRST] if random.random() < density)
    if more.random() < density:
        faults += ("set_back", "snapshot")
    options = Options(
        seed=seed,
        events=events,
        size=random.choices((1, 3, 5), (4, 70, 26))[0],
        faults=faults,
        fault_interval_us=random.choice((200_000, 500_000, 500_000, 1_500_000)),
        think_us=random.choice((10_000, 40_000, 40_000, 120_000, 400_000)),
        clients=random.choice((1, 2, 3)),
        producers=more.choice((0, 1, 2, 4)),
        drop=random.choice((0.01, 0.05, 0.3)) if "drop" in faults else 0.0,
        duplicate=random.choice((0.02, 0.1, 0.5)) if "duplicate" in faults else 0.0,
        reorder=random.choice((0.02, 0.2, 0.5)) if "reorder" in faults else 0.0,
        spike=random.choice((0.002, 0.02, 0.1)) if "spike" in faults else 0.0,
        segment_bytes=random.choice((512, 2048, 1 << 20)),
        election=ElectionConfig(
            heartbeat_interval_ms=random.choice((100, 100, 160)),
            transfer_max_lag_entries=random.choice((3, 1000)),
            preferred_leaders=(NodeId("n0"),) if random.random() < 0.15 else (),
        ),
        replication=ReplicationConfig(
            push_bytes_max=random.choice((150, 600, 4096)),
            inflight_pushes_max=random.choice((1, 2, 4, 16)),
            handler_queue_pushes_max=random.choice((16, 256)),
            pending_entries_max=random.choice((8, 10_000)),
            ack_timeout_ms=random.choice((600, 2500)),
            producer_snapshot_entries=more.choice((1, 4, 20, 16_384)),
        ),
    )
    options = _newer(options) if options.is_new else options
    options = _changing(options) if options.is_changing else options
    return _with_machines(options) if seed >= MACHINE_WORLDS else options


def _newer(options: Options) -> Options:
    """The same group in another world: faults all over, few, or of one theme; its timers at some tempo."""
    random = Random(f"newer options/{options.seed}")
    faults = _faults(random)
    tempo = random.choice((1000, 1000, 300, 100))
    election, replication = options.election, options.replication
    names = options.names
    told, false_alarm_us = _suspicion(options.seed)
    return replace(
        options,
        faults=(*faults, "snapshot") if "set_back" in faults else faults,
        fault_interval_us=max(60_000, random.choice((200, 500, 500, 1500, 4000)) * tempo),
        think_us=random.choice((15, 40, 80, 200)) * max(tempo, 200),
        drop=random.choice((0.01, 0.05, 0.3)) if "drop" in faults else 0.0,
        duplicate=random.choice((0.02, 0.1, 0.5)) if "duplicate" in faults else 0.0,
        reorder=random.choice((0.02, 0.2, 0.5)) if "reorder" in faults else 0.0,
        spike=random.choice((0.002, 0.02, 0.1)) if "spike" in faults else 0.0,
        election=replace(
            election,
            heartbeat_interval_ms=election.heartbeat_interval_ms * tempo // 1000,
            election_timeout_ms_min=election.election_timeout_ms_min * tempo // 1000,
            election_timeout_ms_max=election.election_timeout_ms_max * tempo // 1000,
            transfer_timeout_ms=election.transfer_timeout_ms * tempo // 1000,
            preferred_check_interval_ms=election.preferred_check_interval_ms * tempo // 1000,
        ),
        replication=replace(
            replication,
            push_timeout_ms=replication.push_timeout_ms * tempo // 1000,
            retry_interval_ms=replication.retry_interval_ms * tempo // 1000,
            ack_timeout_ms=replication.ack_timeout_ms * tempo // 1000,
        ),
        tempo=tempo,
        patient=random.random() < 0.8,
        noise_us=random.choice((0, 2_000, 12_000)) * tempo,
        async_members=_some(random, names) if "async_flush" in faults and options.size > 1 else (),
        senders=Random(f"senders/{options.seed}").choice((1, 1, 2)) if options.seed >= SENDER_WORLDS else 0,
        told=told,
        false_alarm_us=false_alarm_us * tempo // 1000,
    )


def _changing(options: Options) -> Options:
    """The same world with members that come and go: often little else happens."""
    random = Random(f"members/{options.seed}")
    density = random.choice((0.3, 0.6, 1.0))
    changes = tuple(fault for fault in MEMBER_FAULTS if random.random() < density)
    faults = options.faults
    if random.random() < 0.5:
        kept = random.sample(faults, min(len(faults), random.choice((0, 2, 4))))
        faults = tuple(fault for fault in faults if fault in kept)
    if random.random() < 0.3 and "expire" not in faults:
        faults += ("expire",)
    size = random.choices((1, 2, 3, 4, 5), (8, 14, 48, 18, 12))[0]
    names = tuple(NodeId(f"n{number}") for number in range(size))
    return replace(
        options,
        size=size,
        faults=faults + (changes or ("add", "remove")),
        spares=tuple(NodeId(f"n{number}") for number in range(size, size + random.choice((1, 2, 3)))),
        change_interval_us=options.tempo * random.choice((300, 1_000, 3_000, 10_000)),
        async_members=_some(random, names) if "async_flush" in faults and size > 1 else (),
        segment_bytes=max(options.segment_bytes, 4096),
        drop=options.drop if "drop" in faults else 0.0,
        duplicate=options.duplicate if "duplicate" in faults else 0.0,
        reorder=options.reorder if "reorder" in faults else 0.0,
        spike=options.spike if "spike" in faults else 0.0,
    )


def _with_machines(options: Options) -> Options:
    """The same world with a state machine on each member: other clients send less, and logs often become short."""
    random = Random(f"machines/{options.seed}")
    density = random.choice((0.6, 1.0))
    faults = options.faults
    if random.random() < 0.6:  # little else happens
        kept = random.sample(faults, min(len(faults), random.choice((0, 2, 4))))
        faults = tuple(fault for fault in faults if fault in kept)
    faults += tuple(fault for fault in MACHINE_FAULTS if random.random() < density)
    often = ("expire", "crash_one", "crash_leader", "crash_all", "wipe")
    faults += tuple(fault for fault in often if fault not in faults and random.random() < 0.6)
    if "snapshot_damage" in faults and "expire" not in faults:  # else nothing is lost with a snapshot
        faults += ("expire",)
    if random.random() < 0.5:  # the members stay, and are struck more often
        faults = tuple(fault for fault in faults if fault not in MEMBER_FAULTS)
    return replace(
        options,
        faults=faults,
        fault_interval_us=min(options.fault_interval_us, 500 * options.tempo),
        drop=options.drop if "drop" in faults else 0.0,
        duplicate=options.duplicate if "duplicate" in faults else 0.0,
        reorder=options.reorder if "reorder" in faults else 0.0,
        spike=options.spike if "spike" in faults else 0.0,
        async_members=options.async_members if "async_flush" in faults else (),
        clients=1,
        producers=random.choice((0, 0, 1)),
        senders=random.choice((0, 0, 1)),
        snapshot_entries=random.choice((5, 20, 20, 100, 500)),
        callers=random.choice((2, 4, 8)),
        concurrent_queries=random.random() < 0.5,
    )


def _suspicion(seed: int) -> tuple[float, int]:
    """Whom a crash tells, and how often there are false alarms."""
    if seed < SUSPICION_WORLDS:
        return 0.0, 0
    random = Random(f"suspicion/{seed}")
    return random.choice((0.0, 0.5, 1.0, 1.0)), random.choice((0, 0, 300_000, 2_000_000))


def _faults(random: Random) -> tuple[str, ...]:
    """Which kinds strike, in the order of ``SWARM``."""
    kinds = (*SWARM, _NO_MORE)
    match random.choice(("all over", "few", "theme", "theme", "theme", "theme")):
        case "all over":
            density = random.choice((0.05, 0.1, 0.2, 0.3, 0.5))
            chosen = {fault for fault in kinds if random.random() < density}
        case "few":
            chosen = set(random.sample(kinds, random.choice((1, 2, 3))))
        case _:
            theme = [fault for fault in random.choice(THEMES) if random.random() < 0.85]
            chosen = {*theme, *random.sample(kinds, random.choice((0, 0, 1, 2)))}
    return tuple(fault for fault in SWARM if fault in chosen)


def _some(random: Random, names: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """Each with the same, drawn probability, and at least one."""
    share = random.choice((0.3, 0.6, 1.0))
    return tuple(name for name in names if random.random() < share) or (random.choice(names),)
