//! One function per promise.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::StreamExt;
use pulsar::consumer::{DeadLetterPolicy, InitialPosition};
use pulsar::producer::ProducerOptions;
use pulsar::proto::{schema, MessageIdData, Schema};
use pulsar::reader::Reader;
use pulsar::routing_policy::RoutingPolicy;
use pulsar::{ConsumerOptions, SubType, TokioExecutor};
use tokio::time::{sleep, timeout};

use crate::messages::{acknowledge, batches_of, close, expect, message, nothing, number_of, place, receive, send, Place};
use crate::need;
use crate::world::{because, Outcome, Receiver, World, PATIENT, SILENT};

pub fn earliest() -> MessageIdData {
    MessageIdData { ledger_id: u64::MAX, entry_id: u64::MAX, ..Default::default() }
}

fn id_of((ledger_id, entry_id): Place) -> MessageIdData {
    MessageIdData { ledger_id, entry_id, ..Default::default() }
}

pub async fn reader(world: &World) -> Outcome<()> {
    for is_batched in [false, true] {
        let topic = world.topic(if is_batched { "reader-batched" } else { "reader-plain" });
        let options = if is_batched { batches_of(10) } else { ProducerOptions::default() };
        let mut producer = world.producer(&topic, options).await?;
        let places = send(&mut producer, 100).await?;
        // This client has no exclusive start and skips nothing inside a batch: it begins with the entry named.
        let entry_start = places.iter().position(|at| *at == places[44]).unwrap_or(44);
        for (start, first) in [(earliest(), 0), (id_of(places[44]), entry_start)] {
            let mut reader: Reader<Vec<u8>, TokioExecutor> = world
                .client
                .reader()
                .with_topic(&topic)
                .with_options(ConsumerOptions::default().starting_on_message(start))
                .into_reader()
                .await
                .map_err(because("create reader"))?;
            for number in first..100 {
                let got = number_of(&receive(&mut reader).await?)?;
                need!(got == number, "the reader from {first} read {got} when {number} was due");
            }
            let last = reader.get_last_message_id().await.map_err(because("last message id"))?;
            need!(place(&last) == places[99], "the last message id is {last:?}, sent was {:?}", places[99]);
            need!(!is_batched || last.batch_index == Some(9), "the last message id is {last:?}");
        }
    }
    Ok(())
}

pub async fn seek(world: &World) -> Outcome<()> {
    let topic = world.topic("seek");
    let mut producer = world.producer(&topic, ProducerOptions::default()).await?;
    let places = send(&mut producer, 100).await?;
    sleep(Duration::from_millis(20)).await;
    let middle = SystemTime::now().duration_since(UNIX_EPOCH).map_err(because("clock"))?.as_millis() as u64;
    sleep(Duration::from_millis(20)).await;
    send(&mut producer, 50).await?;
    // Not on Exclusive: this client opens the new consumer while its old one comes back by itself, and is refused for ever.
    for kind in [SubType::Shared, SubType::Failover] {
        let mut consumer = world.subscribe(&topic, "seek", kind).await?;
        for (id, time, first) in [
            (Some(id_of(places[40])), None, 40),
            (Some(id_of(places[41])), None, 41),
            (None, Some(middle), 100),
            (Some(earliest()), None, 0),
        ] {
            consumer.seek(None, id, time, world.client.clone()).await.map_err(because("seek"))?;
            drain(&mut consumer, first, kind == SubType::Failover).await?;
        }
        close(consumer).await?;
    }
    let mut reader: Reader<Vec<u8>, TokioExecutor> = world
        .client
        .reader()
        .with_topic(&topic)
        .with_options(ConsumerOptions::default().starting_on_message(earliest()))
        .into_reader()
        .await
        .map_err(because("create reader"))?;
    for (id, time, first) in [(None, None, 0), (Some(id_of(places[40])), None, 40), (None, Some(middle), 100)] {
        if first > 0 {
            reader.seek(id, time).await.map_err(because("reader seek"))?;
        }
        for number in first..150 {
            let got = number_of(&receive(&mut reader).await?)?;
            need!(got == number % 100, "the reader from {first} got {got} when {} was due", number % 100);
        }
    }
    Ok(())
}

