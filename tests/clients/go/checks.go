package main

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

type namedCheck struct {
	name  string
	check func(*World)
}

func checks() []namedCheck {
	all := []namedCheck{}
	codecs := []struct {
		name  string
		codec pulsar.CompressionType
	}{{"none", pulsar.NoCompression}, {"lz4", pulsar.LZ4}, {"zlib", pulsar.ZLib}, {"zstd", pulsar.ZSTD}, {"snappy", pulsar.SNAPPY}}
	for _, each := range codecs {
		all = append(all,
			namedCheck{"plain-" + each.name, func(w *World) { roundTrip(w, "plain-"+each.name, each.codec, false) }},
			namedCheck{"batched-" + each.name, func(w *World) { roundTrip(w, "batched-"+each.name, each.codec, true) }})
	}
	all = append(all, transactionChecks()...)
	return append(all, []namedCheck{
		{"reader", readFrom},
		{"seek", seek},
		{"nack", nack},
		{"dead-letter", deadLetter},
		{"chunks", chunks},
		{"producer-name", producerName},
		{"exclusive-producer", exclusiveProducer},
		{"schema-string", schemaString},
		{"schema-json", schemaJSON},
		{"partitions", partitions},
		{"batch-index-ack", batchIndexAck},
		{"ack-receipt", ackReceipt},
		{"terminated", terminated},
		{"restart-plain", func(w *World) { restart(w, "restart-plain", false) }},
		{"restart-batched", func(w *World) { restart(w, "restart-batched", true) }},
	}...)
}

// roundTrip publishes and consumes on every kind of subscription, with individual and with cumulative acks.
func roundTrip(w *World, name string, codec pulsar.CompressionType, isBatched bool) {
	topic := w.topic(name)
	producer := w.producer(pulsar.ProducerOptions{
		Topic: topic, CompressionType: codec, DisableBatching: !isBatched, BatchingMaxMessages: 100, BatchingMaxPublishDelay: 5 * time.Millisecond,
	})
	defer producer.Close()
	ids := send(producer, count)

	consumer := w.consumer(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "exclusive"})
	for number := range count {
		m := receive(consumer)
		need(numberOf(m) == number, "Exclusive: %d came when %d was due", numberOf(m), number)
		need(isSame(m.ID(), ids[number]), "%d has id %v, its receipt said %v", number, m.ID(), ids[number])
		must(consumer.Ack(m), "ack")
	}
	consumer.Close()
	consumer = w.consumer(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "exclusive"})
	nothing(consumer, "after all acks")
	consumer.Close()
	shared(w, topic)
	failover(w, topic)
}

func shared(w *World, topic string) {
	seen := map[int]bool{}
	var lock sync.Mutex
	var all sync.WaitGroup
	problems := make(chan string, 2)
	share := [2]int{}
	done := make(chan struct{})
	options := pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "shared", Type: pulsar.Shared, ReceiverQueueSize: 200}
	consumers := []pulsar.Consumer{w.consumer(options), w.consumer(options)}
	for index, consumer := range consumers {
		all.Add(1)
		go func() {
			defer all.Done()
			defer func() {
				if trouble := recover(); trouble != nil {
					problems <- trouble.(Broken).why
				}
			}()
			last := -1
			for {
				select {
				case m := <-consumer.Chan():
					number := numberOf(m.Message)
					lock.Lock()
					need(!seen[number], "Shared: %d came twice", number)
					need(number > last, "Shared: %d came after %d", number, last)
					last = number
					seen[number] = true
					share[index]++
					must(consumer.Ack(m.Message), "ack")
					if len(seen) == count {
						close(done)
					}
					lock.Unlock()
				case <-done:
					return
				case <-time.After(patient):
					broken("Shared: %d messages came", len(seen))
				}
			}
		}()
	}
	all.Wait()
	select {
	case why := <-problems:
		broken("%s", why)
	default:
	}
	need(share[0] > 0 && share[1] > 0, "Shared: the consumers got %v messages", share)
	for _, consumer := range consumers {
		consumer.Close()
	}
	consumer := w.consumer(options)
	nothing(consumer, "Shared after all acks")
	consumer.Close()
}

