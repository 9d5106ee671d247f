package braid.clients;

import static braid.clients.Messages.expect;
import static braid.clients.Messages.keyOf;
import static braid.clients.Messages.nothing;
import static braid.clients.Messages.numberOf;
import static braid.clients.Messages.payload;
import static braid.clients.Messages.receive;
import static braid.clients.Messages.send;
import static braid.clients.World.need;

import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerBuilder;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/** Promises about transactions. Each check has a client of its own that can begin them. */
final class Transactions {
    private static final int TOTAL = 60;

    private Transactions() {
    }

    private interface Inside {
        void run(World world) throws Exception;
    }

    private static void inside(World world, Inside check) throws Exception {
        try (PulsarClient client = PulsarClient.builder().serviceUrl(world.url).operationTimeout(30, TimeUnit.SECONDS)
                .enableTransaction(true).build()) {
            check.run(world.with(client));
        }
    }

    private static Transaction begin(World world, long seconds) throws Exception {
        return world.client.newTransaction().withTransactionTimeout(seconds, TimeUnit.SECONDS).build()
                .get(Messages.PATIENT_SECONDS, TimeUnit.SECONDS);
    }

    private static CompletableFuture<MessageId> sendIn(Producer<byte[]> producer, Transaction txn, int number) {
        return producer.newMessage(txn).value(payload(number)).key(keyOf(number)).eventTime(1_000_000L + number)
                .property("number", Integer.toString(number)).property("text", "grün ✓").sendAsync();
    }

    private static <T> T get(CompletableFuture<T> future) throws Exception {
        return future.get(Messages.PATIENT_SECONDS, TimeUnit.SECONDS);
    }

    private static void refused(CompletableFuture<?> future, String what) throws Exception {
        try {
            get(future);
        } catch (ExecutionException refusal) {
            return;
        }
        need(false, "%s succeeded", what);
    }

    private static void end(Transaction txn, boolean isCommit) throws Exception {
        get(isCommit ? txn.commit() : txn.abort());
        Transaction.State due = isCommit ? Transaction.State.COMMITTED : Transaction.State.ABORTED;
        need(txn.getState() == due, "the ended transaction is %s", txn.getState());
    }

    /** Reads, writes to a plain and a partitioned topic, and acknowledges what it read, all in one transaction. */
    static void all(World outer, String name, boolean isCommit) throws Exception {
        inside(outer, world -> {
            String input = world.topic(name + "-in");
            String plain = world.topic(name + "-out");
            String parted = world.topic(name + "-parts");
            world.ask("partitions " + parted + " 3");
            try (Producer<byte[]> feeder = world.batching(input, 10).create()) {
                send(feeder, TOTAL);
            }
            ConsumerBuilder<byte[]> reading = world.consumer(input, "reading").subscriptionType(SubscriptionType.Shared);
            try (Consumer<byte[]> one = world.consumer(plain, "out").subscribe();
                    Consumer<byte[]> other = world.consumer(parted, "out").subscribe();
                    Producer<byte[]> producer = world.batching(plain, 10).sendTimeout(0, TimeUnit.SECONDS).create();
                    Producer<byte[]> spread = world.batching(parted, 10).sendTimeout(0, TimeUnit.SECONDS).create();
                    Consumer<byte[]> consumer = reading.clone().subscribe()) {
                Transaction txn = begin(world, 60);
                List<CompletableFuture<?>> done = new ArrayList<>();
                for (int turn = 0; turn < TOTAL; turn++) {
                    Message<byte[]> message = receive(consumer);
                    done.add(sendIn(producer, txn, numberOf(message)));
                    done.add(sendIn(spread, txn, numberOf(message)));
                    done.add(consumer.acknowledgeAsync(message.getMessageId(), txn));
                }
                for (CompletableFuture<?> each : done) {
                    get(each);
                }
                get(Messages.sendOne(producer, TOTAL));
                nothing(one, "before the end");
                nothing(other, "before the end");
                end(txn, isCommit);
                if (isCommit) {
                    for (int number = 0; number < TOTAL; number++) {
                        expect(one, number, "after the commit");
                    }
                    needAll(other, "the partitions");
                    nothing(consumer, "inputs after the commit");
                } else {
                    needAll(consumer, "inputs after the abort");
                }
                expect(one, TOTAL, "behind the transaction");
                nothing(one, "after everything");
                nothing(other, "after everything");
            }
            if (isCommit) {
                try (Consumer<byte[]> consumer = reading.clone().subscribe()) {
                    nothing(consumer, "inputs at a new consumer");
                }
            }
        });
    }

