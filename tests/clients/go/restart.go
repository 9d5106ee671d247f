package main

import (
	"context"
	"sync"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

const kills = 2

// restart publishes without pause while the broker is killed and started again: nothing acknowledged is lost or reordered.
func restart(w *World, name string, isBatched bool) {
	topic := w.topic(name)
	producer := w.producer(pulsar.ProducerOptions{
		Topic: topic, DisableBatching: !isBatched, BatchingMaxMessages: 20, MaxPendingMessages: 300, SendTimeout: 60 * time.Second,
	})
	live := w.consumer(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "live"})
	receipts := map[int]pulsar.MessageID{}
	var lock sync.Mutex
	var failure error
	sent, stop, stopped := 0, make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			lock.Lock()
			number := sent
			sent++
			lock.Unlock()
			producer.SendAsync(context.Background(), message(number), func(id pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
				lock.Lock()
				defer lock.Unlock()
				if err != nil {
					failure = err
				} else {
					receipts[number] = id
				}
			})
			if number%20 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
	}()
	acknowledged := func() int {
		lock.Lock()
		defer lock.Unlock()
		return len(receipts)
	}
	waitFor := func(more int) {
		goal, deadline := acknowledged()+more, time.Now().Add(60*time.Second)
		for acknowledged() < goal {
			need(time.Now().Before(deadline), "no more receipts: %d of %d", acknowledged(), goal)
			time.Sleep(5 * time.Millisecond)
		}
	}
	inFlight := 0
	for range kills {
		waitFor(1000)
		lock.Lock()
		inFlight += sent - len(receipts)
		lock.Unlock()
		w.ask("restart")
	}
	waitFor(1000)
	close(stop)
	<-stopped
	must(producer.FlushWithCtx(context.Background()), "flush")
	deadline := time.Now().Add(patient)
	for acknowledged() < sent && failure == nil && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	producer.Close()
	must(failure, "a send")
	need(acknowledged() == sent, "%d of %d sends were acknowledged", acknowledged(), sent)
	need(inFlight > 0, "nothing was in flight at the kills")

	at := map[int]map[[3]int64]bool{}
	reader, err := w.client.CreateReader(pulsar.ReaderOptions{Topic: topic, StartMessageID: pulsar.EarliestMessageID()})
	must(err, "create reader")
	due := 0
	for reader.HasNext() {
		m := next(reader)
		number := numberOf(m)
		need(number <= due, "the log has %d where %d was due", number, due)
		if number == due {
			due++
			at[number] = map[[3]int64]bool{}
		}
		at[number][place(m.ID())] = true
	}
	reader.Close()
	need(due == sent, "the log ends at %d of %d", due, sent)
	for number := range sent {
		need(at[number][place(receipts[number])], "%d is not at %v, where its receipt said", number, receipts[number])
		need(number == 0 || isBefore(receipts[number-1], receipts[number]), "receipts of %d and the next are out of order", number-1)
	}
	for due = 0; due < sent; {
		m := receive(live)
		number := numberOf(m)
		need(number <= due, "the live consumer got %d when %d was due", number, due)
		if number == due {
			due++
		}
		must(live.Ack(m), "ack")
	}
	live.Close()
}

func place(id pulsar.MessageID) [3]int64 {
	return [3]int64{id.LedgerID(), id.EntryID(), int64(id.BatchIdx())}
}
