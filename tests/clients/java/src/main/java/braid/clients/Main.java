package braid.clients;

import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.PulsarClient;

/**
 * The Java client against a broker: runs every check and reports one line for each.
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
        for (CompressionType codec : CompressionType.values()) {
            String name = codec.name().toLowerCase();
            all.put("plain-" + name, world -> RoundTrip.run(world, "plain-" + name, codec, false));
            all.put("batched-" + name, world -> RoundTrip.run(world, "batched-" + name, codec, true));
        }
        all.put("reader", Checks::reader);
        all.put("seek", Checks::seek);
        all.put("nack", Checks::nack);
        all.put("dead-letter", Checks::deadLetter);
        all.put("retry-letter", Checks::retryLetter);
        all.put("chunks", Checks::chunks);
        all.put("producer-name", Checks::producerName);
        all.put("exclusive-producer", Checks::exclusiveProducer);
        all.put("schema-string", Checks::schemaString);
        all.put("schema-json", Checks::schemaJson);
        all.put("partitions", Checks::partitions);
        all.put("batch-index-ack", Checks::batchIndexAck);
        all.put("ack-receipt", Checks::ackReceipt);
        all.put("terminated", Checks::terminated);
        all.put("txn-commit", world -> Transactions.all(world, "txn-commit", true));
        all.put("txn-abort", world -> Transactions.all(world, "txn-abort", false));
        all.put("txn-cumulative", Transactions::cumulative);
        all.put("txn-batch-index", Transactions::batchIndexes);
        all.put("txn-ended", Transactions::ended);
        all.put("txn-conflict", Transactions::conflict);
        all.put("txn-timeout", Transactions::timeout);
        all.put("txn-restart", Transactions::restart);
        all.put("restart-plain", world -> Restart.run(world, "restart-plain", false));
        all.put("restart-batched", world -> Restart.run(world, "restart-batched", true));
        return all;
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8));
        String wanted = arguments.length > 2 ? arguments[2] : "";
        boolean isGood = true;
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).operationTimeout(30, TimeUnit.SECONDS).build()) {
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
        try {
            check.run(world);
        } catch (Exception trouble) {
            trouble.printStackTrace();
            System.out.printf("fail %s %s%n", name, String.valueOf(trouble).replace('\n', ' '));
            return false;
        }
        System.out.printf("pass %s (%.1f s)%n", name, (System.nanoTime() - began) / 1e9);
        return true;
    }
}
