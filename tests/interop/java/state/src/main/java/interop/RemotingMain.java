package interop;

import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HexFormat;
import java.util.TreeMap;
import org.apache.rocketmq.acl.common.AclUtils;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.common.protocol.body.RegisterBrokerBody;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;

/** Reads frames and bodies with RocketMQ's own classes, and writes what it read. */
public final class RemotingMain {
    /** Lines of "in" have a class ("compact", a secret) and bytes in hex; "out" gets what Java makes of them. */
    public static void main(String[] arguments) throws Exception {
        Path directory = Path.of(arguments[1]);
        StringBuilder out = new StringBuilder();
        for (String line : Files.readAllLines(directory.resolve("in"))) {
            String[] parts = line.split(" ");
            byte[] bytes = unhex(parts[1]);
            out.append(hex(switch (arguments[0]) {
                case "bodies" -> body(parts[0], bytes);
                case "frames" -> frame(bytes);
                case "signatures" -> signature(parts[0], bytes);
                default -> throw new IllegalArgumentException(arguments[0]);
            })).append('\n');
        }
        Files.writeString(directory.resolve("out"), out);
    }

    private static byte[] body(String kind, byte[] bytes) throws Exception {
        if (kind.equals("compact")) {
            return RegisterBrokerBody.decode(bytes, true).encode(true);
        }
        return RemotingSerializable.encode(RemotingSerializable.decode(bytes, Class.forName(kind)));
    }

    private static byte[] frame(byte[] bytes) throws Exception {
        ByteBuffer encoded = RemotingCommand.decode(ByteBuffer.wrap(bytes, 4, bytes.length - 4).slice()).encode();
        byte[] found = new byte[encoded.remaining()];
        encoded.get(found);
        return found;
    }

    /** Of a frame, as Java's client computes it. */
    private static byte[] signature(String secret, byte[] bytes) throws Exception {
        RemotingCommand command = RemotingCommand.decode(ByteBuffer.wrap(bytes, 4, bytes.length - 4).slice());
        TreeMap<String, String> fields = new TreeMap<>(command.getExtFields());
        fields.remove(SessionCredentials.SIGNATURE);
        return AclUtils.calSignature(AclUtils.combineRequestContent(command, fields), secret).getBytes("UTF-8");
    }

    private static byte[] unhex(String text) {
        return HexFormat.of().parseHex(text);
    }

    private static String hex(byte[] bytes) {
        return HexFormat.of().formatHex(bytes);
    }
}