/// Receive and acknowledge from the given place in the 100 + 50 messages of the seek check to the end. On Shared the
/// consumer this client leaves behind may have held some messages, which then come late.
async fn drain(consumer: &mut Receiver, first: usize, is_ordered: bool) -> Outcome<()> {
    let due: Vec<usize> = (first..150).map(|number| number % 100).collect();
    let mut got = Vec::new();
    for _ in &due {
        let message = receive(consumer).await.map_err(|why| format!("after seek to {first}, {} came: {why}", got.len()))?;
        got.push(number_of(&message)?);
        acknowledge(consumer, &message).await?;
    }
    if is_ordered {
        need!(got == due, "after seek to {first} came {got:?}");
    }
    let sorted = |mut numbers: Vec<usize>| {
        numbers.sort_unstable();
        numbers
    };
    need!(sorted(got.clone()) == sorted(due), "after seek to {first} came {got:?}");
    nothing(consumer, &format!("after seek to {first}")).await
}

pub async fn nack(world: &World) -> Outcome<()> {
    let topic = world.topic("nack");
    let mut producer = world.producer(&topic, ProducerOptions::default()).await?;
    send(&mut producer, 10).await?;
    let mut consumer = world.subscribe(&topic, "nack", SubType::Shared).await?;
    let mut deliveries: HashMap<usize, usize> = HashMap::new();
    for _ in 0..20 {
        let message = receive(&mut consumer).await?;
        let number = number_of(&message)?;
        let count = deliveries.entry(number).or_default();
        *count += 1;
        if number % 2 == 1 || *count == 3 {
            acknowledge(&mut consumer, &message).await?;
        } else {
            consumer.nack(&message).await.map_err(because("nack"))?;
        }
    }
    for (number, count) in deliveries {
        need!(count == if number % 2 == 1 { 1 } else { 3 }, "{number} came {count} times");
    }
    nothing(&mut consumer, "after the last ack").await?;
    close(consumer).await
}

/// The redelivery count decides, which this client shows in no other way.
pub async fn dead_letter(world: &World) -> Outcome<()> {
    let topic = world.topic("dead-letter");
    let grave_topic = format!("{topic}-DLQ");
    let mut graves = world.subscribe(&grave_topic, "graves", SubType::Exclusive).await?;
    let mut producer = world.producer(&topic, ProducerOptions::default()).await?;
    send(&mut producer, 5).await?;
    let policy = DeadLetterPolicy { max_redeliver_count: 2, dead_letter_topic: grave_topic };
    let builder = world.consumer(&topic, "work", SubType::Shared).with_dead_letter_policy(policy);
    let mut consumer: Receiver = builder.build().await.map_err(because("subscribe"))?;
    for _ in 0..10 {
        let message = receive(&mut consumer).await?;
        number_of(&message)?;
        consumer.nack(&message).await.map_err(because("nack"))?;
    }
    nothing(&mut consumer, "after the last delivery").await?;
    let mut found = HashSet::new();
    for _ in 0..5 {
        let message = receive(&mut graves).await?;
        found.insert(number_of(&message)?);
        acknowledge(&mut graves, &message).await?;
    }
    need!(found.len() == 5, "dead letters: {found:?}");
    nothing(&mut graves, "after five dead letters").await?;
    close(consumer).await?;
    close(graves).await
}

