package interop;

import java.lang.reflect.Field;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.nio.file.Path;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.SystemClock;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.config.BrokerRole;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.dledger.DLedgerCommitLog;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** Opens stores with files so small that a few hundred messages fill several of each kind. */
final class Stores {
    static final int SEGMENT_BYTES = 16 * 1024;
    static final int QUEUE_FILE_BYTES = 20 * 20;
    static final int INDEX_SLOTS = 37;
    static final int INDEX_ENTRIES = 100;
    static final long FIRST_STORE_TIME = 1_700_000_000_000L;

    /** Store timestamps of a plain log, which takes them from here, so that its bytes are the same in every run. */
    static final AtomicLong NOW = new AtomicLong(FIRST_STORE_TIME);

    private Stores() {
    }

    static DefaultMessageStore open(Path dir, boolean replicated, boolean fixedClock) throws Exception {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(dir.toString());
        config.setStorePathCommitLog(dir.resolve("commitlog").toString());
        config.setMappedFileSizeCommitLog(SEGMENT_BYTES);
        config.setMappedFileSizeConsumeQueue(QUEUE_FILE_BYTES);
        config.setMaxHashSlotNum(INDEX_SLOTS);
        config.setMaxIndexNum(INDEX_ENTRIES);
        config.setFlushDiskType(FlushDiskType.ASYNC_FLUSH);
        config.setHaListenPort(0);
        config.setMessageIndexSafe(true);
        config.setFileReservedTime(24 * 365 * 100);
        config.setDiskMaxUsedSpaceRatio(95);
        config.setBrokerRole(BrokerRole.SLAVE); // at start: or it delivers the delayed messages
        if (replicated) {
            config.setBrokerRole(BrokerRole.ASYNC_MASTER);
            config.setEnableDLegerCommitLog(true);
            config.setdLegerGroup("interop");
            config.setdLegerPeers("n0-127.0.0.1:" + freePort());
            config.setdLegerSelfId("n0");
        }
        DefaultMessageStore store = new DefaultMessageStore(
            config, new BrokerStatsManager("interop", true), (topic, queue, offset, tags, time, bits, more) -> { },
            new BrokerConfig());
        if (fixedClock) {
            fixClock(store);
        }
        if (!store.load()) {
            throw new IllegalStateException("the store did not load: " + dir);
        }
        store.start();
        config.setBrokerRole(BrokerRole.ASYNC_MASTER);
        if (replicated) {
            awaitLeader((DLedgerCommitLog) store.getCommitLog());
            awaitDispatch(store);
            store.recoverTopicQueueTable(); // as a broker does that is promoted
        }
        awaitDispatch(store);
        return store;
    }

    static void awaitDispatch(DefaultMessageStore store) throws InterruptedException {
        long deadline = System.nanoTime() + 20_000_000_000L;
        while (store.dispatchBehindBytes() > 0) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("dispatch is " + store.dispatchBehindBytes() + " bytes behind");
            }
            Thread.sleep(1);
        }
    }

    private static void awaitLeader(DLedgerCommitLog log) throws InterruptedException {
        long deadline = System.nanoTime() + 60_000_000_000L;
        var state = log.getdLedgerServer().getMemberState();
        while (!state.isLeader() || log.getdLedgerServer().getdLedgerStore().getLedgerEndIndex() >= 0
            && log.getdLedgerServer().getdLedgerStore().getLedgerEndIndex()
                != log.getdLedgerServer().getdLedgerStore().getCommittedIndex()) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("the node does not come to lead a log that is committed to its end");
            }
            Thread.sleep(10);
        }
    }

    private static void fixClock(DefaultMessageStore store) throws ReflectiveOperationException {
        Field field = DefaultMessageStore.class.getDeclaredField("systemClock");
        field.setAccessible(true);
        field.set(store, new SystemClock() {
            @Override
            public long now() {
                return NOW.get();
            }
        });
    }

    private static int freePort() throws Exception {
        try (ServerSocket socket = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
            return socket.getLocalPort();
        }
    }
}
