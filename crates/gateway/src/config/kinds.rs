//! The kinds of model servers and providers: what each is known to do, and the settings that follow from it.
//!
//! Pure data, one row a kind; `docs/kinds.md` is made of it. A row says where its fact comes from: *measured* on a running server,
//! *reported* in documents or by users, or *assumed*, where nothing better was found. An operator's own setting wins over every row.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::AuthStyle;

/// What kind of server an upstream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Vllm,
    Sglang,
    #[serde(rename = "llama.cpp")]
    LlamaCpp,
    Ollama,
    Tgi,
    #[serde(rename = "openai")]
    OpenAi,
    Azure,
    Anthropic,
    OpenRouter,
    DeepSeek,
    Bedrock,
    Gemini,
    Groq,
    Mistral,
    Other,
}

/// What becomes of a call at the upstream when its client has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Contract {
    /// The exchange is closed at once, and the slot kept for `settle`.
    Cancel,
    /// The answer is read on for nobody, within the bounds of `abandon`, so that its true end and usage are known. Past a bound it
    /// is cancelled.
    Drain,
    /// The exchange is closed at once, and the slot kept for `abandon.time`, since the server runs on.
    Linger,
}

/// Where the server is asked whether the work of an abandoned call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Confirm {
    /// Nowhere: the slot is kept for `settle` (`abandon.time` under `linger`).
    Off,
    /// vLLM's gauges of running and waiting requests at `/metrics`.
    VllmMetrics,
    /// llama.cpp's slots at work at `/slots`.
    LlamaSlots,
}

/// How a server shows what it is really running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shows {
    /// Not at all, as far as is known.
    Nothing,
    /// `vllm:num_requests_running` and `vllm:num_requests_waiting` at `/metrics`.
    VllmMetrics,
    /// `is_processing` at `/slots`.
    LlamaSlots,
}

/// A way of a server that its callers have to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quirk {
    BadJsonIs500,
    IgnoresModel,
    OverloadSaysNoTime,
    FinishesItsStep,
    WholeRunsOnUnderTraffic,
    LaunchesWhatLeftItsQueue,
    CancelsOnlyBackground,
    FirstChunkIsEmpty,
    KeepAliveIsEmptyLines,
    ErrorIsAChunk,
    WholeIsBilledInFull,
}

