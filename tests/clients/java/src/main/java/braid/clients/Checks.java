package braid.clients;

import static braid.clients.Messages.COUNT;
import static braid.clients.Messages.SILENT_MS;
import static braid.clients.Messages.expect;
import static braid.clients.Messages.nothing;
import static braid.clients.Messages.numberOf;
import static braid.clients.Messages.receive;
import static braid.clients.Messages.send;
import static braid.clients.Messages.sendOne;
import static braid.clients.World.need;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerBuilder;
import org.apache.pulsar.client.api.DeadLetterPolicy;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.MessageIdAdv;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerAccessMode;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.ReaderBuilder;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionType;

/** One method per promise. */
final class Checks {
    private Checks() {
    }

    /** The call fails with this error of the client. */
    private static void refused(Class<? extends PulsarClientException> error, Main.Check call) throws Exception {
        try {
            call.run(null);
        } catch (PulsarClientException refusal) {
            need(error.isInstance(refusal), "expected %s, got %s", error.getSimpleName(), refusal);
            return;
        }
        need(false, "expected %s, nothing was refused", error.getSimpleName());
    }

    static void reader(World world) throws Exception {
        for (boolean isBatched : List.of(false, true)) {
            String topic = world.topic(isBatched ? "reader-batched" : "reader-plain");
            List<MessageId> ids;
            try (Producer<byte[]> producer = isBatched ? world.batching(topic, 10).create()
                    : world.producer(topic).enableBatching(false).create()) {
                ids = send(producer, 100);
            }
            read(world, topic, MessageId.earliest, false, 0, ids);
            read(world, topic, ids.get(44), false, 45, ids);
            read(world, topic, ids.get(44), true, 44, ids);
            read(world, topic, MessageId.latest, false, 100, ids);
            read(world, topic, MessageId.latest, true, 99, ids);
        }
    }

    private static void read(World world, String topic, MessageId start, boolean isInclusive, int first, List<MessageId> ids)
            throws Exception {
        ReaderBuilder<byte[]> builder = world.client.newReader().topic(topic).startMessageId(start);
        try (Reader<byte[]> reader = (isInclusive ? builder.startMessageIdInclusive() : builder).create()) {
            int number = first;
            while (reader.hasMessageAvailable()) {
                Message<byte[]> message = reader.readNext(Messages.PATIENT_SECONDS, TimeUnit.SECONDS);
                need(message != null, "the reader from %d got nothing at %d", first, number);
                need(numberOf(message) == number, "the reader from %d read %d when %d was due", first, numberOf(message), number);
                number++;
            }
            need(number == 100, "the reader from %d stopped at %d", first, number);
            // Seek on a reader, by id and to both ends.
            reader.seek(ids.get(30));
            int next = isInclusive ? 30 : 31;
            need(numberOf(reader.readNext(Messages.PATIENT_SECONDS, TimeUnit.SECONDS)) == next, "wrong message after reader seek");
            reader.seek(MessageId.earliest);
            need(reader.hasMessageAvailable(), "nothing available after seek to the earliest");
            need(numberOf(reader.readNext(Messages.PATIENT_SECONDS, TimeUnit.SECONDS)) == 0, "wrong message after seek to earliest");
        }
    }

    static void seek(World world) throws Exception {
        String topic = world.topic("seek");
        List<MessageId> ids;
        long middle;
        try (Producer<byte[]> producer = world.producer(topic).enableBatching(false).create()) {
            ids = send(producer, 100);
            Thread.sleep(20);
            middle = System.currentTimeMillis();
            Thread.sleep(20);
            send(producer, 50);
        }
        for (SubscriptionType kind : List.of(SubscriptionType.Exclusive, SubscriptionType.Shared, SubscriptionType.Failover)) {
            try (Consumer<byte[]> consumer = world.consumer(topic, "seek").subscriptionType(kind)
                    .startMessageIdInclusive().subscribe()) {
                if (kind == SubscriptionType.Exclusive) {
                    drain(consumer, 0, "before seek");
                }
                for (int round = 0; round < 3; round++) {
                    consumer.seek(ids.get(40));
                    drain(consumer, 40, "seek by id");
                }
                consumer.seek(middle);
                drain(consumer, 100, "seek by time");
                consumer.seek(MessageId.earliest);
                drain(consumer, 0, "seek to the earliest");
                consumer.seek(MessageId.latest);
                nothing(consumer, "after seek to the latest");
            }
        }
    }

    /** Receive and acknowledge from the given place in the 100 + 50 messages of the seek check to the end. */
    private static void drain(Consumer<byte[]> consumer, int first, String when) throws Exception {
        for (int number = first; number < 150; number++) {
            consumer.acknowledge(expect(consumer, number % 100, when));
        }
    }

