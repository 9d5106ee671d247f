package braid.clients.v5;

import static braid.clients.v5.World.need;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.PulsarClientException;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.Transaction;
import org.apache.pulsar.client.api.v5.config.TransactionPolicy;

/** Promises about transactions. Each check has a client of its own, because that has the timeout. */
final class Transactions {
    private static final int TOTAL = 96;

    private Transactions() {
    }

    private interface Inside {
        void run(World world) throws Exception;
    }

    private static void inside(World world, Duration timeout, Inside check) throws Exception {
        try (PulsarClient client = PulsarClient.builder().serviceUrl(world.url).operationTimeout(Duration.ofSeconds(30))
                .transactionPolicy(TransactionPolicy.builder().timeout(timeout).build()).build()) {
            check.run(world.with(client));
        }
    }

    private static void end(Transaction txn, boolean isCommit) throws PulsarClientException {
        if (isCommit) {
            txn.commit();
        } else {
            txn.abort();
        }
        Transaction.State due = isCommit ? Transaction.State.COMMITTED : Transaction.State.ABORTED;
        need(txn.state() == due, "the ended transaction is %s", txn.state());
    }

    private interface Refused {
        void run() throws Exception;
    }

    private static void refused(Refused call, String what) {
        try {
            call.run();
        } catch (Exception refusal) {
            return;
        }
        need(false, "%s succeeded", what);
    }

    /** Sends what it reads on to a scalable and a regular topic and acknowledges it, while the scalable ones split and merge. */
    static void all(World outer, String name, boolean isCommit) throws Exception {
        inside(outer, Duration.ofMinutes(1), world -> {
            String input = world.scalable(name + "-in", 2);
            String output = world.scalable(name + "-out", 2);
            String regular = world.regular(name + "-regular");
            Map<String, Integer> sent;
            try (Producer<byte[]> feeder = world.unbatched(input)) {
                sent = Load.send(feeder, TOTAL);
            }
            try (QueueConsumer<byte[]> consumer = world.queue(input, "q").subscribe();
                    QueueConsumer<byte[]> one = world.queue(output, "out").subscribe();
                    QueueConsumer<byte[]> other = world.queue(regular, "out").subscribe();
                    Producer<byte[]> producer = world.unbatched(output);
                    Producer<byte[]> plain = world.producer(regular).create()) {
                Transaction txn = world.client.newTransaction();
                for (int turn = 0; turn < TOTAL; turn++) {
                    Message<byte[]> message = consumer.receive(World.PATIENT);
                    need(message != null, "only %d inputs came", turn);
                    producer.newMessage().key(message.key().get()).value(message.value()).transaction(txn).send();
                    plain.newMessage().key(message.key().get()).value(message.value()).transaction(txn).send();
                    consumer.acknowledge(message.id(), txn);
                    if (turn == TOTAL / 3) {
                        world.splitWidest(output);
                        world.splitWidest(input);
                    } else if (turn == TOTAL * 2 / 3) {
                        world.mergeFirst(output);
                    }
                }
                need(one.receive(World.SILENT) == null, "a message came before the end");
                need(other.receive(World.SILENT) == null, "a message came before the end");
                end(txn, isCommit);
                if (isCommit) {
                    needExactly(one, sent, "the scalable topic");
                    needExactly(other, sent, "the regular topic");
                    need(consumer.receive(World.SILENT) == null, "an input came again after the commit");
                } else {
                    needExactly(consumer, sent, "the inputs after the abort");
                    need(one.receive(World.SILENT) == null, "an aborted message came");
                    need(other.receive(World.SILENT) == null, "an aborted message came");
                    try (Producer<byte[]> again = world.unbatched(output)) {
                        needExactly(one, Load.send(again, TOTAL), "plain messages after the abort");
                    }
                }
            }
        });
    }

    private static void needExactly(QueueConsumer<byte[]> consumer, Map<String, Integer> sent, String who) throws Exception {
        Received received = new Received();
        while (received.count() < Load.total(sent)) {
            Message<byte[]> message = consumer.receive(World.PATIENT);
            need(message != null, "%s: %d of %d came", who, received.count(), Load.total(sent));
            received.take(message);
            consumer.acknowledge(message.id());
        }
        received.needAll(sent, who);
        need(received.repeated() == 0, "%s: %d messages came twice", who, received.repeated());
        need(consumer.receive(World.SILENT) == null, "%s: more came than was sent", who);
    }