pub async fn producer_name(world: &World) -> Outcome<()> {
    let topic = world.topic("producer-name");
    let mut consumer = world.subscribe(&topic, "names", SubType::Exclusive).await?;
    let named = || world.impatient.producer().with_topic(&topic).with_name("smith");
    let mut smith = named().build().await.map_err(because("create producer"))?;
    match named().build().await {
        Ok(_) => return Err("a second producer of the same name was admitted".into()),
        Err(error) => need!(format!("{error:?}").contains("ProducerBusy"), "a second producer of the same name: {error:?}"),
    }
    let mut names = HashSet::new();
    let mut one = world.producer(&topic, ProducerOptions::default()).await?;
    let mut two = world.producer(&topic, ProducerOptions::default()).await?;
    for producer in [&mut smith, &mut one, &mut two] {
        send(producer, 1).await?;
        let message = receive(&mut consumer).await?;
        names.insert(message.metadata().producer_name.clone());
    }
    need!(names.len() == 3 && names.contains("smith") && !names.contains(""), "the names are {names:?}");
    smith.close().await.map_err(because("close producer"))?;
    let mut again = named().build().await.map_err(because("create producer again"))?;
    send(&mut again, 5).await?;
    close(consumer).await
}

pub async fn exclusive_producer(world: &World) -> Outcome<()> {
    let topic = world.topic("exclusive-producer");
    let create = |mode: i32| {
        let options = ProducerOptions { access_mode: Some(mode), ..Default::default() };
        world.impatient.producer().with_topic(&topic).with_options(options).build()
    };
    let (shared_mode, exclusive, wait_for_exclusive) = (0, 1, 2);
    let mut owner = create(exclusive).await.map_err(because("create producer"))?;
    for (mode, refusal) in [(exclusive, "ProducerFenced"), (shared_mode, "ProducerBusy")] {
        match create(mode).await {
            Ok(_) => return Err(format!("a second producer with mode {mode} was admitted")),
            Err(error) => need!(format!("{error:?}").contains(refusal), "a second producer with mode {mode}: {error:?}"),
        }
    }
    let mut waiting = Box::pin(create(wait_for_exclusive));
    need!(timeout(SILENT, &mut waiting).await.is_err(), "the waiting producer did not wait");
    send(&mut owner, 5).await?;
    owner.close().await.map_err(because("close producer"))?;
    let granted = timeout(PATIENT, waiting).await.map_err(because("the waiting producer still waits"))?;
    send(&mut granted.map_err(because("the waiting producer"))?, 5).await.map(drop)
}

async fn schema_round_trip(world: &World, name: &str, schema: Schema, text: &str) -> Outcome<()> {
    let topic = world.topic(name);
    let options = ProducerOptions { schema: Some(schema.clone()), ..Default::default() };
    let mut producer = world.producer(&topic, options).await?;
    let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest).with_schema(schema.clone());
    let builder = world.consumer(&topic, "s", SubType::Exclusive).with_options(options);
    let mut consumer: Receiver = builder.build().await.map_err(because("subscribe"))?;
    let receipt = producer.send_non_blocking(text.to_owned()).await.map_err(because("send"))?;
    receipt.await.map_err(because("receipt"))?;
    let message = receive(&mut consumer).await?;
    need!(message.payload.data == text.as_bytes(), "the text differs");
    let version = message.metadata().schema_version.clone();
    need!(version.as_ref().is_some_and(|bytes| bytes.len() == 8), "the schema version is {version:?}");
    let stored = consumer.get_schema(&topic, version).await.map_err(because("get schema"))?;
    let stored = stored.ok_or("no schema is stored")?;
    need!(stored.r#type == schema.r#type && stored.schema_data == schema.schema_data, "the stored schema is {stored:?}");
    close(consumer).await
}

