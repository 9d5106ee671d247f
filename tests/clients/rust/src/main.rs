//! The Rust client against a broker: runs every check and reports one line for each.
//!
//! Arguments: the service URL, a prefix for topic names and, optionally, the beginning of the names of the checks to run.
//! The words written to standard output are explained in run.py, which starts this program and answers its requests.

mod checks;
mod messages;
mod restart;
mod round_trip;
mod world;

use std::time::Instant;

use pulsar::compression::Compression;

use crate::world::{Outcome, World};

/// The client's log goes to standard error, which run.py keeps in a file.
struct Log;

impl log::Log for Log {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::Level::Info
    }

    fn log(&self, record: &log::Record) {
        if self.enabled(record.metadata()) {
            eprintln!("{} {} {}", record.level(), record.target(), record.args());
        }
    }

    fn flush(&self) {}
}

const CHECKS: [&str; 23] = [
    "plain-none",
    "batched-none",
    "plain-lz4",
    "batched-lz4",
    "plain-zlib",
    "batched-zlib",
    "plain-zstd",
    "batched-zstd",
    "plain-snappy",
    "batched-snappy",
    "reader",
    "seek",
    "nack",
    "dead-letter",
    "producer-name",
    "exclusive-producer",
    "schema-string",
    "schema-json",
    "partitions",
    "consumer-stats",
    "terminated",
    "restart-plain",
    "restart-batched",
];

/// What the other clients offer and this one does not.
const NOT_OFFERED: [(&str, &str); 3] = [
    ("chunks", "the client does not split messages"),
    ("batch-index-ack", "the client acknowledges a batch whole"),
    ("ack-receipt", "the client asks for no receipts of acknowledgments"),
];

fn codec(name: &str) -> Compression {
    match name {
        "lz4" => Compression::Lz4(Default::default()),
        "zlib" => Compression::Zlib(Default::default()),
        "zstd" => Compression::Zstd(Default::default()),
        "snappy" => Compression::Snappy(Default::default()),
        _ => Compression::None,
    }
}

async fn run(world: &World, name: &str) -> Outcome<()> {
    match name {
        "reader" => checks::reader(world).await,
        "seek" => checks::seek(world).await,
        "nack" => checks::nack(world).await,
        "dead-letter" => checks::dead_letter(world).await,
        "producer-name" => checks::producer_name(world).await,
        "exclusive-producer" => checks::exclusive_producer(world).await,
        "schema-string" => checks::schema_string(world).await,
        "schema-json" => checks::schema_json(world).await,
        "partitions" => checks::partitions(world).await,
        "consumer-stats" => checks::consumer_stats(world).await,
        "terminated" => checks::terminated(world).await,
        "restart-plain" => restart::run(world, name, false).await,
        "restart-batched" => restart::run(world, name, true).await,
        _ => {
            let (kind, codec_name) = name.split_once('-').unwrap_or((name, ""));
            round_trip::run(world, name, codec(codec_name), kind == "batched").await
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let _ = log::set_logger(&Log);
    log::set_max_level(log::LevelFilter::Info);
    let arguments: Vec<String> = std::env::args().collect();
    let wanted = arguments.get(3).cloned().unwrap_or_default();
    let world = World::connect(&arguments[1], &arguments[2]).await;
    let mut is_good = true;
    for name in CHECKS.iter().filter(|name| name.starts_with(&wanted)) {
        let began = Instant::now();
        match run(&world, name).await {
            Ok(()) => println!("pass {name} ({:.1} s)", began.elapsed().as_secs_f64()),
            Err(why) => {
                is_good = false;
                println!("fail {name} {}", why.replace('\n', " "));
            }
        }
    }
    for (name, why) in NOT_OFFERED.iter().filter(|(name, _)| name.starts_with(&wanted)) {
        println!("skip {name} {why}");
    }
    std::process::exit(i32::from(!is_good));
}
