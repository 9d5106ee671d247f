//! Publish without pause while the broker is killed and started again: nothing acknowledged is lost or reordered.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;
use std::time::Duration;

use pulsar::consumer::InitialPosition;
use pulsar::producer::ProducerOptions;
use pulsar::reader::Reader;
use pulsar::{ConsumerOptions, SubType, TokioExecutor};
use tokio::task::LocalSet;
use tokio::time::{sleep, Instant};

use crate::messages::{acknowledge, batches_of, close, ends_batch, message, number_of, place, receive, Place};
use crate::need;
use crate::world::{because, Outcome, Sender, World};

const KILLS: usize = 2;
const MORE: usize = 1000;
const MAX_PENDING: usize = 300;

/// What the sending task and the check share; both run on one thread.
#[derive(Default)]
struct Progress {
    sent: Cell<usize>,
    acknowledged: Cell<usize>,
    receipts: RefCell<Vec<Option<Place>>>,
    failure: RefCell<Option<String>>,
    is_stopped: Cell<bool>,
}

pub async fn run(world: &World, name: &str, is_batched: bool) -> Outcome<()> {
    let topic = world.topic(name);
    let options = if is_batched { batches_of(20) } else { ProducerOptions::default() };
    let producer = world.producer(&topic, options).await?;
    let mut live = world.subscribe(&topic, "live", SubType::Exclusive).await?;
    let progress = Rc::new(Progress::default());
    let in_flight = LocalSet::new()
        .run_until(async {
            let sending = tokio::task::spawn_local(publish(producer, progress.clone()));
            let mut in_flight = 0;
            for _ in 0..KILLS {
                wait_for_more(&progress).await?;
                in_flight += progress.sent.get() - progress.acknowledged.get();
                world.ask("restart").await?;
            }
            wait_for_more(&progress).await?;
            progress.is_stopped.set(true);
            sending.await.map_err(because("the sending task"))?;
            Ok::<usize, String>(in_flight)
        })
        .await?;
    if let Some(failure) = progress.failure.borrow().as_ref() {
        return Err(format!("a send: {failure}"));
    }
    need!(in_flight > 0, "nothing was in flight at the kills");
    let receipts: Vec<Place> = progress.receipts.borrow().iter().flatten().copied().collect();
    let sent = progress.sent.get();
    need!(receipts.len() == sent, "{} of {sent} sends were acknowledged", receipts.len());
    need!(receipts.windows(2).all(|pair| pair[0] <= pair[1]), "the receipts are out of order");
    check_log(world, &topic, &receipts).await?;
    let mut due = 0;
    while due < sent {
        let message = receive(&mut live).await?;
        let number = number_of(&message)?;
        need!(number <= due, "the live consumer got {number} when {due} was due");
        due += usize::from(number == due);
        acknowledge(&mut live, &message).await?;
    }
    close(live).await
}

async fn publish(mut producer: Sender, progress: Rc<Progress>) {
    while !progress.is_stopped.get() {
        let number = progress.sent.get();
        match producer.send_non_blocking(message(number)).await {
            Ok(receipt) => {
                progress.sent.set(number + 1);
                progress.receipts.borrow_mut().push(None);
                let progress = progress.clone();
                tokio::task::spawn_local(async move {
                    match receipt.await {
                        Ok(receipt) => {
                            progress.receipts.borrow_mut()[number] = receipt.message_id.as_ref().map(place);
                            progress.acknowledged.set(progress.acknowledged.get() + 1);
                        }
                        Err(error) => *progress.failure.borrow_mut() = Some(format!("{number}: {error}")),
                    }
                });
            }
            Err(error) => {
                *progress.failure.borrow_mut() = Some(format!("{number}: {error}"));
                break;
            }
        }
        while number - progress.acknowledged.get() >= MAX_PENDING && progress.failure.borrow().is_none() {
            sleep(Duration::from_millis(1)).await;
        }
        if number % 20 == 0 {
            sleep(Duration::from_millis(1)).await;
        }
    }
    while progress.acknowledged.get() < progress.sent.get() && progress.failure.borrow().is_none() {
        sleep(Duration::from_millis(5)).await;
    }
    let _ = producer.close().await;
}

async fn wait_for_more(progress: &Progress) -> Outcome<()> {
    let goal = progress.acknowledged.get() + MORE;
    let deadline = Instant::now() + Duration::from_secs(60);
    while progress.acknowledged.get() < goal {
        if let Some(failure) = progress.failure.borrow().as_ref() {
            return Err(format!("a send: {failure}"));
        }
        need!(Instant::now() < deadline, "no more receipts: {} of {goal}", progress.acknowledged.get());
        sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Every message stands in the log in the order sent, and where its receipt said.
async fn check_log(world: &World, topic: &str, receipts: &[Place]) -> Outcome<()> {
    let mut reader: Reader<Vec<u8>, TokioExecutor> = world
        .client
        .reader()
        .with_topic(topic)
        .with_options(
            ConsumerOptions::default()
                .with_initial_position(InitialPosition::Earliest)
                .starting_on_message(crate::checks::earliest()),
        )
        .into_reader()
        .await
        .map_err(because("create reader"))?;
    let last = place(&reader.get_last_message_id().await.map_err(because("last message id"))?);
    let mut places: Vec<HashSet<Place>> = Vec::new();
    loop {
        let message = receive(&mut reader).await?;
        let number = number_of(&message)?;
        need!(number <= places.len(), "the log has {number} where {} was due", places.len());
        if number == places.len() {
            places.push(HashSet::new());
        }
        let at = place(message.message_id());
        places[number].insert(at);
        if at == last && ends_batch(&message) {
            break;
        }
    }
    need!(places.len() == receipts.len(), "the log ends at {} of {}", places.len(), receipts.len());
    for (number, receipt) in receipts.iter().enumerate() {
        need!(places[number].contains(receipt), "{number} is not at {receipt:?}, where its receipt said");
    }
    Ok(())
}
