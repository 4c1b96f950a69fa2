package interop;

import java.io.ByteArrayOutputStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.zip.Deflater;
import java.util.zip.DeflaterOutputStream;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.MessageExtBrokerInner;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.PutMessageStatus;

/** The messages: every kind that the store treats in a way of its own. */
final class Content {
    private static final InetSocketAddress BORN_4 = host("10.20.30.40", 54321);
    private static final InetSocketAddress BORN_6 = host("1050::5:600:300c:326b", 65535);
    private static final InetSocketAddress STORE_4 = host("127.0.0.1", 10911);
    private static final InetSocketAddress STORE_6 = host("::1", 10911);
    private static final long FIRST_BORN_TIME = 1_690_000_000_000L;
    private static final String[] TAGS = {
        "TagA", "TAG1", "polygenelubricants", "\u4e2d\u6587", "\ud83d\ude80tag", "a", "Aa", "BB", "TagA || TagB",
        "x".repeat(300), null,
    };

    private final DefaultMessageStore store;
    private final boolean replicated;
    private int count;

    private Content(DefaultMessageStore store, boolean replicated) {
        this.store = store;
        this.replicated = replicated;
    }

    static void writeAll(DefaultMessageStore store, boolean replicated) throws Exception {
        Content content = new Content(store, replicated);
        content.putTags();
        content.putHosts();
        content.putTransactions();
        content.putDelays();
        content.putBodies();
        content.putKeys();
        content.putProperties();
        content.putBatches();
        content.putMany("TopicTest", 4, 100);
        content.putMany("%RETRY%group-1", 1, 30);
        content.putMany("L".repeat(127), 1, 3);
        Stores.awaitDispatch(store);
    }

    static void writeMore(DefaultMessageStore store, boolean replicated) throws Exception {
        Content content = new Content(store, replicated);
        content.count = 5000;
        content.putMany("TopicTest", 4, 40);
        content.putHosts();
        content.putBatches();
        content.putMany("Later", 2, 30);
        Stores.awaitDispatch(store);
    }

    private void putTags() throws Exception {
        for (String tag : TAGS) {
            MessageExtBrokerInner message = message("TopicTest", 0, "tagged");
            if (tag != null) {
                message.setTags(tag);
            }
            put(message);
        }
    }

    private void putHosts() throws Exception {
        for (InetSocketAddress born : List.of(BORN_4, BORN_6)) {
            for (InetSocketAddress stored : List.of(STORE_4, STORE_6)) {
                MessageExtBrokerInner message = message("Hosts", 1, "from " + born.getPort());
                message.setBornHost(born);
                message.setStoreHost(stored);
                message.setTags("hosts");
                message.setKeys("host-key");
                put(message);
            }
        }
    }

    private void putTransactions() throws Exception {
        for (int type : new int[] {0x4, 0x8, 0xC, 0x0}) {
            MessageExtBrokerInner message = message("Transactions", 0, "type " + type);
            message.setSysFlag(type);
            message.setPreparedTransactionOffset(type == 0 ? 0 : 1024);
            message.setKeys("tx-" + type + " tx");
            message.putUserProperty("PGROUP_OF_USER", "producers");
            put(message);
        }
    }

    private void putDelays() throws Exception {
        for (int level : new int[] {1, 2, 5, 17, 18, 18, 99}) {
            MessageExtBrokerInner message = message("Delayed", 3, "level " + level);
            message.setDelayTimeLevel(level);
            message.setTags("later");
            message.setKeys("delayed");
            put(message);
        }
        MessageExtBrokerInner prepared = message("Delayed", 3, "a prepared message is not delayed");
        prepared.setDelayTimeLevel(4);
        prepared.setSysFlag(0x4);
        put(prepared);
        MessageExtBrokerInner committed = message("Delayed", 3, "a committed one is");
        committed.setDelayTimeLevel(4);
        committed.setSysFlag(0x8);
        put(committed);
    }

    private void putBodies() throws Exception {
        put(message("Bodies", 0, ""));
        for (int size : new int[] {1, 4095, 9000, 7200, 12000, 15000, 16000}) {
            MessageExtBrokerInner message = message("Bodies", 0, "");
            byte[] body = new byte[size];
            Arrays.fill(body, (byte) (size % 251));
            message.setBody(body);
            put(message);
        }
        MessageExtBrokerInner compressed = message("Bodies", 0, "");
        compressed.setBody(deflate("compressed ".repeat(50)));
        compressed.setSysFlag(0x1 | 0x300);
        put(compressed);
        MessageExtBrokerInner flags = message("Bodies", 15, "flags");
        flags.setFlag(-2);
        flags.setReconsumeTimes(16);
        flags.setSysFlag(0x2);
        flags.setBornTimestamp(-1);
        put(flags);
    }

