//! Clients that leave: every route, every phase, every way, each pairing of versions. Whoever leaves takes the upstream's work along.

use serde_json::{Value, json};
use tidegate::config::{AuthStyle, Config, Secret};
use tidegate_rig::clock::now_ns;

use super::caller::Caller;
use super::stage::{Http, STREAMS, Stage, Way, forms, ms, on_each, routes};
use crate::security::key;
use crate::support::{CANCEL, CHAT, MESSAGES, SOON, only, room_for, slots, stream, whole};

const HOURS: u64 = 3_600_000;

/// Where a call is when its client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Head,
    Silence,
    Streaming,
    Stalled,
    ErrorBody,
}

impl At {
    pub(crate) fn phase(self) -> &'static str {
        match self {
            Self::Head => "waiting_head",
            Self::Silence => "waiting_first_event",
            Self::Streaming | Self::Stalled | Self::ErrorBody => "streaming",
        }
    }

    fn script(self, streaming: bool) -> Value {
        let (kind, start, more) = if streaming {
            let event = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n";
            ("text/event-stream", event, event)
        } else {
            ("application/json", "{\"text\":\"", "word ")
        };
        let (headers, start) = (json!([["content-type", kind]]), json!({"text": start}));
        let pieces = |more: Value| json!({"headers": headers, "body": {"pieces": [start, more]}});
        match self {
            Self::Head => json!({"stall": {"at": "head"}}),
            Self::Silence => {
                json!({"headers": headers, "first_ms": HOURS, "body": {"pieces": [start]}})
            }
            Self::Streaming => pieces(json!({"text": more, "times": 1_000_000, "pause_ms": 50})),
            Self::Stalled => pieces(json!({"text": more, "pause_ms": HOURS})),
            Self::ErrorBody => json!({
                "status": 429, "headers": [["content-type", "application/json"]],
                "body": {"pieces": [{"text": "{\"error\":{\"message\":\"", "pause_ms": HOURS}]},
            }),
        }
    }

    pub(crate) fn body(self, streaming: bool, id: &str) -> Value {
        let script = self.script(streaming);
        let mut body = if streaming {
            stream(script)
        } else {
            whole(script)
        };
        body["test_id"] = json!(id);
        body
    }

    /// Waits until the upstream is there with a call.
    pub(crate) async fn came(self, up: &tidegate_rig::FakeUpstream, id: &str) {
        let there = |c: &tidegate_rig::CallTruth| {
            let answering = self == Self::Head || c.first_write_ns.is_some();
            c.test_id.as_deref() == Some(id) && c.body_ns.is_some() && answering
        };
        up.wait_for_call(there, SOON).await.expect("the call came");
    }

    /// Waits until a call is there, on both sides.
    pub(crate) async fn reached(
        self,
        up: &tidegate_rig::FakeUpstream,
        id: &str,
        caller: &mut Caller,
    ) {
        self.came(up, id).await;
        if matches!(self, Self::Streaming | Self::Stalled | Self::ErrorBody) {
            let status = if self == Self::ErrorBody { 429 } else { 200 };
            assert_eq!(caller.head().await.status, status, "{id}");
            caller.bytes(5).await;
        }
    }
}

/// Leaves; the upstream has to be told in time.
async fn left(stage: &Stage, id: &str, caller: Caller, way: Way) -> Option<Caller> {
    let at = now_ns();
    let rest = caller.leave(way).await;
    let gone =
        |c: &tidegate_rig::CallTruth| c.test_id.as_deref() == Some(id) && c.peer_gone_ns.is_some();
    let call = stage.up.wait_for_call(gone, SOON).await;
    let call = call.unwrap_or_else(|_| panic!("{stage}, {id}: the upstream was not told"));
    let after = call.peer_gone_ns.unwrap_or(u64::MAX).saturating_sub(at);
    assert!(
        u128::from(after) < CANCEL.as_nanos(),
        "{stage}, {id}: {after} ns"
    );
    rest
}

/// Whether the line of a call says that its client left, and where.
async fn written(stage: &Stage, peer: std::net::SocketAddr, at: At) {
    let line = stage.gate.line_of(peer).await;
    let seen = (
        &line["outcome"],
        &line["phase"],
        &line["wait_end"],
        &line["work_end"],
    );
    let right = (
        &json!("client_closed"),
        &json!(at.phase()),
        &json!("left"),
        &json!("cancelled"),
    );
    assert_eq!(seen, right, "{stage}: {line}");
}

