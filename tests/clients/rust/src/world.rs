//! What a check works with: the client, names for topics, and the driver that can do what a client cannot.

use std::time::Duration;

use pulsar::consumer::InitialPosition;
use pulsar::producer::ProducerOptions;
use pulsar::{Consumer, ConsumerBuilder, ConsumerOptions, OperationRetryOptions, Producer, Pulsar, SubType, TokioExecutor};

/// The result of a check; the error says which promise does not hold.
pub type Outcome<T> = Result<T, String>;
pub type Receiver = Consumer<Vec<u8>, TokioExecutor>;
pub type Sender = Producer<TokioExecutor>;

pub const PATIENT: Duration = Duration::from_secs(20);
pub const SILENT: Duration = Duration::from_millis(700);

/// Ends the check with a reason unless the condition holds.
#[macro_export]
macro_rules! need {
    ($holds:expr, $($why:tt)*) => {
        if !$holds {
            return Err(format!($($why)*));
        }
    };
}

pub fn because<E: std::fmt::Display>(what: &str) -> impl FnOnce(E) -> String + '_ {
    move |error| format!("{what}: {error}")
}

pub struct World {
    pub client: Pulsar<TokioExecutor>,
    /// Gives up at once when the broker refuses; the ordinary client tries again for ever.
    pub impatient: Pulsar<TokioExecutor>,
    prefix: String,
}

async fn client(url: &str, max_retries: Option<u32>) -> Pulsar<TokioExecutor> {
    Pulsar::builder(url, TokioExecutor)
        .with_operation_retry_options(OperationRetryOptions {
            operation_timeout: Duration::from_secs(60),
            retry_delay: Duration::from_millis(200),
            max_retries,
        })
        .build()
        .await
        .expect("the broker can be reached")
}

impl World {
    pub async fn connect(url: &str, prefix: &str) -> World {
        World { client: client(url, None).await, impatient: client(url, Some(0)).await, prefix: prefix.to_owned() }
    }

    pub fn topic(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    /// Have the driver do something; returns what it answers. Other tasks go on meanwhile.
    pub async fn ask(&self, request: &str) -> Outcome<String> {
        println!("do {request}");
        let line = tokio::task::spawn_blocking(|| {
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).map(|_| line)
        })
        .await
        .map_err(because("the driver's answer"))?
        .map_err(because("the driver's answer"))?;
        match line.trim().strip_prefix("done") {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => Err(format!("{request}: {line}")),
        }
    }

    pub async fn producer(&self, topic: &str, options: ProducerOptions) -> Outcome<Sender> {
        let options = ProducerOptions { block_queue_if_full: true, ..options };
        self.client.producer().with_topic(topic).with_options(options).build().await.map_err(because("create producer"))
    }

    pub fn consumer(&self, topic: &str, subscription: &str, kind: SubType) -> ConsumerBuilder<TokioExecutor> {
        self.client
            .consumer()
            .with_topic(topic)
            .with_subscription(subscription)
            .with_subscription_type(kind)
            .with_options(ConsumerOptions::default().with_initial_position(InitialPosition::Earliest))
    }

    pub async fn subscribe(&self, topic: &str, subscription: &str, kind: SubType) -> Outcome<Receiver> {
        self.consumer(topic, subscription, kind).build().await.map_err(because("subscribe"))
    }
}
