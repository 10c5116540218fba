//! What calls and chunks cost is measured, or said not to be.

use std::net::SocketAddr;

use tidegate_rig::load::{
    Bars, CallsPlan, LeavePlan, StreamsPlan, Target, ToldBars, Way, calls, leave, streams,
};
use tidegate_rig::{FakeUpstream, NaiveProxy, Script, free_port};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

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

/// What the naive proxy never tells is said, and without a proxy everything is told.
#[tokio::test]
async fn a_proxy_that_does_not_tell_of_a_close_is_found_out() {
    let listen = free_port().expect("a port");
    let plan = LeavePlan {
        rounds: 1,
        within: std::time::Duration::from_millis(50),
        ..LeavePlan::default()
    };
    let direct = leave(&Target::new(listen), listen, &plan).await;
    let direct = direct.expect("measured");
    assert_eq!(
        direct.all().expect("times").count,
        144,
        "{}",
        direct.table()
    );
    let none = ToldBars {
        p99_ms: Some(0.0),
        max_ms: None,
    };
    assert_eq!(direct.failures(&ToldBars::default()), Vec::<String>::new());
    assert_eq!(direct.failures(&none).len(), 1, "a bar below the figure");
    for row in [
        "half-close",
        "silent in its middle",
        "/v1/embeddings",
        "whole",
    ] {
        assert!(direct.table().contains(row), "{}", direct.table());
    }

    let listen = free_port().expect("a port");
    let naive = NaiveProxy::start(ANY, listen, 1000).await.expect("starts");
    let told = leave(&Target::new(naive.addr()), listen, &plan).await;
    let told = told.expect("measured");
    assert!(told.never >= 36, "{}", told.table());
    let failures = told.failures(&ToldBars::default());
    assert!(failures[0].contains("never told"), "{failures:?}");
}

/// Over HTTP/2 on both sides, as far as that goes without a gateway.
#[tokio::test]
async fn clients_of_http2_leave_in_three_more_ways() {
    let listen = free_port().expect("a port");
    let plan = LeavePlan {
        rounds: 1,
        ways: Way::TWO.to_vec(),
        upstream_http2: true,
        ..LeavePlan::default()
    };
    let told = leave(&Target::new(listen), listen, &plan).await;
    let told = told.expect("measured");
    assert_eq!((told.error_count(), told.never), (0, 0), "{}", told.table());
    assert_eq!(told.all().expect("times").count, 144, "{}", told.table());
}