    private void putKeys() throws Exception {
        String smallest = keyOfSmallestHash("Keys#");
        for (String keys : List.of("k1 k2", "k1", "Aa", "BB", " two  blanks ", "\u952e \ud83d\udd11", smallest, "same same")) {
            MessageExtBrokerInner message = message("Keys", 2, "keys");
            message.setKeys(keys);
            MessageAccessor.putProperty(message, "UNIQ_KEY", String.format("7F00000100002A9F0000%012X", count));
            put(message);
        }
    }

    private void putProperties() throws Exception {
        MessageExtBrokerInner many = message("Properties", 0, "many");
        for (int i = 0; i < 60; i++) {
            many.putUserProperty("name-" + i, "value \u00e9\u4e2d " + i);
        }
        put(many);
        MessageExtBrokerInner odd = message("Properties", 0, "odd");
        odd.putUserProperty("inner", "a\u0001b");
        odd.putUserProperty("\u00e9t\u00e9", "\ud83d\ude80");
        odd.setWaitStoreMsgOK(false);
        put(odd);
        MessageExtBrokerInner large = message("Properties", 0, "large");
        large.putUserProperty("large", "p".repeat(7000));
        put(large);
    }

    private void putBatches() throws Exception {
        for (InetSocketAddress born : List.of(BORN_4, BORN_6)) {
            List<Message> messages = new ArrayList<>();
            for (int i = 0; i < 5; i++) {
                Message message = new Message("Batches", "TagB", "batch-key-" + i, ("item " + i).getBytes(StandardCharsets.UTF_8));
                message.setFlag(i);
                message.putUserProperty("item", String.valueOf(i));
                messages.add(message);
            }
            messages.add(new Message("Batches", "no properties".getBytes(StandardCharsets.UTF_8)));
            MessageExtBatch batch = new MessageExtBatch();
            batch.setTopic("Batches");
            batch.setQueueId(1);
            batch.setBody(MessageDecoder.encodeMessages(messages));
            batch.setBornTimestamp(FIRST_BORN_TIME + count);
            batch.setBornHost(born);
            batch.setStoreHost(STORE_4);
            batch.putUserProperty("of-the-batch", "yes");
            tick();
            check(store.putMessages(batch));
        }
    }

    private void putMany(String topic, int queues, int messages) throws Exception {
        for (int i = 0; i < messages; i++) {
            MessageExtBrokerInner message = message(topic, i % queues, "message " + i + " " + "b".repeat(i % 97));
            message.setTags(i % 3 == 0 ? "TagA" : "TagB");
            if (i % 2 == 0) {
                message.setKeys("order-" + i % 10 + " item-" + i);
            }
            put(message);
        }
    }

    private MessageExtBrokerInner message(String topic, int queueId, String body) {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        message.setTopic(topic);
        message.setQueueId(queueId);
        message.setBody(body.getBytes(StandardCharsets.UTF_8));
        message.setBornTimestamp(FIRST_BORN_TIME + count);
        message.setBornHost(BORN_4);
        message.setStoreHost(STORE_4);
        return message;
    }

    private void put(MessageExtBrokerInner message) throws Exception {
        Map<String, String> properties = new TreeMap<>(message.getProperties() == null ? Map.of() : message.getProperties());
        message.setPropertiesString(MessageDecoder.messageProperties2String(properties)); // as the broker does
        tick();
        check(store.putMessage(message));
    }

    /** One message at a time goes through, so that every index file gets a name of its own: it is a time. */
    private void tick() throws Exception {
        count++;
        Stores.NOW.addAndGet(count % 10 == 0 ? 2500 : 130);
        Stores.awaitDispatch(store);
        Thread.sleep(2);
    }

    private void check(PutMessageResult result) {
        if (result.getPutMessageStatus() != PutMessageStatus.PUT_OK) {
            throw new IllegalStateException("message " + count + ", replicated " + replicated + ": " + result);
        }
    }

    /** A key for which "prefix + key" has the hash -2^31, the one whose absolute value is negative. */
    private static String keyOfSmallestHash(String prefix) {
        int digits = 7;
        long wanted = 0x80000000L - Integer.toUnsignedLong((prefix + "0".repeat(digits)).hashCode()) & 0xFFFFFFFFL;
        char[] key = new char[digits];
        for (int i = digits - 1; i >= 0; i--) {
            key[i] = (char) ('0' + wanted % 31);
            wanted /= 31;
        }
        String text = new String(key);
        if ((prefix + text).hashCode() != Integer.MIN_VALUE) {
            throw new IllegalStateException(text);
        }
        return text;
    }

    private static byte[] deflate(String text) throws Exception {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        try (DeflaterOutputStream out = new DeflaterOutputStream(bytes, new Deflater(5))) {
            out.write(text.getBytes(StandardCharsets.UTF_8));
        }
        return bytes.toByteArray();
    }

    private static InetSocketAddress host(String ip, int port) {
        try {
            return new InetSocketAddress(InetAddress.getByName(ip), port);
        } catch (java.net.UnknownHostException exception) {
            throw new IllegalStateException(exception);
        }
    }
}