/// All routes and ways in this phase, in each pairing.
async fn matrix(at: At, streaming: bool) {
    on_each(
        |c| room_for(c, 100),
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for path in routes() {
                for way in stage.down.ways() {
                    let id = format!("{path} {at:?} {way:?} {streaming}");
                    let caller = stage.post(path, &at.body(streaming, &id)).await;
                    callers.push((id, way, caller));
                }
            }
            for (id, _, caller) in &mut callers {
                at.reached(&stage.up, id, caller).await;
            }
            let n = callers.len();
            if at == At::Silence {
                // The upstream has written its heads; the gateway has to have seen them.
                let heads = [("phase", "waiting_head")];
                let seen = |g: &crate::support::Gate| {
                    g.metric("phase_duration_seconds_count", &heads) as usize >= n
                };
                stage.gate.eventually("all heads are there", seen).await;
            }
            for (id, way, caller) in callers {
                let peer = caller.peer();
                let rest = left(stage, &id, caller, way).await;
                written(stage, peer, at).await;
                drop(rest);
            }
            let gone = stage
                .gate
                .metric("disconnects_total", &[("phase", at.phase())]);
            assert_eq!(gone as usize, n, "{stage}");
            assert_eq!(
                stage.gate.lines().len(),
                n,
                "{stage}: one line for each call"
            );
        },
    )
    .await;
}

#[tokio::test]
async fn c01_c03_gone_in_mid_stream_on_every_route() {
    matrix(At::Streaming, true).await;
}

/// Far more than the buffers on the way take: only a closed connection stops it.
#[tokio::test]
async fn c01_gone_from_a_reply_that_no_buffer_holds() {
    const READ: usize = 1 << 20;
    const BUFFERS: u64 = 16 << 20;
    on_each(
        |c| room_for(c, 50),
        async |stage: &Stage| {
            let big = json!({"end": "never", "event_bytes": 16_384});
            let mut callers = Vec::new();
            for n in 0..6 {
                let mut body = stream(big.clone());
                body["test_id"] = json!(n.to_string());
                callers.push((n, stage.post(STREAMS[n % 4], &body).await));
            }
            for (n, mut caller) in callers {
                caller.accepted().await;
                caller.bytes(READ).await;
                let way = stage.down.ways()[n % 3];
                drop(left(stage, &n.to_string(), caller, way).await);
            }
            stage.running(0).await;
            for call in stage.up.calls() {
                assert!(
                    call.bytes_written < READ as u64 + BUFFERS,
                    "{stage}: {call:?}"
                );
            }
            for line in stage.gate.logged(6).await {
                assert_eq!(line["outcome"], "client_closed", "{stage}: {line}");
            }
        },
    )
    .await;
}

#[tokio::test]
async fn c02_c03_gone_before_the_head() {
    matrix(At::Head, true).await;
}

#[tokio::test]
async fn c02_c03_gone_between_the_head_and_the_first_event() {
    matrix(At::Silence, true).await;
}

#[tokio::test]
async fn c02_c03_gone_from_a_stream_that_has_gone_silent() {
    matrix(At::Stalled, true).await;
}

#[tokio::test]
async fn c03_gone_in_an_errors_body() {
    matrix(At::ErrorBody, true).await;
}

/// What has no body of its own is watched too.
#[tokio::test]
async fn c03_gone_while_the_models_are_listed() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            stage.up.set_default(
                serde_json::from_value(json!({"stall": {"at": "head"}})).expect("a script"),
            );
            for way in stage.down.ways() {
                let mut caller = stage.caller().await;
                caller.request("GET", "/v1/models", &[], b"").await;
                stage.running(1).await;
                let rest = caller.leave(way).await;
                let told = stage.up.wait_for(|t| t.running == 0, CANCEL).await;
                told.unwrap_or_else(|t| panic!("{stage}, {way:?}: not told: {t:?}"));
                drop(rest);
            }
        },
    )
    .await;
}

#[tokio::test]
async fn c14_gone_before_a_whole_answers_head() {
    matrix(At::Head, false).await;
}

#[tokio::test]
async fn c14_gone_between_head_and_body_of_a_whole_answer() {
    matrix(At::Silence, false).await;
}

#[tokio::test]
async fn c14_gone_in_the_middle_of_a_whole_answer() {
    matrix(At::Streaming, false).await;
}

#[tokio::test]
async fn c14_gone_from_a_whole_answer_that_has_stopped() {
    matrix(At::Stalled, false).await;
}

