//! `fake-upstream`.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::words::{TimeMs, WayOfClosing};
use crate::script::{Fault, OnClose, Pages, Usage};
use crate::{FakeUpstream, Script};

/// Text after the options' list.
pub const FAKE_HELP: &str = "\
Examples:
  tidegate fake-upstream --listen 127.0.0.1:8000
  tidegate fake-upstream --pace 20ms --tokens 200 --slots 8 --pages vllm
  tidegate fake-upstream --like llama.cpp --slots 4 --delay 500ms
  tidegate fake-upstream --fault cut --at 5
  curl -s http://127.0.0.1:8000/__rig/truth

A request changes single settings for itself with a field of its JSON body, such as
  \"rig\": {\"tokens\": 400, \"pace_ms\": 20, \"stall\": {\"at\": {\"event\": 3}}}
or with a header `x-rig: {...}`. GET /__rig/script shows all settings as they are now, PUT sets them.

Ways of treating a close (--on-close): stop, step, late:TIME, tokens:N, poll:TIME, never, bills.
  stop   at once                          poll   looked for in so great intervals
  step   with the step under way          never  runs to its end, connection open
  late   so much later                    bills  closes and shows nothing, runs to its end
  tokens so many tokens later

Paths: GET /__rig/truth what really happens, GET /__rig/calls the last calls one by one (--keep),
POST /__rig/reset forgets the counts, POST /__rig/cut resets all connections. Ends with SIGINT or SIGTERM, and then prints the truth to standard error.";

