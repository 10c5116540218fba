//! A machine that starts again: it answers what belongs to a connection from before with a reset.

use super::ground::{Cable, play};
use super::{Phases, World, outcomes};
use crate::support::{only, slots};

const PER_GATE: usize = 2 * Phases::EACH as usize;

/// Connections that the server's machine has forgotten: whoever waits on one is told.
#[test]
fn calls_on_a_machine_that_starts_again_are_told() {
    play(
        module_path!(),
        "calls_on_a_machine_that_starts_again_are_told",
        async |net| {
            let world = World::new(net, |c| only(c).slots = slots(PER_GATE));
            let phases = Phases::begin(&world).await;
            let world = world.reboot_server();
            world
                .noticed("a server that has forgotten", |w| w.counted().is_empty())
                .await;
            phases.are_told().await;
            let ended = outcomes(&world, PER_GATE).await;
            assert!(
                ended.iter().all(|o| o.starts_with("upstream_")),
                "{ended:?}"
            );
            world.answers().await;
            world.settled().await;
        },
    );
}

/// The clients' machine has forgotten: their calls end as those of clients that leave.
#[test]
fn calls_of_a_machine_that_starts_again_end() {
    play(
        module_path!(),
        "calls_of_a_machine_that_starts_again_end",
        async |net| {
            let mut world = World::new(net, |c| only(c).slots = slots(PER_GATE));
            let phases = Phases::begin(&world).await;
            world.net.cut(Cable::Client);
            drop(phases);
            world.net.at_the_gate();
            world.net.reboot(Cable::Client);
            world.net.at_the_client();
            world.net.mend(Cable::Client);
            world
                .noticed("clients that have forgotten", |w| w.counted().is_empty())
                .await;
            let ended = outcomes(&world, PER_GATE).await;
            assert!(ended.iter().all(|o| o == "client_closed"), "{ended:?}");
            world.settled().await;
            world.answers().await;
        },
    );
}