/// Impatient clients in a crowd: their slots come back at once.
#[tokio::test]
async fn c14_a_crowd_that_gives_up_leaves_its_slots_to_the_next() {
    on_each(
        |c| {
            only(c).slots = slots(4);
            only(c).queue = 40;
        },
        async |stage: &Stage| {
            let silent = whole(json!({"stall": {"at": "head"}}));
            let mut crowd = Vec::new();
            for n in 0..30 {
                crowd.push(stage.post(routes()[n % 7], &silent).await);
            }
            stage.running(4).await;
            stage
                .gate
                .eventually("all others wait", |g| g.metric("queued", &[]) == 26.0)
                .await;
            assert_eq!(stage.up.truth().max_running, 4, "{stage}");
            let mut next = stage.post(CHAT, &whole(json!({}))).await;
            stage
                .gate
                .eventually("the next waits", |g| g.metric("queued", &[]) == 27.0)
                .await;
            let mut rests = Vec::new();
            for (n, caller) in crowd.into_iter().enumerate() {
                rests.push(caller.leave(stage.down.ways()[n % 3]).await);
            }
            assert_eq!(next.answer().await.0.status, 200, "{stage}");
            for line in stage.gate.logged(31).await {
                assert!(
                    line["outcome"] == "client_closed" || line["outcome"] == "ok",
                    "{line}"
                );
            }
        },
    )
    .await;
}

/// One class for whoever leaves, wherever they were: it is no error of anybody's.
#[tokio::test]
async fn c16_leaving_is_an_outcome_of_its_own() {
    on_each(
        |c| {
            only(c).slots = slots(5);
            only(c).queue = 5;
        },
        async |stage: &Stage| {
            let mut callers = Vec::new();
            for (n, at) in [
                At::Head,
                At::Silence,
                At::Streaming,
                At::Stalled,
                At::ErrorBody,
            ]
            .into_iter()
            .enumerate()
            {
                let id = format!("{at:?}");
                let path = STREAMS[n % 4];
                let mut caller = stage.post(path, &at.body(true, &id)).await;
                at.reached(&stage.up, &id, &mut caller).await;
                callers.push((at.phase(), caller));
            }
            for streaming in [true, false] {
                callers.push((
                    "queued",
                    stage.post(MESSAGES, &At::Head.body(streaming, "q")).await,
                ));
            }
            stage
                .gate
                .eventually("two wait", |g| g.metric("queued", &[]) == 2.0)
                .await;
            let heads = [("phase", "waiting_head")];
            stage
                .gate
                .eventually("the heads are there", |g| {
                    g.metric("phase_duration_seconds_count", &heads) >= 4.0
                })
                .await;
            for (phase, caller) in callers.into_iter().rev() {
                let peer = caller.peer();
                let rest = caller.leave(stage.down.reset()).await;
                let line = stage.gate.line_of(peer).await;
                assert_eq!(line["outcome"], "client_closed", "{stage}: {line}");
                assert_eq!(line["phase"], phase, "{stage}: {line}");
                drop(rest);
            }
            let closed = [("outcome", "client_closed")];
            assert_eq!(stage.gate.metric("calls_total", &closed), 7.0, "{stage}");
            assert_eq!(stage.gate.metric("calls_total", &[]), 7.0, "{stage}");
            assert_eq!(stage.gate.metric("disconnects_total", &[]), 7.0, "{stage}");
        },
    )
    .await;
}

