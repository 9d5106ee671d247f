package braid.clients.v5;

import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.pulsar.client.api.v5.PulsarClient;

/**
 * The V5 Java client against a broker: runs every check and reports one line for each.
 *
 * <p>Arguments: the service URL, a prefix for topic names and, optionally, the beginning of the names of the checks to run. The
 * words written to standard output are explained in run.py, which starts this program and answers its requests.
 */
public final class Main {
    private Main() {
    }

    interface Check {
        void run(World world) throws Exception;
    }

    private static Map<String, Check> checks() {
        Map<String, Check> all = new LinkedHashMap<>();
        all.put("sends", world -> Producing.sends(world, world.scalable("sends", 3)));
        all.put("sends-regular", world -> Producing.sends(world, world.regular("sends-regular")));
        all.put("auto-create", Producing::autoCreate);
        all.put("schema", Producing::schemas);
        all.put("stream-churn", Streaming::churn);
        all.put("stream-share", Streaming::share);
        all.put("stream-successor", Streaming::successor);
        all.put("stream-regular", Streaming::regular);
        all.put("queue-churn", Queueing::churn);
        all.put("queue-dead-letter", Queueing::deadLetter);
        all.put("queue-latest", Queueing::latest);
        all.put("queue-regular", world -> Queueing.regular(world, 0));
        all.put("queue-partitions", world -> Queueing.regular(world, 3));
        all.put("checkpoint-churn", Checkpointing::churn);
        all.put("checkpoint-latest", Checkpointing::latest);
        all.put("checkpoint-group", Checkpointing::group);
        all.put("in-flight", Producing::inFlight);
        all.put("txn-commit", world -> Transactions.all(world, "txn-commit", true));
        all.put("txn-abort", world -> Transactions.all(world, "txn-abort", false));
        all.put("txn-stream", Transactions::stream);
        all.put("txn-ended", Transactions::ended);
        all.put("txn-timeout", Transactions::timeout);
        all.put("txn-restart", Transactions::restart);
        all.put("restart", Streaming::restart);
        return all;
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8));
        String wanted = arguments.length > 2 ? arguments[2] : "";
        boolean isGood = true;
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).operationTimeout(Duration.ofSeconds(30)).build()) {
            World world = new World(client, arguments[0], arguments[1]);
            for (Map.Entry<String, Check> each : checks().entrySet()) {
                if (each.getKey().startsWith(wanted)) {
                    isGood &= run(world, each.getKey(), each.getValue());
                }
            }
        }
        System.exit(isGood ? 0 : 1);
    }

    private static boolean run(World world, String name, Check check) {
        long began = System.nanoTime();
        world.takeNotes();
        System.err.printf("--- %s%n", name);
        try {
            check.run(world);
        } catch (Exception | LinkageError trouble) {
            trouble.printStackTrace();
            System.out.printf("fail %s %s%n", name, String.valueOf(trouble).replace('\n', ' '));
            return false;
        }
        System.out.printf("pass %s (%.1f s%s)%n", name, (System.nanoTime() - began) / 1e9, world.takeNotes());
        return true;
    }
}
