//! The command line: what a person may type, and the commands that need no gateway.
//!
//! [`parse`] returns a [`Command`]; `main` runs it. This module starts no runtime and prints nothing itself.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::Read;
use std::net::SocketAddr;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use tidegate_rig::cli as rig;

use crate::config::{self, Config, Sources, keys};

pub mod admin;
pub mod demo;
pub mod health;
pub mod probe;
pub mod report;
#[cfg(test)]
mod tests;

/// Exit codes of every command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Ok = 0,
    /// The gateway ran, or began to, and failed.
    Failed = 1,
    /// The command line or the configuration is wrong; nothing was started.
    Usage = 2,
    /// It ended as asked, and calls that were still running at the deadline of the drain were cut.
    Cut = 3,
}

/// What is to be done.
#[derive(Clone, Debug)]
pub enum Command {
    Serve(Sources),
    Demo(Demo),
    Check(Sources),
    Schema,
    HashKey(HashKey),
    Health(Health),
    Calls(admin::Calls),
    Kill(admin::Kill),
    Report(report::Report),
    /// One of the judge's.
    Rig(rig::Command),
    Probe(Box<probe::Probe>),
}

/// What a finished command has to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    pub stdout: String,
    pub stderr: String,
    pub exit: Exit,
}

const EXIT_CODES: &str =
    "Exit codes: 0 done, 1 failed while running, 2 wrong command line or configuration.";

#[derive(Debug, Parser)]
#[command(
    name = "tidegate",
    version,
    about = "The LLM gateway that knows what is really running",
    after_help = EXIT_CODES,
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run the gateway
    #[command(after_help = SERVE_HELP)]
    Serve(SourceArgs),
    /// Run the gateway in front of a built-in fake upstream: no network, no key
    #[command(after_help = DEMO_HELP)]
    Demo(Demo),
    /// Check a configuration and print the settings in force, with secrets masked
    #[command(after_help = CHECK_HELP)]
    Check(SourceArgs),
    /// Print the JSON schema of the configuration file
    #[command(after_help = SCHEMA_HELP)]
    Schema,
    /// Read a client key from standard input and print its line for the configuration
    #[command(after_help = HASH_KEY_HELP)]
    HashKey(HashKey),
    /// Ask a running gateway whether it answers
    #[command(after_help = HEALTH_HELP)]
    Health(Health),
    /// Find out what a model server does when its clients leave
    #[command(after_help = probe::HELP)]
    Probe(probe::ProbeArgs),
    /// Show upstreams, endpoints and the calls in flight, those of clients that have left among them
    #[command(after_help = CALLS_HELP)]
    Calls(admin::Calls),
    /// End a call, or all calls of an upstream, and free their slots
    #[command(after_help = KILL_HELP)]
    Kill(admin::Kill),
    /// Sum up an access log: what was generated for clients that had left, by model, upstream and key
    #[command(after_help = REPORT_HELP)]
    Report(report::Report),
    /// Print the version
    #[command(after_help = VERSION_HELP)]
    Version,
    /// Serve scripted answers like a model server, and count what really happens
    #[command(after_help = rig::FAKE_HELP)]
    FakeUpstream(Box<rig::FakeArgs>),
    /// Let users leave, lag, crowd and retry against any gateway, and see what becomes of their work
    #[command(after_help = rig::STORM_HELP)]
    Storm(Box<rig::StormArgs>),
}

const SERVE_HELP: &str = "\
Examples:
  tidegate serve --upstream http://127.0.0.1:8000
  tidegate serve --upstream http://127.0.0.1:8000 --listen 0.0.0.0:8080 --keys-file keys.txt
  TIDEGATE_API_KEY=... tidegate serve --upstream https://api.openai.com --slots 20 --queue-timeout 10s
  tidegate serve --config tidegate.toml

