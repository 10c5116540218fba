//! Connections that one side has and the other has not: dead without a word, in the pool or under calls.

use serde_json::json;

use super::ground::{Cable, play};
use super::{NOTICED, World};
use crate::cases::caller::Caller;
use crate::cases::stage::{Http, PAIRINGS, STREAMS};
use crate::support::{CHAT, Gate, only, stream, whole};

const IDLE: usize = 3;

fn kept(config: &mut tidegate::config::Config) {
    // Longer than the test: nothing but a probe closes what is idle.
    only(config).pool.idle = NOTICED * 10;
    config.server.tcp_user_timeout = NOTICED * 10;
    config.server.tcp_keep_alive = NOTICED * 10;
}

fn connections(world: &World) -> f64 {
    let of = |gate: &Gate| gate.metric("upstream_connections", &[]);
    world.gates.iter().map(of).sum()
}

/// Fills the pools: some idle connections for HTTP/1.1 and the one of HTTP/2.
async fn warm(world: &World) {
    let mut callers = Vec::new();
    for pairing in PAIRINGS.into_iter().cycle().take(PAIRINGS.len() * IDLE) {
        callers.push(
            world
                .post(pairing, CHAT, &whole(json!({"delay_ms": 300})))
                .await,
        );
    }
    for mut caller in callers {
        assert_eq!(caller.answer().await.0.status, 200);
    }
    assert!(connections(world) > IDLE as f64, "{}", connections(world));
}

/// Each call is answered by the first attempt, and the server had it once.
async fn answered_at_once(world: &World) {
    let before = world.server.up.truth().calls_begun;
    let lines = |world: &World| world.gates.iter().flat_map(Gate::lines).collect::<Vec<_>>();
    let already = lines(world).len();
    for pairing in PAIRINGS {
        for path in STREAMS {
            let mut caller = world
                .post(pairing, path, &stream(json!({"tokens": 2})))
                .await;
            caller.accepted().await;
            assert!(caller.rest().await.whole, "{pairing:?}, {path}");
        }
    }
    let calls = PAIRINGS.len() * STREAMS.len();
    assert_eq!(
        (world.server.up.truth().calls_begun - before) as usize,
        calls
    );
    super::eventually("all are logged", || lines(world).len() == already + calls).await;
    assert!(
        lines(world)
            .iter()
            .all(|l| l["attempts"] == 1 && l["outcome"] == "ok")
    );
}

/// A middlebox has dropped the connections of the pool: they are found out while they rest, and no call pays for one.
#[test]
fn c86_idle_connections_that_are_dead_are_found_out() {
    play(
        module_path!(),
        "c86_idle_connections_that_are_dead_are_found_out",
        async |net| {
            let mut world = World::new(net, kept);
            warm(&world).await;
            world.net.forget(Cable::Server);
            world
                .noticed("dead connections", |w| connections(w) == 0.0)
                .await;
            answered_at_once(&world).await;
            world.settled().await;
        },
    );
}

/// The server's machine was started again: the next call is none that fails.
#[test]
fn a_pool_outlives_a_machine_that_starts_again() {
    play(
        module_path!(),
        "a_pool_outlives_a_machine_that_starts_again",
        async |net| {
            let world = World::new(net, kept);
            warm(&world).await;
            let world = world.reboot_server();
            world
                .noticed("connections that nobody knows", |w| connections(w) == 0.0)
                .await;
            answered_at_once(&world).await;
            world.settled().await;
        },
    );
}

/// Connections that rest and are well are kept, however long.
#[test]
fn idle_connections_that_are_well_are_kept() {
    play(
        module_path!(),
        "idle_connections_that_are_well_are_kept",
        async |net| {
            let mut world = World::new(net, kept);
            warm(&world).await;
            let open = connections(&world);
            world.net.poor(Cable::Server, 0.0, 0.1);
            let end = tokio::time::Instant::now() + std::time::Duration::from_secs(5);
            while tokio::time::Instant::now() < end {
                assert_eq!(connections(&world), open);
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
            answered_at_once(&world).await;
            world.settled().await;
        },
    );
}

/// A shared connection with silent streams on it dies without a word: new calls go elsewhere after some seconds, though no limit was over.
#[test]
fn c106_new_calls_leave_a_shared_connection_that_is_silent() {
    play(
        module_path!(),
        "c106_new_calls_leave_a_shared_connection_that_is_silent",
        async |net| {
            let mut world = World::new(net, kept);
            let two = PAIRINGS.into_iter().filter(|(_, back)| *back == Http::Two);
            let mut silent = Vec::new();
            for pairing in two.clone() {
                for path in STREAMS {
                    let stall = stream(json!({"tokens": 5, "stall": {"at": {"event": 3}}}));
                    let mut caller = world.post(pairing, path, &stall).await;
                    caller.accepted().await;
                    silent.push(caller);
                }
            }
            assert_eq!(world.server.front.truth().connections_accepted, 1);
            world.net.forget(Cable::Server);
            let moved = |w: &World| w.server.front.truth().connections_accepted > 1;
            let mut stuck: Vec<Caller> = Vec::new();
            let end = tokio::time::Instant::now() + NOTICED;
            while !moved(&world) {
                assert!(
                    tokio::time::Instant::now() < end,
                    "{} calls were put on a dead connection",
                    stuck.len()
                );
                for pairing in two.clone() {
                    stuck.push(
                        world
                            .post(pairing, CHAT, &stream(json!({"tokens": 2})))
                            .await,
                    );
                }
                tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            }
            for pairing in two {
                for path in STREAMS {
                    let mut caller = world
                        .post(pairing, path, &stream(json!({"tokens": 2})))
                        .await;
                    caller.accepted().await;
                    assert!(caller.rest().await.whole, "{pairing:?}, {path}");
                }
            }
            drop((silent, stuck));
            super::eventually("nothing is counted", || world.counted().is_empty()).await;
        },
    );
}
