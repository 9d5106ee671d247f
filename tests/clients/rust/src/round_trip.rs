//! Publish and consume on every kind of subscription, with individual and with cumulative acknowledgments.

use std::collections::HashSet;
use std::time::Duration;

use futures::StreamExt;
use pulsar::compression::Compression;
use pulsar::producer::ProducerOptions;
use pulsar::SubType;
use tokio::time::{timeout, Instant};

use crate::messages::{acknowledge, batches_of, close, ends_batch, expect, nothing, number_of, place, receive, send};
use crate::need;
use crate::world::{because, Outcome, World, PATIENT};

const COUNT: usize = 2000;

pub async fn run(world: &World, name: &str, codec: Compression, is_batched: bool) -> Outcome<()> {
    let topic = world.topic(name);
    let options = if is_batched { batches_of(100) } else { ProducerOptions::default() };
    let mut producer = world.producer(&topic, ProducerOptions { compression: Some(codec), ..options }).await?;
    let places = send(&mut producer, COUNT).await?;
    producer.close().await.map_err(because("close producer"))?;

    let mut consumer = world.subscribe(&topic, "exclusive", SubType::Exclusive).await?;
    for (number, sent_to) in places.iter().enumerate() {
        let message = expect(&mut consumer, number, "Exclusive").await?;
        need!(
            place(message.message_id()) == *sent_to,
            "{number} is at {:?}, its receipt said {sent_to:?}",
            message.message_id()
        );
        acknowledge(&mut consumer, &message).await?;
    }
    close(consumer).await?;
    let mut consumer = world.subscribe(&topic, "exclusive", SubType::Exclusive).await?;
    nothing(&mut consumer, "after all acks").await?;
    close(consumer).await?;
    shared(world, &topic).await?;
    failover(world, &topic).await
}

async fn shared(world: &World, topic: &str) -> Outcome<()> {
    let mut consumers = Vec::new();
    for _ in 0..2 {
        let builder = world.consumer(topic, "shared", SubType::Shared).with_batch_size(200);
        consumers.push(builder.build().await.map_err(because("subscribe"))?);
    }
    let mut seen = HashSet::new();
    let mut last = [None, None];
    let deadline = Instant::now() + PATIENT;
    while seen.len() < COUNT {
        need!(Instant::now() < deadline, "Shared: {} messages came", seen.len());
        for (index, consumer) in consumers.iter_mut().enumerate() {
            while let Ok(Some(message)) = timeout(Duration::from_millis(20), consumer.next()).await {
                let message = message.map_err(because("receive"))?;
                let number = number_of(&message)?;
                need!(seen.insert(number), "Shared: {number} came twice");
                need!(last[index] < Some(number), "Shared: {number} came after {:?}", last[index]);
                last[index] = Some(number);
                acknowledge(consumer, &message).await?;
                if seen.len() % 20 == 0 {
                    break;
                }
            }
        }
    }
    need!(last.iter().all(Option::is_some), "Shared: one consumer got everything");
    for consumer in consumers {
        close(consumer).await?;
    }
    let mut consumer = world.subscribe(topic, "shared", SubType::Shared).await?;
    nothing(&mut consumer, "Shared after all acks").await?;
    close(consumer).await
}

async fn failover(world: &World, topic: &str) -> Outcome<()> {
    let builder = |name: &str| world.consumer(topic, "failover", SubType::Failover).with_consumer_name(name);
    let mut first = builder("a").build().await.map_err(because("subscribe"))?;
    let mut second = builder("b").build().await.map_err(because("subscribe"))?;
    let mut due = 0;
    loop {
        let message = expect(&mut first, due, "Failover").await?;
        due += 1;
        // At the end of a batch: this client acknowledges a batch whole.
        if due >= COUNT / 2 && ends_batch(&message) {
            first.cumulative_ack(&message).await.map_err(because("cumulative ack"))?;
            break;
        }
    }
    nothing(&mut second, "the waiting consumer").await?;
    close(first).await?;
    for number in due..COUNT {
        let message = receive(&mut second).await?;
        let got = number_of(&message)?;
        need!(got == number, "Failover: {got} came to the second consumer when {number} was due");
        second.cumulative_ack(&message).await.map_err(because("cumulative ack"))?;
    }
    close(second).await?;
    let mut third = builder("c").build().await.map_err(because("subscribe"))?;
    nothing(&mut third, "Failover after all acks").await?;
    close(third).await
}