A flag wins over its variable, a variable over the file. Secrets have variables and files but no flags:
TIDEGATE_API_KEY (the upstream's key) and TIDEGATE_KEYS (client keys, `name: key`, separated by commas).
SIGHUP, or a change of the file, loads the configuration again; SIGTERM lets running calls finish.

Exit codes: 0 ended as asked, 1 failed while running, 2 wrong command line or configuration.";

const CHECK_HELP: &str = "\
Examples:
  tidegate check --config tidegate.toml
  tidegate check --upstream http://127.0.0.1:8000 --slots 8

Prints the settings in force as TOML; what is not a default says where it was given. Keys, and hashes of keys, are shown as ***,
so that the output can be passed on: it is for reading, and no file to start with. Warnings and mistakes go to standard error,
all of them at once.

Exit codes: 0 good, 2 wrong.";

const DEMO_HELP: &str = "\
Examples:
  tidegate demo
  tidegate demo --listen 127.0.0.1:9000";

const VERSION_HELP: &str = "\
Examples:
  tidegate version";

const SCHEMA_HELP: &str = "\
Examples:
  tidegate schema > tidegate.schema.json";

const HASH_KEY_HELP: &str = "\
Examples:
  openssl rand -hex 24 | tee ci.key | tidegate hash-key
  tidegate hash-key --name ci < ci.key >> tidegate.toml";

const HEALTH_HELP: &str = "\
Examples:
  tidegate health
  tidegate health --admin 127.0.0.1:9091

For images that have neither a shell nor curl. Exit codes: 0 it answers, 1 it does not.";
const CALLS_HELP: &str = "\
Examples:
  tidegate calls
  tidegate calls --admin 127.0.0.1:9090 --json

First a line for each upstream and endpoint: its slots, who runs, lingers (the exchange is over, the slot is kept) and waits in the
queue, and whether the endpoint can be connected to; then the calls. LEFT is the time since the client left; ATTACHABLE, whether a
retry may still take the call up; STATE is attended, abandoned (it runs on for nobody), lingering (the exchange is over,
the slot is kept) or kept (all is over, the answer waits for a retry).";

const KILL_HELP: &str = "\
Examples:
  tidegate kill req_0123456789abcdef0123456789abcdef
  tidegate kill --upstream gpu

The client, if it is still there, gets an error that SDKs do not try again.";

const REPORT_HELP: &str = "\
Examples:
  tidegate report access.log
  tidegate report access.log.1 access.log
  journalctl -u tidegate -o cat | tidegate report --json

A row for each model, upstream and client key. ABANDONED are calls whose client left or stopped reading; RETRIES, calls that try
an abandoned one again; LOST, those that a killed gateway had; TOKENS, output tokens, wasted ones included. SECONDS is for how long
the server worked after the client had left. WASTED counts output tokens after the client had left; UNKNOWN, the abandoned calls of which nobody knows. MONEY is the price of
the wasted tokens, where [prices] says what the model costs.";

/// The sources of a configuration. Values are texts here and are checked with the rest of the configuration.
#[derive(Clone, Debug, Default, Args)]
struct SourceArgs {
    /// Configuration file [env: TIDEGATE_CONFIG]
    #[arg(short, long, value_name = "FILE")]
    config: Option<String>,
    /// Address of the one model server, instead of a file [env: TIDEGATE_UPSTREAM]
    #[arg(short, long, value_name = "URL")]
    upstream: Option<String>,
    /// Address and port for clients [env: TIDEGATE_LISTEN] [default: 127.0.0.1:8080]
    #[arg(short, long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// Address and port for health and metrics, or off [env: TIDEGATE_ADMIN] [default: 127.0.0.1:9090]
    #[arg(long, value_name = "ADDRESS")]
    admin: Option<String>,
    /// Calls that may run at once; with --upstream [env: TIDEGATE_SLOTS] [default: 64]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    slots: Option<String>,
    /// Calls that may wait; with --upstream [env: TIDEGATE_QUEUE] [default: as many as slots]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    queue: Option<String>,
    /// Longest wait for a slot; with --upstream [env: TIDEGATE_QUEUE_TIMEOUT] [default: 30s]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    queue_timeout: Option<String>,
    /// What server it is, such as vllm or llama.cpp; with --upstream [env: TIDEGATE_KIND]
    #[arg(long, value_name = "KIND")]
    kind: Option<String>,
    /// cancel, drain or linger, when a client leaves; with --upstream [env: TIDEGATE_ON_ABANDON] [default: by kind]
    #[arg(long, value_name = "CONTRACT")]
    on_abandon: Option<String>,
    /// File with the upstream's key; with --upstream [env: TIDEGATE_API_KEY_FILE]
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<String>,
    /// File with client keys, a line `name: sha256:HEX` or `name: KEY` each [env: TIDEGATE_KEYS_FILE]
    #[arg(long, value_name = "FILE")]
    keys_file: Option<String>,
    /// Serve without client keys on an address that others can reach [env: TIDEGATE_ALLOW_UNAUTHENTICATED]
    #[arg(long)]
    allow_unauthenticated: bool,
    /// error, warn, info, debug or trace [env: TIDEGATE_LOG_LEVEL] [default: info]
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// text or json [env: TIDEGATE_LOG_FORMAT] [default: text]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
}

/// Settings of the demo.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct Demo {
    /// Address and port for clients
    #[arg(short, long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// Address and port for health and metrics
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9090")]
    pub admin: SocketAddr,
}

