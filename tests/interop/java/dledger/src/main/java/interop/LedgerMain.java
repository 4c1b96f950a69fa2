package interop;

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONWriter;
import io.openmessaging.storage.dledger.DLedgerConfig;
import io.openmessaging.storage.dledger.DLedgerServer;
import io.openmessaging.storage.dledger.entry.DLedgerEntry;
import io.openmessaging.storage.dledger.protocol.AppendEntryRequest;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import java.util.Optional;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;

/** Writes and reads logs with DLedger itself, the line that adds NOOPs of magic 2. What it reads goes out as JSON lines. */
public final class LedgerMain {
    private static final int SEGMENT_BYTES = 16 * 1024;
    private static final int INDEX_FILE_BYTES = 32 * 64;
    private static final String USAGE = """
        write DIR    new logs of three nodes, which begin their terms with a NOOP: two terms, several segments
        append DIR   some more entries into a log that is there, with n0 alone
        read DIR     print its entries, without taking part in an election
        """;

    private LedgerMain() {
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments.length != 2) {
            System.err.print(USAGE);
            System.exit(2);
        }
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);
        System.setOut(System.err);
        int status = 1;
        try {
            run(arguments[0], arguments[1], out);
            status = 0;
        } catch (Throwable throwable) {
            throwable.printStackTrace();
        }
        out.flush();
        Runtime.getRuntime().halt(status);
    }

    private static void run(String command, String dir, PrintStream out) throws Exception {
        switch (command) {
            case "write" -> {
                append(dir, 3, 0, 70);
                append(dir, 3, 70, 70);
            }
            case "append" -> append(dir, 1, 140, 60);
            case "read" -> read(dir, out);
            default -> {
                System.err.print(USAGE);
                System.exit(2);
            }
        }
    }

    private static void append(String dir, int nodes, int first, int count) throws Exception {
        String peers = peers(nodes);
        List<DLedgerServer> servers = new ArrayList<>();
        for (int node = 0; node < nodes; node++) {
            servers.add(new DLedgerServer(config(dir, "n" + node, peers)));
        }
        servers.forEach(DLedgerServer::startup);
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
        for (int i = first; i < first + count; ) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("entry " + i + " was not appended in a minute");
            }
            Optional<DLedgerServer> leader = servers.stream().filter(DLedgerServer::isLeader).findFirst();
            if (leader.isPresent() && append(leader.get(), i)) {
                i++;
            } else {
                Thread.sleep(20);
            }
        }
        long end = servers.stream().mapToLong(server -> server.getDLedgerStore().getLedgerEndIndex()).max().orElseThrow();
        while (servers.stream().anyMatch(server -> server.getDLedgerStore().getLedgerEndIndex() < end)) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("the followers do not come to entry " + end);
            }
            Thread.sleep(20);
        }
        for (DLedgerServer server : servers) {
            server.getDLedgerStore().flush();
            server.shutdown();
        }
    }

    private static boolean append(DLedgerServer leader, int i) throws Exception {
        AppendEntryRequest request = new AppendEntryRequest();
        request.setGroup("interop");
        request.setRemoteId(leader.getMemberState().getSelfId());
        byte[] body = new byte[i * 37 % 1500];
        Arrays.fill(body, (byte) i);
        request.setBody(body);
        return leader.handleAppend(request).get(10, TimeUnit.SECONDS).getCode() == 200;
    }

    private static void read(String dir, PrintStream out) throws Exception {
        DLedgerConfig config = config(dir, "n0", peers(1));
        config.setEnableLeaderElector(false);
        DLedgerServer server = new DLedgerServer(config);
        server.startup();
        var store = server.getDLedgerStore();
        for (long index = store.getLedgerBeforeBeginIndex() + 1; index <= store.getLedgerEndIndex(); index++) {
            DLedgerEntry entry = store.get(index);
            var fields = new TreeMap<String, Object>();
            fields.put("index", entry.getIndex());
            fields.put("term", entry.getTerm());
            fields.put("magic", entry.getMagic());
            fields.put("pos", entry.getPos());
            fields.put("size", entry.getSize());
            fields.put("channel", entry.getChannel());
            fields.put("body", entry.getBody() == null ? "" : HexFormat.of().formatHex(entry.getBody()));
            out.println(JSON.toJSONString(fields, JSONWriter.Feature.MapSortField));
        }
        server.shutdown();
    }

    private static String peers(int nodes) throws Exception {
        List<ServerSocket> sockets = new ArrayList<>();
        List<String> peers = new ArrayList<>();
        for (int node = 0; node < nodes; node++) {
            ServerSocket socket = new ServerSocket(0, 1, InetAddress.getLoopbackAddress());
            sockets.add(socket); // all open at once: or they get the same port
            peers.add("n" + node + "-127.0.0.1:" + socket.getLocalPort());
        }
        for (ServerSocket socket : sockets) {
            socket.close();
        }
        return String.join(";", peers);
    }

    private static DLedgerConfig config(String dir, String self, String peers) {
        DLedgerConfig config = new DLedgerConfig();
        config.setGroup("interop");
        config.setSelfId(self);
        config.setPeers(peers);
        config.setStoreBaseDir(dir);
        config.setStoreType(DLedgerConfig.FILE);
        config.setMappedFileSizeForEntryData(SEGMENT_BYTES);
        config.setMappedFileSizeForEntryIndex(INDEX_FILE_BYTES);
        config.setDiskSpaceRatioToCheckExpired(0.95f);
        config.setEnableFastAdvanceCommitIndex(true); // without it there are no NOOPs
        config.setHeartBeatTimeIntervalMs(200);
        config.init();
        return config;
    }
}
