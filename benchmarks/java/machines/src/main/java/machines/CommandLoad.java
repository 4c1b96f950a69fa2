package machines;

import io.etcd.jetcd.ByteSequence;
import io.etcd.jetcd.Client;
import java.util.Arrays;
import java.util.Locale;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.Supplier;
import org.apache.ratis.client.RaftClient;
import org.apache.ratis.conf.RaftProperties;
import org.apache.ratis.protocol.Message;
import org.apache.ratis.protocol.RaftClientReply;
import org.apache.ratis.thirdparty.com.google.protobuf.ByteString;

/**
 * So many callers, each with one command at a time, on one client: {@code CommandLoad KIND PEERS
 * CALLERS BODY_BYTES WARMUP_S SECONDS}; KIND is ratis or etcd. Prints one JSON object.
 */
public final class CommandLoad {
  private final Supplier<CompletableFuture<?>> send;
  private final int callers;
  private final AtomicReference<String> failure = new AtomicReference<>();

  private CommandLoad(Supplier<CompletableFuture<?>> send, int callers) {
    this.send = send;
    this.callers = callers;
  }

  public static void main(String[] arguments) throws Exception {
    byte[] body = new byte[Integer.parseInt(arguments[3])];
    new Random(1).nextBytes(body);
    CommandLoad load =
        new CommandLoad(sender(arguments[0], arguments[1], body), Integer.parseInt(arguments[2]));
    load.run(Double.parseDouble(arguments[4]));
    double seconds = Double.parseDouble(arguments[5]);
    long[] took = load.run(seconds);
    if (load.failure.get() != null) {
      System.err.println(load.failure.get());
      System.exit(1);
    }
    System.out.printf(
        Locale.ROOT,
        "{\"per_second\": %.1f, \"p50_ms\": %.4f}%n",
        took.length / seconds,
        took[took.length / 2] / 1e6);
    System.exit(0);
  }

  private static Supplier<CompletableFuture<?>> sender(String kind, String peers, byte[] body) {
    if (kind.equals("ratis")) {
      RaftClient client =
          RaftClient.newBuilder()
              .setProperties(new RaftProperties())
              .setRaftGroup(RatisGroup.of(peers))
              .build();
      Message command = Message.valueOf(ByteString.copyFrom(body));
      return () -> client.async().send(command).thenAccept(CommandLoad::requireSuccess);
    }
    String[] endpoints =
        Arrays.stream(peers.split(",")).map(one -> "http://" + one).toArray(String[]::new);
    Client client = Client.builder().endpoints(endpoints).build();
    ByteSequence key = ByteSequence.from("bench".getBytes());
    ByteSequence value = ByteSequence.from(body);
    return () -> client.getKVClient().put(key, value);
  }

  private static void requireSuccess(RaftClientReply reply) {
    if (!reply.isSuccess()) {
      throw new IllegalStateException(reply.toString());
    }
  }

  /** The nanoseconds of each command that was answered in time, sorted. */
  private long[] run(double seconds) throws InterruptedException {
    long until = System.nanoTime() + (long) (seconds * 1e9);
    Caller[] all = new Caller[callers];
    CountDownLatch left = new CountDownLatch(callers);
    for (int number = 0; number < callers; number++) {
      all[number] = new Caller(until, left);
      all[number].next();
    }
    left.await();
    return Arrays.stream(all)
        .flatMapToLong(one -> Arrays.stream(one.took, 0, one.count))
        .sorted()
        .toArray();
  }

  /** Sends the next command when one is answered. */
  private final class Caller {
    private final long until;
    private final CountDownLatch left;
    private long[] took = new long[1024];
    private int count;

    Caller(long until, CountDownLatch left) {
      this.until = until;
      this.left = left;
    }

    void next() {
      long began = System.nanoTime();
      if (began >= until || failure.get() != null) {
        left.countDown();
        return;
      }
      send.get()
          .whenComplete(
              (answer, error) -> {
                if (error != null) {
                  failure.compareAndSet(null, error.toString());
                } else if (System.nanoTime() < until) {
                  note(System.nanoTime() - began);
                }
                next();
              });
    }

    private void note(long nanoseconds) {
      if (count == took.length) {
        took = Arrays.copyOf(took, 2 * count);
      }
      took[count++] = nanoseconds;
    }
  }
}