func failover(w *World, topic string) {
	options := pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "failover", Type: pulsar.Failover, Name: "a"}
	first := w.consumer(options)
	options.Name = "b"
	second := w.consumer(options)
	for number := range count / 2 {
		m := receive(first)
		need(numberOf(m) == number, "Failover: %d came when %d was due", numberOf(m), number)
		if number == count/2-1 {
			must(first.AckCumulative(m), "cumulative ack")
		}
	}
	nothing(second, "the waiting consumer")
	first.Close()
	for number := count / 2; number < count; {
		m := receive(second)
		// Without batch index acks a batch that is only partly acknowledged comes again whole.
		if numberOf(m) < count/2 && m.ID().BatchIdx() >= 0 {
			continue
		}
		need(numberOf(m) == number, "Failover: %d came to the second when %d was due", numberOf(m), number)
		must(second.AckCumulative(m), "cumulative ack")
		number++
	}
	second.Close()
	third := w.consumer(options)
	nothing(third, "Failover after all acks")
	third.Close()
}

func readFrom(w *World) {
	for _, isBatched := range []bool{false, true} {
		topic := w.topic(map[bool]string{false: "reader-plain", true: "reader-batched"}[isBatched])
		producer := w.producer(pulsar.ProducerOptions{Topic: topic, DisableBatching: !isBatched, BatchingMaxMessages: 10})
		ids := send(producer, 100)
		producer.Close()
		for _, start := range []struct {
			id          pulsar.MessageID
			isInclusive bool
			first       int
		}{{pulsar.EarliestMessageID(), false, 0}, {ids[44], false, 45}, {ids[44], true, 44}, {pulsar.LatestMessageID(), false, 100}} {
			reader, err := w.client.CreateReader(pulsar.ReaderOptions{
				Topic: topic, StartMessageID: start.id, StartMessageIDInclusive: start.isInclusive,
			})
			must(err, "create reader")
			number := start.first
			for ; reader.HasNext(); number++ {
				m := next(reader)
				need(numberOf(m) == number, "reader from %d read %d when %d was due", start.first, numberOf(m), number)
			}
			need(number == 100, "reader from %d stopped at %d (batched: %v)", start.first, number, isBatched)
			last, err := reader.GetLastMessageID()
			must(err, "last message id")
			need(isSame(last, ids[99]), "last message id %v, sent %v", last, ids[99])
			reader.Close()
		}
	}
}

func seek(w *World) {
	topic := w.topic("seek")
	producer := w.producer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	defer producer.Close()
	ids := send(producer, 100)
	time.Sleep(20 * time.Millisecond)
	middle := time.Now()
	time.Sleep(20 * time.Millisecond)
	send(producer, 50)
	for _, kind := range []pulsar.SubscriptionType{pulsar.Exclusive, pulsar.Shared, pulsar.Failover} {
		consumer := w.consumer(pulsar.ConsumerOptions{
			Topic: topic, SubscriptionName: "seek", Type: kind, StartMessageIDInclusive: true,
		})
		expect := func(first, last int, when string) {
			for number := first; number < last; number++ {
				m := receive(consumer)
				need(numberOf(m) == number%100, "%s: %d came when %d was due", when, numberOf(m), number%100)
				must(consumer.Ack(m), "ack")
			}
		}
		if kind == pulsar.Exclusive {
			expect(0, 150, "before seek")
		}
		for range 3 {
			must(consumer.Seek(ids[40]), "seek")
			expect(40, 150, "seek by id")
		}
		must(consumer.SeekByTime(middle), "seek by time")
		expect(100, 150, "seek by time")
		// This client refuses its own earliest and latest ids in Seek, because their partition is -1.
		must(consumer.Seek(pulsar.NewMessageID(-1, -1, -1, 0)), "seek earliest")
		expect(0, 150, "seek to the earliest")
		must(consumer.Seek(pulsar.NewMessageID(math.MaxInt64, math.MaxInt64, -1, 0)), "seek latest")
		nothing(consumer, "after seek to the latest")
		consumer.Close()
	}
}

