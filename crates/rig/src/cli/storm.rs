//! `storm`.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::bars::BarArgs;
use super::words::TimeMs;
use crate::Script;
use crate::bench::Machine;
use crate::compare::Run;
use crate::load::Bars;
use crate::storm::{
    By, Ceiling, Failure, Gateway, Plan, Scenario, Source, VanishArgs, ceiling, compare,
    failures as of_run, page, ratios, side_by_side, upstream_at, vanish_clients,
};

/// Text after the options' list.
pub const STORM_HELP: &str = "\
Examples:
  tidegate storm --target http://127.0.0.1:8080 --upstream-listen 127.0.0.1:8000
  tidegate storm abort --by fin --users 500 --calls 5000 --max-waste 0.1% --max-time-wait 150 --max-close-wait 0
  tidegate storm abandon leave-early steady --html storm.html --json storm.json
  tidegate storm retry --slots 8 --users 40 --max-amplification 2
  tidegate storm abort burst --rounds 3 --compare nginx=http://127.0.0.1:8081 --compare mine=http://127.0.0.1:8082

Put any gateway in front of a fake upstream: either one that this command starts (--upstream-listen; point the
gateway at that address), or `tidegate fake-upstream` elsewhere (--upstream). The upstream knows what really ran.
Without one, only what clients see is measured. The gateway's process is found by its port on this machine.

Work is abandoned while more calls run at the upstream than clients have open, and queued while fewer do.

Exit codes: 0 all bars held, 1 a bar did not hold, or a storm ended early or measured nothing (what was measured is printed and
written), 2 nothing was run.";

/// Settings of a storm.
#[derive(Clone, Debug, Args)]
pub struct StormArgs {
    /// What users do; several run one after the other [default: abort]
    #[arg(value_enum, value_name = "SCENARIO")]
    scenarios: Vec<Scenario>,
    /// The gateway
    #[arg(
        short,
        long,
        value_name = "URL",
        default_value = "http://127.0.0.1:8080"
    )]
    target: String,
    /// Instead of one gateway several, in turn; NAME=URL, may be given more than once
    #[arg(long, value_name = "NAME=URL", conflicts_with_all = ["target", "pid"])]
    compare: Vec<String>,
    /// Rounds of a comparison
    #[arg(long, value_name = "N", default_value_t = 3, requires = "compare")]
    rounds: usize,
    /// The fake upstream behind the gateway
    #[arg(long, value_name = "ADDRESS")]
    upstream: Option<SocketAddr>,
    /// Start a fake upstream here; the gateway has to be pointed at it
    #[arg(long, value_name = "ADDRESS", conflicts_with = "upstream")]
    upstream_listen: Option<SocketAddr>,
    /// The gateway's process, where its port does not tell
    #[arg(long)]
    pid: Option<u32>,
    /// Users at once
    #[arg(long, value_name = "N", default_value_t = 100)]
    users: usize,
    /// Calls in all, of scenarios that count them [default: ten for each user]
    #[arg(long, value_name = "N")]
    calls: Option<u64>,
    /// Length of the other scenarios [default: 10; `vanish` waits up to 60 for the work to end]
    #[arg(long, value_name = "N")]
    seconds: Option<f64>,
    /// Calls a second of `burst`
    #[arg(long, value_name = "N", default_value_t = 100.0)]
    rate: f64,
    /// Tokens of an answer; `retry`, `burst` and `drain` ask for 50 at most
    #[arg(long, value_name = "N", default_value_t = 200)]
    tokens: u64,
    /// Time between tokens
    #[arg(long, value_name = "TIME", default_value = "20ms")]
    pace: TimeMs,
    /// The chunk at which users leave
    #[arg(long, value_name = "N", default_value_t = 5)]
    at: u64,
    /// How users leave
    #[arg(long, value_enum, default_value_t = By::Rst)]
    by: By,
    /// Before `abort`, also time the first event while nobody leaves (--max-first-event-ratio does so too)
    #[arg(long)]
    undisturbed: bool,
    /// How long users wait who leave without an answer
    #[arg(long, value_name = "TIME", default_value = "200ms")]
    patience: TimeMs,
    /// Calls that the upstream takes at once in `retry`; others get 503
    #[arg(long, value_name = "N", default_value_t = 8)]
    slots: u32,
    /// Longest time of one scenario
    #[arg(long, value_name = "TIME", default_value = "180s")]
    limit: TimeMs,
    /// Request path
    #[arg(long, value_name = "PATH")]
    path: Option<String>,
    /// Further request header
    #[arg(long, value_name = "NAME: VALUE")]
    header: Vec<String>,
    /// File with a client key, sent as a bearer token
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Model asked for
    #[arg(long, default_value = "tiny")]
    model: String,
    /// Write everything as JSON here, or - for standard output instead of tables
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a report with plots here
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// No progress on standard error
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    bars: BarArgs,
    #[command(flatten)]
    vanish: VanishArgs,
}

