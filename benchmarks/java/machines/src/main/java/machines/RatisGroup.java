package machines;

import java.util.Arrays;
import java.util.List;
import java.util.UUID;
import org.apache.ratis.protocol.RaftGroup;
import org.apache.ratis.protocol.RaftGroupId;
import org.apache.ratis.protocol.RaftPeer;

/** A group, from a text such as {@code n0=127.0.0.1:1000,n1=127.0.0.1:1001}. */
final class RatisGroup {
  private static final RaftGroupId ID = RaftGroupId.valueOf(new UUID(0, 1));

  private RatisGroup() {}

  static RaftGroup of(String peers) {
    List<RaftPeer> members =
        Arrays.stream(peers.split(","))
            .map(one -> one.split("="))
            .map(one -> RaftPeer.newBuilder().setId(one[0]).setAddress(one[1]).build())
            .toList();
    return RaftGroup.valueOf(ID, members);
  }

  static int portOf(String id, String peers) {
    return Arrays.stream(peers.split(","))
        .filter(one -> one.startsWith(id + "="))
        .map(one -> Integer.parseInt(one.substring(one.lastIndexOf(':') + 1)))
        .findFirst()
        .orElseThrow();
  }
}