    static void nack(World world) throws Exception {
        String topic = world.topic("nack");
        try (Producer<byte[]> producer = world.producer(topic).enableBatching(false).create()) {
            send(producer, 10);
        }
        try (Consumer<byte[]> consumer = world.consumer(topic, "nack").subscriptionType(SubscriptionType.Shared)
                .negativeAckRedeliveryDelay(100, TimeUnit.MILLISECONDS).subscribe()) {
            for (int round = 0; round < 3; round++) {
                for (int turn = 0; turn < (round == 0 ? 10 : 5); turn++) {
                    Message<byte[]> message = receive(consumer);
                    int number = numberOf(message);
                    need(message.getRedeliveryCount() == round, "%d has redelivery count %d in round %d",
                            number, message.getRedeliveryCount(), round);
                    need(round == 0 || number % 2 == 0, "%d came again although acknowledged", number);
                    if (number % 2 == 1 || round == 2) {
                        consumer.acknowledge(message);
                    } else {
                        consumer.negativeAcknowledge(message);
                    }
                }
            }
            nothing(consumer, "after the last ack");
        }
        // On Exclusive everything unacknowledged comes again, in order; consumer epochs drop what was under way.
        try (Consumer<byte[]> consumer = world.consumer(topic, "rewind").subscribe()) {
            for (int number = 0; number < 10; number++) {
                Message<byte[]> message = expect(consumer, number, "before redelivery");
                if (number < 4) {
                    consumer.acknowledge(message);
                }
            }
            consumer.redeliverUnacknowledgedMessages();
            for (int number = 4; number < 10; number++) {
                consumer.acknowledge(expect(consumer, number, "after redelivery"));
            }
            nothing(consumer, "after the redelivery");
        }
    }

    static void deadLetter(World world) throws Exception {
        String topic = world.topic("dead-letter");
        try (Producer<byte[]> producer = world.producer(topic).enableBatching(false).create()) {
            send(producer, 5);
        }
        DeadLetterPolicy policy = DeadLetterPolicy.builder().maxRedeliverCount(2).deadLetterTopic(topic + "-DLQ")
                .initialSubscriptionName("graves").build();
        try (Consumer<byte[]> consumer = world.consumer(topic, "work").subscriptionType(SubscriptionType.Shared)
                .negativeAckRedeliveryDelay(100, TimeUnit.MILLISECONDS).deadLetterPolicy(policy).subscribe()) {
            for (int turn = 0; turn < 15; turn++) {
                consumer.negativeAcknowledge(receive(consumer));
            }
            nothing(consumer, "after the last delivery");
            try (Consumer<byte[]> graves = world.consumer(topic + "-DLQ", "graves").subscribe()) {
                Set<Integer> found = new HashSet<>();
                for (int turn = 0; turn < 5; turn++) {
                    Message<byte[]> message = receive(graves);
                    found.add(numberOf(message));
                    graves.acknowledge(message);
                }
                need(found.size() == 5, "dead letters: %s", found);
                nothing(graves, "after five dead letters");
            }
        }
        try (Consumer<byte[]> consumer = world.consumer(topic, "work").subscriptionType(SubscriptionType.Shared).subscribe()) {
            nothing(consumer, "what became a dead letter");
        }
    }

    static void retryLetter(World world) throws Exception {
        String topic = world.topic("retry-letter");
        try (Producer<byte[]> producer = world.producer(topic).enableBatching(false).create();
                Consumer<byte[]> consumer = world.consumer(topic, "work").subscriptionType(SubscriptionType.Shared)
                        .enableRetry(true).deadLetterPolicy(DeadLetterPolicy.builder().maxRedeliverCount(2).build())
                        .subscribe()) {
            send(producer, 1);
            for (int turn = 0; turn < 3; turn++) {
                Message<byte[]> message = receive(consumer);
                need(numberOf(message) == 0, "wrong message");
                if (turn < 2) {
                    consumer.reconsumeLater(message, 1, TimeUnit.MILLISECONDS);
                } else {
                    consumer.acknowledge(message);
                }
            }
            nothing(consumer, "after the last retry");
        }
    }

    static void chunks(World world) throws Exception {
        String topic = world.topic("chunks");
        byte[] big = new byte[12_000_000];
        for (int at = 0; at < big.length; at++) {
            big[at] = (byte) (at / 1000 * 7);
        }
        try (Producer<byte[]> producer = world.producer(topic).enableBatching(false).enableChunking(true).create();
                Consumer<byte[]> consumer = world.consumer(topic, "chunks").subscribe()) {
            for (int round = 0; round < 2; round++) {
                producer.send(big);
                send(producer, 1);
                Message<byte[]> message = receive(consumer);
                need(Arrays.equals(message.getData(), big), "the large message came back with %d bytes", message.size());
                consumer.acknowledge(message);
                consumer.acknowledge(expect(consumer, 0, "after the large message"));
            }
        }
        try (Consumer<byte[]> consumer = world.consumer(topic, "chunks").subscribe()) {
            nothing(consumer, "after all chunks are acknowledged");
        }
    }