/// Everything that is written as JSON.
#[derive(serde::Serialize)]
struct Document<'a> {
    machine: &'a Machine,
    plan: &'a Plan,
    ceiling: Option<Ceiling>,
    runs: &'a [Run],
    compared: Vec<crate::storm::Compared>,
    failures: &'a [Failure],
}

fn wrong(text: impl Into<String>) -> io::Error {
    io::Error::other(text.into())
}

impl StormArgs {
    fn plan(&self) -> Plan {
        Plan {
            users: self.users,
            calls: self.calls,
            seconds: self.seconds,
            rate: self.rate,
            tokens: self.tokens,
            pace_ms: self.pace.0,
            at: self.at,
            by: self.by,
            patience: Duration::from_millis(self.patience.whole()),
            slots: self.slots,
            rounds: if self.compare.is_empty() {
                1
            } else {
                self.rounds
            },
            limit: Duration::from_millis(self.limit.whole()),
            undisturbed: self.undisturbed || self.bars.bars().max_first_event_ratio.is_some(),
            progress: !self.quiet,
        }
    }

    fn scenarios(&self) -> Vec<Scenario> {
        if self.scenarios.is_empty() {
            vec![Scenario::Abort]
        } else {
            self.scenarios.clone()
        }
    }

    fn gateways(&self) -> io::Result<Vec<Gateway>> {
        let mut gateways = Vec::new();
        if self.compare.is_empty() {
            gateways.push(Gateway::at(&self.target).map_err(wrong)?);
        }
        for one in &self.compare {
            let (name, url) = one
                .split_once('=')
                .ok_or_else(|| wrong(format!("--compare {one:?}: expected NAME=URL")))?;
            if name.trim().is_empty() {
                return Err(wrong(format!("--compare {one:?}: the name is empty")));
            }
            let mut gateway = Gateway::at(url).map_err(wrong)?;
            name.clone_into(&mut gateway.name);
            if gateways.iter().any(|g: &Gateway| g.name == gateway.name) {
                return Err(wrong(format!("--compare: two gateways are named {name:?}")));
            }
            gateways.push(gateway);
        }
        let mut headers = Vec::new();
        for header in &self.header {
            let (name, value) = header
                .split_once(':')
                .ok_or_else(|| wrong(format!("--header {header:?}: expected `name: value`")))?;
            headers.push((name.trim().to_owned(), value.trim().to_owned()));
        }
        if let Some(file) = &self.key_file {
            let said = |e| wrong(format!("--key-file {}: {e}", file.display()));
            let key = std::fs::read_to_string(file).map_err(said)?;
            headers.push(("authorization".to_owned(), format!("Bearer {}", key.trim())));
        }
        for gateway in &mut gateways {
            gateway.headers.clone_from(&headers);
            gateway.model.clone_from(&self.model);
            if let Some(path) = &self.path {
                gateway.path.clone_from(path);
            }
            gateway.find_process(self.pid).map_err(wrong)?;
        }
        Ok(gateways)
    }

    /// What cannot be, before anything runs.
    fn contradictions(&self, gateways: &[Gateway], bars: &Bars) -> io::Result<()> {
        let (plan, scenarios) = (self.plan(), self.scenarios());
        for scenario in &scenarios {
            if let Some(why) = scenario.contradiction(&plan) {
                return Err(wrong(why));
            }
        }
        let counts = [self.users as u64, self.rounds as u64, self.tokens, self.at];
        if counts.contains(&0) || self.calls == Some(0) || self.limit.0 <= 0.0 {
            return Err(wrong(
                "--users, --calls, --rounds, --tokens and --at are 1 or more, and --limit is above 0",
            ));
        }
        let sane = |n: f64| n.is_finite() && n > 0.0 && n <= 1e6;
        if !self.seconds.is_none_or(sane) || !sane(self.rate) {
            return Err(wrong(
                "--seconds and --rate are above 0 and at most 1000000",
            ));
        }
        if let Some(at) = scenarios.iter().position(|s| *s == Scenario::Drain) {
            if at + 1 < scenarios.len() || !self.compare.is_empty() {
                return Err(wrong(
                    "drain ends the gateway: it is the last scenario, and of one gateway only",
                ));
            }
            if gateways.iter().any(|g| g.pid.is_none()) {
                return Err(wrong("drain: give the gateway's process with --pid"));
            }
        }
        let judged = |bar: &&str| {
            let of = |s: &Scenario| s.judged(bars).set().contains(bar);
            scenarios.iter().any(of)
        };
        if let Some(bar) = bars.set().into_iter().find(|bar| !judged(bar)) {
            let names: Vec<&str> = scenarios.iter().map(|s| s.name()).collect();
            return Err(wrong(format!(
                "{bar}: {} has no such figure; leave it out, or add a scenario that has it (--help)",
                names.join(", ")
            )));
        }
        let truth = self.upstream.is_some() || self.upstream_listen.is_some();
        if !truth && bars.needs_truth() {
            return Err(wrong(
                "a bar on waste, on what runs on or on amplification needs --upstream or --upstream-listen",
            ));
        }
        let unseen = |g: &&Gateway| g.pid.is_none() && !self.is_upstream(g);
        if let Some(gateway) = gateways.iter().find(unseen)
            && bars.needs_process()
        {
            return Err(wrong(format!(
                "a bar on memory or CPU needs the gateway's process; that of {} is not found by its port: give --pid",
                gateway.url()
            )));
        }
        Ok(())
    }

