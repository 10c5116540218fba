//! Storms: what is sound passes, and bad targets are told in clear words. What
//! is not sound stands in `naive.rs`.

use std::net::SocketAddr;
use std::time::Duration;

use tidegate_rig::load::{Bars, Report};
use tidegate_rig::storm::{
    By, Gateway, Plan, Scenario, Source, compare, failures, ratios, storm, upstream_at,
};
use tidegate_rig::{NaiveProxy, Script};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const RIG: &str = env!("CARGO_BIN_EXE_rig");
const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

fn plan() -> Plan {
    Plan {
        users: 20,
        calls: Some(40),
        seconds: Some(1.0),
        rate: 40.0,
        tokens: 100,
        pace_ms: 10.0,
        patience: Duration::from_millis(100),
        limit: Duration::from_secs(30),
        ..Plan::default()
    }
}

fn source() -> Source {
    Source::start(ANY, Script::default()).expect("a port")
}

fn bars() -> Bars {
    Bars {
        max_waste_percent: Some(10.0),
        max_running_after: Some(0),
        max_errors: Some(0),
        ..Bars::default()
    }
}

async fn ran(gateway: &Gateway, source: &Source, scenario: Scenario, plan: &Plan) -> Report {
    let report = storm(gateway, Some(source), scenario, plan).await;
    let report = report.expect("runs");
    assert_eq!(report.ended_early, None, "{scenario:?}");
    report
}

#[tokio::test]
async fn without_a_gateway_every_way_of_leaving_passes() {
    let source = source();
    let direct = Gateway::direct(source.addr());
    for by in [By::Rst, By::Fin, By::Drop] {
        for scenario in [Scenario::Abort, Scenario::LeaveEarly, Scenario::Abandon] {
            let plan = Plan { by, ..plan() };
            let report = ran(&direct, &source, scenario, &plan).await;
            let failures = report.failures(&bars());
            assert_eq!(failures, Vec::<String>::new(), "{scenario:?} {by:?}");
            let truth = report.truth.expect("known");
            assert_eq!((report.calls, truth.calls_begun), (40, 40), "{scenario:?}");
            let gone = truth.ended_peer_fin + truth.ended_peer_rst;
            assert_eq!(gone, 40, "{scenario:?} {by:?}: {truth:?}");
            if by == By::Fin {
                assert_eq!(truth.ended_peer_fin, 40, "{scenario:?}: {truth:?}");
            }
        }
    }
}

#[tokio::test]
async fn readers_who_stay_hold_their_streams_for_the_time_given() {
    let source = source();
    let direct = Gateway::direct(source.addr());
    for scenario in [Scenario::Slow, Scenario::Stalled, Scenario::Idle] {
        let report = ran(&direct, &source, scenario, &plan()).await;
        assert_eq!(
            (report.calls, report.error_count()),
            (20, 0),
            "{scenario:?}"
        );
        let truth = report.truth.expect("known");
        assert_eq!((truth.max_running, truth.running), (20, 0), "{scenario:?}");
        assert!(report.seconds >= 1.0, "{scenario:?}: {}", report.seconds);
        let sockets = report.sockets_during.expect("counted");
        assert_eq!(sockets.count("ESTABLISHED"), 20, "{scenario:?}");
    }
}

#[tokio::test]
async fn streams_read_to_their_end_waste_nothing_and_show_the_distributions() {
    let source = source();
    let direct = Gateway::direct(source.addr());
    for scenario in [Scenario::Steady, Scenario::Burst] {
        let report = ran(&direct, &source, scenario, &plan()).await;
        assert_eq!(report.error_count(), 0, "{scenario:?}: {:?}", report.errors);
        let waste = report.waste.expect("known");
        assert_eq!(
            (waste.wasted, waste.generated),
            (0, waste.received),
            "{scenario:?}"
        );
        assert_eq!(waste.planned, waste.generated, "{scenario:?}");
        for name in ["first event", "delay per chunk", "whole call"] {
            assert!(
                report.distributions.contains_key(name),
                "{scenario:?}: {name}"
            );
        }
        let most = report.series.iter().map(|t| t.open).max();
        assert!(most > Some(0), "{scenario:?}");
    }
}

