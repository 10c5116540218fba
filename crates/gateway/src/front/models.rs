//! `GET /v1/models`: what the upstreams serve, as one list.

use std::sync::Arc;

use http::{Response, StatusCode};
use tidegate_wire::{ModelEntry, anthropic_models_body, models_body};

use super::json;
use crate::call::body::OutBody;
use crate::call::handover::Gone;
use crate::call::{Caller, Generation, Rejection, Worker, listing};
use crate::upstream::Upstream;

/// Asks all upstreams at once and merges what they say with what the configuration says. An upstream that does not answer contributes the
/// names that are configured for it; only if there is nothing at all to say is that an error.
pub async fn list(
    caller: &Arc<Caller>,
    worker: &Arc<Worker>,
    generation: &Arc<Generation>,
    anthropic: bool,
    gone: &Arc<Gone>,
) -> Result<Response<OutBody>, Rejection> {
    let upstreams = generation.routes.upstreams();
    let mut tasks = Vec::with_capacity(upstreams.len());
    for upstream in upstreams {
        let (caller, worker, generation) = (
            Arc::clone(caller),
            Arc::clone(worker),
            Arc::clone(generation),
        );
        let (upstream, gone) = (Arc::clone(upstream), Arc::clone(gone));
        tasks.push(worker.tasks.clone().spawn(async move {
            listing::fetch(&caller, &worker, &generation, &upstream, gone).await
        }));
    }
    let mut entries: Vec<ModelEntry> = Vec::new();
    let mut failure = None;
    for (task, upstream) in tasks.into_iter().zip(upstreams) {
        match task.await.unwrap_or(Err(Rejection::Internal)) {
            Ok(served) => merge(&mut entries, upstream, served),
            Err(Rejection::Gone) => return Err(Rejection::Gone),
            Err(rejection) => {
                merge(&mut entries, upstream, Vec::new());
                failure = Some(rejection);
            }
        }
    }
    if let (true, Some(rejection)) = (entries.is_empty(), failure) {
        return Err(rejection);
    }
    let body = if anthropic {
        anthropic_models_body(entries.iter())
    } else {
        models_body(entries.iter())
    };
    Ok(json(StatusCode::OK, body))
}

/// The names that clients can really use: those served that are routed here, and the configured aliases.
fn merge(entries: &mut Vec<ModelEntry>, upstream: &Upstream, served: Vec<ModelEntry>) {
    let settings = &upstream.settings;
    let mut found: Vec<ModelEntry> = Vec::new();
    for (alias, model) in &settings.aliases {
        let entry = served.iter().find(|e| e.id == *model);
        found.push(entry.map_or_else(
            || ModelEntry::named(alias, &upstream.name),
            |e| e.renamed(alias),
        ));
    }
    for name in settings.models.iter().filter(|name| !name.ends_with('*')) {
        let entry = served.iter().find(|e| e.id == *name);
        found.push(
            entry
                .cloned()
                .unwrap_or_else(|| ModelEntry::named(name, &upstream.name)),
        );
    }
    let routed = |id: &str| {
        settings.models.is_empty()
            || settings.models.iter().any(|m| {
                m.strip_suffix('*')
                    .is_some_and(|prefix| id.starts_with(prefix))
            })
    };
    found.extend(served.into_iter().filter(|e| routed(&e.id)));
    for entry in found {
        if !entries.iter().any(|known| known.id == entry.id) {
            entries.push(entry);
        }
    }
}
