//! The judge's `drain`: SIGTERM to the program under load, and nobody who was
//! there loses an answer. (That it fails a process which ends at once stands
//! with the judge: `crates/rig/tests/naive.rs`.)

use std::time::Duration;

use tidegate_rig::Script;
use tidegate_rig::compare::Run;
use tidegate_rig::load::Bars;
use tidegate_rig::storm::{Gateway, Plan, Scenario, Source, failures, storm};

use crate::binary::Program;

/// With half of the users in the queue: those are served too.
#[tokio::test]
async fn who_is_there_at_sigterm_gets_all_of_the_answer() {
    let anywhere = "127.0.0.1:0".parse().expect("an address");
    let source = Source::start(anywhere, Script::default()).expect("a port");
    let text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\ndrain = \"20s\"\n[admin]\nlisten = \"127.0.0.1:0\"\n\
         [[upstreams]]\nurl = \"http://{}\"\nslots = 10\nqueue = 20\n",
        source.addr()
    );
    let mut program = Program::configured(&text);
    let mut gateway = Gateway::direct(program.address("listen=").await);
    gateway.pid = Some(program.pid());
    let plan = Plan {
        users: 20,
        seconds: Some(1.0),
        tokens: 40,
        pace_ms: 10.0,
        limit: Duration::from_secs(40),
        ..Plan::default()
    };
    let report = storm(&gateway, Some(&source), Scenario::Drain, &plan).await;
    let report = report.expect("runs");
    assert_eq!(program.exit().await, 0, "{}", program.err());
    let table = report.table();
    assert!(report.open_at_drain > Some(10), "{table}");
    let truth = report.truth.expect("known");
    assert_eq!(truth.calls_begun, truth.ended_complete, "{table}");
    assert_eq!(report.calls, truth.calls_begun, "{table}");
    let run = Run {
        scenario: "drain".to_owned(),
        report,
        ..Run::default()
    };
    let bars = Bars {
        max_waste_percent: Some(0.0),
        max_running_after: Some(0),
        max_running: Some(10),
        max_exit_seconds: Some(20.0),
        max_errors: Some(0),
        max_close_wait: Some(0),
        ..Bars::default()
    };
    assert_eq!(failures(&run, &bars), [], "{table}");
}
