//! A machine that vanishes: no word comes from it any more.

use serde_json::json;
use tidegate::config::Contract;

use super::ground::{Cable, play};
use super::{NOTICED, Phases, World, outcomes};
use crate::attach::{LONG, graced};
use crate::cases::caller::Caller;
use crate::cases::stage::{Http, PAIRINGS, STREAMS, ms};
use crate::security::key;
use crate::support::{CHAT, only, slots, stream, whole};

/// Two pairings for each gateway.
const PER_GATE: usize = 2 * Phases::EACH as usize;

/// Whatever they waited for, their work ends and their slots are free.
#[test]
fn clients_that_vanish_are_noticed_in_each_phase() {
    play(
        module_path!(),
        "clients_that_vanish_are_noticed_in_each_phase",
        async |net| {
            let mut world = World::new(net, |c| only(c).slots = slots(PER_GATE));
            let phases = Phases::begin(&world).await;
            world.net.cut(Cable::Client);
            world
                .noticed("clients that are gone", |w| w.counted().is_empty())
                .await;
            let ended = outcomes(&world, PER_GATE).await;
            assert!(ended.iter().all(|o| o == "client_closed"), "{ended:?}");
            world.settled().await;
            world.net.at_the_gate();
            world.answers().await;
            drop(phases);
        },
    );
}

/// Who has vanished does not keep a place in the queue, nor gets a slot.
#[test]
fn clients_that_vanish_from_the_queue_leave_it() {
    play(
        module_path!(),
        "clients_that_vanish_from_the_queue_leave_it",
        async |net| {
            let mut world = World::new(net, |c| only(c).slots = slots(PER_GATE));
            world.net.at_the_gate();
            let phases = Phases::begin(&world).await;
            world.net.at_the_client();
            let waiting = world.wait_in_the_queue().await;
            world.net.cut(Cable::Client);
            let queued = |w: &World| w.gates.iter().map(|g| g.metric("queued", &[])).sum::<f64>();
            world
                .noticed("clients that are gone", |w| queued(w) == 0.0)
                .await;
            for gate in &world.gates {
                for line in gate.logged(2).await {
                    assert_eq!(
                        (&line["outcome"], &line["phase"]),
                        (&json!("client_closed"), &json!("queued")),
                        "{line}"
                    );
                }
            }
            assert_eq!(
                world.server.up.truth().calls_begun as usize,
                2 * PER_GATE,
                "they never began"
            );
            drop((phases, waiting));
            world.settled().await;
        },
    );
}

/// Its clients are told, their slots are free, and a new call has the time of its own limit; when it is back, all is well.
#[test]
fn a_server_that_vanishes_is_noticed_in_each_phase() {
    play(
        module_path!(),
        "a_server_that_vanishes_is_noticed_in_each_phase",
        async |net| {
            let mut world = World::new(net, |c| {
                only(c).slots = slots(PER_GATE);
                only(c).timeouts.connect = ms(1000);
                only(c).pool.eject = ms(1);
            });
            let phases = Phases::begin(&world).await;
            world.net.cut(Cable::Server);
            world
                .noticed("a server that is gone", |w| w.counted().is_empty())
                .await;
            phases.are_told().await;
            let ended = outcomes(&world, PER_GATE).await;
            assert!(
                ended.iter().all(|o| o.starts_with("upstream_")),
                "{ended:?}"
            );
            for pairing in PAIRINGS {
                let mut caller = world.post(pairing, CHAT, &whole(json!({}))).await;
                assert_eq!(
                    caller.head().await.status,
                    504,
                    "{pairing:?}: the limit of a connect"
                );
            }
            world.net.mend(Cable::Server);
            world.answers().await;
            // What its machine says of the old connections meets a reset, when it comes to say something.
            assert!(world.counted().is_empty());
        },
    );
}

