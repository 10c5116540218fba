//! `GET /v1/models`: what the upstreams serve, as one list; `GET /v1/models/{id}`: one of it.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use http::StatusCode;
use tidegate_wire::{
    ModelEntry, anthropic_model_body, anthropic_models_body, model_body, models_body,
};

use crate::call::answer::Answer;
use crate::call::downstream::Client;
use crate::call::{Generation, Rejection, Worker, listing};
use crate::upstream::Upstream;
use crate::upstream::route::Target;

/// Asks all upstreams at once and merges what they say with what the configuration says. An upstream that does not answer contributes the
/// names that are configured for it; only if there is nothing at all to say is that an error.
pub async fn list(
    worker: &Arc<Worker>,
    generation: &Arc<Generation>,
    anthropic: bool,
    client: &Arc<Client>,
) -> Result<Answer, Rejection> {
    let upstreams = generation.routes.upstreams();
    // All in this task: it is the one that is told when the client leaves.
    let asked = upstreams
        .iter()
        .map(|upstream| listing::fetch(worker, generation, upstream, client));
    let answers = all(asked).await;
    let mut entries: Vec<ModelEntry> = Vec::new();
    let mut failure = None;
    for (answer, upstream) in answers.into_iter().zip(upstreams) {
        match answer {
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
    Ok(Answer::json(StatusCode::OK, body))
}

/// Asks the upstream that calls with this name go to. What the configuration names is there also while the upstream does not answer.
pub async fn one(
    worker: &Arc<Worker>,
    generation: &Arc<Generation>,
    id: &str,
    anthropic: bool,
    client: &Arc<Client>,
) -> Result<Answer, Rejection> {
    let unknown = || Rejection::UnknownModel(id.chars().take(128).collect());
    let Target { upstream, model } = generation.routes.find(id).ok_or_else(unknown)?;
    let settings = &upstream.settings;
    let named = model.is_some() || settings.models.iter().any(|name| name == id);
    let sent = model.unwrap_or(id);
    let entry = match listing::fetch(worker, generation, upstream, client).await {
        Ok(served) => served.into_iter().find(|entry| entry.id == sent),
        Err(Rejection::Gone) => return Err(Rejection::Gone),
        Err(_) if named => None,
        Err(rejection) => return Err(rejection),
    };
    let entry = match entry {
        Some(entry) if model.is_some() => entry.renamed(id),
        Some(entry) => entry,
        None if named => ModelEntry::named(id, &upstream.name),
        None => return Err(unknown()),
    };
    let body = if anthropic {
        anthropic_model_body(&entry)
    } else {
        model_body(&entry)
    };
    Ok(Answer::json(StatusCode::OK, body))
}

/// Waits for all of them at once.
async fn all<T>(work: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut waiting: Vec<_> = work.map(|one| (Box::pin(one), None)).collect();
    poll_fn(|cx| {
        let mut pending = false;
        for (one, done) in &mut waiting {
            if done.is_none() {
                match one.as_mut().poll(cx) {
                    Poll::Ready(result) => *done = Some(result),
                    Poll::Pending => pending = true,
                }
            }
        }
        if pending {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    })
    .await;
    waiting.into_iter().filter_map(|(_, done)| done).collect()
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
