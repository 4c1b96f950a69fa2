package machines;

import java.io.File;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.ratis.conf.RaftProperties;
import org.apache.ratis.grpc.GrpcConfigKeys;
import org.apache.ratis.proto.RaftProtos.LogEntryProto;
import org.apache.ratis.protocol.Message;
import org.apache.ratis.protocol.RaftPeerId;
import org.apache.ratis.server.RaftServer;
import org.apache.ratis.server.RaftServerConfigKeys;
import org.apache.ratis.statemachine.TransactionContext;
import org.apache.ratis.statemachine.impl.BaseStateMachine;
import org.apache.ratis.util.TimeDuration;

/**
 * A member of a Ratis group whose state machine counts commands: {@code RatisNode ID PEERS DIR}, with
 * Ratis's defaults, but the election timeouts of ours. It ends when stdin is closed.
 */
public final class RatisNode {
  private RatisNode() {}

  public static void main(String[] arguments) throws Exception {
    String id = arguments[0];
    RaftProperties properties = new RaftProperties();
    RaftServerConfigKeys.setStorageDir(properties, List.of(new File(arguments[2])));
    GrpcConfigKeys.Server.setPort(properties, RatisGroup.portOf(id, arguments[1]));
    RaftServerConfigKeys.Rpc.setTimeoutMin(properties, TimeDuration.valueOf(500, TimeUnit.MILLISECONDS));
    RaftServerConfigKeys.Rpc.setTimeoutMax(properties, TimeDuration.valueOf(1, TimeUnit.SECONDS));
    try (RaftServer server =
        RaftServer.newBuilder()
            .setGroup(RatisGroup.of(arguments[1]))
            .setProperties(properties)
            .setServerId(RaftPeerId.valueOf(id))
            .setStateMachine(new Counting())
            .build()) {
      server.start();
      while (System.in.read() >= 0) {}
    }
    System.exit(0);
  }

  /** Counts commands and their bytes. */
  private static final class Counting extends BaseStateMachine {
    private long commands;
    private long bytes;

    @Override
    public CompletableFuture<Message> applyTransaction(TransactionContext transaction) {
      LogEntryProto entry = transaction.getLogEntry();
      commands++;
      bytes += entry.getStateMachineLogEntry().getLogData().size();
      updateLastAppliedTermIndex(entry.getTerm(), entry.getIndex());
      return CompletableFuture.completedFuture(Message.EMPTY);
    }
  }
}