func nack(w *World) {
	topic := w.topic("nack")
	producer := w.producer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	defer producer.Close()
	send(producer, 10)
	consumer := w.consumer(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "nack", Type: pulsar.Shared, NackRedeliveryDelay: 100 * time.Millisecond,
	})
	for round := range 3 {
		for range 10 {
			m := receive(consumer)
			number := numberOf(m)
			if number%2 == 0 {
				need(m.RedeliveryCount() == uint32(round), "%d has redelivery count %d in round %d", number, m.RedeliveryCount(), round)
			}
			if number%2 == 1 || round == 2 {
				must(consumer.Ack(m), "ack")
			} else {
				consumer.Nack(m)
			}
			if round > 0 {
				need(number%2 == 0, "%d came again although acknowledged", number)
				if number == 8 {
					break
				}
			}
		}
	}
	nothing(consumer, "after the last ack")
	consumer.Close()
}

func deadLetter(w *World) {
	topic := w.topic("dead-letter")
	producer := w.producer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	defer producer.Close()
	send(producer, 5)
	consumer := w.consumer(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "work", Type: pulsar.Shared, NackRedeliveryDelay: 100 * time.Millisecond,
		DLQ: &pulsar.DLQPolicy{MaxDeliveries: 3, DeadLetterTopic: topic + "-DLQ", InitialSubscriptionName: "graves"},
	})
	for range 15 {
		consumer.Nack(receive(consumer))
	}
	stop := make(chan struct{})
	go func() { // the client moves a message when it would be delivered once more
		for {
			select {
			case m := <-consumer.Chan():
				_ = m
			case <-stop:
				return
			}
		}
	}()
	graves := w.consumer(pulsar.ConsumerOptions{Topic: topic + "-DLQ", SubscriptionName: "graves"})
	found := map[int]bool{}
	for range 5 {
		m := receive(graves)
		found[numberOf(m)] = true
		must(graves.Ack(m), "ack")
	}
	need(len(found) == 5, "dead letters: %v", found)
	nothing(graves, "after five dead letters")
	close(stop)
	graves.Close()
	consumer.Close()
}

func chunks(w *World) {
	topic := w.topic("chunks")
	producer := w.producer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true, EnableChunking: true})
	defer producer.Close()
	consumer := w.consumer(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "chunks"})
	big := make([]byte, 12_000_000)
	for at := range big {
		big[at] = byte(at * 7 / 1000)
	}
	for range 2 {
		_, err := producer.Send(context.Background(), &pulsar.ProducerMessage{Payload: big})
		must(err, "send a large message")
		send(producer, 1)
		m := receive(consumer)
		need(string(m.Payload()) == string(big), "the large message came back with %d bytes", len(m.Payload()))
		must(consumer.Ack(m), "ack")
		small := receive(consumer)
		need(numberOf(small) == 0, "a wrong message follows the large one")
		must(consumer.Ack(small), "ack")
	}
	consumer.Close()
	consumer = w.consumer(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "chunks"})
	nothing(consumer, "after all chunks are acknowledged")
	consumer.Close()
}

func producerName(w *World) {
	topic := w.topic("producer-name")
	named := w.producer(pulsar.ProducerOptions{Topic: topic, Name: "smith"})
	need(named.Name() == "smith", "the name is %s", named.Name())
	_, err := w.client.CreateProducer(pulsar.ProducerOptions{Topic: topic, Name: "smith"})
	need(err != nil && strings.Contains(err.Error(), "ProducerBusy"), "a second producer of the same name: %v", err)
	one, two := w.producer(pulsar.ProducerOptions{Topic: topic}), w.producer(pulsar.ProducerOptions{Topic: topic})
	need(one.Name() != "" && one.Name() != two.Name(), "generated names %q and %q", one.Name(), two.Name())
	send(named, 5)
	named.Close()
	again := w.producer(pulsar.ProducerOptions{Topic: topic, Name: "smith"})
	send(again, 5)
	for _, producer := range []pulsar.Producer{one, two, again} {
		producer.Close()
	}
}

