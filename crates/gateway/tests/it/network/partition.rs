//! A cable that is cut, and mended before any limit is over.

use serde_json::json;

use super::ground::{Cable, play};
use super::{NOTICED, World};
use crate::cases::stage::{PAIRINGS, STREAMS};
use crate::support::{CHAT, room_for, stream, whole};

/// Frames that a cable has to have lost before it is mended: each connection has tried again several times.
const ENOUGH: u64 = 60;

async fn heals(net: super::Net, cable: Cable) {
    let mut world = World::new(net, |c| {
        room_for(c, 64);
        c.server.tcp_user_timeout = NOTICED;
    });
    let mut callers = Vec::new();
    for pairing in PAIRINGS {
        for path in STREAMS {
            let mut flows = world
                .post(pairing, path, &stream(json!({"tokens": 40, "pace_ms": 50})))
                .await;
            flows.accepted().await;
            assert_eq!(flows.events(2).await.len(), 2);
            callers.push((pairing, path, flows));
        }
    }
    let mut thinking = Vec::new();
    for pairing in PAIRINGS {
        for body in [
            whole(json!({"delay_ms": 1500})),
            stream(json!({"first_ms": 1500, "tokens": 3})),
        ] {
            thinking.push(world.post(pairing, CHAT, &body).await);
        }
    }
    world.running((callers.len() + thinking.len()) as u64).await;
    world.net.cut(cable);
    while world.net.lost(cable) < ENOUGH {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    world.net.mend(cable);
    for (pairing, path, mut caller) in callers {
        let rest = caller.rest().await;
        assert!(rest.whole, "{pairing:?}, {path}: {}", rest.text());
    }
    for mut caller in thinking {
        let (head, rest) = caller.answer().await;
        assert!(head.status == 200 && rest.whole, "{}", rest.text());
    }
    world.answers().await;
    let calls = world.server.up.truth().calls_begun as usize;
    assert_eq!(
        calls,
        PAIRINGS.len() * (STREAMS.len() + 3),
        "none was sent twice"
    );
    for gate in &world.gates {
        for line in gate.lines() {
            assert_eq!(line["outcome"], "ok", "{line}");
        }
    }
    world.settled().await;
}

#[test]
fn a_short_cut_to_clients_heals() {
    play(
        module_path!(),
        "a_short_cut_to_clients_heals",
        async |net| {
            heals(net, Cable::Client).await;
        },
    );
}

#[test]
fn a_short_cut_to_the_upstream_heals() {
    play(
        module_path!(),
        "a_short_cut_to_the_upstream_heals",
        async |net| {
            heals(net, Cable::Server).await;
        },
    );
}
