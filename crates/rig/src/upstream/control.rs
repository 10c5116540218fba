//! Control paths, for judges in another process.

use super::Shared;
use crate::http1::Head;
use crate::script::Script;
use std::sync::Arc;

/// Answers `GET /__rig/truth`, `GET /__rig/calls`, `POST /__rig/reset` and
/// `PUT /__rig/script`.
pub(super) fn answer(shared: &Shared, head: &Head, body: &[u8]) -> Vec<u8> {
    let (method, path, _) = head.words().unwrap_or_default();
    let (status, json) = match (method, path) {
        ("GET", "/__rig/truth") => (200, to_json(&shared.ledger.truth())),
        ("GET", "/__rig/calls") => (200, to_json(&shared.ledger.calls())),
        ("POST", "/__rig/reset") => {
            shared.ledger.reset();
            (200, "{}".to_owned())
        }
        ("PUT", "/__rig/script") => match serde_json::from_slice::<Script>(body) {
            Ok(script) => {
                shared.script.send_replace(Arc::new(script));
                (200, "{}".to_owned())
            }
            Err(e) => (
                400,
                serde_json::json!({ "error": e.to_string() }).to_string(),
            ),
        },
        _ => (404, "{\"error\":\"no such control path\"}".to_owned()),
    };
    format!(
        "HTTP/1.1 {status} {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{json}",
        crate::http1::reason(status),
        json.len()
    )
    .into_bytes()
}

fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
}
