//! What is sent again, and what never is: a second generation costs the operator, and nobody would know.

use serde_json::json;
use tidegate_rig::Script;

use super::caller::Caller;
use super::stage::{Http, PAIRINGS, STREAMS, Stage, forms, on_each, over};
use crate::ends::errors;
use crate::support::{Gate, SOON, endpoint, gateway_at, only, room_for, slots, stream};

/// A gateway with two endpoints of this version; both stages' own gateways are idle.
async fn two_endpoints(pairing: (Http, Http)) -> (Stage, Stage, Gate) {
    let (one, two) = (
        Stage::new(pairing, |_| {}).await,
        Stage::new(pairing, |_| {}).await,
    );
    let gate = gateway_at(one.upstream_addr(), |c| {
        over(c, pairing.1);
        only(c).endpoints.push(endpoint(two.upstream_addr()));
    });
    (one, two, gate)
}

/// Nobody waits with a slot in hand for another try: a refusal goes back to the client at once.
#[tokio::test]
async fn c53_a_refused_call_holds_no_slot() {
    on_each(
        |c| only(c).slots = slots(2),
        async |stage: &Stage| {
            for form in forms() {
                let begun = stage.up.truth().calls_begun;
                for _ in 0..2 {
                    let busy = form.ask(json!({"status": 503, "retry_after": "5"}));
                    let (head, _) = stage.post(form.path, &busy).await.answer().await;
                    assert_eq!(
                        (head.status, head.header("retry-after")),
                        (503, Some("5")),
                        "{stage}"
                    );
                }
                let well = form.ask(json!({"tokens": 2}));
                let mut third = stage.post(form.path, &well).await;
                third.accepted().await;
                assert!(third.rest().await.whole, "{stage}, {form:?}");
                assert_eq!(
                    stage.up.truth().calls_begun,
                    begun + 3,
                    "{stage}: no second attempts"
                );
            }
            assert_eq!(stage.gate.metric("retries_total", &[]), 0.0, "{stage}");
        },
    )
    .await;
}

/// The upstream had the request: it is generated once, whatever becomes of the answer, and the client learns that it may have run.
#[tokio::test]
async fn c54_a_lost_answer_is_generated_once() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            let lost = [
                json!({"body": {"wire": []}, "end": "rst"}),
                json!({"body": {"wire": []}, "end": "fin"}),
                json!({"status": 502}),
                json!({"end": "fin", "end_at": 2}),
                json!({"end": "rst", "end_at": 0, "end_delay_ms": 20}),
                json!({"end": "rst", "end_at": 1, "end_delay_ms": 20}),
            ];
            let fields = [("idempotency-key", "once-only")];
            for form in forms() {
                let path = form.path;
                // An answer in one piece has no events to break at.
                let cuts = if form.streaming {
                    &lost[..]
                } else {
                    &lost[..4]
                };
                for (n, rig) in cuts.iter().enumerate() {
                    let begun = stage.up.truth().calls_begun;
                    let mut caller = stage.caller().await;
                    let body = form.ask(rig.clone()).to_string();
                    caller.request("POST", path, &fields, body.as_bytes()).await;
                    let (head, rest) = caller.answer().await;
                    assert!(head.status == 502 || !rest.whole, "{stage}, {path}, {rig}");
                    if n < 2 {
                        assert_eq!(
                            head.header("x-tidegate-started"),
                            Some("true"),
                            "{stage}, {rig}"
                        );
                    }
                    assert_eq!(
                        stage.up.truth().calls_begun,
                        begun + 1,
                        "{stage}, {path}, {rig}"
                    );
                }
            }
            for call in stage.up.calls() {
                assert_eq!(call.header("idempotency-key"), Some("once-only"), "{stage}");
            }
            assert_eq!(stage.gate.metric("retries_total", &[]), 0.0, "{stage}");
        },
    )
    .await;
}

/// Tries are the client's: what an upstream has answered is asked once, however many there are.
#[tokio::test]
async fn c56_layers_do_not_multiply() {
    for pairing in PAIRINGS {
        let (one, two, gate) = two_endpoints(pairing).await;
        let asked = 3 * forms().len();
        for (attempt, form) in forms().into_iter().cycle().take(asked).enumerate() {
            let mut caller = Caller::connect(pairing.0, gate.addr()).await;
            let body = form.ask(json!({"status": 503})).to_string();
            let count = (attempt % 3).to_string();
            let fields = [("x-stainless-retry-count", count.as_str())];
            caller
                .request("POST", form.path, &fields, body.as_bytes())
                .await;
            assert_eq!(caller.answer().await.0.status, 503);
        }
        let calls = one.up.truth().calls_begun + two.up.truth().calls_begun;
        assert_eq!(calls as usize, asked, "{one}: one for each of the client's");
        for line in gate.logged(asked).await {
            assert_eq!(line["attempts"], 1, "{line}");
            assert!(line["client_retry"].is_u64(), "{line}");
        }
    }
}