/// How the hash of a key is printed.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct HashKey {
    /// Print a whole [[keys]] entry with this name
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
}

/// Which gateway is asked.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct Health {
    #[command(flatten)]
    pub at: admin::At,
}

/// Reads the command line; `sources` brings the environment.
///
/// The error of `--help` and `--version` is a text for standard output, see [`Output::from`].
pub fn parse(
    args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    sources: Sources,
) -> Result<Command, clap::Error> {
    let matches = Cli::command().try_get_matches_from(args).map_err(advised)?;
    Ok(match Cli::from_arg_matches(&matches)?.verb {
        Verb::Serve(args) => Command::Serve(args.onto(sources)),
        Verb::Check(args) => Command::Check(args.onto(sources)),
        Verb::Demo(demo) => Command::Demo(demo),
        Verb::Schema => Command::Schema,
        Verb::HashKey(hash_key) => Command::HashKey(hash_key),
        Verb::Health(mut health) => {
            health.at.or(&sources);
            Command::Health(health)
        }
        Verb::Probe(args) => Command::Probe(Box::new(args.read(&sources)?)),
        Verb::Calls(mut calls) => {
            calls.at.or(&sources);
            Command::Calls(calls)
        }
        Verb::Kill(mut kill) => {
            kill.at.or(&sources);
            Command::Kill(kill)
        }
        Verb::Version => return Err(Cli::command().error(ErrorKind::DisplayVersion, VERSION)),
        Verb::Report(report) => Command::Report(report),
        Verb::FakeUpstream(args) => Command::Rig(rig::Command::FakeUpstream(args)),
        Verb::Storm(args) => Command::Rig(rig::Command::Storm(args)),
    })
}

const VERSION: &str = concat!("tidegate ", env!("CARGO_PKG_VERSION"), "\n");

/// Says more where an argument is not known and one knows what was meant.
fn advised(mut error: clap::Error) -> clap::Error {
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    let advice = match given.as_str() {
        "--api-key" | "--key" | "--keys" => {
            "keys have no flag, since a process list shows flags: set TIDEGATE_API_KEY or TIDEGATE_KEYS, or name a file with --api-key-file or --keys-file"
        }
        "--port" | "-p" | "--host" | "--bind" => {
            "address and port are given together: --listen 127.0.0.1:8080"
        }
        given if given.ends_with(".toml") => "the configuration file is given with --config",
        _ => return error,
    };
    error.remove(ContextKind::SuggestedArg);
    let advice = ContextValue::StyledStrs(vec![advice.to_owned().into()]);
    error.insert(ContextKind::Suggested, advice);
    error
}

/// The command tree, for the generated reference.
pub fn command() -> clap::Command {
    Cli::command()
}

