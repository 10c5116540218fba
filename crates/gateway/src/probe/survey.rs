//! Who is there, and how fast: everything that must be known before the first call is left.

use std::time::Duration;

use http::StatusCode;
use serde_json::Value;
use tokio::time::Instant;

use super::ask::{self, Call, PATIENCE, Server, Trouble, Whole, said};
use super::shown::Shown;
use super::{Allowance, Failure, Probe, Settings, Speed};
use crate::config::Kind;

/// Tokens that the speed is measured over.
const SAMPLE: u32 = 48;
/// Most tokens of one call.
const TOKENS_MAX: u32 = 8192;
const TOKENS_MIN: u32 = 64;
/// Least time that it is measured over.
const SAMPLE_TIME: Duration = Duration::from_millis(800);

/// As many tokens as come in `time`, within the bounds of a call.
fn tokens_in(time: Duration, token: Duration) -> u32 {
    let wanted = time.as_secs_f64() / token.as_secs_f64().max(1e-6);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a float too large becomes the largest number, and that is clamped"
    )]
    let tokens = wanted as u32;
    tokens.clamp(TOKENS_MIN, TOKENS_MAX)
}

pub(super) fn server(settings: &Settings) -> Result<Server, Failure> {
    let [dress, ..] = settings.route.dresses() else {
        return Err(Failure("no way to bound an answer is known".to_owned()));
    };
    Ok(Server {
        endpoint: settings.endpoint.clone(),
        key: settings.key.clone(),
        tls: super::tls(settings)?,
        model: settings.model.clone().unwrap_or_default(),
        route: settings.route,
        dress: *dress,
    })
}

/// Looks who is there, and measures how fast.
pub(super) async fn begin<'a>(
    mut server: Server,
    settings: &'a Settings,
    say: &'a mut dyn FnMut(&str),
) -> Result<Probe<'a>, Failure> {
    say("asking who is there");
    let models = server
        .get("/v1/models")
        .await
        .map_err(|trouble| Failure::of(settings, &trouble))?;
    server.model = model(settings, &models)?;
    let shown = Shown::find(&server).await;
    let mut probe = Probe {
        server,
        settings,
        shown,
        speed: Speed::default(),
        left: Allowance::of(settings),
        full: None,
        say,
        salt: fastrand::u64(..),
    };
    (probe.say)("measuring its speed");
    probe.dress().await?;
    probe.measure().await?;
    Ok(probe)
}

/// The model to ask for, from the list or as told.
fn model(settings: &Settings, models: &Whole) -> Result<String, Failure> {
    let url = &settings.endpoint;
    let status = models.head.status;
    refusal(settings, status, &models.body)?;
    if let Some(model) = &settings.model {
        return Ok(model.clone());
    }
    let list: Value = serde_json::from_slice(&models.body).unwrap_or_default();
    let Some(data) = list["data"].as_array().filter(|_| status.is_success()) else {
        let kind = ask::kind(&models.head.headers);
        return Err(Failure(format!(
            "there is no model server at {url}: GET /v1/models was answered {} ({kind}), not with a list of models; \
             check the address, or name a model with --model",
            status.as_u16()
        )));
    };
    let names: Vec<&str> = data
        .iter()
        .filter_map(|model| model["id"].as_str())
        .collect();
    match names.as_slice() {
        [] => Err(Failure(format!(
            "{url} has no model: its list is empty; load one, or name it with --model"
        ))),
        [one] => Ok((*one).to_owned()),
        several => {
            let shown: Vec<_> = several.iter().take(10).copied().collect();
            Err(Failure(format!(
                "{url} has {} models: choose one with --model, such as {}",
                several.len(),
                shown.join(", ")
            )))
        }
    }
}

/// What no step could go on after.
fn refusal(settings: &Settings, status: StatusCode, body: &[u8]) -> Result<(), Failure> {
    let url = &settings.endpoint;
    let what = match status.as_u16() {
        401 | 403 if settings.key.is_none() => {
            "wants a key: give it in TIDEGATE_API_KEY or with --api-key-file".to_owned()
        }
        401 | 403 => "does not take the key that was given".to_owned(),
        429 => "limits our rate already (429): try again later, or with another key".to_owned(),
        500..=599 => "has an error of its own".to_owned(),
        _ => return Ok(()),
    };
    Err(Failure(format!(
        "{url} {what}; it answered {}: {}",
        status.as_u16(),
        said(body)
    )))
}

