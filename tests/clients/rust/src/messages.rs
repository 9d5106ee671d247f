//! Numbered messages: made, sent, received and checked in all their parts.

use std::collections::HashMap;
use std::time::Duration;

use futures::{Stream, StreamExt};
use pulsar::consumer::Message;
use pulsar::producer::{self, ProducerOptions};
use pulsar::proto::MessageIdData;
use tokio::time::timeout;

use crate::need;
use crate::world::{because, Outcome, Receiver, Sender, PATIENT, SILENT};

const TEXT: &str = "grün ✓";

pub type Received = Message<Vec<u8>>;
/// Ledger and entry: this client's receipts do not say where in a batch a message stands.
pub type Place = (u64, u64);

pub fn place(id: &MessageIdData) -> Place {
    (id.ledger_id, id.entry_id)
}

pub fn payload(number: usize) -> Vec<u8> {
    format!("message {number:06} {}", "braid ".repeat(number % 40)).into_bytes()
}

pub fn key_of(number: usize) -> String {
    format!("key-{}", number % 7)
}

pub fn message(number: usize) -> producer::Message {
    producer::Message {
        payload: payload(number),
        partition_key: Some(key_of(number)),
        properties: HashMap::from([("number".into(), number.to_string()), ("text".into(), TEXT.into())]),
        event_time: Some(1_000_000 + number as u64),
        ..Default::default()
    }
}

pub fn batches_of(size: u32) -> ProducerOptions {
    ProducerOptions { batch_size: Some(size), batch_timeout: Some(Duration::from_millis(20)), ..Default::default() }
}

/// Publish without waiting in between; returns where each message stands.
pub async fn send(producer: &mut Sender, total: usize) -> Outcome<Vec<Place>> {
    let mut waiting = Vec::new();
    for number in 0..total {
        waiting.push(producer.send_non_blocking(message(number)).await.map_err(because("send"))?);
    }
    let mut places = Vec::new();
    for receipt in waiting {
        let receipt = timeout(PATIENT, receipt).await.map_err(because("receipt"))?.map_err(because("receipt"))?;
        places.push(place(&receipt.message_id.ok_or("a receipt without an id")?));
    }
    need!(places.windows(2).all(|pair| pair[0] <= pair[1]), "the receipts are out of order");
    Ok(places)
}

/// Check all parts of a message; returns its number.
pub fn number_of(message: &Received) -> Outcome<usize> {
    let metadata = message.metadata();
    let property = |name: &str| metadata.properties.iter().find(|pair| pair.key == name).map(|pair| pair.value.as_str());
    let number: usize = property("number").ok_or("no property number")?.parse().map_err(because("property number"))?;
    need!(message.payload.data == payload(number), "the payload of {number} differs");
    need!(message.key().as_deref() == Some(&key_of(number)), "the key of {number} is {:?}", message.key());
    need!(property("text") == Some(TEXT), "the properties of {number} are {:?}", metadata.properties);
    need!(metadata.event_time == Some(1_000_000 + number as u64), "the event time of {number} is {:?}", metadata.event_time);
    Ok(number)
}

pub async fn receive<S>(source: &mut S) -> Outcome<Received>
where
    S: Stream<Item = Result<Received, pulsar::Error>> + Unpin,
{
    match timeout(PATIENT, source.next()).await {
        Ok(Some(message)) => message.map_err(because("receive")),
        Ok(None) => Err("the consumer ended".into()),
        Err(_) => Err("no message came".into()),
    }
}

/// Receive the message with this number.
pub async fn expect(consumer: &mut Receiver, number: usize, when: &str) -> Outcome<Received> {
    let message = receive(consumer).await?;
    let got = number_of(&message)?;
    need!(got == number, "{when}: {got} came when {number} was due");
    Ok(message)
}

/// No further message comes.
pub async fn nothing(consumer: &mut Receiver, when: &str) -> Outcome<()> {
    match timeout(SILENT, consumer.next()).await {
        Err(_) => Ok(()),
        Ok(Some(Ok(message))) => Err(format!("{when}: a message came: {:?}", message.message_id())),
        Ok(Some(Err(error))) => Err(format!("{when}: {error}")),
        Ok(None) => Err(format!("{when}: the consumer ended")),
    }
}

/// Whether a message is the last of its batch, or in none.
pub fn ends_batch(message: &Received) -> bool {
    message.message_id().batch_index.is_none_or(|index| index + 1 == message.message_id.batch_size.unwrap_or(1))
}

/// Acknowledge and let the client's own task send it: it has no way to say that it did.
pub async fn acknowledge(consumer: &mut Receiver, message: &Received) -> Outcome<()> {
    consumer.ack(message).await.map_err(because("ack"))
}

/// Close a consumer once what it acknowledged is on its way; a request after the acks proves that.
pub async fn close(mut consumer: Receiver) -> Outcome<()> {
    consumer.get_last_message_id().await.map_err(because("last message id"))?;
    consumer.close().await.map_err(because("close"))
}
