//! `tidegate probe`: its arguments, and where its key comes from.

use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _};

use super::Cli;
use crate::config::{Endpoint, Secret, Sources};
use crate::probe;

pub(super) const HELP: &str = "\
Examples:
  tidegate probe http://127.0.0.1:8000
  tidegate probe http://127.0.0.1:8000 --quick
  tidegate probe http://127.0.0.1:8000 --route messages
  TIDEGATE_API_KEY=... tidegate probe https://api.example.com --model small --json > found.json

Makes real calls, and leaves them: it says first how many calls and tokens that may cost. Does the server stop when a client leaves, with a
stream and without, while it generates, reads the prompt, or lets the call wait? How long does it keep an idle connection, what is its answer
to too many calls? Where it shows its running calls (vLLM, llama.cpp) they are read; else the wait of a next call tells. What cannot be told
is \"unknown\". At the end stands the block for the configuration file that follows. Nothing else should use the server meanwhile.

The key is read from TIDEGATE_API_KEY or a file; there is no flag for it, since a process list shows flags.

Exit codes: 0 found out, 1 there is no server to probe, 2 wrong command line.";

/// As typed.
#[derive(Clone, Debug, Args)]
pub struct ProbeArgs {
    /// Address of the model server, like http://127.0.0.1:8000
    #[arg(value_name = "URL")]
    url: String,
    /// The model to ask for [default: the server's only one]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The API to make its calls by
    #[arg(long, value_name = "API", value_enum, default_value_t)]
    route: probe::Route,
    /// Leave out long prompts and the queue, and make each step once
    #[arg(long)]
    quick: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Print what it may cost, and do nothing
    #[arg(long)]
    plan: bool,
    /// File with the server's key [env: TIDEGATE_API_KEY_FILE]
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<String>,
    /// Most calls at once, to fill the server
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    at_once: u32,
    /// Most tokens asked for, over all calls
    #[arg(long, value_name = "N", default_value_t = 400_000, value_parser = clap::value_parser!(u32).range(1_000..=100_000_000))]
    tokens: u32,
}

/// What is to be probed, and what is printed of it.
#[derive(Clone, Debug)]
pub struct Probe {
    pub settings: probe::Settings,
    pub json: bool,
    /// Say what it would cost and stop there.
    pub plan: bool,
}

// === impl ProbeArgs ===

/// How long the calls run that are left: long enough to tell a stop from an end, and to wait for.
const PROBE_LONG: Duration = Duration::from_secs(6);

impl ProbeArgs {
    pub(super) fn read(self, sources: &Sources) -> Result<Probe, clap::Error> {
        let wrong = |what: String| {
            let mut command = Cli::command();
            command.build();
            let own = command.find_subcommand_mut("probe");
            own.map_or_else(
                || Cli::command().error(ErrorKind::ValueValidation, &what),
                |own| own.error(ErrorKind::ValueValidation, &what),
            )
        };
        let endpoint = Endpoint::parse(&self.url)
            .map_err(|why| wrong(format!("the URL `{}` {}: {}", self.url, why.what, why.help)))?;
        let file = self.api_key_file.as_deref();
        let file = file.or_else(|| sources.env.get("TIDEGATE_API_KEY_FILE"));
        let key = match (file, sources.env.get("TIDEGATE_API_KEY")) {
            (Some(_), Some(_)) => {
                let both = "the key is in TIDEGATE_API_KEY and in a file; give one of them";
                return Err(wrong(both.to_owned()));
            }
            (Some(file), None) => {
                let key = std::fs::read_to_string(file).map_err(|error| {
                    wrong(format!("the key file {file} cannot be read: {error}"))
                })?;
                Some(key.trim().to_owned())
            }
            (None, key) => key.map(str::to_owned),
        };
        let usable = |key: &String| !key.is_empty() && key.chars().all(|c| c.is_ascii_graphic());
        if key.as_ref().is_some_and(|key| !usable(key)) {
            return Err(wrong(
                "a key is one word of printable ASCII characters".to_owned(),
            ));
        }
        Ok(Probe {
            settings: probe::Settings {
                endpoint,
                key: key.map(Secret::new),
                model: self.model,
                route: self.route,
                quick: self.quick,
                at_once: self.at_once,
                tokens: self.tokens,
                long: PROBE_LONG,
            },
            json: self.json,
            plan: self.plan,
        })
    }
}