func exclusiveProducer(w *World) {
	topic := w.topic("exclusive-producer")
	owner := w.producer(pulsar.ProducerOptions{Topic: topic, ProducerAccessMode: pulsar.ProducerAccessModeExclusive})
	_, err := w.client.CreateProducer(pulsar.ProducerOptions{Topic: topic, ProducerAccessMode: pulsar.ProducerAccessModeExclusive})
	need(err != nil && strings.Contains(err.Error(), "ProducerFenced"), "a second exclusive producer: %v", err)
	_, err = w.client.CreateProducer(pulsar.ProducerOptions{Topic: topic})
	need(err != nil && strings.Contains(err.Error(), "ProducerBusy"), "a shared producer: %v", err)
	granted := make(chan pulsar.Producer, 1)
	refused := make(chan error, 1)
	go func() {
		waiter, err := w.client.CreateProducer(pulsar.ProducerOptions{
			Topic: topic, ProducerAccessMode: pulsar.ProducerAccessModeWaitForExclusive,
		})
		if err != nil {
			refused <- err
			return
		}
		granted <- waiter
	}()
	select {
	case <-granted:
		broken("the waiting producer did not wait")
	case err := <-refused:
		broken("the waiting producer was refused: %v", err)
	case <-time.After(silent):
	}
	send(owner, 5)
	owner.Close()
	select {
	case waiter := <-granted:
		send(waiter, 5)
		waiter.Close()
	case err := <-refused:
		broken("the waiting producer was refused: %v", err)
	case <-time.After(patient):
		broken("the waiting producer still waits after the owner left")
	}
}

func schemaString(w *World) {
	topic := w.topic("schema-string")
	producer := w.producer(pulsar.ProducerOptions{Topic: topic, Schema: pulsar.NewStringSchema(nil)})
	consumer := w.consumer(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "s", Schema: pulsar.NewStringSchema(nil)})
	_, err := producer.Send(context.Background(), &pulsar.ProducerMessage{Value: "grün ✓"})
	must(err, "send")
	var text *string
	must(receive(consumer).GetSchemaValue(&text), "decode")
	need(*text == "grün ✓", "the text is %q", *text)
	producer.Close()
	consumer.Close()
}

type order struct {
	Name  string `json:"name"`
	Count int    `json:"count"`
}

func schemaJSON(w *World) {
	topic := w.topic("schema-json")
	definition := `{"type":"record","name":"order","fields":[{"name":"name","type":"string"},{"name":"count","type":"int"}]}`
	producer := w.producer(pulsar.ProducerOptions{Topic: topic, Schema: pulsar.NewJSONSchema(definition, nil)})
	consumer := w.consumer(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "s", Schema: pulsar.NewJSONSchema(definition, nil),
	})
	for number := range 10 {
		_, err := producer.Send(context.Background(), &pulsar.ProducerMessage{Value: &order{"grün", number}})
		must(err, "send")
		m := receive(consumer)
		var got order
		must(m.GetSchemaValue(&got), "decode")
		need(got == order{"grün", number}, "the value is %v", got)
		need(len(m.SchemaVersion()) == 8, "the schema version is %v", m.SchemaVersion())
	}
	producer.Close()
	consumer.Close()
}

