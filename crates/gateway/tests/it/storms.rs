//! Many clients at once: what they leave behind, and what the gauges say meanwhile.

use serde_json::json;
use tidegate_rig::{RawClient, Script};
use tokio::task::JoinSet;

use crate::leave::{WAYS, Way, leave};
use crate::support::{
    CANCEL, CHAT, SOON, eventually, gateway, only, room_for, slots, stream, upstream, whole,
};

#[tokio::test]
async fn fifty_leave_big_streams_in_one_moment() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| room_for(c, 50));
    let script = json!({"end": "never", "event_bytes": 16_384, "pace_ms": 20.0});
    for way in [Way::Rst, Way::Fin] {
        let mut clients = Vec::new();
        for _ in 0..50 {
            clients.push(gate.post(CHAT, &stream(script.clone())).await);
        }
        for client in &mut clients {
            client.final_head().await.expect("head");
            client.body_bytes(100_000).await.expect("bytes");
        }
        for client in clients {
            leave(client, way).await;
        }
        let told = up.wait_for(|t| t.running == 0, 2 * CANCEL).await;
        told.unwrap_or_else(|truth| panic!("{way:?}: {truth:?}"));
        gate.settled_with(&up, 0).await;
    }
    assert_eq!(up.truth().max_running, 50);
    let lines = gate.stop();
    assert_eq!(lines.len(), 100);
    assert!(lines.iter().all(|l| l["outcome"] == "client_closed"));
}

#[tokio::test]
async fn a_storm_wastes_next_to_nothing() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| room_for(c, 100));
    let mut clients = JoinSet::new();
    for n in 0..100 {
        let (addr, way) = (gate.addr(), WAYS[n % 2]);
        clients.spawn(async move {
            let mut client = RawClient::connect(addr).await.expect("connect");
            let ask = stream(json!({"tokens": 500, "pace_ms": 80.0}));
            client.post(CHAT, &ask.to_string()).await.expect("sent");
            client.final_head().await.expect("head");
            client.events(5).await.expect("events");
            leave(client, way).await;
        });
    }
    clients.join_all().await;
    gate.settled_with(&up, 0).await;
    let truth = up.truth();
    assert_eq!(truth.calls_begun, 100, "none was tried again");
    assert!(truth.tokens < 100 * (5 + 25), "{truth:?}");
}

#[tokio::test]
async fn slots_of_those_who_left_go_to_those_who_wait() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(4);
        only(c).queue = 40;
    });
    let slow = whole(json!({"stall": {"at": "head"}}));
    let mut clients = Vec::new();
    for _ in 0..30 {
        clients.push(gate.post(CHAT, &slow).await);
    }
    gate.eventually("all are there", |g| {
        g.metric("running", &[]) == 4.0 && g.metric("queued", &[]) == 26.0
    })
    .await;
    let truth = up.wait_for(|t| t.running == 4, SOON).await;
    assert_eq!(truth.expect("four run").max_running, 4);
    let mut last = gate.post(CHAT, &whole(json!({"tokens": 1}))).await;
    gate.eventually("the last is queued", |g| g.metric("queued", &[]) == 27.0)
        .await;
    for client in clients {
        client.leave_fin();
    }
    assert_eq!(last.final_head().await.expect("head").status, 200);
    last.rest().await.expect("body");
    gate.settled(&up).await;
}

#[tokio::test]
async fn a_gauge_tells_the_truth_about_open_streams() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| room_for(c, 100));
    let ask = stream(json!({"end": "never", "pace_ms": 20.0}));
    let mut clients = Vec::new();
    for _ in 0..60 {
        let mut client = gate.post(CHAT, &ask).await;
        client.final_head().await.expect("head");
        clients.push(client);
    }
    for left in (0..60).rev() {
        let client = clients.pop().expect("a client");
        leave(client, WAYS[left % 3]).await;
        if left % 20 == 0 {
            eventually("both counts agree", || {
                let (seen, open) = (gate.metric("running", &[]), up.truth().running);
                seen as usize == left && open as usize == left
            })
            .await;
        }
    }
    gate.settled_with(&up, 0).await;
    assert_eq!(
        gate.metric("started_total", &[]),
        gate.metric("ended_total", &[])
    );
    assert_eq!(gate.metric("calls_total", &[]), 60.0);
}

#[tokio::test]
async fn a_slot_is_held_until_the_last_byte() {
    let up = upstream(Script::default()).await;
    let gate = gateway(&up, |c| {
        only(c).slots = slots(4);
        only(c).queue = 20;
    });
    // The head comes at once, the events take their time; every third client leaves on the way.
    let ask = stream(json!({"tokens": 10, "pace_ms": 10.0}));
    let mut clients = JoinSet::new();
    for n in 0..20 {
        let mut client = gate.post(CHAT, &ask).await;
        clients.spawn(async move {
            assert_eq!(client.final_head().await.expect("head").status, 200);
            client.events(3).await.expect("events");
            if n % 3 == 0 {
                leave(client, WAYS[n % 2]).await;
            } else {
                client.rest().await.expect("body");
            }
        });
    }
    let mut most = 0.0;
    while let Some(client) = clients.join_next().await {
        client.expect("a client");
        let running = gate.metric("running", &[]);
        most = f64::max(most, running);
        assert!(running <= 4.0, "{running}");
    }
    assert!(most > 0.0);
    gate.settled(&up).await;
    assert_eq!(up.truth().calls_begun, 20);
    assert_eq!(gate.metric("started_total", &[]), 20.0);
}
