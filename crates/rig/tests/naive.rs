//! A judge that passes the naive proxy is no judge: each scenario fails it, by
//! the bars that are about its faults, and passes a server with no proxy before
//! it by the same bars.

mod common;

use std::time::Duration;

use common::Server;
use tidegate_rig::compare::Run;
use tidegate_rig::load::{Bars, Report};
use tidegate_rig::storm::{By, Gateway, Plan, Scenario, Source, failures, storm, upstream_at};

fn gateway(server: &Server, name: &str) -> Gateway {
    let mut gateway = Gateway::direct(server.addr);
    name.clone_into(&mut gateway.name);
    gateway.pid = Some(server.child.id());
    gateway
}

/// Slots of the naive proxy, and of the upstream where it refuses.
const SLOTS: u32 = 8;

/// What a sound gateway of eight slots holds in every scenario.
fn bars() -> Bars {
    Bars {
        max_waste_percent: Some(2.0),
        max_time_wait: Some(5),
        max_close_wait: Some(0),
        max_running_after: Some(0),
        max_mib: Some(24.0),
        max_amplification: Some(1.0),
        max_abandoned_seconds: Some(2.0),
        max_running: Some(u64::from(SLOTS)),
        max_errors: Some(0),
        ..Bars::default()
    }
}

fn plan() -> Plan {
    Plan {
        users: 20,
        calls: Some(60),
        seconds: Some(2.0),
        rate: 30.0,
        tokens: 200,
        pace_ms: 10.0,
        slots: SLOTS,
        patience: Duration::from_millis(100),
        limit: Duration::from_secs(40),
        ..Plan::default()
    }
}

fn judged(report: Report, scenario: Scenario, bars: &Bars) -> Vec<String> {
    let run = Run {
        scenario: scenario.name().to_owned(),
        report,
        ..Run::default()
    };
    let name = |what: &str| what.split(": ").next().unwrap_or_default().to_owned();
    failures(&run, bars).iter().map(|f| name(&f.what)).collect()
}

/// Runs the scenario on the naive proxy, whose failures are to be these, and
/// on the server itself, which has none. (Without a proxy nobody limits what
/// runs at once.)
async fn fails(scenario: Scenario, by: By, expected: &[&str]) {
    let upstream = Server::start(&["fake-upstream"]);
    let source = upstream_at(upstream.addr).await.expect("there");
    let slots = SLOTS.to_string();
    let behind = upstream.addr.to_string();
    let proxy = Server::start(&["naive-proxy", "--upstream", &behind, "--slots", &slots]);
    let plan = Plan { by, ..plan() };
    let naive = storm(&gateway(&proxy, "naive"), Some(&source), scenario, &plan).await;
    let naive = naive.expect("runs");
    assert_eq!(naive.ended_early, None);
    let table = naive.table();
    let found = judged(naive, scenario, &bars());
    assert_eq!(found, expected, "{scenario:?} {by:?}\n{table}");
    drop(proxy);
    let direct = storm(
        &gateway(&upstream, "direct"),
        Some(&source),
        scenario,
        &plan,
    )
    .await;
    let direct = direct.expect("runs");
    let table = direct.table();
    let bars = Bars {
        max_running: None,
        max_amplification: None,
        max_errors: (scenario != Scenario::Retry).then_some(0),
        ..bars()
    };
    let none: [&str; 0] = [];
    assert_eq!(
        judged(direct, scenario, &bars),
        none,
        "{scenario:?} {by:?}\n{table}"
    );
}

const WASTE: &str = "waste %";
const TIME_WAIT: &str = "TIME_WAIT";
const CLOSE_WAIT: &str = "CLOSE_WAIT";
const AFTER: &str = "running after";
const MEMORY: &str = "MiB taken";
const CALLS: &str = "amplification";
const NOBODY: &str = "abandoned call-seconds";
const LIMIT: &str = "running at most";
const ERRORS: &str = "errors";

#[tokio::test]
async fn users_who_cut_their_streams() {
    for by in [By::Rst, By::Fin, By::Drop] {
        fails(Scenario::Abort, by, &[WASTE, AFTER, NOBODY, LIMIT]).await;
    }
}

#[tokio::test]
async fn users_who_leave_before_anything_came() {
    // Its slots are taken by those who have gone: the others never get one.
    fails(Scenario::LeaveEarly, By::Rst, &[AFTER, NOBODY]).await;
    fails(Scenario::LeaveEarly, By::Fin, &[CLOSE_WAIT, AFTER, NOBODY]).await;
}

#[tokio::test]
async fn users_who_give_up_on_whole_answers() {
    fails(Scenario::Abandon, By::Rst, &[WASTE, AFTER, NOBODY]).await;
    fails(
        Scenario::Abandon,
        By::Fin,
        &[WASTE, CLOSE_WAIT, AFTER, NOBODY],
    )
    .await;
}

#[tokio::test]
async fn users_who_read_slowly_or_not_at_all() {
    fails(Scenario::Slow, By::Rst, &[AFTER, MEMORY, NOBODY, LIMIT]).await;
    fails(Scenario::Stalled, By::Rst, &[AFTER, MEMORY, NOBODY, LIMIT]).await;
}

#[tokio::test]
async fn users_who_leave_idle_streams() {
    fails(Scenario::Idle, By::Rst, &[AFTER, NOBODY, LIMIT]).await;
    fails(Scenario::Idle, By::Fin, &[CLOSE_WAIT, AFTER, NOBODY, LIMIT]).await;
}

#[tokio::test]
async fn users_who_crowd_and_read_to_the_end() {
    fails(Scenario::Burst, By::Rst, &[TIME_WAIT, LIMIT]).await;
    fails(Scenario::Steady, By::Rst, &[TIME_WAIT, LIMIT]).await;
}

#[tokio::test]
async fn users_who_try_again() {
    fails(Scenario::Retry, By::Rst, &[TIME_WAIT, CALLS, LIMIT, ERRORS]).await;
}

/// Ends at once on SIGTERM, and whoever reads sees a cut stream.
#[tokio::test]
async fn a_process_that_ends_at_once_when_it_is_asked_to() {
    let source = Source::start(
        "127.0.0.1:0".parse().expect("an address"),
        Default::default(),
    );
    let source = source.expect("a port");
    let behind = source.addr().to_string();
    let proxy = Server::start(&["naive-proxy", "--upstream", &behind]);
    let gateway = gateway(&proxy, "naive");
    let report = storm(&gateway, Some(&source), Scenario::Drain, &plan()).await;
    let report = report.expect("runs");
    assert_eq!(report.ended_early, None);
    assert_eq!(report.error_free_until_drain, Some(true));
    assert!(report.open_at_drain > Some(0), "{:?}", report.open_at_drain);
    assert!(report.exit_seconds.is_some());
    let cut = report.errors.get("a stream was cut").copied();
    assert!(cut > Some(0), "{:?}", report.errors);
    let bars = Bars {
        max_exit_seconds: Some(30.0),
        max_errors: Some(0),
        ..Bars::default()
    };
    assert_eq!(judged(report, Scenario::Drain, &bars), [ERRORS]);
}
