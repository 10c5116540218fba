//! `rig bench`.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::bench::{self, Kind, Machine, Plan, SCENARIOS, markdown, verdicts};

#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// The gateway to judge.
    #[arg(long)]
    tidegate: Option<PathBuf>,
    /// nginx to compare with.
    #[arg(long)]
    nginx: Option<PathBuf>,
    /// HAProxy to compare with.
    #[arg(long)]
    haproxy: Option<PathBuf>,
    /// Also run the naive proxy.
    #[arg(long)]
    naive: bool,
    /// Only these scenarios: calls, streams, steady, idle, slow, storm-rst, storm-fin.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Rounds; 5, or 2 of a quick bench.
    #[arg(long)]
    rounds: Option<usize>,
    /// Smaller loads.
    #[arg(long)]
    quick: bool,
    /// Before each run, wait up to so many seconds for other programs to leave
    /// the machine alone.
    #[arg(long, default_value_t = 0)]
    wait_quiet: u64,
    /// Write the page here.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Write all single results here, one JSON object a line, as they come.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Exit with 1 if Tidegate misses a bar.
    #[arg(long)]
    check: bool,
}

pub(super) async fn run(args: BenchArgs) -> io::Result<bool> {
    crate::load::raise_descriptors(if args.quick { 8_000 } else { 16_000 })?;
    let plan = plan(&args)?;
    let programs: Vec<(&str, &Path, &str)> = plan
        .contenders
        .iter()
        .filter(|(kind, _)| *kind != Kind::Direct)
        .map(|(kind, program)| {
            let flag = match kind {
                Kind::Nginx | Kind::Haproxy => "-v",
                _ => "--version",
            };
            (kind.name(), program.as_path(), flag)
        })
        .collect();
    let machine = Machine::look(&programs).await;
    let ceiling = bench::ceiling().await?;
    super::complain(&format!("rig: without a gateway: {ceiling}"));
    let mut json = match &args.json {
        Some(path) => Some(std::fs::File::create(path)?),
        None => None,
    };
    let runs = bench::run(&plan, |run| {
        if let Some(file) = &mut json {
            let line = serde_json::to_string(run).unwrap_or_default();
            if let Err(e) = io::Write::write_all(file, format!("{line}\n").as_bytes()) {
                super::complain(&format!("rig: --json: {e}"));
            }
        }
    })
    .await;
    let page = markdown(&machine, Some(ceiling), &runs);
    match &args.out {
        Some(path) => std::fs::write(path, &page)?,
        None => super::say(&page)?,
    }
    let missed =
        args.tidegate.is_some() && !verdicts(&runs, "Tidegate").iter().all(bench::Verdict::met);
    Ok(!(args.check && missed))
}

fn plan(args: &BenchArgs) -> io::Result<Plan> {
    let mut contenders = vec![(Kind::Direct, PathBuf::new())];
    let given = [
        (Kind::Nginx, &args.nginx),
        (Kind::Haproxy, &args.haproxy),
        (Kind::Tidegate, &args.tidegate),
    ];
    for (kind, program) in given {
        contenders.extend(program.clone().map(|p| (kind, p)));
    }
    if args.naive {
        contenders.push((Kind::Naive, std::env::current_exe()?));
    }
    for name in &args.only {
        if !SCENARIOS.contains(&name.as_str()) {
            let known = SCENARIOS.join(", ");
            let text = format!("--only {name:?}: scenarios are {known}");
            return Err(io::Error::other(text));
        }
    }
    let wanted = |s: &&str| args.only.is_empty() || args.only.iter().any(|o| o == s);
    Ok(Plan {
        contenders,
        scenarios: SCENARIOS
            .iter()
            .filter(|s| wanted(s))
            .map(|s| (*s).to_owned())
            .collect(),
        rounds: args.rounds.unwrap_or(if args.quick { 2 } else { 5 }).max(1),
        wait_quiet: std::time::Duration::from_secs(args.wait_quiet),
        quick: args.quick,
    })
}
