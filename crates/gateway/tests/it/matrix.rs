//! The cells of {where a call is} × {how its client leaves} × {contract} that `contracts` and `cases::disconnect` leave open: what was
//! never sent, streams of a route that we do not know, readers that stop.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::{Config, Contract};
use tidegate_rig::{BlackHole, RawClient};

use crate::cases::caller::Caller;
use crate::cases::stage::{Http, STREAMS, Stage, ms, on_each, routes};
use crate::leave::{WAYS, leave};
use crate::support::{LOCALHOST, SOON, ask, gateway_at, only, room_for, slots, stream};

const UNKNOWN: &str = "/v1/something/else";
const KEPT: Duration = ms(1500);
const CONTRACTS: [Contract; 3] = [Contract::Cancel, Contract::Drain, Contract::Linger];

fn under(c: &mut Config, contract: Contract) {
    only(c).abandon.contract = contract;
    only(c).abandon.at_once = 1000;
    // A drain has time enough; a slot that is kept is kept for so long.
    only(c).abandon.time = match contract {
        Contract::Linger => KEPT,
        Contract::Cancel | Contract::Drain => SOON * 6,
    };
}

/// A contract is about work; whoever leaves the queue leaves none.
#[tokio::test]
async fn no_contract_keeps_what_waits_in_the_queue() {
    for contract in CONTRACTS {
        let change = |c: &mut Config| {
            only(c).slots = slots(1);
            only(c).queue = 100;
            under(c, contract);
        };
        on_each(change, async |stage: &Stage| {
            let mut holder = stage.post(STREAMS[0], &endless()).await;
            holder.accepted().await;
            let mut waiting = Vec::new();
            for path in routes() {
                for way in stage.down.ways() {
                    for streaming in [true, false] {
                        let body = ask(json!({"stream": streaming}));
                        waiting.push((stage.post(path, &body).await, way));
                    }
                }
            }
            let n = waiting.len() as f64;
            let queued = |g: &crate::support::Gate| g.metric("queued", &[]);
            stage.gate.eventually("all wait", |g| queued(g) == n).await;
            let mut rests = Vec::new();
            for (caller, way) in waiting {
                rests.push(caller.leave(way).await);
            }
            stage
                .gate
                .eventually("none waits", |g| queued(g) == 0.0)
                .await;
            let left = stage.gate.metric("abandoned_calls_total", &[]);
            assert_eq!(left, 0.0, "{stage}, {contract:?}: nothing was left behind");
            assert_eq!(stage.up.truth().calls_begun, 1, "{stage}, {contract:?}");
            drop(rests);
            // Its own end is not what is asked here; the upstream ends it.
            stage.up.cut_all(tidegate_rig::PeerEnd::Fin);
            holder.rest().await;
        })
        .await;
    }
}

/// Nor does whoever leaves while the connection is made.
#[tokio::test]
async fn no_contract_keeps_a_call_that_has_no_connection() {
    for contract in CONTRACTS {
        let hole = BlackHole::start(LOCALHOST).expect("a black hole");
        let gate = gateway_at(hole.addr(), |c| {
            room_for(c, 100);
            under(c, contract);
        });
        let mut waiting = Vec::new();
        for path in routes() {
            for way in WAYS {
                for streaming in [true, false] {
                    let body = ask(json!({"stream": streaming}));
                    waiting.push((gate.post(path, &body).await, way));
                }
            }
        }
        let n = waiting.len();
        gate.eventually("all run", |g| g.metric("running", &[]) == n as f64)
            .await;
        let mut rests = Vec::new();
        for (client, way) in waiting {
            rests.push(leave(client, way).await);
        }
        gate.eventually("all ended", |g| g.metric("running", &[]) == 0.0)
            .await;
        for line in gate.logged(n).await {
            let seen = (&line["outcome"], &line["phase"], &line["work_end"]);
            let right = (
                &json!("client_closed"),
                &json!("connecting"),
                &json!("none"),
            );
            assert_eq!(seen, right, "{contract:?}: {line}");
        }
        assert_eq!(gate.counted(), Vec::<String>::new(), "{contract:?}");
        drop(rests);
    }
}