#[tokio::test]
async fn a_burst_is_counted_from_when_calls_were_due() {
    let source = source();
    let direct = Gateway::direct(source.addr());
    // 200 calls in a second: those of the last are due at its end, and begin
    // whether or not the first are over.
    let plan = Plan {
        rate: 200.0,
        tokens: 50,
        pace_ms: 40.0,
        ..plan()
    };
    let report = ran(&direct, &source, Scenario::Burst, &plan).await;
    assert!((200..=202).contains(&report.calls), "{}", report.calls);
    let truth = report.truth.expect("known");
    assert!(truth.max_running > 100, "{truth:?}");
}

#[tokio::test]
async fn who_retries_multiplies_the_calls_and_the_figure_says_so() {
    let source = source();
    let direct = Gateway::direct(source.addr());
    let plan = Plan {
        slots: 4,
        calls: Some(20),
        tokens: 20,
        ..plan()
    };
    let report = ran(&direct, &source, Scenario::Retry, &plan).await;
    let amplification = report.amplification.expect("measured");
    assert!(
        amplification > 1.0 && amplification <= 3.0,
        "{amplification}"
    );
    let bars = Bars {
        max_amplification: Some(1.0),
        ..Bars::default()
    };
    assert_eq!(report.failures(&bars).len(), 1);
    // The upstream is what it was: nobody is refused any more.
    let after = ran(&direct, &source, Scenario::Steady, &plan).await;
    assert_eq!(after.error_count(), 0, "{:?}", after.errors);
}

#[tokio::test]
async fn gateways_take_turns_and_are_set_side_by_side() {
    let source = source();
    let proxy = NaiveProxy::start(ANY, source.addr(), 1000)
        .await
        .expect("a port");
    let mut naive = Gateway::direct(proxy.addr());
    naive.name = "naive".to_owned();
    let gateways = [Gateway::direct(source.addr()), naive];
    let mut order = Vec::new();
    let plan = Plan {
        calls: Some(20),
        rounds: 2,
        ..plan()
    };
    let runs = compare(&gateways, Some(&source), &[Scenario::Abort], &plan, |run| {
        order.push(run.gateway.clone());
    })
    .await;
    assert_eq!(order, ["direct", "naive", "naive", "direct"]);
    let all = ratios(&runs);
    let wasted = |who: &str| {
        let found = all
            .iter()
            .find(|c| c.gateway == who && c.figure.starts_with("wasted"));
        found.expect("compared").value.median
    };
    assert!(wasted("naive") > 5.0 * wasted("direct").max(0.1));
}

/// A server that says these bytes to whoever comes.
async fn rubbish(bytes: &'static [u8]) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind(ANY).await.expect("a port");
    let addr = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = client.read(&mut [0; 1024]).await;
                let _ = client.write_all(bytes).await;
            });
        }
    });
    addr
}

#[tokio::test]
async fn rubbish_ends_the_storm_early_with_a_word() {
    let addr = rubbish(b"SSH-2.0-OpenSSH_9.2\r\n").await;
    let plan = Plan {
        calls: Some(100_000),
        ..plan()
    };
    let report = storm(&Gateway::direct(addr), None, Scenario::Abort, &plan).await;
    let early = report.expect("begins").ended_early.expect("ended early");
    assert!(early.contains("does not speak HTTP"), "{early}");
}