/// Settings of the fake upstream.
#[derive(Clone, Debug, Args)]
pub struct FakeArgs {
    /// Address and port
    #[arg(short, long, value_name = "ADDRESS", default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Time before the head: the prompt's
    #[arg(long, value_name = "TIME")]
    delay: Option<TimeMs>,
    /// Time between head and first event
    #[arg(long, value_name = "TIME")]
    first: Option<TimeMs>,
    /// Time between tokens
    #[arg(long, value_name = "TIME")]
    pace: Option<TimeMs>,
    /// Tokens of an answer; without, as many as the request allows, or 16
    #[arg(long, value_name = "N")]
    tokens: Option<u64>,
    /// Least bytes of text in an event
    #[arg(long, value_name = "BYTES")]
    size: Option<usize>,
    /// A comment after each so long silence
    #[arg(long, value_name = "TIME")]
    heartbeats: Option<TimeMs>,
    /// Usage on streams
    #[arg(long, value_enum)]
    usage: Option<UsageArg>,
    /// Prompt tokens reported
    #[arg(long, value_name = "N")]
    prompt_tokens: Option<u64>,
    /// Tokens of reasoning before the text
    #[arg(long, value_name = "N")]
    reasoning: Option<u64>,
    /// Tool calls instead of text
    #[arg(long, value_name = "N")]
    tool_calls: Option<u32>,
    /// Calls worked on at once; others wait unanswered
    #[arg(long, value_name = "N")]
    slots: Option<u32>,
    /// Calls running or waiting at once; others get 503
    #[arg(long, value_name = "N")]
    capacity: Option<u64>,
    /// Something goes wrong; may be given more than once
    #[arg(long, value_enum, value_name = "FAULT")]
    fault: Vec<Fault>,
    /// The event at which it goes wrong
    #[arg(long, value_name = "N", default_value_t = 3)]
    at: u64,
    /// What a close by the peer does to the work
    #[arg(long, value_name = "WAY")]
    on_close: Option<WayOfClosing>,
    /// The same for answers that are not streamed
    #[arg(long, value_name = "WAY")]
    on_close_plain: Option<WayOfClosing>,
    /// Serve the status pages of a server: vllm (/metrics, /health), llama.cpp (/metrics, /slots, /health)
    #[arg(long, value_name = "KIND")]
    pages: Option<PagesArg>,
    /// Treat a close, and show it, as measured on a kind of server
    #[arg(long, value_name = "KIND")]
    like: Option<Like>,
    /// Leave the time of a monotonic clock (ns) out of the events
    #[arg(long)]
    no_stamp: bool,
    /// All settings as JSON, or @FILE; the flags go over them
    #[arg(
        long,
        value_name = "JSON",
        default_value = "{}",
        hide_default_value = true
    )]
    script: String,
    /// Calls kept one by one for /__rig/calls
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    keep: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum UsageArg {
    /// As the request asks
    Auto,
    Yes,
    No,
    /// On every event
    Continuous,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PagesArg {
    Vllm,
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Like {
    /// Stops with the step, streamed or not
    Vllm,
    /// Stops a token later; not streamed, looks once a second
    #[value(name = "llama.cpp")]
    LlamaCpp,
    /// Closes, generates on and bills
    Cloud,
}

impl From<PagesArg> for Pages {
    fn from(pages: PagesArg) -> Self {
        match pages {
            PagesArg::Vllm => Self::Vllm,
            PagesArg::LlamaCpp => Self::LlamaCpp,
        }
    }
}

impl FakeArgs {
    /// The script that the flags mean.
    fn script(&self) -> io::Result<Script> {
        let text = match self.script.strip_prefix('@') {
            Some(file) => {
                let said = |e| io::Error::other(format!("--script {file}: {e}"));
                std::fs::read_to_string(PathBuf::from(file)).map_err(said)?
            }
            None => self.script.clone(),
        };
        let mut script =
            Script::from_json(&text).map_err(|e| io::Error::other(format!("--script: {e}")))?;
        if let Some(like) = self.like {
            like.into_script(&mut script);
        }
        for fault in &self.fault {
            fault.into_script(&mut script, self.at);
        }
        self.times(&mut script);
        self.answer(&mut script);
        script.stamp |= !self.no_stamp;
        Ok(script)
    }

    fn times(&self, script: &mut Script) {
        let whole = |time: Option<TimeMs>, into: &mut u64| {
            if let Some(time) = time {
                *into = time.whole();
            }
        };
        whole(self.delay, &mut script.delay_ms);
        whole(self.first, &mut script.first_ms);
        if let Some(pace) = self.pace {
            script.pace_ms = pace.0;
        }
        script.heartbeat_ms = self.heartbeats.map(TimeMs::whole).or(script.heartbeat_ms);
    }

    fn answer(&self, script: &mut Script) {
        script.tokens = self.tokens.or(script.tokens);
        script.event_bytes = self.size.unwrap_or(script.event_bytes);
        script.prompt_tokens = self.prompt_tokens.unwrap_or(script.prompt_tokens);
        script.reasoning_tokens = self.reasoning.unwrap_or(script.reasoning_tokens);
        script.tool_calls = self.tool_calls.unwrap_or(script.tool_calls);
        script.slots = self.slots.or(script.slots);
        script.capacity = self.capacity.or(script.capacity);
        script.usage = match self.usage {
            None => script.usage,
            Some(UsageArg::Auto) => Usage::Auto,
            Some(UsageArg::Yes) => Usage::Yes,
            Some(UsageArg::No) => Usage::No,
            Some(UsageArg::Continuous) => Usage::Continuous,
        };
        script.on_close = self.on_close.map_or(script.on_close, |way| way.0);
        script.on_close_plain = self
            .on_close_plain
            .map(|way| way.0)
            .or(script.on_close_plain);
        script.pages = self.pages.map_or(script.pages, Into::into);
    }
}

impl Like {
    fn into_script(self, script: &mut Script) {
        match self {
            Self::Vllm => {
                script.on_close = OnClose::Step;
                script.pages = Pages::Vllm;
            }
            Self::LlamaCpp => {
                script.on_close = OnClose::AfterTokens(1);
                script.on_close_plain = Some(OnClose::PollMs(1000));
                script.pages = Pages::LlamaCpp;
            }
            Self::Cloud => script.on_close = OnClose::Bills,
        }
    }
}

/// Serves until SIGINT or SIGTERM.
pub(super) async fn run(args: FakeArgs) -> io::Result<bool> {
    // Fails only where the limit cannot be read; then it is as it is.
    let _ = crate::load::raise_descriptors(0);
    let script = args.script()?;
    let said = |e| io::Error::other(format!("cannot listen on {}: {e}", args.listen));
    let upstream = FakeUpstream::start_keeping(args.listen, script, args.keep);
    let upstream = upstream.await.map_err(said)?;
    super::say(&format!("fake upstream on http://{}", upstream.addr()))?;
    super::asked_to_end().await?;
    super::complain(&serde_json::to_string(&upstream.truth())?);
    Ok(true)
}