fn endless() -> Value {
    stream(json!({"end": "never", "pace_ms": 20.0}))
}

/// A stream on a route that we do not know is under the contract like any other: it is read to its end, or closed and its slot kept.
#[tokio::test]
async fn a_stream_of_an_unknown_route_obeys_each_contract() {
    for contract in CONTRACTS {
        let change = |c: &mut Config| {
            room_for(c, 100);
            under(c, contract);
        };
        on_each(change, async |stage: &Stage| {
            let event = "data: {\"x\":1}\n\n";
            let pieces =
                json!([{"text": event}, {"text": event, "pause_ms": 1000}, {"text": event}]);
            let script = json!({
                "headers": [["content-type", "text/event-stream"]], "body": {"pieces": pieces},
            });
            for way in stage.down.ways() {
                let mut caller = stage.post(UNKNOWN, &stream(script.clone())).await;
                caller.accepted().await;
                caller.bytes(event.len()).await;
                let peer = caller.peer();
                let rest = caller.leave(way).await;
                let line = stage.gate.line_of(peer).await;
                let work = if contract == Contract::Drain {
                    "complete"
                } else {
                    "cancelled"
                };
                let seen = (&line["outcome"], &line["phase"], &line["work_end"]);
                let right = (&json!("client_closed"), &json!("streaming"), &json!(work));
                assert_eq!(seen, right, "{stage}, {contract:?}, {way:?}: {line}");
                kept(&line, contract);
                drop(rest);
            }
            let complete = if contract == Contract::Drain { 3 } else { 0 };
            assert_eq!(stage.up.truth().ended_complete, complete, "{stage}");
        })
        .await;
    }
}

/// Whoever stops reading has left: closed at once under cancel, closed and counted under linger, read to its end under drain.
#[tokio::test]
async fn a_reader_that_stops_is_under_the_contract() {
    for contract in CONTRACTS {
        let change = |c: &mut Config| {
            room_for(c, 100);
            under(c, contract);
            only(c).timeouts.write = ms(300);
            only(c).abandon.bytes = 1 << 30;
        };
        on_each(change, async |stage: &Stage| {
            let mut callers = Vec::new();
            for path in STREAMS {
                let mut caller = match stage.down {
                    Http::One => Caller::One(
                        RawClient::connect_slow(stage.gate.addr(), 16_384)
                            .await
                            .expect("accepted"),
                    ),
                    Http::Two => stage.caller().await,
                };
                let script = match contract {
                    Contract::Drain => json!({"tokens": 250, "event_bytes": 16_384}),
                    _ => json!({"end": "never", "event_bytes": 16_384}),
                };
                caller.post(path, &stream(script)).await;
                caller.accepted().await;
                caller.events(2).await;
                callers.push(caller);
            }
            for caller in &callers {
                let line = stage.gate.line_of(caller.peer()).await;
                let work = if contract == Contract::Drain {
                    "complete"
                } else {
                    "cancelled"
                };
                let seen = (&line["outcome"], &line["wait_end"], &line["work_end"]);
                let right = (&json!("client_stalled"), &json!("stalled"), &json!(work));
                assert_eq!(seen, right, "{stage}, {contract:?}: {line}");
                kept(&line, contract);
            }
            let complete = stage.up.truth().ended_complete;
            let right = if contract == Contract::Drain {
                STREAMS.len() as u64
            } else {
                0
            };
            assert_eq!(complete, right, "{stage}, {contract:?}");
            stage.settled().await;
            drop(callers);
        })
        .await;
    }
}

/// Only linger keeps a slot, for as long as it says.
fn kept(line: &Value, contract: Contract) {
    let kept = line["slot_kept_ms"].as_f64();
    let right = (contract == Contract::Linger).then_some(KEPT.as_secs_f64() * 1e3);
    assert_eq!(kept, right, "{contract:?}: {line}");
}
