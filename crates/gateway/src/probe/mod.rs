//! `tidegate probe`: what a model server does when its clients leave, found out on the server itself.
//!
//! Two ways to know whether it has stopped. Where it shows its running requests ([`shown`]), they are read, with the traps of each server in
//! mind. Everywhere, by what it does to others: when the server is filled with calls, one more waits, and how long it waits after one of them
//! was left says how long that one ran on. Where neither tells, the answer is "unknown", never a guess.
//!
//! Every call is paid for out of an [`Allowance`] that is told beforehand.

use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use crate::config::{Endpoint, Kind, Secret, Upstream};
use crate::upstream::connect;

mod ask;
mod crowd;
mod report;
mod route;
mod shown;
mod steps;
mod survey;
#[cfg(test)]
mod tests;
mod waits;

pub use report::{Finding, Report, Verdict};
pub use route::Route;

use ask::{Server, Trouble};
use shown::Shown;

/// What is asked of the prober.
#[derive(Clone, Debug)]
pub struct Settings {
    pub endpoint: Endpoint,
    pub key: Option<Secret>,
    pub model: Option<String>,
    /// The API that its calls are made by.
    pub route: Route,
    /// Only what a setting follows from: no long prompt, no queue, each step once.
    pub quick: bool,
    /// Most calls at once, to fill the server.
    pub at_once: u32,
    /// Most tokens asked for, over all calls.
    pub tokens: u32,
    /// About how long the calls run that are left.
    pub long: Duration,
}

/// The smallest and the largest of what may be set.
pub const AT_ONCE: std::ops::RangeInclusive<u32> = 1..=64;

/// Why nothing could be found out.
#[derive(Debug)]
pub struct Failure(pub String);

/// What may still be spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Allowance {
    pub calls: u32,
    pub tokens: u32,
    pub prompt_tokens: u32,
}

/// Calls of a full run; those of the fill and of the crowd come on top.
const CALLS: u32 = 60;
/// Long prompts, and how long the longest is.
const PROMPTS: u32 = 6;
const PROMPT_WORDS: u32 = 6000;
/// Calls that are sent at once to see whether the server refuses some.
const CROWD: u32 = 16;

impl Allowance {
    fn of(settings: &Settings) -> Self {
        let rounds = if settings.quick { 4 } else { 12 };
        let calls = CALLS + rounds * settings.at_once + CROWD;
        let long = if settings.quick { 0 } else { PROMPTS };
        Self {
            calls,
            tokens: settings.tokens,
            prompt_tokens: long * PROMPT_WORDS * 4 + 50 * calls,
        }
    }
}

/// What will be done and what it may cost, before it is.
pub fn plan(settings: &Settings) -> String {
    let Allowance {
        calls,
        tokens,
        prompt_tokens,
    } = Allowance::of(settings);
    let time = if settings.quick {
        "half a minute"
    } else {
        "two minutes"
    };
    format!(
        "Probing {}: about {time}, longer on a slow server. At most {calls} calls, {tokens} generated tokens and about\n\
         {prompt_tokens} tokens of prompts; a server that stops when it is left generates far fewer. Nothing else should use the server meanwhile.\n",
        settings.endpoint
    )
}

/// The prober at work.
struct Probe<'a> {
    server: Server,
    settings: &'a Settings,
    shown: Shown,
    speed: Speed,
    left: Allowance,
    /// Calls that run at once before one more has to wait, if that many were tried.
    full: Option<u32>,
    say: &'a mut dyn FnMut(&str),
    /// Makes each prompt a new one.
    salt: u64,
}

/// How fast the server is when it is idle.
#[derive(Clone, Copy, Debug, Default)]
struct Speed {
    /// Request sent → first token of a short prompt.
    first: Duration,
    /// From token to token.
    token: Duration,
    /// Tokens of a call that is to run for long, and how long that is.
    tokens: u32,
    long: Duration,
}

/// Runs all steps. `say` gets a line before each.
///
/// # Errors
///
/// What stands in the way of every step: no such server, no model, a wrong key.
pub async fn run(settings: &Settings, say: &mut dyn FnMut(&str)) -> Result<Report, Failure> {
    let begin = Instant::now();
    let server = survey::server(settings)?;
    let idle_limit = if settings.quick { 8 } else { 75 };
    let idle = waits::idle_limit(server.clone(), Duration::from_secs(idle_limit));
    let steps = async {
        let mut probe = survey::begin(server, settings, say).await?;
        let findings = probe.steps().await;
        let kind = probe.kind().await;
        let spent = Allowance::of(settings);
        let spent = Allowance {
            calls: spent.calls - probe.left.calls,
            tokens: spent.tokens - probe.left.tokens,
            prompt_tokens: spent.prompt_tokens - probe.left.prompt_tokens,
        };
        (probe.say)("waiting for an idle connection to be closed");
        Ok(Report {
            url: settings.endpoint.to_string(),
            model: probe.server.model.clone(),
            route: settings.route.path(),
            kind,
            shows: probe.shown.name(),
            confirm: probe.shown.confirm(),
            first_token_ms: waits::millis(probe.speed.first),
            tokens_per_second: 1.0 / probe.speed.token.as_secs_f64().max(1e-6),
            calls_at_once: probe.full,
            findings,
            spent,
            seconds: 0.0,
            config: String::new(),
        })
    };
    let (report, idle) = tokio::join!(steps, idle);
    let mut report: Report = report?;
    report.findings.push(idle);
    report.seconds = begin.elapsed().as_secs_f64();
    report.config = report::config(&report);
    Ok(report)
}

impl Failure {
    fn of(settings: &Settings, trouble: &Trouble) -> Self {
        Self(format!("cannot probe {}: {trouble}", settings.endpoint))
    }
}

/// The client side of TLS, if the server wants it.
fn tls(settings: &Settings) -> Result<Option<tokio_rustls::TlsConnector>, Failure> {
    if !settings.endpoint.tls {
        return Ok(None);
    }
    let upstream = Upstream::new("probe", Kind::Other, vec![settings.endpoint.clone()]);
    let config = connect::tls_config(&upstream).map_err(|error| Failure(error.to_string()))?;
    Ok(Some(ask::tls(&config)))
}
