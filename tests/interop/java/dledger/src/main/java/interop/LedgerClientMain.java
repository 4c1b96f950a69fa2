package interop;

import com.alibaba.fastjson2.JSON;
import io.openmessaging.storage.dledger.client.DLedgerClient;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HexFormat;

/**
 * DLedger's own client. Reads a command per line, prints the response of each as a line of JSON:
 * {@code append HEX}, {@code get INDEX}, {@code transfer LEADER TARGET TERM}.
 */
public final class LedgerClientMain {
    private LedgerClientMain() {
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments.length != 2) {
            System.err.println("GROUP PEERS");
            System.exit(2);
        }
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        DLedgerClient client = new DLedgerClient(arguments[0], arguments[1]);
        client.startup();
        try (BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))) {
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                out.println(JSON.toJSONString(run(client, line.split(" "))));
            }
        }
        client.shutdown();
        Runtime.getRuntime().halt(0);
    }

    private static Object run(DLedgerClient client, String[] words) {
        return switch (words[0]) {
            case "append" -> client.append(HexFormat.of().parseHex(words.length > 1 ? words[1] : ""));
            case "get" -> client.get(Long.parseLong(words[1]));
            case "transfer" -> client.leadershipTransfer(words[1], words[2], Long.parseLong(words[3]));
            default -> throw new IllegalArgumentException(words[0]);
        };
    }
}
