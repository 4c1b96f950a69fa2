"""Subscription groups and their offsets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, ClassVar, Final

from dledger.records import record
from rocketstore.remoting.bodies.topics import PUT_AT_ONCE_MAX, DataVersion
from rocketstore.remoting.body import EMPTY_IS_NULL, AtMost, Body
from rocketstore.remoting.headers import Int32, Int64

GROUP_BYTES_MAX: Final = 64 * 1024
"""Of one group's settings: RocketMQ's take 300."""
RETRY_DELAYS_MAX: Final = 1024
"""That can be read; a group may have fewer."""
GROUPS_BYTES_MAX: Final = 1024 * 1024
"""Of a list of them."""


@record(frozen=True, slots=True)
class CustomizedRetryPolicy(Body):
    """Delays in milliseconds."""

    next: Annotated[tuple[Int64, ...], AtMost(RETRY_DELAYS_MAX)]


@record(frozen=True, slots=True)
class ExponentialRetryPolicy(Body):
    """The first and the longest delay in milliseconds; each is so many times the one before."""

    initial: Int64
    max: Int64
    multiplier: Int64


@record(frozen=True, slots=True)
class GroupRetryPolicy(Body):
    """Of RocketMQ 5: the one that ``type`` names (CUSTOMIZED, EXPONENTIAL) counts."""

    type: str = "CUSTOMIZED"
    exponential_retry_policy: ExponentialRetryPolicy | None = None
    customized_retry_policy: CustomizedRetryPolicy | None = None


@record(frozen=True, slots=True)
class SubscriptionGroupConfig(Body):
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP."""

    bytes_max: ClassVar[int] = GROUP_BYTES_MAX
    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queue_nums: Int32 = 1
    retry_max_times: Int32 = 16
    broker_id: Int64 = 0
    which_broker_when_consume_slowly: Int64 = 1
    notify_consumer_ids_changed_enable: bool = True
    consume_message_orderly: Annotated[bool, EMPTY_IS_NULL] = False
    group_retry_policy: GroupRetryPolicy | None = None
    """RocketMQ 5's, as the next and the one before."""


@record(frozen=True, slots=True)
class SubscriptionGroupList(Body):
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST."""

    bytes_max: ClassVar[int] = GROUPS_BYTES_MAX
    group_config_list: Annotated[tuple[SubscriptionGroupConfig, ...], AtMost(PUT_AT_ONCE_MAX)] = ()


@record(frozen=True, slots=True)
class SubscriptionGroupTable(Body):
    """Answer to GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""

    data_version: DataVersion = DataVersion()
    subscription_group_table: Mapping[str, SubscriptionGroupConfig] = field(default_factory=dict)


@record(frozen=True, slots=True)
class GroupList(Body):
    """Answer to QUERY_TOPIC_CONSUME_BY_WHO."""

    group_list: tuple[str, ...] = ()


@record(frozen=True, slots=True)
class ConsumerOffsetTable(Body):
    """Answer to GET_ALL_CONSUMER_OFFSET: offsets by queue, by ``topic@group``."""

    offset_table: Mapping[str, Mapping[Int32, Int64]] = field(default_factory=dict)


@record(frozen=True, slots=True)
class DelayOffsetTable(Body):
    """Answer to GET_ALL_DELAY_OFFSET: offsets by delay level."""

    offset_table: Mapping[Int32, Int64] = field(default_factory=dict)


@record(frozen=True, slots=True)
class CorrectionOffsets(Body):
    """Answer to QUERY_CORRECTION_OFFSET: offsets by queue."""

    correction_offsets: Mapping[Int32, Int64] = field(default_factory=dict)
