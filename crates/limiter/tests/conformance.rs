//! The same question to several limiters: whose slot is it? `cargo run --example probe` prints the answers.
#![cfg(not(any(loom, shuttle, protocol)))]

#[path = "conformance/subjects.rs"]
mod subjects;
#[path = "conformance/suite.rs"]
mod suite;

use std::sync::{Arc, mpsc};
use std::time::Duration;

use tokio::runtime::Runtime;

use self::subjects::{CallersPermit, LimitInside, LimitOutside, MovedPermit, Ours};
use self::suite::{Gate, PATIENCE, Report, Subject, three_abandoned};

async fn report(subject: impl Subject) -> Report {
    let report = three_abandoned(&subject).await;
    assert!(report.real > 0, "{} ran nothing", subject.name());
    report
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ours_really_runs_one_and_says_so() {
    let expected = Report {
        real: 1,
        leftovers: Some(1),
        ran_later: 0,
    };
    assert_eq!(report(Ours::new()).await, expected);
}

/// If these ever change, the table in the documentation does too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_of_the_callers_really_runs_three() {
    assert_eq!(report(CallersPermit::new()).await.real, 3);
    assert_eq!(report(LimitOutside::new()).await.real, 3);
    assert_eq!(report(LimitInside::new()).await.real, 3);
    let moved = report(MovedPermit::new()).await;
    assert_eq!((moved.real, moved.leftovers), (1, None));
}

/// Leaves a call blocked for ever and ends the runtime. Says whether that came to an end.
fn ends(subject: impl Subject + Send + 'static, patience: Duration) -> bool {
    let (say, heard) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = Runtime::new().expect("a runtime");
        let never_opened = Arc::new(Gate::default());
        runtime.block_on(subject.call(never_opened.work(), PATIENCE));
        drop(runtime);
        let _unless_given_up = say.send(());
    });
    heard.recv_timeout(patience).is_ok()
}

#[test]
fn what_is_left_behind_does_not_hold_up_the_end_of_a_runtime() {
    assert!(ends(Ours::new(), Duration::from_secs(10)));
    assert!(
        !ends(MovedPermit::new(), Duration::from_millis(500)),
        "tokio waits for its own"
    );
}