/// Whoever vanishes has left, as far as the contract goes: under drain the work is read on, under linger its slot is kept.
#[test]
fn clients_that_vanish_are_under_the_contract() {
    play(
        module_path!(),
        "clients_that_vanish_are_under_the_contract",
        async |net| {
            let mut world = World::new(net, |c| {
                only(c).slots = slots(PER_GATE);
                only(c).abandon.at_once = 1000;
                only(c).abandon.contract = Contract::Drain;
                only(c).abandon.time = NOTICED * 50;
            });
            let phases = Phases::begin(&world).await;
            world.net.cut(Cable::Client);
            let sum = |w: &World, name: &str| -> f64 {
                w.gates.iter().map(|g| g.metric(name, &[])).sum()
            };
            let all = (2 * PER_GATE) as f64;
            world
                .noticed("clients that are gone", |w| sum(w, "abandoned") == all)
                .await;
            assert_eq!(sum(&world, "attended"), 0.0);
            assert_eq!(world.server.up.truth().running as usize, 2 * PER_GATE);
            // Its work goes on; here it is the server that ends it.
            world.server.up.cut_all(tidegate_rig::PeerEnd::Rst);
            let ended = outcomes(&world, PER_GATE).await;
            assert!(ended.iter().all(|o| o == "client_closed"), "{ended:?}");
            for line in world.gates.iter().flat_map(crate::support::Gate::lines) {
                assert_eq!(line["work_end"], "failed", "{line}");
            }
            drop(phases);
            world.settled().await;
        },
    );
}

/// The slots of those who vanished are kept for as long as the operator said.
#[test]
fn the_slots_of_clients_that_vanish_linger() {
    play(
        module_path!(),
        "the_slots_of_clients_that_vanish_linger",
        async |net| {
            let mut world = World::new(net, |c| {
                only(c).slots = slots(PER_GATE);
                only(c).abandon.contract = Contract::Linger;
                only(c).abandon.time = ms(2000);
            });
            let phases = Phases::begin(&world).await;
            world.net.cut(Cable::Client);
            let linger = |w: &World| {
                w.gates
                    .iter()
                    .map(|g| g.metric("lingering", &[]))
                    .sum::<f64>()
                    > 0.0
            };
            world.noticed("clients that are gone", linger).await;
            let ended = outcomes(&world, PER_GATE).await;
            assert!(ended.iter().all(|o| o == "client_closed"), "{ended:?}");
            for line in world.gates.iter().flat_map(crate::support::Gate::lines) {
                let seen = (&line["work_end"], &line["slot_kept_ms"]);
                assert_eq!(seen, (&json!("cancelled"), &json!(2000.0)), "{line}");
            }
            drop(phases);
            world.settled().await;
        },
    );
}

/// A client whose network was cut comes back when it is mended, and has its answer from the first event.
#[test]
fn clients_that_vanished_come_back_for_their_answers() {
    play(
        module_path!(),
        "clients_that_vanished_come_back_for_their_answers",
        async |net| {
            let mut world = World::new(net, |c| {
                graced(c, LONG);
                c.keys = vec![key("mine", "secret")];
            });
            let ask = async |world: &World, pairing: (Http, Http), n: usize| {
                let (down, back) = pairing;
                let mut caller = Caller::connect(down, world.gate(back).addr()).await;
                let name = format!("call {n}");
                let fields = [
                    ("authorization", "Bearer secret"),
                    ("idempotency-key", &*name),
                ];
                let body = stream(json!({"end": "never", "pace_ms": 100.0})).to_string();
                caller
                    .request("POST", STREAMS[n], &fields, body.as_bytes())
                    .await;
                caller.accepted().await;
                let events = caller.events(5).await;
                (caller, events)
            };
            let mut callers = Vec::new();
            for (n, pairing) in PAIRINGS.into_iter().enumerate() {
                callers.push(ask(&world, pairing, n).await);
            }
            world.net.cut(Cable::Client);
            let sum = |w: &World, name: &str| -> f64 {
                w.gates.iter().map(|g| g.metric(name, &[])).sum()
            };
            world
                .noticed("clients that are gone", |w| sum(w, "abandoned") == 4.0)
                .await;
            world.net.mend(Cable::Client);
            let mut retries = Vec::new();
            for (n, pairing) in PAIRINGS.into_iter().enumerate() {
                let (mut retry, events) = ask(&world, pairing, n).await;
                assert_eq!(events, callers[n].1, "{pairing:?}: from the first event");
                assert_eq!(retry.events(100).await.len(), 100, "and live");
                retries.push(retry);
            }
            assert_eq!(sum(&world, "attended"), 4.0);
            assert_eq!(world.server.up.truth().calls_begun, 4);
            drop((callers, retries));
            for gate in &world.gates {
                gate.gateway.drain().await;
            }
            world.settled().await;
        },
    );
}