    static void producerName(World world) throws Exception {
        String topic = world.topic("producer-name");
        try (Producer<byte[]> named = world.producer(topic).producerName("smith").create();
                Producer<byte[]> one = world.producer(topic).create();
                Producer<byte[]> two = world.producer(topic).create()) {
            need(named.getProducerName().equals("smith"), "the name is %s", named.getProducerName());
            need(!one.getProducerName().equals(two.getProducerName()), "both are called %s", one.getProducerName());
            refused(PulsarClientException.ProducerBusyException.class,
                    none -> world.producer(topic).producerName("smith").create().close());
            send(named, 5);
        }
        try (Producer<byte[]> again = world.producer(topic).producerName("smith").create()) {
            send(again, 5);
        }
    }

    static void exclusiveProducer(World world) throws Exception {
        String topic = world.topic("exclusive-producer");
        Producer<byte[]> owner = world.producer(topic).accessMode(ProducerAccessMode.Exclusive).create();
        refused(PulsarClientException.ProducerFencedException.class,
                none -> world.producer(topic).accessMode(ProducerAccessMode.Exclusive).create().close());
        refused(PulsarClientException.ProducerBusyException.class, none -> world.producer(topic).create().close());
        CompletableFuture<Producer<byte[]>> waiting =
                world.producer(topic).accessMode(ProducerAccessMode.WaitForExclusive).createAsync();
        try {
            waiting.get(SILENT_MS, TimeUnit.MILLISECONDS);
            need(false, "the waiting producer did not wait");
        } catch (TimeoutException expected) {
            send(owner, 5);
        }
        owner.close();
        Producer<byte[]> second = waiting.get(Messages.PATIENT_SECONDS, TimeUnit.SECONDS);
        send(second, 5);
        try (Producer<byte[]> third = world.producer(topic).accessMode(ProducerAccessMode.ExclusiveWithFencing).create()) {
            send(third, 5);
            refused(PulsarClientException.class, none -> second.send(Messages.payload(0)));
            send(third, 5);
        }
        second.close();
    }

    static void schemaString(World world) throws Exception {
        String topic = world.topic("schema-string");
        try (Producer<String> producer = world.client.newProducer(Schema.STRING).topic(topic).create();
                Consumer<String> consumer = world.consumer(Schema.STRING, topic, "s").subscribe()) {
            producer.send("grün ✓");
            need(receive(consumer).getValue().equals("grün ✓"), "the text differs");
        }
    }

    /** A value with a JSON schema. */
    public static final class Order {
        public String name;
        public int count;
    }

    static void schemaJson(World world) throws Exception {
        String topic = world.topic("schema-json");
        Schema<Order> schema = Schema.JSON(Order.class);
        try (Producer<Order> producer = world.client.newProducer(schema).topic(topic).create();
                Consumer<Order> consumer = world.consumer(schema, topic, "s").subscribe()) {
            for (int number = 0; number < 10; number++) {
                Order order = new Order();
                order.name = "grün";
                order.count = number;
                producer.send(order);
                Message<Order> message = receive(consumer);
                need(message.getValue().name.equals("grün") && message.getValue().count == number, "the value differs");
                need(message.getSchemaVersion().length == 8, "the schema version has %d bytes", message.getSchemaVersion().length);
                consumer.acknowledge(message);
            }
        }
        // A consumer without a schema of its own fetches the stored one.
        try (Consumer<?> consumer = world.consumer(Schema.AUTO_CONSUME(), topic, "auto").subscribe()) {
            Object value = receive(consumer).getValue();
            need(value.toString().length() > 0, "no value");
            need(((org.apache.pulsar.client.api.schema.GenericRecord) value).getField("count").equals(0), "the field differs");
        }
    }

