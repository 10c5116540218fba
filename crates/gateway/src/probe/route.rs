//! The APIs that a server can be probed by.

use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value, json};
use tidegate_wire::Dialect;

use super::ask::{Call, Dress};
use crate::config::{Kind, Secret};

/// Which of its routes the calls are made on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Route {
    /// POST /v1/chat/completions
    #[default]
    Chat,
    /// POST /v1/completions
    Completions,
    /// POST /v1/messages
    Messages,
    /// POST /v1/responses
    Responses,
}

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const VERSION: HeaderName = HeaderName::from_static("anthropic-version");
/// Fewer are refused there.
const RESPONSE_TOKENS: u32 = 16;

const fn dress(ignore_eos: bool, bound: &'static str) -> Dress {
    Dress { ignore_eos, bound }
}

/// The ways to bound an answer, the most telling first.
const CHAT: [Dress; 3] = [
    dress(true, "max_tokens"),
    dress(false, "max_tokens"),
    dress(false, "max_completion_tokens"),
];
const PLAIN: [Dress; 2] = [dress(true, "max_tokens"), dress(false, "max_tokens")];
const RESPONSES: [Dress; 2] = [
    dress(true, "max_output_tokens"),
    dress(false, "max_output_tokens"),
];

impl Route {
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Messages => "/v1/messages",
            Self::Responses => "/v1/responses",
        }
    }

    pub(super) fn dialect(self) -> Dialect {
        match self {
            Self::Chat | Self::Completions => Dialect::OpenAi,
            Self::Messages => Dialect::Anthropic,
            Self::Responses => Dialect::Responses,
        }
    }

    pub(super) fn dresses(self) -> &'static [Dress] {
        match self {
            Self::Chat => &CHAT,
            Self::Completions | Self::Messages => &PLAIN,
            Self::Responses => &RESPONSES,
        }
    }

    /// Usage on a stream comes only if it is asked for.
    pub(super) fn asks_usage(self) -> bool {
        matches!(self, Self::Chat | Self::Completions)
    }

    pub(super) fn body(self, model: &str, dress: Dress, call: &Call) -> Value {
        let prompt = match self {
            Self::Chat | Self::Messages => "messages",
            Self::Completions => "prompt",
            Self::Responses => "input",
        };
        let mut body = json!({"model": model, "stream": call.stream});
        body[prompt] = match self {
            Self::Chat | Self::Messages => json!([{"role": "user", "content": call.prompt}]),
            Self::Completions | Self::Responses => json!(call.prompt),
        };
        body[dress.bound] = json!(match self {
            Self::Responses => call.tokens.max(RESPONSE_TOKENS),
            _ => call.tokens,
        });
        if dress.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        if call.usage && self.asks_usage() {
            body["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
        }
        body
    }

    /// What else the API wants in the head, and the key where its host looks for it.
    pub(super) fn head(self, host: &str, key: Option<&Secret>, headers: &mut HeaderMap) {
        if self == Self::Messages {
            headers.insert(VERSION, HeaderValue::from_static("2023-06-01"));
        }
        let Some(key) = key else { return };
        let (name, value) = match Kind::of_hosts([host].into_iter()) {
            Kind::Anthropic => (API_KEY, key.expose().to_owned()),
            _ => (AUTHORIZATION, format!("Bearer {}", key.expose())),
        };
        if let Ok(mut value) = HeaderValue::try_from(value) {
            value.set_sensitive(true);
            headers.insert(name, value);
        }
    }
}
