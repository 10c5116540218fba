//! The upstreams and their endpoints: who has slots, who waits, and which endpoint cannot be connected to, since when and why.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::seconds;
use crate::call::Generation;
use crate::upstream::connect::{self, TcpOptions};
use crate::upstream::{EndpointState, Upstream};

/// Longest wait for an endpoint to take a connection. Whoever asks has a limit of its own, most often of seconds.
const CONNECT: Duration = Duration::from_secs(1);

/// In the order of the configuration.
pub(super) fn rows(generation: &Generation) -> Value {
    let upstreams = generation.routes.upstreams().iter();
    upstreams.map(|upstream| row(upstream)).collect()
}

fn row(upstream: &Upstream) -> Value {
    let now = upstream.limiter.snapshot();
    let endpoints = upstream.endpoints.iter();
    json!({
        "name": &*upstream.name,
        "slots": now.hard_limit,
        "running": now.running,
        "abandoned": now.abandoned,
        "lingering": now.lingering,
        "queue": now.queue_limit,
        "queued": now.queued,
        "oldest_queued_seconds": now.oldest_queued.map(seconds),
        "oldest_lingering_seconds": now.oldest_lingering.map(seconds),
        "endpoints": endpoints.map(|endpoint| endpoint_row(endpoint)).collect::<Vec<_>>(),
    })
}

fn endpoint_row(endpoint: &EndpointState) -> Value {
    let trouble = endpoint.trouble();
    let out = trouble.as_ref().and_then(|trouble| trouble.out);
    json!({
        "endpoint": &*endpoint.authority,
        "connections": endpoint.open.get(),
        "left_out_seconds": out.map(|since| seconds(since.elapsed())),
        "last_error": trouble.map(|trouble| json!({
            "reason": trouble.reason,
            "error": trouble.why,
            "seconds": seconds(trouble.last.elapsed()),
        })),
    })
}

/// Opens a connection to each endpoint, all at a time, and closes it. Done with the first that is taken.
///
/// # Errors
///
/// None was: a line for each endpoint.
///
/// # Cancel safety
///
/// May be dropped: so are the attempts.
pub(super) async fn reach(generation: Arc<Generation>, tcp: TcpOptions) -> Result<(), String> {
    let mut attempts = JoinSet::new();
    for upstream in generation.routes.upstreams() {
        for endpoint in &upstream.endpoints {
            let (name, endpoint) = (Arc::clone(&upstream.name), Arc::clone(endpoint));
            attempts.spawn(async move {
                let why = match tokio::time::timeout(CONNECT, connect::tcp(&endpoint, tcp)).await {
                    Ok(Ok(_taken)) => return Ok(()),
                    Ok(Err(error)) => error.to_string(),
                    Err(_late) => format!("no answer within {CONNECT:?}"),
                };
                Err(format!("{name} {}: {why}\n", endpoint.authority))
            });
        }
    }
    let mut lines = Vec::new();
    while let Some(attempt) = attempts.join_next().await {
        match attempt {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(line)) => lines.push(line),
            Err(_ended) => {}
        }
    }
    lines.sort_unstable();
    Err(lines.concat())
}