impl Probe<'_> {
    /// Finds out which fields the server takes, by a call of a few tokens.
    async fn dress(&mut self) -> Result<(), Failure> {
        let mut last = String::new();
        let path = self.server.route.path();
        for dress in self.server.route.dresses() {
            self.server.dress = *dress;
            let call = self.call(true, 2).map_err(|why| Failure(why.to_owned()))?;
            let fail = |trouble: Trouble| Failure::of(self.settings, &trouble);
            let begun = self.server.begin(&call).await.map_err(fail)?;
            let (mut exchange, head) = begun.head(PATIENCE).await.map_err(fail)?;
            if head.status.is_success() {
                let kind = ask::kind(&head.headers);
                if !kind.starts_with("text/event-stream") {
                    return Err(Failure(format!(
                        "{} does not stream: POST {path} with \"stream\": true was answered with {kind}",
                        self.settings.endpoint
                    )));
                }
                let answered = exchange.deltas(1, PATIENCE).await.map_err(fail)?;
                if !answered {
                    return Err(Failure(format!(
                        "{} answers without a token",
                        self.settings.endpoint
                    )));
                }
                return Ok(());
            }
            let body = exchange.rest(PATIENCE).await.map_err(fail)?;
            last = format!("{}: {}", head.status.as_u16(), said(&body));
            match head.status.as_u16() {
                404 => {
                    return Err(Failure(format!(
                        "{} does not answer {path} for the model `{}`: {last} (--route asks by another API: chat, completions, messages or responses)",
                        self.settings.endpoint, self.server.model
                    )));
                }
                400 | 422 => {}
                _ => refusal(self.settings, head.status, &body)?,
            }
        }
        Err(Failure(format!(
            "{} refuses a plain call of {path}: {last}",
            self.settings.endpoint
        )))
    }

    /// Time to the first token and between tokens, and from that how long the long calls are.
    async fn measure(&mut self) -> Result<(), Failure> {
        let fail =
            |why: String| Failure(format!("cannot measure {}: {why}", self.settings.endpoint));
        let mut token = self.token_time(SAMPLE).await.map_err(fail)?;
        let sampled = token * SAMPLE;
        if sampled < SAMPLE_TIME {
            // Too short a look at a fast model: one token's time is mostly the machine's mood.
            token = self
                .token_time(tokens_in(SAMPLE_TIME, token))
                .await
                .map_err(fail)?;
        }
        let mut firsts = Vec::new();
        for _ in 0..3 {
            firsts.push(self.first_token(PATIENCE).await.map_err(fail)?);
        }
        firsts.sort();
        let tokens = tokens_in(self.settings.long, token);
        self.speed = Speed {
            first: firsts.get(1).copied().unwrap_or_default(),
            token,
            tokens,
            long: token * tokens,
        };
        Ok(())
    }

    /// From token to token, over a stream of so many.
    async fn token_time(&mut self, tokens: u32) -> Result<Duration, String> {
        let call = self.call(true, tokens)?;
        let mut exchange = self.running(&call, PATIENCE).await?;
        let first = Instant::now();
        // One that does not end where it was asked to is left there.
        exchange
            .deltas(tokens, PATIENCE)
            .await
            .map_err(|t| t.to_string())?;
        Ok(first.elapsed() / (exchange.deltas.max(2) - 1))
    }

    /// A call answered before it could be left: the model is faster than it was when it was measured. False: it cannot run for longer.
    pub(super) fn faster(&mut self) -> bool {
        let tokens = self.speed.tokens.saturating_mul(3).min(TOKENS_MAX);
        let more = tokens > self.speed.tokens;
        self.speed.token = self.speed.long / tokens;
        self.speed.tokens = tokens;
        more
    }

    /// What kind it seems to be.
    pub(super) async fn kind(&self) -> Kind {
        let hosts = [self.settings.endpoint.host.as_str()];
        let by_host = Kind::of_hosts(hosts.into_iter());
        if by_host != Kind::Other {
            return by_host;
        }
        match self.shown {
            Shown::Vllm => return Kind::Vllm,
            Shown::Llama { .. } => return Kind::LlamaCpp,
            Shown::Nothing => {}
        }
        let Ok(models) = self.server.get("/v1/models").await else {
            return Kind::Other;
        };
        let named = |name: &str| {
            models
                .head
                .headers
                .get("server")
                .is_some_and(|v| v.as_bytes() == name.as_bytes())
        };
        let list: Value = serde_json::from_slice(&models.body).unwrap_or_default();
        match list["data"][0]["owned_by"].as_str() {
            Some("vllm") => Kind::Vllm,
            Some("sglang") => Kind::Sglang,
            Some("llamacpp") => Kind::LlamaCpp,
            _ if named("llama.cpp") => Kind::LlamaCpp,
            _ => Kind::Other,
        }
    }

    /// A short call.
    pub(super) fn call(&mut self, stream: bool, tokens: u32) -> Result<Call, &'static str> {
        let prompt = format!(
            "Count from {} to one million, one number a line.",
            self.salted() % 1000
        );
        self.pay(Call {
            stream,
            tokens,
            prompt,
            usage: false,
        })
    }

    pub(super) fn salted(&mut self) -> u64 {
        self.salt = self
            .salt
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.salt >> 33
    }

    pub(super) fn pay(&mut self, call: Call) -> Result<Call, &'static str> {
        let words = u32::try_from(call.prompt.len() / 6).unwrap_or(u32::MAX);
        let prompt = 20 + words.saturating_mul(2);
        let left = Allowance {
            calls: self.left.calls.checked_sub(1).ok_or(SPENT)?,
            tokens: self.left.tokens.checked_sub(call.tokens).ok_or(SPENT)?,
            prompt_tokens: self.left.prompt_tokens.checked_sub(prompt).ok_or(SPENT)?,
        };
        self.left = left;
        Ok(call)
    }

    /// Time to the first token of a call of one token.
    pub(super) async fn first_token(&mut self, within: Duration) -> Result<Duration, String> {
        let call = self.call(true, 1)?;
        self.server.first_token(&call, within).await
    }
}

/// Why a step was not made.
pub(super) const SPENT: &str = "the allowance of calls and tokens is used up; raise --tokens";
