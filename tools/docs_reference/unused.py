"""Why some setting names of RocketMQ and DLedger have no effect. The names are in ``dledger.java_names``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

REASONS: Final = (
    (
        r"namesrvDomain.*|forceRegister|compressedRegister|fetchNamesrvAddrByAddressServer"
        r"|loadBalancePollNameServerInterval",
        "A broker registers with the name servers that `namesrv_addr` lists, always, and uncompressed.",
    ),
    (
        r"ha[A-Z].*|slaveTimeout|inSyncReplicas|minInSyncReplicas|allAckInSyncStateSet|totalReplicas|skipPreOnlineHA"
        r"|enableAutoInSyncReplicas|duplicationEnable|slaveReadEnable|enableSlaveActingMaster|enableControllerMode"
        r"|brokerIP2|offsetCheckInSlave|brokerRole|brokerId",
        "They belong to RocketMQ 5's controller, or to classic replication between plain brokers, while a group has "
        "Raft.",
    ),
    (
        r".*ThreadPool.*|.*ThreadNums?|.*Threads|.*PoolNums|.*PoolQueueCapacity|.*AsyncSemaphoreValue"
        r"|.*OnewaySemaphoreValue|serverCallbackExecutorThreads|waitTimeMillsIn.*Queue|brokerFastFailureEnable"
        r"|useReentrantLockWhenPutMessage|sendMessageThreadPoolNums|startAcceptSendRequestTimeStamp"
        r"|printStoreThreadPoolTimeInterval|disableConsumeIfConsumerReadSlowly|consumerFallbehindThreshold"
        r"|dispatchFromSenderThread|enableBuildConsumeQueueConcurrently",
        "There are no thread pools or queues per kind of request: one event loop serves all clients, and pending work "
        "is limited in messages and bytes (`pending_entries_max`, `send_pending_messages_max`).",
    ),
    (
        r"(server|client)(Socket|Pooled|Channel|Close).*|useEpollNativeSelector|connectTimeoutMillis"
        r"|channelNotActiveInterval|writeBuffer.*WaterMark|transferMsgByHeap|highSpeedMode",
        "The system and gRPC size the buffers of connections; what a connection may occupy is limited.",
    ),
    (r"useTLS|kerberosEnable|tls.*", "They belong to RocketMQ's remoting protocol; TLS has its own settings here."),
    (
        r"timer.*|.*[Pp]op[A-Z].*|maxPopPollingSize|popPolling.*|enableLmq|maxLmqConsumeQueueNum|enableMultiDispatch"
        r"|defaultMessageRequestMode|.*[Rr]eply.*|maxDelayTime|enableScheduleAsyncDeliver|scheduleAsyncDeliver.*"
        r"|enableScheduleMessageStats",
        "They belong to RocketMQ 5 or to request-reply messages, which are not supported.",
    ),
    (
        r".*BitMap.*|.*BloomFilter|enablePropertyFilter|expectConsumerNumUseFilter|filter.*|enableConsumeQueueExt"
        r"|mappedFileSizeConsumeQueueExt|bitMapLengthConsumeQueueExt",
        "Filtering by properties (SQL92) and consume queue extensions are not supported; filtering by tags is.",
    ),
    (
        r"trace.*|msgTraceTopicName|enableDetailStat|autoDeleteUnusedStats|debugLockEnable|metric.*",
        "Tracing and RocketMQ's own exporters are not supported.",
    ),
    (
        r".*[Ss]napshot.*",
        "There are no snapshots: a member that lags too far restarts at the leader's first kept entry.",
    ),
    (
        r".*[Bb]atchPush|.*[Bb]atchAppend.*|maxBatch.*|peerPush.*|enablePushToFollower",
        "Pushes are always batched, up to `push_bytes_max`, and limited by `inflight_pushes_max`, not by a rate.",
    ),
    (
        r"enableLeaderElector|m(in|ax)TakeLeadershipVoteIntervalMs|enableFastAdvanceCommitIndex",
        "Elections are always on, leadership transfer needs no wait, and a leader always starts its term with a NOOP.",
    ),
    (r"storeType", "Logs are always in files."),
    (
        r"abortFile|storeCheckpoint|rocketmqHome|storePathConsumeQueue|storePathIndex|mapedFileSizeCommitLog"
        r"|messageStorePlugIn|putMsgIndexHightWater",
        "Files have fixed paths below `storePathRootDir`, and there are no plug-ins.",
    ),
    (
        r"destroyMapedFile.*|redeleteHangedFileInterval|flushLeastPagesWhenWarmMapedFile|delete.*FilesInterval",
        "Files are removed immediately, and warming writes whole files.",
    ),
    (
        r"notifyConsumerIdsChangedEnable|consumer.*|heartbeat.*|flushConsumerOffset.*|disappearTimeAfterStart"
        r"|autoCreateSubscriptionGroup|startRealTimeNotifyThread",
        "The broker keeps no list of connected consumers, and writes each offset commit to the log.",
    ),
    (
        r"commercial.*|configBlackList|isolateLogEnable",
        "They belong to RocketMQ's cloud offerings, and to changing settings at runtime, which is not supported.",
    ),
    (
        r"regionId|brokerTopicEnable|clusterTopicEnable|translateMsgIdEnable|diskFallRecorded",
        "They belong to RocketMQ's cloud offerings, built-in topics and statistics, which are not supported.",
    ),
)
"""First match wins; the pattern is of whole names."""


def by_reason(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """The names under each reason, in the order of ``REASONS``. Raises ``LookupError`` for a name that has none."""
    found: dict[str, list[str]] = {reason: [] for _, reason in REASONS}
    for name in sorted(names, key=str.lower):
        reason = next((why for pattern, why in REASONS if re.fullmatch(pattern, name)), None)
        if reason is None:
            raise LookupError(f"{name} changes nothing: say why in tools/docs_reference/unused.py")
        found[reason].append(name)
    return [(reason, listed) for reason, listed in found.items() if listed]
