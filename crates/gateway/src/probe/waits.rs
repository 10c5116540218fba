//! The waits that go on beside the steps.

use std::time::Duration;

use http::Method;

use super::ask::{PATIENCE, Server};
use super::report::{Finding, Verdict};

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// How long an idle connection is kept after an answer.
pub(super) async fn idle_limit(server: Server, limit: Duration) -> Finding {
    let found = |verdict, answer, time: Option<Duration>| Finding {
        id: "idle",
        question: "An idle connection",
        verdict,
        answer,
        millis: time.map(millis),
        tokens: None,
    };
    let unknown = |why: String| found(Verdict::Unknown, why, None);
    let mut exchange = match server.open().await {
        Ok(exchange) => exchange,
        Err(trouble) => return unknown(trouble.to_string()),
    };
    let request = server.request(Method::GET, "/v1/models", None);
    let head = match exchange.send(request, PATIENCE).await {
        Ok(head) => head,
        Err(trouble) => return unknown(trouble.to_string()),
    };
    if let Err(trouble) = exchange.rest(PATIENCE).await {
        return unknown(trouble.to_string());
    }
    let told = head
        .headers
        .get("keep-alive")
        .and_then(|value| value.to_str().ok());
    let told = told.map_or_else(String::new, |told| {
        format!("; it says `Keep-Alive: {told}`")
    });
    if head
        .headers
        .get("connection")
        .is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"close"))
    {
        return found(
            Verdict::Closes,
            "is closed after each answer".to_owned(),
            Some(Duration::ZERO),
        );
    }
    match exchange.closed(limit).await {
        Some(time) => {
            let answer = format!("is closed after {:.1} s{told}", time.as_secs_f64());
            found(Verdict::Closes, answer, Some(time))
        }
        None => {
            let answer = format!("is kept for more than {} s{told}", limit.as_secs());
            found(Verdict::StaysOpen, answer, None)
        }
    }
}
