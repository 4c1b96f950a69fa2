package interop;

import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.List;
import org.apache.rocketmq.store.DefaultMessageStore;

/** Writes and reads message stores with RocketMQ's own classes. What it reads goes to standard output, as JSON lines. */
public final class Main {
    private static final String USAGE = """
        write-plain DIR | write-dledger DIR     a new store with everything of Content
        killed-plain DIR                        the same, and the process ends without stopping the store
        append-plain DIR | append-dledger DIR   some more messages into a store that is there
        read-plain DIR | read-dledger DIR       print everything in it
        """;

    private Main() {
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments.length != 2) {
            System.err.print(USAGE);
            System.exit(2);
        }
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);
        System.setOut(System.err); // the libraries print there
        int status = 1;
        try {
            run(arguments[0], Path.of(arguments[1]), out);
            status = 0;
        } catch (Throwable throwable) {
            throwable.printStackTrace();
        }
        out.flush();
        Runtime.getRuntime().halt(status); // the libraries' threads are not daemons
    }

    private static void run(String command, Path dir, PrintStream out) throws Exception {
        boolean replicated = command.endsWith("-dledger");
        switch (command) {
            case "write-plain", "write-dledger", "killed-plain" -> {
                DefaultMessageStore store = Stores.open(dir, replicated, true);
                Content.writeAll(store, replicated);
                if (command.equals("killed-plain")) {
                    store.flush();
                    Runtime.getRuntime().halt(0);
                }
                store.shutdown();
            }
            case "append-plain", "append-dledger" -> {
                DefaultMessageStore store = Stores.open(dir, replicated, false);
                Content.writeMore(store, replicated);
                store.shutdown();
            }
            case "read-plain", "read-dledger" -> {
                DefaultMessageStore store = Stores.open(dir, replicated, false);
                List<String> lines = new Dump(store, replicated).lines();
                lines.forEach(out::println);
                store.shutdown();
            }
            default -> {
                System.err.print(USAGE);
                System.exit(2);
            }
        }
    }
}
