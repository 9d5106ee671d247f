package braid.clients;

import static braid.clients.Messages.COUNT;
import static braid.clients.Messages.expect;
import static braid.clients.Messages.nothing;
import static braid.clients.Messages.numberOf;
import static braid.clients.Messages.send;
import static braid.clients.World.need;

import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerBuilder;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.SubscriptionType;

/** Publish and consume on every kind of subscription, with individual and with cumulative acknowledgments. */
final class RoundTrip {
    private RoundTrip() {
    }

    static void run(World world, String name, CompressionType codec, boolean isBatched) throws Exception {
        String topic = world.topic(name);
        List<MessageId> ids;
        try (Producer<byte[]> producer = (isBatched ? world.batching(topic, 100) : world.producer(topic).enableBatching(false))
                .compressionType(codec).create()) {
            ids = send(producer, COUNT);
        }
        try (Consumer<byte[]> consumer = world.consumer(topic, "exclusive").subscribe()) {
            for (int number = 0; number < COUNT; number++) {
                Message<byte[]> message = expect(consumer, number, "Exclusive");
                need(message.getMessageId().equals(ids.get(number)), "%d has id %s, its receipt said %s",
                        number, message.getMessageId(), ids.get(number));
                consumer.acknowledge(message);
            }
        }
        try (Consumer<byte[]> consumer = world.consumer(topic, "exclusive").subscribe()) {
            nothing(consumer, "after all acks");
        }
        shared(world, topic);
        failover(world, topic);
    }

    private static void shared(World world, String topic) throws Exception {
        ConsumerBuilder<byte[]> builder = world.consumer(topic, "shared").subscriptionType(SubscriptionType.Shared)
                .receiverQueueSize(200);
        Set<Integer> seen = new HashSet<>();
        int[] last = {-1, -1};
        try (Consumer<byte[]> one = builder.clone().subscribe(); Consumer<byte[]> two = builder.clone().subscribe()) {
            List<Consumer<byte[]>> both = List.of(one, two);
            int quiet = 0;
            while (seen.size() < COUNT && quiet < 200) {
                quiet++;
                for (int index = 0; index < 2; index++) {
                    Message<byte[]> message;
                    while ((message = both.get(index).receive(50, TimeUnit.MILLISECONDS)) != null) {
                        quiet = 0;
                        int number = numberOf(message);
                        need(seen.add(number), "Shared: %d came twice", number);
                        need(number > last[index], "Shared: %d came after %d", number, last[index]);
                        last[index] = number;
                        both.get(index).acknowledge(message);
                        if (seen.size() % 20 == 0) {
                            break;
                        }
                    }
                }
            }
            need(seen.size() == COUNT, "Shared: %d messages came", seen.size());
            need(last[0] >= 0 && last[1] >= 0, "Shared: one consumer got everything");
        }
        try (Consumer<byte[]> consumer = builder.subscribe()) {
            nothing(consumer, "Shared after all acks");
        }
    }

    private static void failover(World world, String topic) throws Exception {
        ConsumerBuilder<byte[]> builder = world.consumer(topic, "failover").subscriptionType(SubscriptionType.Failover)
                .enableBatchIndexAcknowledgment(true);
        Consumer<byte[]> first = builder.clone().consumerName("a").subscribe();
        try (Consumer<byte[]> second = builder.clone().consumerName("b").subscribe()) {
            for (int number = 0; number < COUNT / 2; number++) {
                Message<byte[]> message = expect(first, number, "Failover");
                if (number == COUNT / 2 - 1) {
                    first.acknowledgeCumulative(message);
                }
            }
            nothing(second, "the waiting consumer");
            first.close();
            for (int number = COUNT / 2; number < COUNT; number++) {
                second.acknowledgeCumulative(expect(second, number, "Failover, second consumer"));
            }
        } finally {
            first.close();
        }
        try (Consumer<byte[]> consumer = builder.subscribe()) {
            nothing(consumer, "Failover after all acks");
        }
    }
}
