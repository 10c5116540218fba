//! Asking an upstream what it serves. No slot: it is no work for a model, and must answer while all slots are taken.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::uri::PathAndQuery;
use http::{Method, StatusCode};
use tidegate_wire::{ModelEntry, parse_models};
use tokio::time::Instant;

use super::alarm::Alarm;
use super::attempt;
use super::attendance::Attendance;
use super::deadline::{Patience, Tier};
use super::downstream::Client;
use super::outcome::Rejection;
use super::settle::Record;
use super::upload::Upload;
use super::{Generation, Prepared, Toward, Worker, headers};
use crate::fields::Fields;
use crate::upstream::Upstream;

/// Longest that a list may take: a person waits for it.
const LIST_TIME: Duration = Duration::from_secs(5);
/// Lists that are fetched at once, over all workers.
pub const LISTS_AT_ONCE: usize = 4;
/// Longest list that is read.
const LIST_BYTES: usize = 4 * 1024 * 1024;

/// # Errors
///
/// The upstream cannot be reached or does not answer with a list.
pub async fn fetch(
    worker: &Arc<Worker>,
    generation: &Arc<Generation>,
    upstream: &Arc<Upstream>,
    client: &Arc<Client>,
) -> Result<Vec<ModelEntry>, Rejection> {
    let caller = &worker.caller;
    let alarm = Alarm::default();
    let patience = Patience::new((client, &alarm), &caller.cut, None);
    let turn = caller.listings.acquire();
    let _turn = patience.within(Tier::Pool, LIST_TIME, turn).await?;
    let body = patience
        .within(
            Tier::ResponseHead,
            LIST_TIME,
            read(Toward { worker, upstream }, generation, &patience),
        )
        .await??;
    parse_models(&body).map_err(|_| Rejection::UnexpectedContent {
        what: "something else than a list of models",
    })
}

async fn read(
    to: Toward<'_>,
    generation: &Arc<Generation>,
    patience: &Patience<'_>,
) -> Result<Bytes, Rejection> {
    let Toward { worker, upstream } = to;
    let path_and_query = PathAndQuery::from_static("/v1/models");
    let mut prepared = Prepared {
        method: &Method::GET,
        path_and_query: &path_and_query,
        fields: headers::to_upstream(Fields::default(), &generation.config, &upstream.settings),
        upload: Upload::none(),
    };
    let mut record = Record::unwritten(&worker.caller, generation);
    let mut attendance = Attendance::without_slot(upstream);
    let mut exchange =
        attempt::until_head(to, patience, &mut prepared, &mut attendance, &mut record).await?;
    if exchange.head.status != StatusCode::OK {
        return Err(Rejection::UnexpectedContent {
            what: "no list of models",
        });
    }
    let mut read = BytesMut::new();
    while let Some(data) = exchange.body.data().await {
        let data = data.map_err(|_| Rejection::Truncated)?;
        if read.len() + data.len() > LIST_BYTES {
            return Err(Rejection::UnexpectedContent {
                what: "too long a list of models",
            });
        }
        read.extend_from_slice(&data);
    }
    if let Some(conn) = exchange.body.into_idle() {
        worker.pool.put(conn, Instant::now(), exchange.keep_idle);
    }
    Ok(read.freeze())
}
