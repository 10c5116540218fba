//! A machine that vanishes: no word comes from it any more.

use serde_json::json;

use super::ground::{Cable, play};
use super::{Phases, World, outcomes};
use crate::cases::stage::{PAIRINGS, ms};
use crate::support::{CHAT, only, slots, whole};

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