    static void partitions(World world) throws Exception {
        String topic = world.topic("partitions");
        world.ask("partitions " + topic + " 3");
        int size = world.client.getPartitionsForTopic(topic, false).get(10, TimeUnit.SECONDS).size();
        need(size == 3, "%d partitions", size);
        Map<String, Integer> home = new HashMap<>();
        Map<String, Integer> last = new HashMap<>();
        try (Producer<byte[]> producer = world.batching(topic, 10).create();
                Consumer<byte[]> consumer = world.consumer(topic, "all").subscribe()) {
            List<CompletableFuture<MessageId>> sends = new ArrayList<>();
            for (int number = 0; number < COUNT; number++) {
                sends.add(sendOne(producer, number));
            }
            for (CompletableFuture<MessageId> each : sends) {
                each.get(Messages.PATIENT_SECONDS, TimeUnit.SECONDS);
            }
            for (int turn = 0; turn < COUNT; turn++) {
                Message<byte[]> message = receive(consumer);
                int number = numberOf(message);
                int partition = ((MessageIdAdv) message.getMessageId()).getPartitionIndex();
                Integer before = home.put(message.getKey(), partition);
                need(before == null || before == partition, "key %s is in two partitions", message.getKey());
                Integer previous = last.put(message.getKey(), number);
                need(previous == null || number == previous + 7, "key %s: %d came after %d", message.getKey(), number, previous);
                consumer.acknowledge(message);
            }
            need(new HashSet<>(home.values()).size() > 1, "all keys are in one partition");
            nothing(consumer, "after all messages");
        }
    }

    static void batchIndexAck(World world) throws Exception {
        String topic = world.topic("batch-index-ack");
        try (Producer<byte[]> producer = world.batching(topic, 10).batchingMaxPublishDelay(1, TimeUnit.SECONDS).create()) {
            send(producer, 20);
        }
        ConsumerBuilder<byte[]> builder = world.consumer(topic, "some").subscriptionType(SubscriptionType.Shared)
                .enableBatchIndexAcknowledgment(true).isAckReceiptEnabled(true);
        try (Consumer<byte[]> consumer = builder.clone().subscribe()) {
            for (int turn = 0; turn < 20; turn++) {
                Message<byte[]> message = receive(consumer);
                if (numberOf(message) % 2 == 0) {
                    consumer.acknowledge(message);
                }
            }
        }
        world.ask("restart");
        try (Consumer<byte[]> consumer = builder.clone().subscribe()) {
            for (int number = 1; number < 20; number += 2) {
                consumer.acknowledge(expect(consumer, number, "only what was not acknowledged"));
            }
            nothing(consumer, "after all indexes are acknowledged");
        }
    }

    static void ackReceipt(World world) throws Exception {
        String topic = world.topic("ack-receipt");
        try (Producer<byte[]> producer = world.producer(topic).enableBatching(false).create()) {
            send(producer, 200);
        }
        for (boolean isCumulative : List.of(false, true)) {
            ConsumerBuilder<byte[]> builder = world.consumer(topic, isCumulative ? "cumulative" : "single")
                    .isAckReceiptEnabled(true);
            try (Consumer<byte[]> consumer = builder.clone().subscribe()) {
                List<CompletableFuture<Void>> receipts = new ArrayList<>();
                for (int number = 0; number < 200; number++) {
                    Message<byte[]> message = receive(consumer);
                    if (!isCumulative) {
                        receipts.add(consumer.acknowledgeAsync(message));
                    } else if (number % 20 == 19) {
                        receipts.add(consumer.acknowledgeCumulativeAsync(message));
                    }
                }
                for (CompletableFuture<Void> each : receipts) {
                    each.get(Messages.PATIENT_SECONDS, TimeUnit.SECONDS);
                }
                world.ask("restart");
                nothing(consumer, "after all receipts and a kill");
            }
        }
    }

    static void terminated(World world) throws Exception {
        String topic = world.topic("terminated");
        Producer<byte[]> producer = world.producer(topic).enableBatching(false).create();
        send(producer, 10);
        world.ask("terminate " + topic);
        try {
            sendOne(producer, 10).get(Messages.PATIENT_SECONDS, TimeUnit.SECONDS);
            need(false, "a send after the end succeeded");
        } catch (ExecutionException refusal) {
            need(refusal.getCause() instanceof PulsarClientException.TopicTerminatedException,
                    "send after the end: %s", refusal.getCause());
        }
        refused(PulsarClientException.TopicTerminatedException.class, none -> world.producer(topic).create().close());
        try (Consumer<byte[]> consumer = world.consumer(topic, "drain").subscribe()) {
            String before = world.ask("consumer " + topic);
            for (int number = 0; number < 10; number++) {
                need(!consumer.hasReachedEndOfTopic(), "the end was told before %d was acknowledged", number);
                consumer.acknowledge(expect(consumer, number, "after the end"));
            }
            for (int wait = 0; !consumer.hasReachedEndOfTopic(); wait++) {
                need(wait < 500, "the end of the topic was never told");
                Thread.sleep(10);
            }
            String after = world.ask("consumer " + topic);
            need(before.equals(after), "the connection changed: %s, then %s", before, after);
        }
        producer.close();
    }
}
