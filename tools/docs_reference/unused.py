"""Why names that RocketMQ and DLedger know change nothing here. The names themselves are in ``dledger.java_names``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

REASONS: Final = (
    (
        r"namesrv.*|registerNameServerPeriod|registerBrokerTimeoutMills|forceRegister|compressedRegister"
        r"|fetchNamesrvAddrByAddressServer|loadBalancePollNameServerInterval",
        "There is no name server: clients learn of all brokers from any of them.",
    ),
    (
        r"ha[A-Z].*|slaveTimeout|inSyncReplicas|minInSyncReplicas|allAckInSyncStateSet|totalReplicas|skipPreOnlineHA"
        r"|enableAutoInSyncReplicas|duplicationEnable|slaveReadEnable|enableSlaveActingMaster|enableControllerMode"
        r"|brokerIP2|offsetCheckInSlave|brokerRole|brokerId",
        "Classic master-slave replication and RocketMQ 5's controller are not here; the group replicates by Raft.",
    ),
    (
        r".*ThreadPool.*|.*ThreadNums?|.*Threads|.*PoolNums|.*PoolQueueCapacity|.*AsyncSemaphoreValue"
        r"|.*OnewaySemaphoreValue|serverCallbackExecutorThreads|waitTimeMillsIn.*Queue|brokerFastFailureEnable"
        r"|useReentrantLockWhenPutMessage|sendMessageThreadPoolNums|startAcceptSendRequestTimeStamp"
        r"|printStoreThreadPoolTimeInterval|disableConsumeIfConsumerReadSlowly|consumerFallbehindThreshold"
        r"|dispatchFromSenderThread|enableBuildConsumeQueueConcurrently",
        "No kind of request has a thread pool and a queue of its own: one event loop serves all clients, and what may "
        "wait is bounded in messages and bytes (`pending_entries_max`, `send_pending_messages_max`).",
    ),
    (
        r"(server|client)(Socket|Pooled|Channel|Close).*|useEpollNativeSelector|connectTimeoutMillis"
        r"|channelNotActiveInterval|writeBuffer.*WaterMark|transferMsgByHeap|highSpeedMode",
        "RocketMQ's remoting is not here: clients talk gRPC, which sizes its own buffers.",
    ),
    (r"useTLS|kerberosEnable|tls.*", "RocketMQ's switches for its own remoting; TLS has settings of its own here."),
    (
        r"transaction.*|endTransaction.*|rejectTransactionMessage",
        "Transactions' check-back is not here.",
    ),
    (
        r"timer.*|.*[Pp]op[A-Z].*|maxPopPollingSize|popPolling.*|enableLmq|maxLmqConsumeQueueNum|enableMultiDispatch"
        r"|defaultMessageRequestMode|.*[Rr]eply.*|maxDelayTime|enableScheduleAsyncDeliver|scheduleAsyncDeliver.*"
        r"|enableScheduleMessageStats",
        "Of RocketMQ 5 or of request-reply messages, which are not here.",
    ),
    (
        r".*BitMap.*|.*BloomFilter|enablePropertyFilter|expectConsumerNumUseFilter|filter.*|enableConsumeQueueExt"
        r"|mappedFileSizeConsumeQueueExt|bitMapLengthConsumeQueueExt",
        "Filtering by properties (SQL92) and consume queue extensions are not here; filtering by tags is.",
    ),
    (
        r"trace.*|msgTraceTopicName|enableDetailStat|autoDeleteUnusedStats|debugLockEnable|metric.*",
        "Tracing and RocketMQ's own exporters are not here.",
    ),
    (r"aclEnable", "RocketMQ's access control is not here under this name."),
    (
        r".*[Ss]napshot.*",
        "There are no snapshots: the log's own begin is what a lagging member is given.",
    ),
    (
        r".*[Bb]atchPush|.*[Bb]atchAppend.*|maxBatch.*|peerPush.*|enablePushToFollower",
        "Pushes are always gathered, up to `push_bytes_max`, and limited by `inflight_pushes_max`, not by a rate.",
    ),
    (
        r"enableLeaderElector|m(in|ax)TakeLeadershipVoteIntervalMs|enableFastAdvanceCommitIndex",
        "Elections are always on, a hand-over needs no waiting, and a leader always begins its term with a NOOP.",
    ),
    (r"storeType", "Logs are always in files."),
    (
        r"abortFile|storeCheckpoint|rocketmqHome|storePathConsumeQueue|storePathIndex|mapedFileSizeCommitLog"
        r"|messageStorePlugIn|putMsgIndexHightWater",
        "Files have fixed places below `storePathRootDir`, and there are no plug-ins.",
    ),
    (
        r"destroyMapedFile.*|redeleteHangedFileInterval|flushLeastPagesWhenWarmMapedFile|delete.*FilesInterval",
        "Files are removed at once, and warming writes whole files.",
    ),
    (
        r"notifyConsumerIdsChangedEnable|consumer.*|heartbeat.*|flushConsumerOffset.*|disappearTimeAfterStart"
        r"|autoCreateSubscriptionGroup|startRealTimeNotifyThread",
        "The broker keeps no list of connected consumers; their offsets are in the log, written as they are committed.",
    ),
    (
        r"commercial.*|configBlackList|isolateLogEnable",
        "Of RocketMQ's clouds, and of commands that change a running broker's settings, which are not here.",
    ),
    (
        r"regionId|brokerTopicEnable|clusterTopicEnable|translateMsgIdEnable|diskFallRecorded",
        "Of RocketMQ's clouds, built-in topics and statistics, which are not here.",
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
