//! Frames that are lost and late, under load.

use std::collections::HashMap;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::ground::{Cable, Server, play};
use super::{World, without_identity};
use crate::cases::caller::Caller;
use crate::cases::stage::{Http, PAIRINGS, STREAMS};
use crate::support::{ask, room_for, stream, whole};

/// What is asked for: streams, answers in one piece that fill many frames, and requests that do.
fn asked() -> Vec<(&'static str, Value)> {
    let mut asked = Vec::new();
    for path in STREAMS {
        asked.push((
            path,
            stream(json!({"tokens": 60, "pace_ms": 20, "event_bytes": 200})),
        ));
        asked.push((
            path,
            whole(json!({"tokens": 100, "token_text": "t".repeat(500)})),
        ));
        let mut long = ask(json!({"stream": true, "user": "u".repeat(40_000)}));
        long["rig"] = json!({"tokens": 5});
        asked.push((path, long));
    }
    asked
}

/// Asks for all of it at once, in each of these versions of these servers. The bodies, by what was asked for, with their names and times blanked.
async fn load(at: Vec<(Http, std::net::SocketAddr)>) -> HashMap<usize, Vec<String>> {
    let mut calls = JoinSet::new();
    for (version, addr) in at {
        for (n, (path, body)) in asked().into_iter().enumerate() {
            calls.spawn(async move {
                let mut caller = Caller::connect(version, addr).await;
                caller.post(path, &body).await;
                let (head, rest) = caller.answer().await;
                assert!(
                    head.status == 200 && rest.whole,
                    "{version:?}, {path}: {}",
                    rest.text()
                );
                (n, without_identity(&rest.body))
            });
        }
    }
    let mut got: HashMap<usize, Vec<String>> = HashMap::new();
    while let Some(answer) = calls.join_next().await {
        let (n, body) = answer.expect("answered");
        got.entry(n).or_default().push(body);
    }
    got
}

/// 5 % of the frames lost and the others 100 ms late, both ways, on this cable or on both: no byte is missing, none is twice, and nothing is left.
async fn lose_nothing(net: super::Net, cables: &[Cable]) {
    let mut world = World::new(net, |c| {
        room_for(c, 64);
        // A machine that is there answers late, and not that late.
        c.server.tcp_user_timeout = super::NOTICED;
    });
    world.net.at_the_gate();
    let direct = load(vec![(Http::One, Server::addr(Http::One))]).await;
    let uploads = |world: &World| {
        let mut sizes: Vec<_> = world
            .server
            .up
            .calls()
            .iter()
            .map(|c| c.body_hash)
            .collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    };
    let sent = uploads(&world);
    world.net.at_the_client();
    for cable in cables {
        world.net.poor(*cable, 0.05, 0.1);
    }
    let at = PAIRINGS.map(|(down, back)| (down, world.gate(back).addr()));
    for (n, bodies) in load(at.into()).await {
        assert_eq!(bodies.len(), PAIRINGS.len());
        for body in bodies {
            assert_eq!(body, direct[&n][0], "{:?}", asked()[n].0);
        }
    }
    assert_eq!(uploads(&world), sent, "requests arrive as they were sent");
    for cable in cables {
        assert!(world.net.lost(*cable) > 20, "it does lose frames");
    }
    for gate in &world.gates {
        gate.logged(asked().len() * PAIRINGS.len() / 2).await;
    }
    world.settled().await;
}

#[test]
fn a_poor_network_to_clients_loses_no_byte() {
    play(
        module_path!(),
        "a_poor_network_to_clients_loses_no_byte",
        async |net| {
            lose_nothing(net, &[Cable::Client]).await;
        },
    );
}

#[test]
fn a_poor_network_to_the_upstream_loses_no_byte() {
    play(
        module_path!(),
        "a_poor_network_to_the_upstream_loses_no_byte",
        async |net| {
            lose_nothing(net, &[Cable::Server]).await;
        },
    );
}

#[test]
fn a_poor_network_on_both_sides_loses_no_byte() {
    play(
        module_path!(),
        "a_poor_network_on_both_sides_loses_no_byte",
        async |net| {
            lose_nothing(net, &Cable::BOTH).await;
        },
    );
}
