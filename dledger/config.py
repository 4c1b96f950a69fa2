"""Every setting of a node, its default, its limits and its relations to the others.

Pure: it reads no file, no environment and no clock. ``ServerConfig`` is one frozen record; ``problems()`` names all
that is wrong with it at once. Reading conf files and the environment is ``dledger.settings``'s business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

from dledger.errors import ConfigError
from dledger.records import ENTRY_HEADER_BYTES, INDEX_UNIT_BYTES, MIN_BLANK_BYTES
from dledger.types import NodeId
from dledger.values import (
    CLIENT_PORT_OFFSET,
    GRPC_PORT_OFFSET,
    MIB,
    PORT_MAX,
    Bytes,
    BytesOrZero,
    Internal,
    Millis,
    Percent,
    Port,
    Positive,
    Range,
    Unit,
    address_text,
    out_of_range,
    parse_address,
    plaintext_problems,
    split,
)

_DEFAULT_NODE: Final = NodeId("n0")


class FlushMode(StrEnum):
    """When an entry counts as stored: after its flush (group commit), or once it is in the page cache (as RocketMQ)."""

    SYNC = "sync"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class Member:
    """One configured member: its id and the address (host, port) where its peers reach it."""

    node_id: NodeId
    host: str
    port: int

    @property
    def address(self) -> str:
        """``host:port``, with brackets around an IPv6 host."""
        return address_text(self.host, self.port)


@dataclass(frozen=True, slots=True)
class ElectionConfig:
    """Timers of the elector, in milliseconds."""

    heartbeat_interval_ms: Millis = 100
    """How often a leader sends heartbeats."""
    election_timeout_ms_min: Millis = 500
    """Shortest silence after which a follower starts an election; within it, no member votes against the leader."""
    election_timeout_ms_max: Millis = 1000
    """Longest such silence (drawn at random each time); a leader that no quorum answers for this long steps down."""
    transfer_timeout_ms: Millis = 1000
    """How long a leadership transfer may take before the old leader carries on."""
    transfer_max_lag_entries: Annotated[int, Internal()] = 1000
    """Leadership is not transferred to a member that lags further behind than this."""
    preferred_leaders: tuple[NodeId, ...] = ()
    """Members that should lead: any other leader transfers leadership to one of them once that has caught up."""
    preferred_check_interval_ms: Annotated[Millis, Internal()] = 1000
    """How often a leader checks whether a preferred member, or one with free disk space, should lead instead."""
    fast_failover: bool = True
    """Replace a leader whose process has ended (its address refuses connections) without waiting for its silence."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        found = out_of_range(self)
        if self.election_timeout_ms_min < 3 * self.heartbeat_interval_ms:
            found.append(
                f"election_timeout_ms_min={self.election_timeout_ms_min} must be at least three times "
                f"heartbeat_interval_ms={self.heartbeat_interval_ms}, or one lost heartbeat starts an election"
            )
        if self.election_timeout_ms_max <= self.election_timeout_ms_min:
            found.append(
                f"election_timeout_ms_max={self.election_timeout_ms_max} must exceed "
                f"election_timeout_ms_min={self.election_timeout_ms_min}, or candidates may split the vote forever"
            )
        return found