    private static void needAll(Consumer<byte[]> consumer, String what) throws Exception {
        Set<Integer> seen = new HashSet<>();
        for (int turn = 0; turn < TOTAL; turn++) {
            seen.add(numberOf(receive(consumer)));
        }
        need(seen.size() == TOTAL, "%d different messages came: %s", seen.size(), what);
    }

    /** Cumulative acknowledgments of single messages and inside batches: dropped by an abort, kept by a commit. */
    static void cumulative(World outer) throws Exception {
        inside(outer, world -> {
            for (boolean isBatched : List.of(false, true)) {
                String topic = world.topic("txn-cumulative-" + isBatched);
                try (Producer<byte[]> producer = (isBatched ? world.batching(topic, 10)
                        .batchingMaxPublishDelay(1, TimeUnit.SECONDS) : world.producer(topic).enableBatching(false)).create()) {
                    send(producer, TOTAL);
                }
                ConsumerBuilder<byte[]> builder = world.consumer(topic, "reading").subscriptionType(SubscriptionType.Failover)
                        .enableBatchIndexAcknowledgment(true);
                for (boolean isCommit : List.of(false, true)) {
                    try (Consumer<byte[]> consumer = builder.clone().subscribe()) {
                        Transaction txn = begin(world, 60);
                        for (int number = 0; number < TOTAL / 2 + 5; number++) {
                            Message<byte[]> message = expect(consumer, number, isCommit ? "after the abort" : "at first");
                            if (number % 7 == 6 || number == TOTAL / 2 + 4) {
                                get(consumer.acknowledgeCumulativeAsync(message.getMessageId(), txn));
                            }
                        }
                        end(txn, isCommit);
                    }
                }
                try (Consumer<byte[]> consumer = builder.clone().subscribe()) {
                    for (int number = TOTAL / 2 + 5; number < TOTAL; number++) {
                        expect(consumer, number, "after the commit");
                    }
                    nothing(consumer, "after everything");
                }
            }
        });
    }

    /** Single messages of a batch. */
    static void batchIndexes(World outer) throws Exception {
        inside(outer, world -> {
            String topic = world.topic("txn-batch");
            try (Producer<byte[]> producer = world.batching(topic, 20).batchingMaxPublishDelay(1, TimeUnit.SECONDS).create()) {
                send(producer, 20);
            }
            ConsumerBuilder<byte[]> builder = world.consumer(topic, "some").subscriptionType(SubscriptionType.Shared)
                    .enableBatchIndexAcknowledgment(true);
            try (Consumer<byte[]> consumer = builder.clone().subscribe()) {
                Transaction kept = begin(world, 60);
                Transaction dropped = begin(world, 60);
                for (int number = 0; number < 20; number++) {
                    Message<byte[]> message = expect(consumer, number, "at first");
                    get(consumer.acknowledgeAsync(message.getMessageId(), number % 2 == 0 ? kept : dropped));
                }
                end(kept, true);
                end(dropped, false);
            }
            try (Consumer<byte[]> consumer = builder.clone().subscribe()) {
                for (int number = 1; number < 20; number += 2) {
                    consumer.acknowledge(expect(consumer, number, "what the aborted transaction had acknowledged"));
                }
                nothing(consumer, "after everything");
            }
        });
    }