    /** Cumulative acknowledgments of a stream consumer: an abort brings everything again in order, a commit nothing. */
    static void stream(World outer) throws Exception {
        inside(outer, Duration.ofMinutes(1), world -> {
            String topic = world.scalable("txn-stream", 3);
            Map<String, Integer> sent;
            try (Producer<byte[]> producer = world.unbatched(topic)) {
                sent = Load.send(producer, TOTAL);
            }
            for (boolean isCommit : List.of(false, true)) {
                try (StreamConsumer<byte[]> consumer = world.stream(topic, "s", "c").subscribe()) {
                    Transaction txn = world.client.newTransaction();
                    Received received = new Received();
                    while (received.count() < TOTAL) {
                        Message<byte[]> message = consumer.receive(World.PATIENT);
                        need(message != null, "%d of %d came", received.count(), TOTAL);
                        received.take(message);
                        consumer.acknowledgeCumulative(message.id(), txn);
                    }
                    received.needAll(sent, isCommit ? "after the abort" : "at first");
                    received.needOrder(isCommit ? "after the abort" : "at first");
                    end(txn, isCommit);
                }
            }
            try (StreamConsumer<byte[]> consumer = world.stream(topic, "s", "c").subscribe()) {
                need(consumer.receive(World.SILENT) == null, "a message came again after the commit");
            }
        });
    }

    /** What is sent or ended after the end is refused and has no effect. */
    static void ended(World outer) throws Exception {
        inside(outer, Duration.ofMinutes(1), world -> {
            String topic = world.scalable("txn-ended", 2);
            try (Producer<byte[]> producer = world.unbatched(topic);
                    QueueConsumer<byte[]> consumer = world.queue(topic, "q").subscribe()) {
                for (boolean isCommit : List.of(true, false)) {
                    Transaction txn = world.client.newTransaction();
                    producer.newMessage().key("key-0").value(Received.value("key-0", 0)).transaction(txn).send();
                    end(txn, isCommit);
                    refused(isCommit ? txn::abort : txn::commit, "ending it otherwise");
                    refused(() -> producer.newMessage().key("key-0").value(Received.value("key-0", 1)).transaction(txn).send(),
                            "a send after the end");
                }
                producer.newMessage().key("key-1").value(Received.value("key-1", 0)).send();
                needExactly(consumer, new TreeMap<>(Map.of("key-0", 1, "key-1", 1)), "what was committed or plain");
            }
        });
    }

    /** A transaction runs out: it is aborted, and what is behind it comes. */
    static void timeout(World outer) throws Exception {
        inside(outer, Duration.ofSeconds(2), world -> {
            String topic = world.scalable("txn-timeout", 1);
            try (Producer<byte[]> producer = world.unbatched(topic);
                    QueueConsumer<byte[]> consumer = world.queue(topic, "q").subscribe()) {
                Transaction txn = world.client.newTransaction();
                producer.newMessage().key("key-0").value(Received.value("key-0", 0)).transaction(txn).send();
                producer.newMessage().key("key-1").value(Received.value("key-1", 0)).send();
                needExactly(consumer, new TreeMap<>(Map.of("key-1", 1)), "behind the transaction");
                refused(txn::commit, "the commit of a transaction that had timed out");
            }
        });
    }

    /** The broker is killed inside an open transaction with asynchronous sends, which then commits. */
    static void restart(World outer) throws Exception {
        inside(outer, Duration.ofMinutes(1), world -> {
            String topic = world.scalable("txn-restart", 2);
            Map<String, Integer> sent = new TreeMap<>();
            try (Producer<byte[]> producer = world.unbatched(topic);
                    QueueConsumer<byte[]> consumer = world.queue(topic, "q").subscribe()) {
                Transaction txn = world.client.newTransaction();
                for (int half = 0; half < 2; half++) {
                    List<CompletableFuture<MessageId>> done = new ArrayList<>();
                    for (int turn = 0; turn < TOTAL / 2; turn++) {
                        String key = "key-" + turn % Load.KEYS;
                        byte[] value = Received.value(key, sent.merge(key, 1, Integer::sum) - 1);
                        done.add(producer.async().newMessage().key(key).value(value).transaction(txn).send());
                    }
                    for (CompletableFuture<MessageId> each : done) {
                        each.get(World.PATIENT.toSeconds(), TimeUnit.SECONDS);
                    }
                    if (half == 0) {
                        world.ask("restart");
                    }
                }
                need(consumer.receive(World.SILENT) == null, "a message came before the commit");
                end(txn, true);
                needExactly(consumer, sent, "after the commit");
            }
        });
    }
}