/// Nothing is wasted of what never came: no bar would object.
#[tokio::test]
async fn a_storm_that_measured_nothing_is_no_pass() {
    let objections = async |served: &Source, upstream: &Source, scenario| {
        let plan = Plan {
            users: 2,
            calls: Some(4),
            // For an answer to come at all, ten storms beside each other and others beside them.
            seconds: Some(1.5),
            ..plan()
        };
        let gateway = Gateway::direct(served.addr());
        let runs = compare(&[gateway], Some(upstream), &[scenario], &plan, |_| ()).await;
        let found = failures(&runs[0], &Bars::default());
        found.into_iter().map(|f| f.what).collect::<Vec<String>>()
    };
    let sound = async |scenario| {
        let here = source();
        let none = objections(&here, &here, scenario).await;
        assert_eq!(none, Vec::<String>::new(), "{scenario:?}");
    };
    let astray = async |scenario| {
        let (here, elsewhere) = (source(), source());
        let said = objections(&here, &elsewhere, scenario).await;
        let word = format!("calls came to the upstream at {}", elsewhere.addr());
        assert!(
            said.len() == 1 && said[0].contains(&word),
            "{scenario:?}: {said:?}"
        );
    };
    let refused = async |scenario| {
        let refusing = Script {
            status: 401,
            ..Script::default()
        };
        let refusing = Source::start(ANY, refusing).expect("a port");
        let said = objections(&refusing, &refusing, scenario).await;
        let word = |w: &str| said.len() == 1 && said[0].contains(w);
        let told = word("every call went wrong: ") && word("x status 401");
        assert!(told, "{scenario:?}: {said:?}");
    };
    tokio::join!(
        sound(Scenario::Abort),
        sound(Scenario::LeaveEarly),
        sound(Scenario::Burst),
        astray(Scenario::Abort),
        astray(Scenario::LeaveEarly),
        astray(Scenario::Slow),
        refused(Scenario::Abort),
        refused(Scenario::Abandon),
        refused(Scenario::Idle),
        refused(Scenario::Steady),
    );
}

/// However a gateway frames its answers, one that ends too early is no answer.
#[tokio::test]
async fn a_cut_stream_is_an_error_in_each_framing() {
    let plan = Plan {
        users: 1,
        calls: Some(2),
        ..plan()
    };
    for (bytes, errors) in [
        (&b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {}\n\n"[..], 2),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\na\r\ndata: {}\n\n\r\n", 2),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: {}\n\n", 2),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {}\n\ndata: [DONE]\n\n", 0),
    ] {
        let gateway = Gateway::direct(rubbish(bytes).await);
        let report = storm(&gateway, None, Scenario::Steady, &plan).await;
        let report = report.expect("begins");
        let words = String::from_utf8_lossy(bytes);
        assert_eq!((report.calls, report.error_count()), (2, errors), "{words}");
        let cut = report.errors.get("a stream was cut").copied();
        assert_eq!(cut.unwrap_or(0), errors, "{words}: {:?}", report.errors);
    }
}

