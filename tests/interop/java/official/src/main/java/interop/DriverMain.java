package interop;

import com.google.gson.Gson;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.ProducerBuilder;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/** RocketMQ's official Java client behind lines of JSON: the protocol is in README.md of tests/interop/official. */
public final class DriverMain {
    private static final int ALWAYS = -1;
    private static final Gson GSON = new Gson();
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static final Map<String, AutoCloseable> CLIENTS = new ConcurrentHashMap<>();
    private static final Map<Integer, MessageView> MESSAGES = new ConcurrentHashMap<>();
    private static final Map<String, Load> LOADS = new ConcurrentHashMap<>();
    private static final AtomicInteger NUMBERS = new AtomicInteger();
    private static PrintStream out;

    private DriverMain() {
    }

    public static void main(String[] arguments) throws Exception {
        out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        ExecutorService pool = Executors.newCachedThreadPool();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            JsonObject request = JsonParser.parseString(line).getAsJsonObject();
            pool.submit(() -> answer(request));
        }
        System.exit(0);
    }

    private static void answer(JsonObject request) {
        JsonObject said = new JsonObject();
        said.add("id", request.get("id"));
        try {
            said.add("ok", done(request));
        } catch (Throwable error) {
            said.addProperty("error", error.toString());
        }
        say(said);
    }

    private static synchronized void say(JsonObject line) {
        out.println(GSON.toJson(line));
    }

    private static JsonObject done(JsonObject request) throws Exception {
        switch (request.get("op").getAsString()) {
            case "producer":
                return producer(request);
            case "send":
                return send(request);
            case "recall":
                return recall(request);
            case "load":
                LOADS.put(text(request, "name"), new Load((Producer) client(request), request));
                return new JsonObject();
            case "loaded":
                return LOADS.remove(text(request, "name")).end();
            case "simple":
                return simple(request);
            case "receive":
                return receive(request);
            case "ack":
                ((SimpleConsumer) client(request)).ack(MESSAGES.get(request.get("message").getAsInt()));
                return new JsonObject();
            case "change":
                ((SimpleConsumer) client(request)).changeInvisibleDuration(
                    MESSAGES.get(request.get("message").getAsInt()), Duration.ofMillis(number(request, "ms", 0)));
                return new JsonObject();
            case "push":
                return push(request);
            case "close":
                CLIENTS.remove(text(request, "name")).close();
                return new JsonObject();
            default:
                throw new IllegalArgumentException("unknown op: " + request.get("op"));
        }
    }

    private static JsonObject producer(JsonObject request) throws Exception {
        String name = text(request, "name");
        ProducerBuilder made = PROVIDER.newProducerBuilder().setClientConfiguration(configuration(request));
        if (request.has("topics")) {
            made.setTopics(request.getAsJsonArray("topics").asList().stream().map(JsonElement::getAsString)
                .toArray(String[]::new));
        }
        if (request.has("check") && !request.get("check").isJsonNull()) {
            TransactionResolution says = TransactionResolution.valueOf(text(request, "check").toUpperCase());
            made.setTransactionChecker(view -> {
                event("check", name, view, null);
                return says;
            });
        }
        CLIENTS.put(name, made.build());
        return new JsonObject();
    }

    private static JsonObject send(JsonObject request) throws Exception {
        Producer producer = (Producer) client(request);
        if (!request.has("transaction")) {
            return receipt(producer.send(message(request, text(request, "body"))));
        }
        Transaction transaction = producer.beginTransaction();
        SendReceipt made = producer.send(message(request, text(request, "body")), transaction);
        switch (text(request, "transaction")) {
            case "commit":
                transaction.commit();
                break;
            case "rollback":
                transaction.rollback();
                break;
            default:
                break;
        }
        return receipt(made);
    }

    private static JsonObject recall(JsonObject request) throws Exception {
        Producer producer = (Producer) client(request);
        JsonObject said = new JsonObject();
        said.addProperty("message_id",
            producer.recallMessage(text(request, "topic"), text(request, "handle")).getMessageId().toString());
        return said;
    }

    private static JsonObject simple(JsonObject request) throws Exception {
        CLIENTS.put(text(request, "name"), PROVIDER.newSimpleConsumerBuilder()
            .setClientConfiguration(configuration(request))
            .setConsumerGroup(text(request, "group"))
            .setSubscriptionExpressions(subscriptions(request))
            .setAwaitDuration(Duration.ofSeconds(number(request, "await_s", 5)))
            .build());
        return new JsonObject();
    }

    private static JsonObject receive(JsonObject request) throws Exception {
        List<MessageView> found = ((SimpleConsumer) client(request)).receive(
            (int) number(request, "max", 32), Duration.ofMillis(number(request, "invisible_ms", 30_000)));
        JsonArray all = new JsonArray();
        for (MessageView view : found) {
            int number = NUMBERS.getAndIncrement();
            MESSAGES.put(number, view);
            JsonObject one = told(view);
            one.addProperty("n", number);
            all.add(one);
        }
        JsonObject said = new JsonObject();
        said.add("messages", all);
        return said;
    }

    private static JsonObject push(JsonObject request) throws Exception {
        String name = text(request, "name");
        Map<String, Integer> seen = new HashMap<>();
        JsonObject fails = request.has("fail") ? request.getAsJsonObject("fail") : new JsonObject();
        long hold = number(request, "hold_ms", 0);
        CLIENTS.put(name, PROVIDER.newPushConsumerBuilder()
            .setClientConfiguration(configuration(request))
            .setConsumerGroup(text(request, "group"))
            .setSubscriptionExpressions(subscriptions(request))
            .setConsumptionThreadCount((int) number(request, "threads", 4))
            .setMessageListener(view -> {
                boolean failed;
                String body = body(view);
                synchronized (seen) {
                    int times = (int) number(fails, body, number(fails, "*", 0));
                    failed = seen.merge(body, 1, Integer::sum) <= times || times == ALWAYS;
                }
                event("message", name, view, failed);
                pause(hold);
                return failed ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
            })
            .build());
        return new JsonObject();
    }

    private static void event(String kind, String name, MessageView view, Boolean failed) {
        JsonObject said = new JsonObject();
        said.addProperty("event", kind);
        said.addProperty("from", name);
        said.add("message", told(view));
        if (failed != null) {
            said.addProperty("failed", failed);
            said.addProperty("at_ms", System.currentTimeMillis());
        }
        say(said);
    }

    private static ClientConfiguration configuration(JsonObject request) {
        var made = ClientConfiguration.newBuilder()
            .setEndpoints(text(request, "endpoints"))
            .enableSsl(request.has("tls") && request.get("tls").getAsBoolean());
        if (request.has("key")) {
            JsonArray key = request.getAsJsonArray("key");
            made.setCredentialProvider(
                new StaticSessionCredentialsProvider(key.get(0).getAsString(), key.get(1).getAsString()));
        }
        return made.build();
    }

    private static Map<String, FilterExpression> subscriptions(JsonObject request) {
        boolean sql = request.has("sql") && request.get("sql").getAsBoolean();
        Map<String, FilterExpression> made = new HashMap<>();
        request.getAsJsonObject("subscriptions").entrySet().forEach(one -> made.put(one.getKey(), new FilterExpression(
            one.getValue().getAsString(), sql ? FilterExpressionType.SQL92 : FilterExpressionType.TAG)));
        return made;
    }

    private static Message message(JsonObject request, String body) {
        var made = PROVIDER.newMessageBuilder()
            .setTopic(text(request, "topic"))
            .setBody((body + "x".repeat((int) number(request, "pad", 0))).getBytes(StandardCharsets.UTF_8));
        if (request.has("tag")) {
            made.setTag(text(request, "tag"));
        }
        if (request.has("keys")) {
            made.setKeys(request.getAsJsonArray("keys").asList().stream().map(JsonElement::getAsString)
                .toArray(String[]::new));
        }
        if (request.has("group")) {
            made.setMessageGroup(text(request, "group"));
        }
        if (request.has("delay_ms")) {
            made.setDeliveryTimestamp(System.currentTimeMillis() + number(request, "delay_ms", 0));
        }
        if (request.has("priority")) {
            made.setPriority((int) number(request, "priority", 0));
        }
        if (request.has("properties")) {
            request.getAsJsonObject("properties").entrySet()
                .forEach(one -> made.addProperty(one.getKey(), one.getValue().getAsString()));
        }
        return made.build();
    }

    private static JsonObject receipt(SendReceipt made) {
        JsonObject said = new JsonObject();
        said.addProperty("message_id", made.getMessageId().toString());
        if (made.getRecallHandle() != null && !made.getRecallHandle().isEmpty()) {
            said.addProperty("recall_handle", made.getRecallHandle());
        }
        return said;
    }

    private static JsonObject told(MessageView view) {
        String body = body(view);
        JsonObject said = new JsonObject();
        said.addProperty("id", view.getMessageId().toString());
        said.addProperty("topic", view.getTopic());
        said.addProperty("body", body.substring(0, Math.min(200, body.length())));
        said.addProperty("size", view.getBody().remaining());
        said.addProperty("tag", view.getTag().orElse(null));
        said.add("keys", GSON.toJsonTree(new TreeSet<>(view.getKeys())));
        said.addProperty("group", view.getMessageGroup().orElse(null));
        said.addProperty("priority", view.getPriority().orElse(null));
        said.add("properties", GSON.toJsonTree(view.getProperties()));
        said.addProperty("attempt", view.getDeliveryAttempt());
        said.addProperty("corrupted", false);
        return said;
    }

    private static String body(MessageView view) {
        return StandardCharsets.UTF_8.decode(view.getBody()).toString();
    }

    private static AutoCloseable client(JsonObject request) {
        return CLIENTS.get(text(request, "client"));
    }

    private static String text(JsonObject request, String name) {
        return request.get(name).getAsString();
    }

    private static long number(JsonObject request, String name, long otherwise) {
        return request.has(name) ? request.get(name).getAsLong() : otherwise;
    }

    private static void pause(long milliseconds) {
        try {
            Thread.sleep(milliseconds);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    /** Sends one message after the other, in several threads, until it is ended. */
    private static final class Load {
        private final Producer producer;
        private final JsonObject request;
        private final JsonArray sent = new JsonArray();
        private final JsonArray errors = new JsonArray();
        private final List<Thread> threads = new ArrayList<>();
        private volatile boolean ended;

        Load(Producer producer, JsonObject request) {
            this.producer = producer;
            this.request = request;
            for (int thread = 0; thread < number(request, "threads", 1); thread++) {
                int its = thread;
                Thread one = new Thread(() -> run(its));
                one.start();
                threads.add(one);
            }
        }

        private void run(int thread) {
            for (int number = 0; !ended; number++) {
                String body = text(request, "name") + "-" + thread + "-" + number;
                long began = System.currentTimeMillis();
                JsonArray acknowledged = new JsonArray();
                String failed = null;
                try {
                    SendReceipt made = producer.send(message(request, body));
                    acknowledged.add(body);
                    acknowledged.add(made.getMessageId().toString());
                    acknowledged.add(began);
                    acknowledged.add(System.currentTimeMillis());
                } catch (Exception error) {
                    failed = body + ": " + error;
                }
                synchronized (this) {
                    if (failed == null) {
                        sent.add(acknowledged);
                    } else {
                        errors.add(failed);
                    }
                }
                pause(number(request, "pause_ms", 0));
            }
        }

        JsonObject end() throws InterruptedException {
            ended = true;
            for (Thread one : threads) {
                one.join();
            }
            JsonObject said = new JsonObject();
            said.add("sent", sent);
            said.add("errors", errors);
            return said;
        }
    }
}
