//! Control paths, for judges in another process, and the status pages of the
//! servers that are imitated.

use std::sync::{Arc, PoisonError};

use super::Shared;
use crate::http1::Head;
use crate::script::{Pages, Script};
use crate::truth::{PeerEnd, Truth};

/// Whether the request is none for the model.
pub(super) fn is_for(shared: &Shared, head: &Head) -> bool {
    let (method, path, _) = head.words().unwrap_or_default();
    let page = || match shared.script().pages {
        Pages::None => false,
        Pages::Vllm => matches!(path, "/metrics" | "/health"),
        Pages::LlamaCpp => matches!(path, "/metrics" | "/health" | "/slots"),
    };
    path.starts_with("/__rig/") || (method == "GET" && page())
}

/// Answers `GET /__rig/truth`, `GET /__rig/calls`, `POST /__rig/reset`,
/// `GET` and `PUT /__rig/script`, and the pages that [`Script::pages`] names.
pub(super) fn answer(shared: &Shared, head: &Head, body: &[u8]) -> Vec<u8> {
    let (method, path, _) = head.words().unwrap_or_default();
    let pages = shared.script().pages;
    let (status, kind, text) = match (method, path, pages) {
        ("GET", "/health", Pages::Vllm) => (200, "text/plain", String::new()),
        ("GET", "/health", _) => (200, JSON, "{\"status\":\"ok\"}".to_owned()),
        ("GET", "/metrics", Pages::Vllm) => (200, PROMETHEUS, vllm(&shared.ledger.truth())),
        ("GET", "/metrics", _) => (200, PROMETHEUS, llama_cpp(&shared.ledger.truth())),
        ("GET", "/slots", _) => (200, JSON, slots(shared)),
        _ => control(shared, method, path, body),
    };
    format!(
        "HTTP/1.1 {status} {}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n{text}",
        crate::http1::reason(status),
        text.len()
    )
    .into_bytes()
}

const JSON: &str = "application/json";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

fn control(shared: &Shared, method: &str, path: &str, body: &[u8]) -> (u16, &'static str, String) {
    let (status, text) = match (method, path) {
        ("GET", "/__rig/truth") => (200, to_json(&shared.ledger.truth())),
        ("GET", "/__rig/calls") => (200, to_json(&shared.ledger.calls())),
        ("GET", "/__rig/script") => (200, to_json(&*shared.script())),
        ("POST", "/__rig/reset") => {
            shared.ledger.reset();
            (200, "{}".to_owned())
        }
        ("POST", "/__rig/cut") => {
            // It takes the asker's connection too.
            shared.cut.send_replace(PeerEnd::Rst);
            (200, "{}".to_owned())
        }
        ("PUT", "/__rig/script") => match serde_json::from_slice::<Script>(body) {
            Ok(script) => {
                shared.set_default(script);
                (200, "{}".to_owned())
            }
            Err(e) => (
                400,
                serde_json::json!({ "error": e.to_string() }).to_string(),
            ),
        },
        _ => (404, "{\"error\":\"no such control path\"}".to_owned()),
    };
    (status, JSON, text)
}

fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
}

/// Calls that the server admits to be working on, and those that wait.
fn shown(truth: &Truth) -> (u64, u64) {
    let busy = truth.running - truth.waiting;
    (busy.saturating_sub(truth.hidden), truth.waiting)
}

/// vLLM 0.32's names. Like vLLM it never counts an aborted call as `abort`.
fn vllm(truth: &Truth) -> String {
    let (running, waiting) = shown(truth);
    let label = "engine=\"0\",model_name=\"tiny\"";
    let gauge = |name: &str, value: u64| {
        format!("# TYPE vllm:{name} gauge\nvllm:{name}{{{label}}} {value}.0\n")
    };
    let counter = |name: &str, value: u64| {
        format!("# TYPE vllm:{name} counter\nvllm:{name}_total{{{label}}} {value}.0\n")
    };
    let success = |reason: &str, n: u64| {
        format!(
            "vllm:request_success_total{{engine=\"0\",finished_reason=\"{reason}\",model_name=\"tiny\"}} {n}.0\n"
        )
    };
    [
        gauge("num_requests_running", running),
        gauge("num_requests_waiting", waiting),
        gauge("kv_cache_usage_perc", 0),
        counter("prompt_tokens", truth.prompt_tokens),
        counter("generation_tokens", truth.tokens),
        "# TYPE vllm:request_success counter\n".to_owned(),
        success("stop", truth.ended_complete),
        success("abort", 0),
    ]
    .concat()
}

/// llama.cpp's names.
fn llama_cpp(truth: &Truth) -> String {
    let (running, waiting) = shown(truth);
    let one = |name: &str, kind: &str, value: u64| {
        format!("# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n")
    };
    [
        one("prompt_tokens_total", "counter", truth.prompt_tokens),
        one("tokens_predicted_total", "counter", truth.tokens),
        one("requests_processing", "gauge", running),
        one("requests_deferred", "gauge", waiting),
    ]
    .concat()
}

fn slots(shared: &Shared) -> String {
    let (running, _) = shown(&shared.ledger.truth());
    let many = shared.script().slots.map_or(running.max(1), u64::from);
    let slot = |id: u64| {
        serde_json::json!({
            "id": id, "n_ctx": 4096, "speculative": false, "is_processing": id < running,
        })
    };
    serde_json::Value::from((0..many).map(slot).collect::<Vec<_>>()).to_string()
}

impl Shared {
    /// Sets the default script, and forgets those made from the one before.
    pub(super) fn set_default(&self, script: Script) {
        self.script.send_replace(Arc::new(script));
        let known = self.known.lock();
        known.unwrap_or_else(PoisonError::into_inner).clear();
    }
}