pub async fn schema_string(world: &World) -> Outcome<()> {
    let schema = Schema { name: "text".into(), r#type: schema::Type::String as i32, ..Default::default() };
    schema_round_trip(world, "schema-string", schema, "grün ✓").await
}

pub async fn schema_json(world: &World) -> Outcome<()> {
    let definition = r#"{"type":"record","name":"order","fields":[{"name":"count","type":"int"}]}"#;
    let schema = Schema {
        name: "order".into(),
        r#type: schema::Type::Json as i32,
        schema_data: definition.as_bytes().to_vec(),
        ..Default::default()
    };
    schema_round_trip(world, "schema-json", schema, r#"{"count":7}"#).await
}

pub async fn partitions(world: &World) -> Outcome<()> {
    const COUNT: usize = 2000;
    let topic = world.topic("partitions");
    world.ask(&format!("partitions {topic} 3")).await?;
    let options = ProducerOptions { routing_policy: Some(RoutingPolicy::RoundRobin), ..batches_of(10) };
    let mut producer = world.producer(&topic, options).await?;
    need!(producer.partitions().is_some_and(|names| names.len() == 3), "partitions: {:?}", producer.partitions());
    let mut consumer = world.subscribe(&topic, "all", SubType::Exclusive).await?;
    let mut waiting = Vec::new();
    for number in 0..COUNT {
        waiting.push(producer.send_non_blocking(message(number)).await.map_err(because("send"))?);
    }
    for receipt in waiting {
        receipt.await.map_err(because("receipt"))?;
    }
    let mut home: HashMap<String, (String, usize)> = HashMap::new();
    for _ in 0..COUNT {
        let message = receive(&mut consumer).await?;
        let number = number_of(&message)?;
        let key = message.key().unwrap_or_default();
        if let Some((partition, last)) = home.insert(key.clone(), (message.topic.clone(), number)) {
            need!(partition == message.topic, "key {key} is in two partitions");
            need!(number == last + 7, "key {key}: {number} came after {last}");
        }
        acknowledge(&mut consumer, &message).await?;
    }
    let used: HashSet<_> = home.values().map(|(partition, _)| partition).collect();
    need!(used.len() > 1, "all keys are in one partition");
    nothing(&mut consumer, "after all messages").await
}

pub async fn consumer_stats(world: &World) -> Outcome<()> {
    let topic = world.topic("consumer-stats");
    let mut producer = world.producer(&topic, ProducerOptions::default()).await?;
    send(&mut producer, 5).await?;
    let mut consumer = world.subscribe(&topic, "s", SubType::Shared).await?;
    for number in 0..5 {
        expect(&mut consumer, number, "before stats").await?;
    }
    let stats = consumer.get_stats().await.map_err(because("stats"))?;
    need!(stats.len() == 1 && stats[0].unacked_messages == Some(5), "the statistics are {stats:?}");
    need!(stats[0].r#type.as_deref() == Some("Shared"), "the statistics are {stats:?}");
    close(consumer).await
}

pub async fn terminated(world: &World) -> Outcome<()> {
    let topic = world.topic("terminated");
    let mut producer = world.producer(&topic, ProducerOptions::default()).await?;
    send(&mut producer, 10).await?;
    world.ask(&format!("terminate {topic}")).await?;
    let refused = match producer.send_non_blocking(message(10)).await {
        Ok(receipt) => timeout(PATIENT, receipt).await.map_err(because("send after the end"))?.map(drop),
        Err(error) => Err(error),
    };
    match refused {
        Ok(()) => return Err("a send after the end succeeded".into()),
        Err(error) => need!(format!("{error:?}").contains("TopicTerminated"), "send after the end: {error:?}"),
    }
    match world.producer(&topic, ProducerOptions::default()).await {
        Ok(_) => return Err("a producer after the end was admitted".into()),
        Err(why) => need!(why.contains("terminated"), "a producer after the end: {why}"),
    }
    let mut consumer = world.subscribe(&topic, "drain", SubType::Exclusive).await?;
    let before = world.ask(&format!("consumer {topic}")).await?;
    for number in 0..10 {
        let message = expect(&mut consumer, number, "after the end").await?;
        acknowledge(&mut consumer, &message).await?;
    }
    // Told of the end, this client ends the stream and keeps the connection.
    let end = timeout(PATIENT, consumer.next()).await.map_err(because("the end of the topic was never told"))?;
    need!(end.is_none(), "something came after the end");
    drop(consumer);
    let mut other = world.subscribe(&world.topic("nack"), "nack", SubType::Shared).await?;
    let after = world.ask(&format!("consumer {}", world.topic("nack"))).await?;
    let peer = |text: &str| text.split(' ').next().map(str::to_owned);
    need!(peer(&before) == peer(&after), "the connection changed: {before}, then {after}");
    nothing(&mut other, "on another topic").await?;
    close(other).await
}