#[tokio::test]
async fn a_gateway_that_dies_ends_the_storm_early_and_the_figures_are_kept() {
    let source = source();
    let proxy = NaiveProxy::start(ANY, source.addr(), 1000)
        .await
        .expect("a port");
    let gateway = Gateway::direct(proxy.addr());
    let plan = Plan {
        seconds: Some(60.0),
        tokens: 5,
        ..plan()
    };
    let plan = Plan {
        calls: None,
        ..plan
    };
    let dies = async {
        loop {
            if source.truth().await.expect("known").ended_complete > 50 {
                return drop(proxy);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let (report, ()) = tokio::join!(storm(&gateway, None, Scenario::Steady, &plan), dies);
    let report = report.expect("begins");
    let early = report.ended_early.expect("ended early");
    assert!(
        early.contains("no connection could be made any more"),
        "{early}"
    );
    assert!(report.calls > 50 && report.first_event.is_some());
}

/// Connections are made and requests are read, and that is all.
#[tokio::test]
async fn a_gateway_that_never_answers_ends_the_storm_at_its_limit() {
    let listener = tokio::net::TcpListener::bind(ANY).await.expect("a port");
    let gateway = Gateway::direct(listener.local_addr().expect("bound"));
    let plan = Plan {
        limit: Duration::from_secs(1),
        ..plan()
    };
    let report = storm(&gateway, None, Scenario::Steady, &plan).await;
    let report = report.expect("begins");
    let early = report.ended_early.expect("ended early");
    assert!(early.contains("not done after 1 s (--limit)"), "{early}");
    assert!(report.attempts > 0 && report.calls == 0);
    // Nobody held a stream that never began.
    for scenario in [Scenario::Idle, Scenario::Slow, Scenario::Stalled] {
        let plan = Plan {
            users: 3,
            seconds: Some(0.2),
            ..plan.clone()
        };
        let report = storm(&gateway, None, scenario, &plan)
            .await
            .expect("begins");
        let held = report.errors.get("nothing of a stream came");
        assert_eq!(held, Some(&3), "{scenario:?}: {:?}", report.errors);
    }
}

/// The gateway lives on, and what users saw is kept; what ran is not known.
#[tokio::test]
async fn an_upstream_that_dies_is_said_and_the_figures_are_kept() {
    let served = source();
    let truth = source();
    let elsewhere = upstream_at(truth.addr()).await.expect("there");
    let plan = Plan {
        tokens: 5,
        calls: None,
        ..plan()
    };
    let dies = async {
        loop {
            if served.truth().await.expect("known").ended_complete > 50 {
                return drop(truth);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let gateway = Gateway::direct(served.addr());
    let (report, ()) = tokio::join!(
        storm(&gateway, Some(&elsewhere), Scenario::Steady, &plan),
        dies
    );
    let report = report.expect("begins");
    assert!(report.calls > 50 && report.first_event.is_some());
    assert!(report.truth.is_none() && report.waste.is_none());
    let said = |word: &str| report.errors.keys().any(|e| e.starts_with(word));
    assert!(said("the upstream's truth: "), "{:?}", report.errors);
    let bars = Bars {
        max_waste_percent: Some(100.0),
        ..Bars::default()
    };
    assert_eq!(report.failures(&bars), ["waste %: not measured, bar 100"]);
}

/// The scenario that makes it refuse leaves it as it was, also when it runs
/// elsewhere.
#[tokio::test]
async fn an_upstream_elsewhere_gets_its_script_back_and_is_left_with_nothing_running() {
    let served = Script {
        name: Some("mine".to_owned()),
        ..Script::default()
    };
    let ours = Source::start(ANY, served).expect("a port");
    let elsewhere = upstream_at(ours.addr()).await.expect("there");
    let direct = Gateway::direct(ours.addr());
    let plan = Plan {
        calls: Some(20),
        tokens: 20,
        slots: 4,
        ..plan()
    };
    let report = ran(&direct, &elsewhere, Scenario::Retry, &plan).await;
    assert!(report.amplification > Some(1.0));
    let proxy = NaiveProxy::start(ANY, ours.addr(), 1000)
        .await
        .expect("a port");
    let naive = Gateway::direct(proxy.addr());
    let plan = Plan {
        tokens: 2000,
        ..plan
    };
    let report = ran(&naive, &elsewhere, Scenario::Abort, &plan).await;
    assert_eq!(report.error_count(), 0, "{:?}", report.errors);
    assert_eq!(report.running_after, Some(20));
    let end = tokio::time::Instant::now() + Duration::from_secs(5);
    while ours.truth().await.expect("known").running > 0 {
        assert!(tokio::time::Instant::now() < end, "it was not cut");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn nobody_there_is_an_error_before_anything_runs() {
    let addr = {
        let listener = std::net::TcpListener::bind(ANY).expect("a port");
        listener.local_addr().expect("bound")
    };
    let error = storm(&Gateway::direct(addr), None, Scenario::Abort, &plan()).await;
    let error = error.expect_err("nobody there").to_string();
    assert!(error.contains("no gateway at http://127.0.0.1:"), "{error}");
}

/// Only root may make a network namespace; who may not is told so. A fake
/// upstream closes nothing by itself, so that what runs for machines that are
/// gone runs on.
#[tokio::test]
async fn machines_that_vanish_leave_their_work_running() {
    let everywhere = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0);
    let source = Source::start(everywhere, Script::default()).expect("a port");
    let addr = SocketAddr::new(ANY.ip(), source.addr().port());
    let plan = Plan { users: 5, ..plan() };
    match tidegate_rig::storm::vanish(&Gateway::direct(addr), Some(&source), &plan, RIG.as_ref())
        .await
    {
        Ok(report) => {
            assert_eq!(report.ended_early, None);
            assert_eq!((report.calls, report.running_after), (5, Some(5)));
            assert_eq!(report.stopped_after_seconds, None);
            assert!(
                report
                    .failures(&bars())
                    .iter()
                    .any(|f| f.starts_with("running after"))
            );
        }
        Err(e) => assert!(
            e.to_string()
                .starts_with("vanish needs a network namespace: "),
            "{e}"
        ),
    }
}