    /// Whether nothing stands between users and upstream: such a gateway has no
    /// process to be judged.
    fn is_upstream(&self, gateway: &Gateway) -> bool {
        let upstreams = [self.upstream, self.upstream_listen];
        upstreams.into_iter().flatten().any(|a| gateway.is(a))
    }

    /// Where results go is found out before anything runs, not after it.
    fn outputs(&self) -> io::Result<()> {
        let dash = std::path::Path::new("-");
        if self.html.as_deref() == Some(dash) {
            return Err(wrong("--html -: a page goes into a file; give its name"));
        }
        let json = self.json.iter().filter(|file| file.as_path() != dash);
        for file in json.chain(&self.html) {
            let opened = std::fs::OpenOptions::new()
                .append(true)
                .create(true)
                .open(file);
            opened.map_err(|e| wrong(format!("{}: {e}", file.display())))?;
        }
        Ok(())
    }

    /// Writes results where they were asked for; whether all could be. What one
    /// file does not take does not cost the other.
    fn keep(&self, all: &Document<'_>) -> io::Result<bool> {
        let mut written = Vec::new();
        if let Some(file) = &self.json {
            let text = serde_json::to_string_pretty(all)?;
            written.push(match file.as_path() == std::path::Path::new("-") {
                true => super::say(&text),
                false => write(file, &text),
            });
        }
        if let Some(file) = &self.html {
            let page = page(all.machine, all.ceiling, all.runs, all.failures);
            written.push(write(file, &page));
        }
        let lost: Vec<io::Error> = written.into_iter().filter_map(Result::err).collect();
        for e in &lost {
            super::complain(&format!("not kept: {e}"));
        }
        Ok(lost.is_empty())
    }

    async fn source(&self) -> io::Result<Option<Source>> {
        match (self.upstream, self.upstream_listen) {
            (Some(addr), _) => upstream_at(addr).await.map(Some),
            (_, Some(addr)) => Source::start(addr, Script::default()).map(Some),
            _ => Ok(None),
        }
    }
}

pub(super) async fn run(args: StormArgs) -> io::Result<bool> {
    if let Some((to, request)) = args.vanish.asked() {
        crate::load::raise_descriptors(args.users as u64 + 64)?;
        return vanish_clients(to, request, args.users).await.map(|()| true);
    }
    let bars = args.bars.bars();
    let gateways = args.gateways()?;
    args.contradictions(&gateways, &bars)?;
    args.outputs()?;
    for unseen in gateways.iter().filter_map(|g| g.unseen.as_ref()) {
        super::complain(unseen);
    }
    crate::load::raise_descriptors(args.users as u64 + 64)?;
    let source = args.source().await?;
    for gateway in &gateways {
        gateway.reachable().await?;
    }
    let machine = Machine::look(&[]).await;
    let ceiling = match &source {
        Some(source) => {
            source.unused().await?;
            Some(ceiling(source).await?)
        }
        None => None,
    };
    let plan = args.plan();
    let tables = args.json.as_deref() != Some(std::path::Path::new("-"));
    let mut failures = Vec::new();
    let runs = compare(
        &gateways,
        source.as_ref(),
        &args.scenarios(),
        &plan,
        |run| {
            let shown = show(run, ceiling, tables, &args, plan.rounds);
            let direct = |g: &Gateway| g.name == run.gateway && args.is_upstream(g);
            let bars = match gateways.iter().any(direct) {
                true => bars.without_process(),
                false => bars.clone(),
            };
            failures.extend(of_run(run, &bars));
            if let Err(e) = shown {
                super::complain(&format!("standard output: {e}"));
            }
        },
    )
    .await;
    if !args.compare.is_empty() && tables {
        super::say(side_by_side(&runs).trim_end())?;
    }
    for failure in &failures {
        super::complain(&format!("FAILED {failure}"));
    }
    let document = Document {
        machine: &machine,
        plan: &plan,
        ceiling,
        runs: &runs,
        compared: ratios(&runs),
        failures: &failures,
    };
    Ok(args.keep(&document)? && failures.is_empty())
}

fn write(file: &std::path::Path, text: &str) -> io::Result<()> {
    std::fs::write(file, text).map_err(|e| wrong(format!("{}: {e}", file.display())))
}

fn show(
    run: &Run,
    ceiling: Option<Ceiling>,
    tables: bool,
    args: &StormArgs,
    rounds: usize,
) -> io::Result<()> {
    if !tables {
        return Ok(());
    }
    let mut text = String::new();
    if !args.compare.is_empty() {
        text = format!("{}, round {} of {rounds}\n", run.gateway, run.round + 1);
    }
    text.push_str(&run.report.table());
    if let Some(ceiling) = ceiling {
        text.push_str(&format!("without a gateway  {ceiling}\n"));
    }
    super::say(&text)
}