type Layer = (&'static str, fn(&mut Config));

/// Everything that an operator can switch on and that stands between the client and the upstream.
const LAYERS: [Layer; 8] = [
    ("keys", |c| c.keys = vec![key("ci", "sk-good")]),
    ("origins", |c| {
        c.cors.origins = vec!["https://app.example".to_owned()]
    }),
    ("upstream key", |c| {
        only(c).api_key = Some(Secret::new("sk-up"));
        only(c).auth = AuthStyle::XApiKey;
    }),
    ("heartbeats", |c| only(c).heartbeat = Some(ms(100))),
    ("usage", |c| only(c).ask_usage = true),
    ("alias", |c| {
        only(c)
            .aliases
            .insert("tiny".to_owned(), "small".to_owned());
    }),
    ("total", |c| only(c).timeouts.total = Some(SOON * 6)),
    ("no access log", |c| c.log.access = false),
];

async fn leaves_under(layer: &str, change: impl Fn(&mut Config)) {
    on_each(change, async |stage: &Stage| {
        for form in forms() {
            let ats = [At::Head, At::Streaming, At::Silence];
            let ats = if form.streaming { &ats[1..] } else { &ats[..2] };
            for at in ats {
                let id = format!("{layer} {form:?} {at:?}");
                let mut caller = stage.caller().await;
                let body = at.body(form.streaming, &id).to_string();
                let fields = [("x-api-key", "sk-good")];
                caller
                    .request("POST", form.path, &fields, body.as_bytes())
                    .await;
                at.reached(&stage.up, &id, &mut caller).await;
                drop(left(stage, &id, caller, stage.down.reset()).await);
            }
        }
    })
    .await;
}

#[tokio::test]
async fn c04_no_option_hides_a_client_that_leaves() {
    for (name, change) in LAYERS {
        leaves_under(name, change).await;
    }
    leaves_under("all", |c| LAYERS.iter().for_each(|(_, change)| change(c))).await;
}

/// Each stops early in a long answer; what they did not read is not generated, and nothing is tried again for nobody.
#[tokio::test]
async fn c05_a_storm_costs_the_upstream_next_to_nothing() {
    const CLIENTS: usize = 24;
    on_each(
        |c| room_for(c, CLIENTS),
        async |stage: &Stage| {
            let long = stream(json!({"tokens": 500, "pace_ms": 20.0}));
            let mut callers = Vec::new();
            for n in 0..CLIENTS {
                callers.push(stage.post(STREAMS[n % 4], &long).await);
            }
            let mut rests = Vec::new();
            for (n, mut caller) in callers.into_iter().enumerate() {
                caller.accepted().await;
                caller.events(3).await;
                rests.push(caller.leave(stage.down.ways()[n % 3]).await);
            }
            stage.running(0).await;
            let truth = stage.up.truth();
            assert_eq!(
                truth.calls_begun as usize, CLIENTS,
                "{stage}: none was tried again"
            );
            let late = truth.tokens_after_peer_left;
            assert!(late <= 2 * CLIENTS as u64, "{stage}: {truth:?}");
        },
    )
    .await;
}

/// Nothing reads on behind the client's back.
#[tokio::test]
async fn c12_nothing_pumps_on_for_nobody() {
    on_each(
        |_| {},
        async |stage: &Stage| {
            for path in STREAMS {
                let fast = stream(json!({"end": "never", "pace_ms": 1.0}));
                let mut caller = stage.post(path, &fast).await;
                caller.accepted().await;
                caller.events(20).await;
                let rest = caller.leave(stage.down.reset()).await;
                stage.running(0).await;
                let before = stage.up.truth().tokens;
                let more = stage.up.wait_for(|t| t.tokens > before, ms(50)).await;
                assert!(more.is_err(), "{stage}, {path}: it went on");
                drop(rest);
            }
        },
    )
    .await;
}

/// FIN means gone, unless the operator says that clients may half-close.
#[tokio::test]
async fn c09_a_half_closed_client_is_gone_or_served_as_configured() {
    for back in [Http::One, Http::Two] {
        let stage = Stage::new((Http::One, back), |c| {
            c.server.half_close = tidegate::config::HalfClose::Serve;
        })
        .await;
        for path in STREAMS {
            let script = json!({"tokens": 10, "pace_ms": 10.0, "first_ms": 50});
            let caller = stage.post(path, &stream(script)).await;
            let mut caller = caller.leave(Way::HalfClose).await.expect("it reads on");
            caller.accepted().await;
            assert!(caller.rest().await.whole, "{stage}, {path}");
            // Whoever closes fully is noticed at the next writes.
            let script = json!({"end": "never", "pace_ms": 5.0});
            let mut caller = stage.post(path, &stream(script)).await;
            caller.accepted().await;
            let mut caller = caller.leave(Way::HalfClose).await.expect("it reads on");
            assert_eq!(caller.events(3).await.len(), 3, "{stage}: still served");
            caller.leave(Way::Fin).await;
            let told = stage.up.wait_for(|t| t.running == 0, 2 * CANCEL).await;
            told.unwrap_or_else(|t| panic!("{stage}, {path}: not told: {t:?}"));
        }
        stage.settled().await;
    }
    // By default it is gone: see the half-closed rows of c01, c02 and c14.
    assert_eq!(
        tidegate::config::Server::default().half_close,
        tidegate::config::HalfClose::Gone
    );
}