@dataclass(frozen=True, slots=True)
class ReplicationConfig:
    """Limits of the entry pusher."""

    push_bytes_max: Bytes = MIB
    """Maximum bytes of log per push; a push always carries at least one entry."""
    inflight_pushes_max: Positive = 16
    """Maximum pushes in flight to one follower; times ``push_bytes_max``, this limits what a slow follower holds up."""
    push_timeout_ms: Millis = 1000
    """How long a push may go unanswered before the dispatcher compares logs again."""
    retry_interval_ms: Annotated[Millis, Internal()] = 100
    """Delay before retrying a follower that is unreachable or refused a push."""
    commit_push_delay_ms: Annotated[Millis, Internal()] = 5
    """How long an idle leader waits for an append to carry the commit index before sending the index on its own."""
    handler_queue_pushes_max: Annotated[Positive, Internal()] = 256
    """Maximum pushes a follower queues; further ones are refused, and the leader compares logs again."""
    pending_entries_max: Positive = 10_000
    """Maximum entries waiting for a quorum on the leader; further appends are refused (``PendingFullError``)."""
    pending_bytes_max: Bytes = 64 * MIB
    """Maximum bytes of entries waiting for a quorum on the leader."""
    ack_timeout_ms: Millis = 2500
    """How long an append or a linearizable read waits for a quorum; after that, the append's outcome is unknown."""
    noop_body: Annotated[bytes, Internal()] = b""
    """Body of the entry that begins a leader's term; a broker sets its own."""
    noop_compatible: Annotated[bool, Internal()] = False
    """Write NOOPs that Java readers before 0.4 take for ordinary entries, as ``noop_body`` must be; brokers do so."""
    max_producers: Annotated[int, Range(1, 65_536)] = 4096
    """Maximum producers whose repeated appends are recognised; a new one replaces one idle for at least 10 minutes."""
    producer_expiry_ms: Millis = 7 * 24 * 3_600_000
    """Minimum time an idle producer is remembered; once forgotten, it must start under a new name."""
    producer_snapshot_entries: Annotated[int, Range(1, 131_072)] = 16_384
    """The leader writes a snapshot of its producers after this many entries (or 32 per producer, if that is more)."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        found = out_of_range(self)
        if self.noop_compatible and not self.noop_body:
            found.append("noop_compatible requires a noop_body that readers of the log accept as an ordinary entry")
        if self.handler_queue_pushes_max < self.inflight_pushes_max:
            found.append(
                f"inflight_pushes_max={self.inflight_pushes_max} must be at most {self.handler_queue_pushes_max}, or "
                "followers would refuse pushes that their leader may send"
            )
        return found


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where and how entries are kept.

    ``base_dir`` holds ``dledger-<node id>/``. ``data_dirs``, when given, replace its ``data`` directory by several
    paths over which segments are spread; ``read_only_data_dirs`` are read but never written to.
    """

    base_dir: Path = Path("dledger-store")
    """Contains ``dledger-<node id>/``, which holds everything the node stores."""
    data_dirs: tuple[Path, ...] = ()
    """Directories to spread segments over, instead of ``data`` in the node's own directory."""
    read_only_data_dirs: tuple[Path, ...] = ()
    """Directories whose segments are read but never written to or removed."""
    segment_bytes: Annotated[int, Range(ENTRY_HEADER_BYTES + MIN_BLANK_BYTES + 1), Unit.BYTES] = 1024 * MIB
    """Size of a segment file; must be the same on all members and cannot change during a log's life."""
    index_segment_bytes: Annotated[int, Range(INDEX_UNIT_BYTES, multiple_of=INDEX_UNIT_BYTES), Unit.BYTES] = 160 * MIB
    """Size of an index file; cannot change during a log's life."""
    max_entry_bytes: Bytes = 4 * MIB
    """Maximum record size, including its 48-byte header."""
    flush_mode: FlushMode = FlushMode.SYNC
    """When an entry counts as stored: after its flush (``sync``), or once in the page cache (``async``: a power cut can
    lose it)."""
    flush_interval_ms: Millis = 10
    """How often ``flush_mode=async`` flushes during appends; ``sync`` flushes as soon as anything is waiting."""
    checkpoint_interval_ms: Annotated[Millis, Internal()] = 100
    """Maximum age of the flushed position recorded on disk."""
    warm_bytes: BytesOrZero = 16 * MIB
    """How far beyond the end of the log the segment's pages are touched in advance."""
    recovery_verify_bytes: BytesOrZero = 64 * MIB
    """How many bytes before the flushed position recorded on disk are verified again at startup."""
    import_unchecked: bool = False
    """Import a log whose CRC fields are 0, as Java's DLedger writes them. A directory remembers that it was imported; a
    member that fetches such entries from others (a new disk) needs this, too, until they have expired."""
    retention_hours: Annotated[float, Range(0), Unit.HOURS] = 72
    """How long after its last write a segment may be removed."""
    delete_hour: Annotated[tuple[int, ...], Range(0, 23)] = (4,)
    """Hours of the day (local time) at which expired segments are removed."""
    disk_check_ratio: Annotated[float, Range(above=0, high=1)] = 0.70
    """Disk usage above which expired segments are removed at any hour."""
    disk_clean_ratio: Annotated[float, Range(above=0, high=1)] = 0.85
    """Disk usage above which unexpired segments are removed too, if ``force_clean`` is on. Of several ``data_dirs``,
    one that is fuller gets no new segment while another has room."""
    disk_full_ratio: Annotated[float, Range(above=0, high=1)] = 0.90
    """Disk usage above which appends are refused with ``DISK_FULL``."""
    force_clean: bool = False
    """Whether the oldest segments are removed, expired or not, while disk usage is above ``disk_clean_ratio``: **this
    deletes acknowledged entries** to make room for new ones. Otherwise everything is kept for ``retention_hours``, and
    appends are refused above ``disk_full_ratio``."""
    clean_interval_ms: Millis = 1000
    """How often to measure disk usage and look for expired segments."""
    follower_keep_bytes: BytesOrZero = 16 * 1024 * MIB
    """How many bytes of log to keep beyond retention for a live follower that still needs them."""
    scrub_bytes_per_s: BytesOrZero = MIB
    """How fast a running node continuously verifies its whole log in the background; 0: never."""
    auto_repair: bool = True
    """Whether a member of a group automatically fetches damaged or missing segments from its peers."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        found = out_of_range(self)
        if not self.disk_check_ratio <= self.disk_clean_ratio <= self.disk_full_ratio:
            found.append(
                f"disk ratios must satisfy disk_check_ratio={self.disk_check_ratio} <= "
                f"disk_clean_ratio={self.disk_clean_ratio} <= disk_full_ratio={self.disk_full_ratio}"
            )
        return found

    @property
    def entry_bytes_limit(self) -> int:
        """The largest record that can be stored: the configured maximum, or what one segment can hold."""
        return min(self.max_entry_bytes, self.segment_bytes - MIN_BLANK_BYTES)


class ClientAuth(StrEnum):
    """Whether a client must show a certificate."""

    REQUIRE = "require"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """How a server protects its traffic. With TLS it accepts nothing else, from peers and clients alike.

    The three main paths are given together. The files may be replaced at any time: new connections use the new ones.
    """

    tls_cert_path: Path | None = None
    """PEM file with this node's certificate and any intermediate ones. Its subjectAltName must list the node id and the
    host names and addresses that clients use."""
    tls_key_path: Path | None = None
    """PEM file with the certificate's private key, unencrypted."""
    tls_trust_cert_path: Path | None = None
    """PEM file with the CAs that must have signed peers' certificates."""
    tls_client_trust_cert_path: Path | None = None
    """PEM file with the CAs that must have signed clients' certificates; unset: the same as for peers."""
    tls_client_auth: ClientAuth = ClientAuth.REQUIRE
    """Whether clients must present a certificate (``require``) or not (``none``); peers always must."""
    insecure: bool = False
    """Allow plaintext to and from other machines. Without it and without TLS, only loopback addresses are accepted."""

    @property
    def has_tls(self) -> bool:
        """Whether TLS is wanted, as far as the settings go."""
        return any(path is not None for _, path in self._paths())

    def problems(self, addresses: Iterable[str]) -> list[str]:
        """Everything wrong with these values, as sentences. ``addresses``: what is listened on or connected to."""
        if self.has_tls or self.tls_client_trust_cert_path is not None:
            missing = [name for name, path in self._paths() if path is None]
            return (
                [f"TLS requires a certificate, its key and the CA: also set {' and '.join(missing)}"] if missing else []
            )
        if self.insecure:
            return []
        return plaintext_problems(
            addresses, "set tls_cert_path, tls_key_path and tls_trust_cert_path", "set insecure=true"
        )

    def _paths(self) -> tuple[tuple[str, Path | None], ...]:
        return (
            ("tls_cert_path", self.tls_cert_path),
            ("tls_key_path", self.tls_key_path),
            ("tls_trust_cert_path", self.tls_trust_cert_path),
        )


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Access control; off unless ``acl_enable`` is on."""

    acl_enable: bool = False
    """Whether clients need an access key with permission for each operation; everything else is denied."""
    acl_file: Path | None = None
    """Accounts and permissions, like RocketMQ's ``plain_acl.yml``; reloaded when it changes, refused if other users can
    access it."""
    account_share_percent: Percent = 75
    """Maximum share of a server's client limits (entries, bytes, pulls, streams, answers) that one account may use.

    Without access control, this applies per address, and to connections as well. An IPv6 address counts as its /64.
    """

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        found = out_of_range(self)
        if self.acl_enable and self.acl_file is None:
            found.append(
                "acl_enable=true requires acl_file, the file of accounts (`dledger access new NAME` creates one)"
            )
        return found


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How much of a server its clients may use."""

    connections_max: Annotated[int, Range(1, 1_000_000)] = 1024
    """Maximum client connections; beyond it, the address with the most loses some, idle ones first."""
    connection_calls_max: Annotated[int, Range(1, 1_000_000)] = 128
    """Maximum concurrent calls and streams per connection; further ones wait at the client. Each may hold an incomplete
    request in memory, so a connection may use this times the largest request. Consumers open one stream per queue, and
    our clients open further connections beyond 64.
    """
    connection_idle_ms_max: Annotated[int, Range(1_000, 86_400_000), Unit.MS] = 600_000
    """How long a connection without calls is kept open."""
    handshake_ms_max: Annotated[int, Range(100, 120_000), Unit.MS, Internal()] = 5_000
    """How long a new connection may take to complete its (TLS and) HTTP/2 handshake."""
    header_bytes_max: Annotated[int, Range(1_024, MIB), Unit.BYTES, Internal()] = 16 * 1024
    """Maximum metadata size of one call."""
    call_ms_max: Annotated[int, Range(100, 3_600_000), Unit.MS] = 30_000
    """Longest call other than a stream, even if the client sets no deadline; a pull may take its wait time longer.

    A client that reads none of its answers for this long is disconnected.
    """
    answer_bytes_max: Annotated[int, Range(MIB, 1 << 40), Unit.BYTES] = 256 * MIB
    """Maximum bytes of answers that clients have not read yet; further log reads and pulls wait for room."""
    ping_interval_ms_min: Annotated[int, Range(100, 3_600_000), Unit.MS, Internal()] = 5_000
    """Clients that ping more often than this without a call are disconnected."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        return out_of_range(self)


@dataclass(frozen=True, slots=True)
class BulkReadConfig:
    """How much of a node bulk readers (Spark jobs, audits) may use."""

    bulk_streams_max: Annotated[int, Range(1, 10_000)] = 16
    """Maximum concurrent bulk reads (raw chunks, block digests); others are refused, and clients retry elsewhere."""
    bulk_stream_ms_max: Annotated[int, Range(1_000, 86_400_000), Unit.MS, Internal()] = 600_000
    """Longest bulk read; clients resume where it ended. The client has ``call_ms_max`` to accept each chunk."""
    # One piece of work must fit into a second, or readers that take turns would wait too long to be told apart from
    # those that get nothing.
    fetch_rate_bytes_max: Annotated[int, Range(MIB, or_zero=True), Unit.BYTES] = 0
    """Maximum bytes of raw log per second for all readers together; 0: as fast as they accept them."""
    digest_rate_bytes_max: Annotated[int, Range(16 * MIB, or_zero=True), Unit.BYTES] = 1024 * MIB
    """Maximum bytes of log per second digested for all callers together; 0: no limit."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        return out_of_range(self)


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """When a node with a state machine saves its state."""

    snapshot_entries: Annotated[int, Range(1)] = 1_000_000
    """After how many entries a node with a state machine writes a snapshot of it."""
    snapshot_bytes: Annotated[int, Range(1), Unit.BYTES] = 1024 * MIB
    """After how many bytes of log it does; not before as many as the last snapshot has."""
    snapshot_rate_bytes_max: Annotated[int, Range(MIB, or_zero=True), Unit.BYTES] = 64 * MIB
    """How many bytes of a snapshot to write per second, so that appends on the same disk go on; 0: no limit."""
    catch_up_rate_bytes_max: Annotated[int, Range(MIB, or_zero=True), Unit.BYTES] = 256 * MIB
    """How many bytes of snapshots to send per second to members that are far behind, all together; 0: no limit."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, as sentences."""
        return out_of_range(self)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything one node needs to run. Build it, then ``check()`` it before anything is opened."""

    group: str = "default"
    """Name of the group; must be the same on all members; recorded on disk."""
    node_id: NodeId = _DEFAULT_NODE
    """This node's id, which must be one of the members'; recorded on disk."""
    members: tuple[Member, ...] = (Member(_DEFAULT_NODE, "127.0.0.1", 20911),)
    """Members with which a new group begins, and where to look for the others: ``id-host:port;id-host:port``, their
    hosts and ports for peers, including this node's. Once members were changed, the group itself knows them.
    """
    bind_host: str = ""
    """Address to listen on, for members and for clients; empty: the host of this node in ``members``.

    Use ``0.0.0.0`` in a container, which does not choose its network address and may see it change.
    """
    client_host: str = ""
    """Address to listen on for clients; empty: ``bind_host``, or the host of this node in ``members``."""
    client_port: Annotated[int | None, Range(0, 65535)] = None
    """Port for clients; unset: the peer port + 10000; 0: any free port."""
    grpc_server_port: Annotated[int | None, Range(0, 65535)] = None
    """Port for gRPC (the service ``dledger.v1.LogService``, health and reflection), at the address for clients; 0:
    none. Unset: the client port + 2, unless that is another member's on the same host.
    """
    advertised_client_address: str = ""
    """Address that nodes give to clients; empty: the client port at ``client_host`` or the host in ``members``."""
    cluster_id: str = ""
    """Must be the same on all members; empty: the group's name. Set it if two groups have one name and could meet."""
    join: bool = False
    """Whether this node, while its directory is empty, waits until it is added to a group that runs already and some of
    whose members ``members`` names. Without it, it would found another group with them.
    """
    election: ElectionConfig = field(default_factory=ElectionConfig)
    replication: ReplicationConfig = field(default_factory=ReplicationConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    bulk: BulkReadConfig = field(default_factory=BulkReadConfig)
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    client_streams_max: Positive = 1024
    """Maximum open client streams of each kind (append, follow, watch; health and reflection) on this node."""
    client_appends: Annotated[bool, Internal()] = True
    """Whether the log service accepts appends; false in a broker, which alone writes to its log."""
    metrics_port: Port = 0
    """Port that serves ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz``; 0: none."""
    metrics_host: str = "127.0.0.1"
    """Address to serve metrics at: read-only, unencrypted, and open to anyone who can connect."""
    exit_with_any_group: bool = False
    """Whether a process of several groups ends when one of them fails; otherwise it ends when none is left."""

    @property
    def self_member(self) -> Member:
        """This node's own entry in ``members``. Raises ``ConfigError`` if there is none."""
        for member in self.members:
            if member.node_id == self.node_id:
                return member
        raise ConfigError([self._missing_self()])

    @property
    def client_bind_host(self) -> str:
        """The host to listen on for clients."""
        return self.client_host or self.bind_host or self.self_member.host

    @property
    def client_bind_port(self) -> int:
        """The port to listen on for clients; 0: any free port."""
        return self.self_member.port + CLIENT_PORT_OFFSET if self.client_port is None else self.client_port

    @property
    def grpc_bind_port(self) -> int | None:
        """The port to listen on for gRPC; 0: any free port, None: none."""
        port = grpc_port_of(self.grpc_server_port, self.client_bind_port)
        return None if self.grpc_server_port is None and port in self._neighbours_ports else port

    @property
    def _neighbours_ports(self) -> set[int]:
        """The ports for clients of the other members on this host, as far as they can be derived."""
        if self.client_port is not None:
            return set()
        return {one.port + CLIENT_PORT_OFFSET for one in self.peers if one.host == self.self_member.host}

    @property
    def peers(self) -> tuple[Member, ...]:
        """The other members, sorted by id."""
        others = (member for member in self.members if member.node_id != self.node_id)
        return tuple(sorted(others, key=lambda member: member.node_id))

    @property
    def effective_cluster_id(self) -> str:
        """The configured cluster id, or the group's name: members come and go, and a newcomer must know it, too."""
        return self.cluster_id or self.group

    def _missing_self(self) -> str:
        ids = ", ".join(member.node_id for member in self.members)
        return f"node id {self.node_id!r} is not among the members ({ids}): set the id to one of them"

    def problems(self) -> list[str]:
        """Everything wrong with this configuration, as sentences; empty if it is valid."""
        found = out_of_range(self)
        ids = [member.node_id for member in self.members]
        if not self.group:
            found.append("group must not be empty")
        if self.node_id not in ids:
            found.append(self._missing_self())
        found += [f"member id {one!r} appears more than once" for one in sorted({i for i in ids if ids.count(i) > 1})]
        found += [f"member id {one!r} must not contain a slash" for one in sorted(set(ids)) if "/" in one]
        addresses = [member.address for member in self.members]
        found += [
            f"member address {one!r} appears more than once"
            for one in sorted({a for a in addresses if addresses.count(a) > 1})
        ]
        found += [
            f"preferred leader {one!r} is not a member" for one in self.election.preferred_leaders if one not in ids
        ]
        if self.node_id in ids and self.client_port is None and self.self_member.port + CLIENT_PORT_OFFSET > 65535:
            found.append(
                f"peer port {self.self_member.port} + {CLIENT_PORT_OFFSET} is not a valid port: set client_port "
                "explicitly"
            )
        elif self.node_id in ids:
            found += self._grpc_port_problems()
        found += self.election.problems() + self.replication.problems() + self.store.problems()
        found += self.access.problems() + self.limits.problems() + self.bulk.problems()
        found += self.snapshots.problems()
        found += self.security.problems([*addresses, *filter(None, (self.bind_host, self.client_host))])
        return found

    def _grpc_port_problems(self) -> list[str]:
        taken = {self.client_bind_port: "the client port", self.metrics_port: "the metrics port"}
        taken |= {
            one.port: f"the peer port of {one.node_id}" for one in self.members if one.host == self.self_member.host
        }
        return grpc_port_problems(self.grpc_bind_port, self.grpc_server_port, "the client port", taken)

    def check(self) -> ServerConfig:
        """Return self, or raise ``ConfigError`` naming every problem."""
        found = self.problems()
        if found:
            raise ConfigError(found)
        return self


def grpc_port_of(configured: int | None, client_port: int) -> int | None:
    """The port to listen on for gRPC beside ``client_port``; 0: any free port, None: none."""
    if configured is None:
        return client_port + GRPC_PORT_OFFSET if client_port else 0
    return configured or None


def grpc_port_problems(
    port: int | None, configured: int | None, client_port: str, taken: Mapping[int, str]
) -> list[str]:
    """Problems of the port of gRPC. ``client_port``: the name of that port; ``taken``: by whom others are."""
    advice = "set grpc_server_port to another one, or to 0 for none"
    how = f"grpc_server_port={port}" if configured is not None else f"grpc_server_port={port} ({client_port} + 2)"
    if port and PORT_MAX < port <= PORT_MAX + GRPC_PORT_OFFSET and configured is None:
        return [f"{how} is not a valid port: {advice}"]
    return [f"{how} is also {taken[port]}: {advice}"] if port and port in taken else []


def parse_members(text: str) -> tuple[Member, ...]:
    """Read RocketMQ's ``dLegerPeers``: ``id-host:port;id-host:port``.

    The id ends at the first ``-`` (so hosts may hold more of them), the port starts after the last ``:`` (so an IPv6
    host works, in brackets or bare). An exact repetition counts once. Raises ``ConfigError`` naming every part
    that does not fit.
    """
    members: list[Member] = []
    problems: list[str] = []
    for part in split(text, ";"):
        node_id, _, address = part.partition("-")
        try:
            host, port = parse_address(address)
        except ValueError:
            host, port = "", 0
        if node_id and host:
            members.append(Member(NodeId(node_id), host, port))
        else:
            problems.append(f"member {part!r} must have the form id-host:port, for example n0-127.0.0.1:20911")
    if not members and not problems:
        problems.append("no members given: use id-host:port;id-host:port")
    if problems:
        raise ConfigError(problems)
    return tuple(dict.fromkeys(members))