/// `tidegate check`. `start` says why a gateway could not start with what is written well. Blocks on files.
pub fn check<E: Display>(sources: &Sources, start: impl Fn(&Config) -> Result<(), E>) -> Output {
    match config::load(sources) {
        Ok(loaded) => {
            let mut stderr: String = loaded
                .warnings
                .iter()
                .map(|warning| format!("{warning}\n"))
                .collect();
            if let Err(error) = start(&loaded.config) {
                stderr.push_str(&format!("{error}\n"));
                return Output {
                    stdout: String::new(),
                    stderr,
                    exit: Exit::Usage,
                };
            }
            Output {
                stdout: config::effective::toml(&loaded),
                stderr,
                exit: Exit::Ok,
            }
        }
        Err(mistakes) => Output {
            stdout: String::new(),
            stderr: format!("{mistakes}\n"),
            exit: Exit::Usage,
        },
    }
}

/// `tidegate schema`.
pub fn schema() -> Output {
    let text = serde_json::to_string_pretty(&config::schema::json()).expect("a JSON value is text");
    Output {
        stdout: text + "\n",
        stderr: String::new(),
        exit: Exit::Ok,
    }
}

/// `tidegate hash-key`. Blocks on `input`.
pub fn hash_key(args: &HashKey, input: impl Read) -> Output {
    let wrong = |why: &str| Output {
        stdout: String::new(),
        stderr: format!("{why}\n"),
        exit: Exit::Usage,
    };
    let mut key = String::new();
    if input.take(1 << 16).read_to_string(&mut key).is_err() {
        return wrong("standard input cannot be read as text");
    }
    let key = key.trim();
    if key.is_empty() || !key.chars().all(|c| c.is_ascii_graphic()) {
        return wrong("a key is one word of printable ASCII characters, on standard input");
    }
    let hash = keys::hex(&keys::hash(key));
    let line = format!("sha256 = \"{hash}\"\n");
    let stdout = match &args.name {
        Some(name) => format!(
            "\n[[keys]]\nname = {}\n{line}",
            config::effective::quoted(name)
        ),
        None => line,
    };
    let weak = if keys::is_short(key) {
        "warning: a key this short can be guessed from its hash\n"
    } else {
        ""
    };
    Output {
        stdout,
        stderr: weak.to_owned(),
        exit: Exit::Ok,
    }
}

// === impl SourceArgs ===

impl SourceArgs {
    fn onto(self, sources: Sources) -> Sources {
        let Self {
            config,
            upstream,
            listen,
            admin,
            slots,
            queue,
            queue_timeout,
            kind,
            on_abandon,
            api_key_file,
            keys_file,
            allow_unauthenticated,
            log_level,
            log_format,
        } = self;
        let flags = [
            ("--config", config),
            ("--upstream", upstream),
            ("--listen", listen),
            ("--admin", admin),
            ("--slots", slots),
            ("--queue", queue),
            ("--queue-timeout", queue_timeout),
            ("--kind", kind),
            ("--on-abandon", on_abandon),
            ("--api-key-file", api_key_file),
            ("--keys-file", keys_file),
            (
                "--allow-unauthenticated",
                allow_unauthenticated.then(|| "true".to_owned()),
            ),
            ("--log-level", log_level),
            ("--log-format", log_format),
        ];
        let given = flags
            .into_iter()
            .filter_map(|(flag, value)| Some((flag, value?)));
        given.fold(sources, |sources, (flag, value)| sources.flag(flag, value))
    }
}

// === impl Exit ===

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

// === impl Output ===

/// Help and version are no mistakes.
impl From<clap::Error> for Output {
    fn from(error: clap::Error) -> Self {
        let text = error.render().to_string();
        if error.use_stderr() {
            Self {
                stdout: String::new(),
                stderr: text,
                exit: Exit::Usage,
            }
        } else {
            Self {
                stdout: text,
                stderr: String::new(),
                exit: Exit::Ok,
            }
        }
    }
}