/// A stream is one server's from its first byte on, and one that may have begun is not begun elsewhere.
#[tokio::test]
async fn c57_no_other_servers_answer_follows() {
    for pairing in PAIRINGS {
        let (one, two, gate) = two_endpoints(pairing).await;
        let mut calls = 0;
        for path in STREAMS {
            let comments = json!({"body": {"pieces": [{"text": ": one\n\n"}, {"text": ": two\n\n"}]},
                "end": "fin", "end_at": 1, "headers": [["content-type", "text/event-stream"]]});
            for script in [
                json!({"end": "fin", "end_at": 5}),
                json!({"end": "fin", "end_at": 1}),
                comments,
            ] {
                let mut caller = Caller::connect(pairing.0, gate.addr()).await;
                caller.post(path, &stream(script.clone())).await;
                let (head, rest) = caller.answer().await;
                calls += 1;
                let text = rest.text();
                if head.status == 200 {
                    assert!(
                        !rest.whole && errors(&rest.events()) == 1,
                        "{one}, {path}, {script}: {text}"
                    );
                } else {
                    assert_eq!(head.status, 502, "{one}, {path}, {script}: {text}");
                }
                let starts = [
                    "\"role\":\"assistant\"",
                    "event: message_start",
                    "event: response.created",
                ];
                let starts = starts.iter().map(|s| text.matches(s).count()).max();
                assert!(starts <= Some(1), "{one}, {path}, {script}: {text}");
            }
        }
        let begun = one.up.truth().calls_begun + two.up.truth().calls_begun;
        assert_eq!(begun, calls, "{one}");
    }
}

/// Clients that leave say nothing about the upstream: nothing is left out because of them.
#[tokio::test]
async fn c59_leaving_says_nothing_about_the_upstream() {
    on_each(
        |c| room_for(c, 20),
        async |stage: &Stage| {
            for rig in [
                json!({"stall": {"at": "head"}}),
                json!({"first_ms": 60_000}),
                json!({"end": "never", "pace_ms": 5}),
                json!({"status": 500, "body": {"pieces": [{"text": "{\"error\"", "pause_ms": 60_000}]}}),
            ] {
                let mut callers = Vec::new();
                for form in forms() {
                    // What has no first event is silent before its head.
                    let events = rig["first_ms"].is_u64() || rig["end"].is_string();
                    let silent = json!({"stall": {"at": "head"}});
                    let rig = if events && !form.streaming { silent } else { rig.clone() };
                    callers.push(stage.post(form.path, &form.ask(rig)).await);
                }
                stage.running(callers.len() as u64).await;
                let mut rests = Vec::new();
                for (n, caller) in callers.into_iter().enumerate() {
                    rests.push(caller.leave(stage.down.ways()[n % 3]).await);
                }
                stage.running(0).await;
            }
            let closed = stage.gate.logged(4 * forms().len()).await;
            assert!(closed.iter().all(|l| l["outcome"] == "client_closed"), "{stage}");
            assert_eq!(stage.gate.metric("endpoint_ejected", &[]), 0.0, "{stage}");
            for form in forms() {
                let (head, _) = stage.post(form.path, &form.ask(json!({}))).await.answer().await;
                assert_eq!(head.status, 200, "{stage}, {form:?}");
            }
        },
    )
    .await;
}

/// The control: an endpoint that takes no connections is left out, and only it.
#[tokio::test]
async fn c59_a_port_that_refuses_is_what_leaves_an_endpoint_out() {
    for pairing in PAIRINGS {
        let (one, two, gate) = two_endpoints(pairing).await;
        let refusing = tidegate_rig::free_port().expect("a port");
        drop(gate);
        let gate = gateway_at(refusing, |c| {
            over(c, pairing.1);
            only(c).pool.eject = SOON;
            for addr in [one.upstream_addr(), two.upstream_addr()] {
                only(c).endpoints.push(endpoint(addr));
            }
        });
        // Each stays in flight, so that the next goes elsewhere: all three have their turn.
        let mut callers = Vec::new();
        for n in 0..6 {
            let mut caller = Caller::connect(pairing.0, gate.addr()).await;
            let flows = stream(json!({"end": "never", "pace_ms": 50}));
            caller.post(STREAMS[n % 4], &flows).await;
            caller.accepted().await;
            callers.push(caller);
        }
        assert_eq!(gate.metric("endpoint_ejected", &[]), 1.0, "{one}");
    }
}

/// A server that is overloaded gets what its clients send and nothing on top of it, and all of its service is back with the first call that it
/// takes: nothing here holds clients off that could be late to let them in again.
#[tokio::test]
async fn c61_an_outage_is_not_made_worse_and_ends_at_once() {
    const ROUNDS: usize = 10;
    on_each(
        |c| room_for(c, 16),
        async |stage: &Stage| {
            let overload = r#"{"status": 529, "retry_after": "3"}"#;
            stage
                .up
                .set_default(Script::from_json(overload).expect("a script"));
            let mut lanes = Vec::new();
            for form in forms() {
                lanes.push((form, stage.caller().await));
            }
            for _ in 0..ROUNDS {
                for (form, caller) in &mut lanes {
                    caller.post(form.path, &form.ask(json!({}))).await;
                }
                for (_, caller) in &mut lanes {
                    let (head, _) = caller.answer().await;
                    let says = (head.status, head.header("retry-after"));
                    assert_eq!(
                        says,
                        (529, Some("3")),
                        "{stage}: what the server says of itself"
                    );
                }
            }
            assert_eq!(
                stage.up.truth().calls_begun as usize,
                ROUNDS * lanes.len(),
                "{stage}: each was sent once"
            );
            stage.up.set_default(Script::default());
            for (form, caller) in &mut lanes {
                let well = form.ask(json!({"tokens": 2}));
                caller.post(form.path, &well).await;
                caller.accepted().await;
                assert!(
                    caller.rest().await.whole,
                    "{stage}: full service with the first call"
                );
            }
        },
    )
    .await;
}