/// How a fact is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// On a running server of this version.
    Measured(&'static str),
    /// In a document or by users.
    Reported(&'static str),
    /// From what it is built of; `tidegate probe` finds out.
    Assumed(&'static str),
}

/// One kind: its defaults and what is known of it.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub kind: Kind,
    /// As in the configuration.
    pub name: &'static str,
    /// Hosts that are this kind without being told; a `*` stands for any text.
    pub hosts: &'static [&'static str],
    pub on_abandon: Contract,
    /// How long it is held to run on after a close.
    pub settle: Duration,
    /// The same for an answer that was asked for in one piece, where that takes longer.
    pub settle_whole: Option<Duration>,
    /// The longest that a stream was seen to run on after a close. No more than that can have been generated.
    pub stream_ran_on: Option<Duration>,
    /// `abandon.time`: how long work for nobody may go on (drain) or is held to (linger).
    pub abandon_time: Duration,
    /// Calls that do not stream go upstream as a stream, so that they can be cancelled and metered at every token.
    pub ask_stream: bool,
    /// It is known to answer `stream_options.include_usage`.
    pub ask_usage: bool,
    pub auth: AuthStyle,
    /// Answers 200 when the server can take calls.
    pub health: Option<&'static str>,
    /// It closes a connection that is idle for so long.
    pub idle: Option<Duration>,
    pub shows: Shows,
    pub quirks: &'static [Quirk],
    pub known: Known,
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// What every row begins with: stops when it is closed, nothing else known.
const PLAIN: Row = Row {
    kind: Kind::Other,
    name: "other",
    hosts: &[],
    on_abandon: Contract::Cancel,
    settle: Duration::ZERO,
    settle_whole: None,
    stream_ran_on: None,
    abandon_time: secs(60),
    ask_stream: false,
    ask_usage: false,
    auth: AuthStyle::Bearer,
    health: None,
    idle: None,
    shows: Shows::Nothing,
    quirks: &[],
    known: Known::Assumed(
        "nothing is known: its slot is free when it is closed, and what it wasted is `unknown`",
    ),
};

const OPENROUTER_LIST: &str = "OpenRouter's list of providers that stop when a stream is aborted";
const OPENROUTER_NOT: &str =
    "OpenRouter's list of providers that do not stop: they generate and bill to the end";

/// All kinds.
pub const ROWS: [Row; 15] = [
    Row {
        kind: Kind::Vllm,
        name: "vllm",
        settle: millis(250),
        stream_ran_on: Some(millis(232)),
        ask_stream: true,
        ask_usage: true,
        health: Some("/health"),
        idle: Some(millis(4800)),
        shows: Shows::VllmMetrics,
        quirks: &[Quirk::FinishesItsStep, Quirk::OverloadSaysNoTime],
        known: Known::Measured(
            "0.32.0 on CPU: 35 to 232 ms after a close, in prefill after the running step",
        ),
        ..PLAIN
    },
    Row {
        kind: Kind::Sglang,
        name: "sglang",
        settle: millis(500),
        ask_usage: true,
        health: Some("/health"),
        idle: Some(secs(5)),
        quirks: &[Quirk::FinishesItsStep],
        known: Known::Assumed("served by uvicorn as vLLM is"),
        ..PLAIN
    },
    Row {
        kind: Kind::LlamaCpp,
        name: "llama.cpp",
        settle: millis(250),
        settle_whole: Some(secs(1)),
        stream_ran_on: Some(millis(33)),
        ask_stream: true,
        ask_usage: true,
        health: Some("/health"),
        idle: Some(millis(4700)),
        shows: Shows::LlamaSlots,
        quirks: &[
            Quirk::WholeRunsOnUnderTraffic,
            Quirk::LaunchesWhatLeftItsQueue,
            Quirk::FinishesItsStep,
            Quirk::BadJsonIs500,
            Quirk::IgnoresModel,
        ],
        known: Known::Measured(
            "build 10434: streams 20 to 33 ms after a close, whole answers 1 s at best",
        ),
        ..PLAIN
    },
    Row {
        kind: Kind::Ollama,
        name: "ollama",
        settle: secs(1),
        health: Some("/api/version"),
        quirks: &[Quirk::FinishesItsStep],
        known: Known::Assumed("its runner is llama.cpp's"),
        ..PLAIN
    },
    Row {
        kind: Kind::Tgi,
        name: "tgi",
        settle: millis(500),
        health: Some("/health"),
        quirks: &[Quirk::FinishesItsStep],
        known: Known::Assumed("it generates in steps and drops a request whose stream was dropped"),
        ..PLAIN
    },
    Row {
        kind: Kind::OpenAi,
        name: "openai",
        hosts: &["api.openai.com"],
        ask_usage: true,
        quirks: &[Quirk::CancelsOnlyBackground],
        known: Known::Reported(OPENROUTER_LIST),
        ..PLAIN
    },
    Row {
        kind: Kind::Azure,
        name: "azure",
        hosts: &["*.openai.azure.com"],
        quirks: &[Quirk::CancelsOnlyBackground, Quirk::FirstChunkIsEmpty],
        known: Known::Reported(OPENROUTER_LIST),
        ..PLAIN
    },
    Row {
        kind: Kind::Anthropic,
        name: "anthropic",
        hosts: &["api.anthropic.com"],
        auth: AuthStyle::XApiKey,
        known: Known::Reported(OPENROUTER_LIST),
        ..PLAIN
    },
    Row {
        kind: Kind::OpenRouter,
        name: "openrouter",
        hosts: &["openrouter.ai"],
        ask_stream: true,
        ask_usage: true,
        quirks: &[Quirk::WholeIsBilledInFull, Quirk::ErrorIsAChunk],
        known: Known::Reported(
            "its documentation: an aborted stream stops, for the providers that can",
        ),
        ..PLAIN
    },
    Row {
        kind: Kind::DeepSeek,
        name: "deepseek",
        hosts: &["api.deepseek.com"],
        ask_usage: true,
        quirks: &[Quirk::KeepAliveIsEmptyLines],
        known: Known::Reported(OPENROUTER_LIST),
        ..PLAIN
    },
    Row {
        kind: Kind::Bedrock,
        name: "bedrock",
        hosts: &["bedrock-runtime.*.amazonaws.com"],
        on_abandon: Contract::Drain,
        known: Known::Reported(OPENROUTER_NOT),
        ..PLAIN
    },
    Row {
        kind: Kind::Gemini,
        name: "gemini",
        hosts: &["generativelanguage.googleapis.com"],
        on_abandon: Contract::Drain,
        known: Known::Reported(OPENROUTER_NOT),
        ..PLAIN
    },
    Row {
        kind: Kind::Groq,
        name: "groq",
        hosts: &["api.groq.com"],
        on_abandon: Contract::Drain,
        known: Known::Reported(OPENROUTER_NOT),
        ..PLAIN
    },
    Row {
        kind: Kind::Mistral,
        name: "mistral",
        hosts: &["api.mistral.ai"],
        on_abandon: Contract::Drain,
        known: Known::Reported(OPENROUTER_NOT),
        ..PLAIN
    },
    PLAIN,
];

/// How long an idle connection to a server of unknown habits is kept.
const IDLE: Duration = secs(4);
/// How much sooner than the server a connection is let go.
const IDLE_MARGIN: Duration = millis(700);

impl Kind {
    /// What is known of it.
    pub fn row(self) -> &'static Row {
        ROWS.iter().find(|row| row.kind == self).unwrap_or(&PLAIN)
    }

    /// The kind that all these hosts are known to be.
    pub fn of_hosts<'a>(mut hosts: impl Iterator<Item = &'a str>) -> Self {
        let Some(first) = hosts.next().map(kind_of) else {
            return Self::Other;
        };
        if hosts.all(|host| kind_of(host) == first) {
            first
        } else {
            Self::Other
        }
    }
}

