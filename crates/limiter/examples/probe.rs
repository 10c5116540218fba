//! A limit of one, three calls abandoned after 20 ms: how many really run, what is countable, what an
//! exit does.
//!
//! `cargo run -p tidegate-limiter --all-features --example probe`
#![expect(clippy::print_stdout, reason = "the result of the probe")]

#[path = "../tests/conformance/subjects.rs"]
mod subjects;
#[path = "../tests/conformance/suite.rs"]
mod suite;

use std::error::Error;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use self::subjects::{CallersPermit, LimitInside, LimitOutside, MovedPermit, Ours};
use self::suite::{Gate, PATIENCE, Subject, three_abandoned};

/// A process that has not left by then hangs.
const EXIT_PATIENCE: Duration = Duration::from_secs(2);

fn main() -> Result<ExitCode, Box<dyn Error>> {
    if let Some(which) = std::env::args().nth(1) {
        leave_one_behind(&which)?;
        return Ok(ExitCode::SUCCESS);
    }
    println!("a limit of one, three calls abandoned after {PATIENCE:?}\n");
    println!(
        "{:<46} {:>6} {:>10} {:>10} {:>14}",
        "limiter", "really", "countable", "ran later", "exit"
    );
    let runtime = Runtime::new()?;
    runtime.block_on(async {
        row("callers", &CallersPermit::new()).await?;
        row("moved", &MovedPermit::new()).await?;
        row("outside", &LimitOutside::new()).await?;
        row("inside", &LimitInside::new()).await?;
        row("ours", &Ours::new()).await
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn row(which: &str, subject: &impl Subject) -> Result<(), Box<dyn Error>> {
    let report = three_abandoned(subject).await;
    let countable = match report.leftovers {
        Some(calls) => format!("yes: {calls}"),
        None => "no".to_owned(),
    };
    println!(
        "{:<46} {:>6} {countable:>10} {:>10} {:>14}",
        subject.name(),
        report.real,
        report.ran_later,
        exit(which)?,
    );
    Ok(())
}

/// Starts this program again to leave a blocked call behind, and looks whether it ends.
fn exit(which: &str) -> Result<String, Box<dyn Error>> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg(which)
        .stdout(Stdio::null())
        .spawn()?;
    let begun = Instant::now();
    while begun.elapsed() < EXIT_PATIENCE {
        if child.try_wait()?.is_some() {
            return Ok(format!("in {} ms", begun.elapsed().as_millis()));
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
    end(child)?;
    Ok("hangs".to_owned())
}

fn end(mut child: Child) -> Result<(), Box<dyn Error>> {
    child.kill()?;
    child.wait()?;
    Ok(())
}

fn leave_one_behind(which: &str) -> Result<(), Box<dyn Error>> {
    let runtime = Runtime::new()?;
    let never_opened = Arc::new(Gate::default());
    let work = never_opened.work();
    runtime.block_on(async {
        match which {
            "callers" => CallersPermit::new().call(work, PATIENCE).await,
            "moved" => MovedPermit::new().call(work, PATIENCE).await,
            "outside" => LimitOutside::new().call(work, PATIENCE).await,
            "inside" => LimitInside::new().call(work, PATIENCE).await,
            _ => Ours::new().call(work, PATIENCE).await,
        }
    });
    Ok(())
}