    /** Sends, acknowledges and ends after the end: refused, and without effect. */
    static void ended(World outer) throws Exception {
        inside(outer, world -> {
            String topic = world.topic("txn-ended");
            try (Producer<byte[]> producer = world.producer(topic).enableBatching(false).sendTimeout(0, TimeUnit.SECONDS).create();
                    Consumer<byte[]> consumer = world.consumer(topic, "all").subscribe()) {
                for (boolean isCommit : List.of(true, false)) {
                    Transaction txn = begin(world, 60);
                    get(sendIn(producer, txn, 0));
                    end(txn, isCommit);
                    refused(isCommit ? txn.abort() : txn.commit(), "ending it otherwise");
                    try {
                        refused(sendIn(producer, txn, 1), "a send after the end");
                    } catch (RuntimeException refusal) {
                        need(!(refusal instanceof World.Broken), "%s", refusal.getMessage());
                    }
                }
                get(Messages.sendOne(producer, 2));
                expect(consumer, 0, "of the committed one");
                expect(consumer, 2, "the plain one");
                nothing(consumer, "after everything");
            }
        });
    }

    /** One message acknowledged in two transactions: the second is refused. */
    static void conflict(World outer) throws Exception {
        inside(outer, world -> {
            String topic = world.topic("txn-conflict");
            try (Producer<byte[]> producer = world.producer(topic).enableBatching(false).create();
                    Consumer<byte[]> consumer = world.consumer(topic, "some").subscriptionType(SubscriptionType.Shared).subscribe()) {
                send(producer, 2);
                Message<byte[]> message = expect(consumer, 0, "at first");
                Transaction first = begin(world, 60);
                Transaction second = begin(world, 60);
                get(consumer.acknowledgeAsync(message.getMessageId(), first));
                refused(consumer.acknowledgeAsync(message.getMessageId(), second), "an ack of a held message");
                end(first, true);
                get(second.abort());
                consumer.acknowledge(expect(consumer, 1, "the other message"));
                nothing(consumer, "after everything");
            }
        });
    }

    /** A transaction runs out: it is aborted, and what is behind it comes. */
    static void timeout(World outer) throws Exception {
        inside(outer, world -> {
            String topic = world.topic("txn-timeout");
            try (Producer<byte[]> producer = world.producer(topic).enableBatching(false).sendTimeout(0, TimeUnit.SECONDS).create();
                    Consumer<byte[]> consumer = world.consumer(topic, "all").subscribe()) {
                Transaction txn = begin(world, 2);
                get(sendIn(producer, txn, 0));
                get(Messages.sendOne(producer, 1));
                expect(consumer, 1, "behind the transaction");
                refused(txn.commit(), "the commit of a transaction that had timed out");
            }
        });
    }

    /** The broker is killed inside an open transaction, which then commits. */
    static void restart(World outer) throws Exception {
        inside(outer, world -> {
            String input = world.topic("txn-restart-in");
            String output = world.topic("txn-restart-out");
            try (Producer<byte[]> feeder = world.producer(input).enableBatching(false).create()) {
                send(feeder, TOTAL);
            }
            ConsumerBuilder<byte[]> reading = world.consumer(input, "reading").subscriptionType(SubscriptionType.Shared);
            try (Producer<byte[]> producer = world.producer(output).enableBatching(false).sendTimeout(0, TimeUnit.SECONDS).create();
                    Consumer<byte[]> reader = world.consumer(output, "all").subscribe()) {
                Transaction txn = begin(world, 60);
                for (int half = 0; half < 2; half++) {
                    try (Consumer<byte[]> consumer = reading.clone().subscribe()) {
                        for (int number = half * TOTAL / 2; number < (half + 1) * TOTAL / 2; number++) {
                            Message<byte[]> message = expect(consumer, number, half == 0 ? "at first" : "after the restart");
                            get(sendIn(producer, txn, number));
                            get(consumer.acknowledgeAsync(message.getMessageId(), txn));
                        }
                    }
                    if (half == 0) {
                        world.ask("restart");
                        nothing(reader, "after the restart");
                    }
                }
                end(txn, true);
                for (int number = 0; number < TOTAL; number++) {
                    expect(reader, number, "after the commit");
                }
            }
            try (Consumer<byte[]> consumer = reading.clone().subscribe()) {
                nothing(consumer, "inputs after the commit");
            }
        });
    }
}