fn kind_of(host: &str) -> Kind {
    let is = |known: &&str| match known.split_once('*') {
        Some((start, end)) => {
            host.len() > start.len() + end.len() && host.starts_with(start) && host.ends_with(end)
        }
        None => host == *known,
    };
    ROWS.iter()
        .find(|row| row.hosts.iter().any(is))
        .map_or(Kind::Other, |row| row.kind)
}

impl Contract {
    /// As in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Drain => "drain",
            Self::Linger => "linger",
        }
    }
}

impl Confirm {
    /// As in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::VllmMetrics => "vllm-metrics",
            Self::LlamaSlots => "llama-slots",
        }
    }
}

impl Shows {
    /// The setting that asks there.
    pub fn confirm(self) -> Confirm {
        match self {
            Self::Nothing => Confirm::Off,
            Self::VllmMetrics => Confirm::VllmMetrics,
            Self::LlamaSlots => Confirm::LlamaSlots,
        }
    }
}

impl Row {
    /// How long an idle connection is kept: shorter than the server keeps it.
    pub fn pool_idle(&self) -> Duration {
        self.idle
            .map_or(IDLE, |idle| idle.saturating_sub(IDLE_MARGIN).min(IDLE))
    }
}

impl Quirk {
    /// For the page.
    pub fn text(self) -> &'static str {
        match self {
            Self::BadJsonIs500 => "bad JSON is answered 500, which SDKs try again",
            Self::IgnoresModel => "any model's name is answered",
            Self::OverloadSaysNoTime => "its overload is a 503 without `Retry-After`",
            Self::FinishesItsStep => "finishes the step of a prefill that was running",
            Self::WholeRunsOnUnderTraffic => {
                "a whole answer is not cancelled while any other result is delivered, its own metrics among them"
            }
            Self::LaunchesWhatLeftItsQueue => "begins queued calls whose client has left",
            Self::CancelsOnlyBackground => "its cancel endpoint serves background responses only",
            Self::FirstChunkIsEmpty => "its first chunk has no choices",
            Self::KeepAliveIsEmptyLines => "sends empty lines before a whole answer",
            Self::ErrorIsAChunk => "an error in mid-stream is a chunk with `error`",
            Self::WholeIsBilledInFull => "a whole answer is billed to its end, whoever leaves",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::units::Time;

    #[test]
    fn each_kind_has_the_row_of_its_name() {
        for row in &ROWS {
            assert_eq!(row.kind.row().name, row.name);
            assert_eq!(serde_json::to_value(row.kind).unwrap(), row.name);
        }
    }

    #[test]
    fn no_connection_is_kept_longer_than_the_server_keeps_it() {
        for row in &ROWS {
            assert!(
                row.idle.is_none_or(|idle| row.pool_idle() < idle),
                "{}",
                row.name
            );
        }
        assert_eq!(Kind::Vllm.row().pool_idle(), secs(4));
    }

    #[test]
    fn hosts_tell_the_kind_if_all_say_the_same() {
        let of = |hosts: &[&str]| Kind::of_hosts(hosts.iter().copied());
        assert_eq!(of(&["api.openai.com"]), Kind::OpenAi);
        assert_eq!(of(&["mine.openai.azure.com"]), Kind::Azure);
        assert_eq!(
            of(&["bedrock-runtime.eu-west-1.amazonaws.com"]),
            Kind::Bedrock
        );
        assert_eq!(of(&["api.openai.com", "api.groq.com"]), Kind::Other);
        assert_eq!(of(&["api.openai.com.evil.example"]), Kind::Other);
        assert_eq!(
            of(&["ec2-1-2-3-4.eu-west-1.compute.amazonaws.com"]),
            Kind::Other
        );
        assert_eq!(of(&[]), Kind::Other);
    }

    fn page() -> String {
        use std::fmt::Write as _;
        let mut page = include_str!("tests/kinds.head.md").to_owned();
        for row in &ROWS {
            let contract = row.on_abandon.name();
            let idle = row
                .idle
                .map_or_else(String::new, |idle| Time(idle).to_string());
            let shows = match row.shows.confirm() {
                Confirm::Off => String::new(),
                confirm => format!("`{}`", confirm.name()),
            };
            let settle = match row.settle_whole {
                Some(whole) => format!("{}; one piece {}", Time(row.settle), Time(whole)),
                None => Time(row.settle).to_string(),
            };
            let yes = |yes: bool| if yes { "yes" } else { "" };
            let health = row.health.map_or(String::new(), |path| format!("`{path}`"));
            let (how, what) = match row.known {
                Known::Measured(what) => ("measured", what),
                Known::Reported(what) => ("reported", what),
                Known::Assumed(what) => ("assumed", what),
            };
            let quirks: Vec<_> = row.quirks.iter().map(|quirk| quirk.text()).collect();
            writeln!(
                page,
                "| `{}` | `{contract}` | {settle} | {} | {} | {health} | {idle} | {shows} | {} | {how}: {what} |",
                row.name,
                yes(row.ask_stream),
                yes(row.ask_usage),
                quirks.join("; "),
            )
            .unwrap();
        }
        page
    }

    #[test]
    fn the_page_is_up_to_date() {
        crate::config::tests::docs::up_to_date("docs/kinds.md", &page());
    }
}
