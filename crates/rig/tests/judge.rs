//! The judge judged: it passes what is sound and fails what is not.

use std::net::SocketAddr;

use tidegate_rig::load::{
    Bars, CallsPlan, Cut, HeldPlan, Leave, StormPlan, StreamsPlan, Target, calls, idle, storm,
    streams,
};
use tidegate_rig::{FakeUpstream, NaiveProxy, Script};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

fn plan(cut: Cut, leave: Leave) -> StormPlan {
    StormPlan {
        users: 40,
        calls: 80,
        pace_ms: 20.0,
        tokens: 300,
        leave,
        cut_at: 5,
        cut,
        undisturbed: false,
    }
}

fn bars() -> Bars {
    Bars {
        max_waste_percent: Some(10.0),
        max_running_after: Some(0),
        max_errors: Some(0),
        ..Bars::default()
    }
}

async fn upstream() -> FakeUpstream {
    FakeUpstream::start(ANY, Script::default())
        .await
        .expect("a loopback port")
}

fn target(addr: SocketAddr, upstream: &FakeUpstream) -> Target {
    let mut target = Target::new(addr);
    target.upstream = Some(upstream.addr());
    target
}

#[tokio::test]
async fn the_storm_passes_without_a_proxy() {
    let upstream = upstream().await;
    let target = target(upstream.addr(), &upstream);
    for (cut, leave) in [
        (Cut::Rst, Leave::Chunk),
        (Cut::Fin, Leave::Chunk),
        (Cut::Fin, Leave::Prefill),
        (Cut::Rst, Leave::Plain),
    ] {
        let report = storm(&target, &plan(cut, leave)).await.expect("runs");
        assert_eq!(report.failures(&bars()), Vec::<String>::new(), "{leave:?}");
        assert_eq!(report.calls, 80);
    }
}

#[tokio::test]
async fn the_storm_fails_the_naive_proxy() {
    let upstream = upstream().await;
    let proxy = NaiveProxy::start(ANY, upstream.addr(), 1000)
        .await
        .expect("a loopback port");
    let target = target(proxy.addr(), &upstream);
    for leave in [Leave::Chunk, Leave::Plain] {
        let report = storm(&target, &plan(Cut::Rst, leave)).await.expect("runs");
        let failures = report.failures(&bars());
        for bar in ["waste", "running after"] {
            let failed = failures.iter().any(|f| f.starts_with(bar));
            assert!(failed, "{leave:?}: {failures:?}");
        }
        assert_eq!(report.error_count(), 0, "{:?}", report.errors);
    }
}

#[tokio::test]
async fn a_bar_that_was_not_measured_fails() {
    let upstream = upstream().await;
    let plan = CallsPlan {
        connections: 4,
        calls: 50,
        warmup: 0,
        ..CallsPlan::default()
    };
    let target = target(upstream.addr(), &upstream);
    let report = calls(&target, &plan).await.expect("runs");
    assert_eq!((report.calls, report.error_count()), (50, 0));
    let bars = Bars {
        max_cpu_us_per_call: Some(1e9),
        ..Bars::default()
    };
    let failures = report.failures(&bars);
    assert_eq!(failures.len(), 1);
    assert!(failures[0].contains("not measured"), "{failures:?}");
}

#[tokio::test]
async fn streams_are_counted_and_their_delay_is_measured() {
    let upstream = upstream().await;
    let target = target(upstream.addr(), &upstream);
    let plan = StreamsPlan {
        streams: 10,
        pace_ms: 5.0,
        seconds: 0.3,
        warmup_seconds: 0.0,
        ..StreamsPlan::default()
    };
    let report = streams(&target, &plan).await.expect("runs");
    let most = 10.0 * report.seconds / 0.005;
    let chunks = f64::from(u32::try_from(report.chunks).expect("few"));
    assert!(
        chunks > 0.0 && chunks < most * 1.5 + 50.0,
        "{chunks} of {most}"
    );
    let delay = report.delay.expect("measured");
    assert!(delay.count > 0 && delay.p50_ms < 1000.0, "{delay:?}");
    let held = HeldPlan {
        streams: 20,
        seconds: 0.1,
    };
    let report = idle(&target, &held).await.expect("runs");
    let sockets = report.sockets_during.expect("counted");
    assert_eq!(sockets.downstream.get("ESTABLISHED"), Some(&20));
}

#[tokio::test]
async fn a_target_that_is_not_there_is_said_so() {
    let upstream = upstream().await;
    let addr = upstream.addr();
    upstream.stop();
    loop {
        // The listener goes with its task, a moment later.
        if tokio::net::TcpStream::connect(addr).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
    }
    let error = calls(&Target::new(addr), &CallsPlan::default()).await;
    assert_eq!(
        error.expect_err("refused").kind(),
        std::io::ErrorKind::ConnectionRefused
    );
}
