package braid.clients;

import static braid.clients.Messages.numberOf;
import static braid.clients.Messages.receive;
import static braid.clients.World.need;

import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.Reader;

/** Publish without pause while the broker is killed and started again: nothing acknowledged is lost or reordered. */
final class Restart {
    private static final int KILLS = 2;
    private static final int MORE = 1000;

    private final World world;
    private final String topic;
    private final List<CompletableFuture<MessageId>> sends = new ArrayList<>();
    private final AtomicInteger acknowledged = new AtomicInteger();
    private volatile boolean isStopped;
    private volatile Exception failure;

    private Restart(World world, String name) {
        this.world = world;
        this.topic = world.topic(name);
    }

    static void run(World world, String name, boolean isBatched) throws Exception {
        new Restart(world, name).run(isBatched);
    }

    private void run(boolean isBatched) throws Exception {
        ProducerBuilder<byte[]> builder = isBatched ? world.batching(topic, 20) : world.producer(topic).enableBatching(false);
        try (Consumer<byte[]> live = world.consumer(topic, "live").subscribe()) {
            try (Producer<byte[]> producer = builder.maxPendingMessages(300).sendTimeout(60, TimeUnit.SECONDS).create()) {
                publish(producer);
            }
            List<MessageId> receipts = new ArrayList<>();
            for (CompletableFuture<MessageId> each : sends) {
                receipts.add(each.get(Messages.PATIENT_SECONDS, TimeUnit.SECONDS));
            }
            checkLog(receipts);
            int due = 0;
            while (due < receipts.size()) {
                Message<byte[]> message = receive(live);
                int number = numberOf(message);
                need(number <= due, "the live consumer got %d when %d was due", number, due);
                due += number == due ? 1 : 0;
                live.acknowledge(message);
            }
        }
    }

    private void publish(Producer<byte[]> producer) throws Exception {
        Thread sender = new Thread(() -> {
            try {
                while (!isStopped) {
                    CompletableFuture<MessageId> one = Messages.sendOne(producer, sends.size());
                    one.thenRun(acknowledged::incrementAndGet);
                    sends.add(one);
                    if (sends.size() % 20 == 0) {
                        Thread.sleep(1);
                    }
                }
            } catch (Exception trouble) {
                failure = trouble;
            }
        });
        sender.start();
        int inFlight = 0;
        try {
            for (int kill = 0; kill < KILLS; kill++) {
                waitForMore();
                inFlight += sends.size() - acknowledged.get();
                world.ask("restart");
            }
            waitForMore();
        } finally {
            isStopped = true;
            sender.join();
        }
        producer.flush();
        if (failure != null) {
            throw failure;
        }
        need(inFlight > 0, "nothing was in flight at the kills");
    }

    private void waitForMore() throws InterruptedException {
        int goal = acknowledged.get() + MORE;
        for (int wait = 0; acknowledged.get() < goal; wait++) {
            need(wait < 12_000, "no more receipts: %d of %d", acknowledged.get(), goal);
            Thread.sleep(5);
        }
    }

    /** Every message stands in the log in the order sent, and where its receipt said. */
    private void checkLog(List<MessageId> receipts) throws Exception {
        List<Set<MessageId>> places = new ArrayList<>();
        try (Reader<byte[]> reader = world.client.newReader().topic(topic).startMessageId(MessageId.earliest).create()) {
            while (reader.hasMessageAvailable()) {
                Message<byte[]> message = reader.readNext(Messages.PATIENT_SECONDS, TimeUnit.SECONDS);
                need(message != null, "the reader got nothing after %d messages", places.size());
                int number = numberOf(message);
                need(number <= places.size(), "the log has %d where %d was due", number, places.size());
                if (number == places.size()) {
                    places.add(new HashSet<>());
                }
                places.get(number).add(message.getMessageId());
            }
        }
        need(places.size() == receipts.size(), "the log ends at %d of %d", places.size(), receipts.size());
        for (int number = 0; number < receipts.size(); number++) {
            need(places.get(number).contains(receipts.get(number)), "%d is not at %s, where its receipt said",
                    number, receipts.get(number));
            need(number == 0 || receipts.get(number - 1).compareTo(receipts.get(number)) < 0,
                    "the receipts of %d and the next are out of order", number - 1);
        }
    }
}
