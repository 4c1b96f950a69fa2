package load;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.Callable;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.atomic.LongAdder;
import java.util.function.BooleanSupplier;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;

/**
 * Producer and push consumer under load: {@code LoadMain NAME_SERVERS}. Commands are JSON lines on
 * stdin, answers go to stdout; it ends when stdin is closed.
 */
public final class LoadMain {
  private static final int QUEUES = 8;
  private static final int BATCH_THREADS = 16;
  private static final int CONSUME_TIMEOUT_S = 120;

  private final String nameServers;
  private final DefaultMQProducer producer = new DefaultMQProducer("bench-producers");
  private final AtomicReference<String> lastFailure = new AtomicReference<>("");

  private LoadMain(String nameServers) {
    this.nameServers = nameServers;
  }

  public static void main(String[] arguments) throws Exception {
    PrintStream answers = System.out;
    System.setOut(System.err); // whatever else prints must not look like an answer
    LoadMain load = new LoadMain(arguments[0]);
    load.start();
    BufferedReader commands =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = commands.readLine(); line != null; line = commands.readLine()) {
      answers.println(JSON.toJSONString(load.answer(JSON.parseObject(line))));
      answers.flush();
    }
    System.exit(0);
  }

  private void start() throws Exception {
    producer.setNamesrvAddr(nameServers);
    producer.setDefaultTopicQueueNums(QUEUES);
    producer.start();
  }

  private Map<String, Object> answer(JSONObject command) throws Exception {
    String topic = command.getString("topic");
    byte[] body = new byte[command.getIntValue("bodyBytes")];
    new Random().nextBytes(body);
    int width = command.getIntValue("width");
    double seconds = command.getDoubleValue("seconds");
    switch (command.getString("do")) {
      case "threads":
        return inThreads(topic, body, width, seconds);
      case "async":
        return asynchronously(topic, body, width, seconds);
      case "batch":
        return inBatches(topic, body, width, seconds, command.getLongValue("count"));
      case "consume":
        return consume(topic, command.getString("group"), width);
      default:
        throw new IllegalArgumentException(command.toJSONString());
    }
  }

  /** Synchronous sends of so many threads with one producer. */
  private Map<String, Object> inThreads(String topic, byte[] body, int threads, double seconds)
      throws InterruptedException {
    return untilEnd(threads, seconds, 0, 1, () -> producer.send(new Message(topic, body)));
  }

  /** Batches of so many messages from several threads; at least {@code count}, if that is given. */
  private Map<String, Object> inBatches(
      String topic, byte[] body, int size, double seconds, long count) throws InterruptedException {
    Callable<SendResult> send =
        () -> {
          Collection<Message> batch = new ArrayList<>(size);
          for (int number = 0; number < size; number++) {
            batch.add(new Message(topic, body));
          }
          return producer.send(batch);
        };
    return untilEnd(BATCH_THREADS, seconds, count, size, send);
  }

  private Map<String, Object> untilEnd(
      int threads, double seconds, long count, int size, Callable<SendResult> send)
      throws InterruptedException {
    LongAdder sent = new LongAdder();
    LongAdder failed = new LongAdder();
    List<long[]> tookOfAll = new ArrayList<>();
    List<Thread> running = new ArrayList<>();
    long started = System.nanoTime();
    long until = started + (long) (seconds * 1e9);
    BooleanSupplier goesOn =
        () -> System.nanoTime() < until && (count == 0 || sent.sum() < count);
    for (int number = 0; number < threads; number++) {
      Thread one =
          new Thread(
              () -> {
                long[] took = sendWhile(goesOn, size, send, sent, failed);
                synchronized (tookOfAll) {
                  tookOfAll.add(took);
                }
              });
      running.add(one);
      one.start();
    }
    for (Thread one : running) {
      one.join();
    }
    double measured = (System.nanoTime() - started) / 1e9;
    long[] all = tookOfAll.stream().flatMapToLong(Arrays::stream).sorted().toArray();
    double p50 = all.length == 0 ? -1 : all[all.length / 2] / 1e6;
    return figures(sent.sum(), failed.sum(), measured, p50);
  }

  private long[] sendWhile(
      BooleanSupplier goesOn,
      int size,
      Callable<SendResult> send,
      LongAdder sent,
      LongAdder failed) {
    long[] took = new long[1024];
    int count = 0;
    while (goesOn.getAsBoolean()) {
      long before = System.nanoTime();
      try {
        stored(send.call(), size, sent, failed);
        if (count == took.length) {
          took = Arrays.copyOf(took, 2 * count);
        }
        took[count++] = System.nanoTime() - before;
      } catch (Exception error) {
        fail(error.toString(), failed);
      }
    }
    return Arrays.copyOf(took, count);
  }

  /** Asynchronous sends, at most so many of them not yet answered. */
  private Map<String, Object> asynchronously(String topic, byte[] body, int window, double seconds)
      throws InterruptedException {
    LongAdder sent = new LongAdder();
    LongAdder failed = new LongAdder();
    Semaphore room = new Semaphore(window);
    SendCallback callback =
        new SendCallback() {
          @Override
          public void onSuccess(SendResult result) {
            stored(result, 1, sent, failed);
            room.release();
          }

          @Override
          public void onException(Throwable error) {
            fail(error.toString(), failed);
            room.release();
          }
        };
    long started = System.nanoTime();
    long until = started + (long) (seconds * 1e9);
    while (System.nanoTime() < until) {
      room.acquire();
      try {
        producer.send(new Message(topic, body), callback);
      } catch (Exception error) {
        fail(error.toString(), failed);
        room.release();
      }
    }
    room.acquire(window);
    return figures(sent.sum(), failed.sum(), (System.nanoTime() - started) / 1e9, -1);
  }

  /** A push consumer of a new group; from its first message until it has so many. */
  private Map<String, Object> consume(String topic, String group, int count) throws Exception {
    AtomicInteger taken = new AtomicInteger();
    AtomicReference<Long> first = new AtomicReference<>();
    CountDownLatch all = new CountDownLatch(1);
    DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
    consumer.setNamesrvAddr(nameServers);
    consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
    consumer.subscribe(topic, "*");
    consumer.registerMessageListener(
        (MessageListenerConcurrently)
            (messages, context) -> {
              first.compareAndSet(null, System.nanoTime());
              if (taken.addAndGet(messages.size()) >= count) {
                all.countDown();
              }
              return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
    consumer.start();
    try {
      if (!all.await(CONSUME_TIMEOUT_S, TimeUnit.SECONDS)) {
        throw new IllegalStateException("received " + taken + " of " + count + " messages");
      }
      double measured = (System.nanoTime() - first.get()) / 1e9;
      return figures(taken.get(), 0, measured, -1);
    } finally {
      consumer.shutdown();
    }
  }

  private void stored(SendResult result, int messages, LongAdder sent, LongAdder failed) {
    if (result.getSendStatus() == SendStatus.SEND_OK) {
      sent.add(messages);
    } else {
      fail(result.getSendStatus().toString(), failed);
    }
  }

  private void fail(String failure, LongAdder failed) {
    lastFailure.set(failure);
    failed.increment();
  }

  private Map<String, Object> figures(long count, long failed, double seconds, double p50) {
    return Map.of(
        "count", count,
        "failed", failed,
        "failure", lastFailure.getAndSet(""),
        "perSecond", count / seconds,
        "p50Ms", p50);
  }
}
