package braid.clients.v5;

import static braid.clients.v5.World.need;

import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumer;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.config.CompressionPolicy;
import org.apache.pulsar.client.api.v5.config.CompressionType;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** Promises to producers. */
final class Producing {
    private static final int IN_FLIGHT = 500;
    private static final int SPLITS = 7;
    private static final int KEYS = 64;

    private Producing() {
    }

    /** Blocking and asynchronous sends with all parts of a message, with and without keys, batched and compressed. */
    static void sends(World world, String topic) throws Exception {
        Set<MessageId> ids = new HashSet<>();
        int count = 200;
        for (CompressionType codec : CompressionType.values()) {
            try (Producer<byte[]> producer = world.producer(topic).compressionPolicy(CompressionPolicy.of(codec)).create()) {
                for (int number = 0; number < 20; number++) {
                    ids.add(producer.newMessage().key("key-" + number % 5).property("codec", codec.name())
                            .eventTime(Instant.ofEpochMilli(1000 + number)).value(text(codec, number)).send());
                }
                List<CompletableFuture<MessageId>> sends = new ArrayList<>();
                for (int number = 20; number < count; number++) {
                    var message = producer.async().newMessage().property("codec", codec.name())
                            .eventTime(Instant.ofEpochMilli(1000 + number)).value(text(codec, number));
                    sends.add((number % 3 == 0 ? message : message.key("key-" + number % 5)).send());
                }
                producer.async().flush().get(20, TimeUnit.SECONDS);
                for (CompletableFuture<MessageId> each : sends) {
                    ids.add(each.get(20, TimeUnit.SECONDS));
                }
            }
        }
        int all = count * CompressionType.values().length;
        need(ids.size() == all, "%d receipts for %d messages", ids.size(), all);
        Set<String> seen = new HashSet<>();
        try (CheckpointConsumer<byte[]> consumer = world.checkpoints(topic, Checkpoint.earliest()).create()) {
            while (seen.size() < all) {
                Message<byte[]> message = consumer.receive(World.PATIENT);
                need(message != null, "only %d of %d messages can be read", seen.size(), all);
                String content = new String(message.value());
                int number = Integer.parseInt(content.split(" ")[1]);
                need(content.startsWith(message.properties().get("codec")), "%s has properties %s", content, message.properties());
                need(message.eventTime().get().toEpochMilli() == 1000 + number, "event time of %s: %s", content, message.eventTime());
                boolean hasKey = number < 20 || number % 3 != 0;
                need(message.key().isPresent() == hasKey, "key of %s: %s", content, message.key());
                need(ids.contains(message.id()), "%s is at %s, which no receipt named", content, message.id());
                need(seen.add(content), "%s came twice", content);
            }
        }
    }

    private static byte[] text(CompressionType codec, int number) {
        return (codec.name() + " " + number + " " + "x".repeat(number)).getBytes();
    }

    /** A topic that nobody made is made by the first producer. */
    static void autoCreate(World world) throws Exception {
        String topic = world.regular("auto").replace("persistent://", "topic://");
        try (Producer<byte[]> producer = world.unbatched(topic)) {
            producer.newMessage().key("k").value(Received.value("k", 0)).send();
        }
        need(world.layout(topic).size() == 1, "the new topic has %d segments", world.layout(topic).size());
        world.readAll(topic, 1).needAll(Map.of("k", 1), "reading");
    }

    /** A class with a JSON schema. */
    public static final class Order {
        public String user;
        public int amount;

        public Order() {
        }

        Order(String user, int amount) {
            this.user = user;
            this.amount = amount;
        }
    }

    /** Typed values across a split: children know the schema. */
    static void schemas(World world) throws Exception {
        String topic = world.scalable("schema", 1);
        Schema<Order> schema = Schema.json(Order.class);
        try (Producer<Order> producer = world.client.newProducer(schema).topic(topic).create();
                var consumer = world.client.newStreamConsumer(schema).topic(topic).subscriptionName("typed").consumerName("c")
                        .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST).subscribe()) {
            for (int round = 0; round < 2; round++) {
                for (int amount = 0; amount < 20; amount++) {
                    producer.newMessage().key("user-" + amount).value(new Order("user-" + amount, amount)).send();
                }
                for (int amount = 0; amount < 20; amount++) {
                    Message<Order> message = consumer.receive(World.PATIENT);
                    need(message != null, "no typed message came in round %d", round);
                    need(message.value().user.equals("user-" + message.value().amount), "a wrong value came: %s", message.value().user);
                    consumer.acknowledgeCumulative(message.id());
                }
                world.splitWidest(topic);
            }
        }
    }

    /**
     * Many sends in flight around splits: each completes. What this client re-routes may lose its order and be stored twice (it
     * sends the messages of a sealed segment again one by one), and a send that chose its segment just before a new layout came
     * may fail because the segment is not in that. No broker can repair these; they are counted.
     */
    static void inFlight(World world) throws Exception {
        String topic = world.scalable("in-flight", 1);
        Map<String, Integer> sent = new TreeMap<>();
        Semaphore window = new Semaphore(IN_FLIGHT);
        List<CompletableFuture<MessageId>> sends = new ArrayList<>();
        int lost = 0;
        try (Producer<byte[]> producer = world.producer(topic).create()) {
            Background splitter = Background.start(() -> {
                for (int split = 0; split < SPLITS; split++) {
                    Thread.sleep(400);
                    world.splitWidest(topic);
                }
                Thread.sleep(400);
            });
            for (int turn = 0; splitter.isRunning(); turn++) {
                need(window.tryAcquire(30, TimeUnit.SECONDS), "no send completed for 30 seconds; %d were made", sends.size());
                String key = "key-" + turn % KEYS;
                int number = sent.merge(key, 1, Integer::sum) - 1;
                CompletableFuture<MessageId> one = producer.async().newMessage().key(key).value(Received.value(key, number)).send();
                one.whenComplete((id, trouble) -> window.release());
                sends.add(one);
                if (turn % 10 == 0) {
                    Thread.sleep(1);
                }
            }
            long deadline = System.nanoTime() + Duration.ofSeconds(30).toNanos();
            int never = 0;
            for (int turn = 0; turn < sends.size(); turn++) {
                try {
                    sends.get(turn).get(Math.max(1, deadline - System.nanoTime()), TimeUnit.NANOSECONDS);
                } catch (TimeoutException late) {
                    never++;
                } catch (ExecutionException trouble) {
                    need(String.valueOf(trouble.getCause()).contains("not found in active segments"), "send %d of %d failed: %s",
                            turn, sends.size(), trouble.getCause());
                    lost++;
                    sent.merge("key-" + turn % KEYS, -1, Integer::sum);
                }
            }
            need(never == 0, "%d of %d sends never completed", never, sends.size());
            need(lost <= SPLITS * 5, "%d of %d sends failed", lost, sends.size());
        }
        Received received = world.readAll(topic, sends.size() - lost);
        received.needAll(sent, "reading");
        Received ordered = new Received();
        try (var consumer = world.stream(topic, "order", "c").subscribe()) {
            while (ordered.count() < received.count()) {
                var message = consumer.receive(World.PATIENT);
                need(message != null, "the stream consumer got %d of %d", ordered.count(), received.count());
                ordered.take(message);
                consumer.acknowledgeCumulative(message.id());
            }
        }
        world.note("%d sends, %d in flight, %d splits: this client stored %d after a later one of their key and %d twice, %d failed in it",
                sends.size(), IN_FLIGHT, SPLITS, ordered.stepsBack(), received.repeated(), lost);
    }
}