func partitions(w *World) {
	topic := w.topic("partitions")
	w.ask("partitions " + topic + " 3")
	names, err := w.client.TopicPartitions(topic)
	must(err, "partitions")
	need(len(names) == 3, "partitions: %v", names)
	producer := w.producer(pulsar.ProducerOptions{Topic: topic, BatchingMaxMessages: 10})
	consumer := w.consumer(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "all"})
	var waiting sync.WaitGroup
	var failed atomic.Int32
	for number := range count {
		waiting.Add(1)
		producer.SendAsync(context.Background(), message(number), func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
			if err != nil {
				failed.Add(1)
			}
			waiting.Done()
		})
	}
	waiting.Wait()
	need(failed.Load() == 0, "%d sends failed", failed.Load())
	home, last, used := map[string]int32{}, map[string]int{}, map[int32]bool{}
	for range count {
		m := receive(consumer)
		number, key, partition := numberOf(m), m.Key(), m.ID().PartitionIdx()
		if where, known := home[key]; known {
			need(where == partition, "key %s is in partitions %d and %d", key, where, partition)
			need(number == last[key]+7, "key %s: %d came after %d", key, number, last[key])
		}
		home[key], last[key], used[partition] = partition, number, true
		must(consumer.Ack(m), "ack")
	}
	need(len(used) > 1, "all keys are in one partition")
	nothing(consumer, "after all messages")
	producer.Close()
	consumer.Close()
}

func batchIndexAck(w *World) {
	topic := w.topic("batch-index-ack")
	producer := w.producer(pulsar.ProducerOptions{Topic: topic, BatchingMaxMessages: 10, BatchingMaxPublishDelay: time.Second})
	send(producer, 20)
	producer.Close()
	options := pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "some", Type: pulsar.Shared, EnableBatchIndexAcknowledgment: true, AckWithResponse: true,
	}
	consumer := w.consumer(options)
	for range 20 {
		m := receive(consumer)
		if numberOf(m)%2 == 0 {
			must(consumer.Ack(m), "ack")
		}
	}
	consumer.Close()
	consumer = w.consumer(options)
	for number := 1; number < 20; number += 2 {
		m := receive(consumer)
		need(numberOf(m) == number, "%d came when %d was due", numberOf(m), number)
		must(consumer.Ack(m), "ack")
	}
	nothing(consumer, "after all indexes are acknowledged")
	consumer.Close()
}

func ackReceipt(w *World) {
	topic := w.topic("ack-receipt")
	producer := w.producer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	defer producer.Close()
	send(producer, 200)
	for _, isCumulative := range []bool{false, true} {
		options := pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "single", AckWithResponse: true}
		if isCumulative {
			options.SubscriptionName = "cumulative"
		}
		consumer := w.consumer(options)
		for number := range 200 {
			m := receive(consumer)
			if !isCumulative {
				must(consumer.Ack(m), "ack with receipt")
			} else if number%20 == 19 {
				must(consumer.AckCumulative(m), "cumulative ack with receipt")
			}
		}
		consumer.Close()
		consumer = w.consumer(options)
		nothing(consumer, "after all receipts")
		consumer.Close()
	}
}

func terminated(w *World) {
	topic := w.topic("terminated")
	producer := w.producer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	send(producer, 10)
	w.ask("terminate " + topic)
	_, err := producer.Send(context.Background(), message(10))
	need(errors.Is(err, pulsar.ErrTopicTerminated) || errors.Is(err, pulsar.ErrProducerClosed), "send after the end: %v", err)
	_, err = w.client.CreateProducer(pulsar.ProducerOptions{Topic: topic})
	need(err != nil && strings.Contains(err.Error(), "TopicTerminated"), "a new producer after the end: %v", err)
	consumer := w.consumer(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "drain"})
	before := w.ask("consumer " + topic)
	for number := range 10 {
		m := receive(consumer)
		need(numberOf(m) == number, "%d came when %d was due", numberOf(m), number)
		must(consumer.Ack(m), "ack")
	}
	nothing(consumer, "after the end")
	time.Sleep(time.Second)
	after := w.ask("consumer " + topic)
	need(before == after, "the connection changed: %s, then %s", before, after)
	consumer.Close()
}
