//! What the request asks for.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::Dialect;

/// The routes with a shape of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Route {
    Chat,
    Completion,
    Embeddings,
    Responses,
    Messages,
    CountTokens,
    Models,
    #[default]
    Other,
}

impl Route {
    pub(crate) fn of(path: &str) -> Self {
        match path.split('?').next().unwrap_or_default() {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completion,
            "/v1/embeddings" => Self::Embeddings,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            "/v1/messages/count_tokens" => Self::CountTokens,
            "/v1/models" => Self::Models,
            _ => Self::Other,
        }
    }

    pub(crate) fn dialect(self) -> Option<Dialect> {
        match self {
            Self::Chat => Some(Dialect::Chat),
            Self::Completion => Some(Dialect::Completion),
            Self::Responses => Some(Dialect::Responses),
            Self::Messages => Some(Dialect::Messages),
            Self::Embeddings | Self::CountTokens | Self::Models | Self::Other => None,
        }
    }

    pub(crate) fn anthropic(self) -> bool {
        matches!(self, Self::Messages | Self::CountTokens)
    }
}

/// What one request asks for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ask {
    pub(crate) route: Route,
    pub(crate) model: String,
    pub(crate) stream: bool,
    pub(crate) max_tokens: Option<u64>,
    pub(crate) include_usage: bool,
    pub(crate) continuous_usage: bool,
    pub(crate) test_id: Option<String>,
    pub(crate) accepts_gzip: bool,
    pub(crate) head_request: bool,
    /// The request asks for the connection to be closed.
    pub(crate) close: bool,
    /// The script the body brings, as JSON text.
    pub(crate) rig: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Fields<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    stream: Option<&'a RawValue>,
    #[serde(borrow)]
    max_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    max_completion_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    max_output_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    stream_options: Option<&'a RawValue>,
    #[serde(borrow)]
    test_id: Option<&'a RawValue>,
    #[serde(borrow)]
    rig: Option<&'a RawValue>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct StreamOptions {
    include_usage: bool,
    continuous_usage_stats: bool,
}

impl Ask {
    /// Reads what it can; a body that is not JSON asks for nothing.
    pub(crate) fn read(path: &str, body: &[u8]) -> Self {
        let fields: Fields<'_> = serde_json::from_slice(body).unwrap_or_default();
        let options: StreamOptions = lenient(fields.stream_options).unwrap_or_default();
        Self {
            route: Route::of(path),
            model: lenient(fields.model).unwrap_or_else(|| "tiny".to_owned()),
            stream: fields.stream.is_some_and(|s| s.get() == "true"),
            max_tokens: lenient(fields.max_completion_tokens)
                .or_else(|| lenient(fields.max_tokens))
                .or_else(|| lenient(fields.max_output_tokens)),
            include_usage: options.include_usage,
            continuous_usage: options.continuous_usage_stats,
            test_id: lenient(fields.test_id),
            accepts_gzip: false,
            head_request: false,
            close: false,
            rig: fields.rig.map(|r| r.get().to_owned()),
        }
    }
}

/// A field of the wrong type is no field.
fn lenient<T: serde::de::DeserializeOwned>(raw: Option<&RawValue>) -> Option<T> {
    serde_json::from_str(raw?.get()).ok()
}
