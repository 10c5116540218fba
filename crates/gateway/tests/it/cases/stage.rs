//! A gateway between either version of HTTP and either version of HTTP: what is true of one pairing has to be true of each.

use std::fmt;
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use serde_json::Value;
use tidegate::config::{Config, HttpVersion};
use tidegate::front::route::KNOWN;
use tidegate_rig::{FakeUpstream, H2Front, H2Options, Script};

use super::caller::Caller;
use crate::support::{
    CHAT, Gate, LOCALHOST, MESSAGES, RESPONSES, SOON, eventually, gateway_at, half_closed, only,
    stream, upstream, whole,
};

/// A version of HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Http {
    One,
    Two,
}

/// The client's version and the upstream's.
pub(crate) const PAIRINGS: [(Http, Http); 4] = [
    (Http::One, Http::One),
    (Http::One, Http::Two),
    (Http::Two, Http::One),
    (Http::Two, Http::Two),
];

pub(crate) const COMPLETIONS: &str = "/v1/completions";
/// The routes that stream, each with a form of its own.
pub(crate) const STREAMS: [&str; 4] = [CHAT, COMPLETIONS, MESSAGES, RESPONSES];

/// Every route that has a body of its own, and one that is passed through.
pub(crate) fn routes() -> Vec<&'static str> {
    let known = KNOWN.iter().map(|known| known.path);
    known.chain(["/v1/something/else"]).collect()
}

/// A request to one of the routes, for a stream or for an answer in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    pub(crate) path: &'static str,
    pub(crate) streaming: bool,
}

impl Form {
    /// Its body; the answer goes by this script.
    pub(crate) fn ask(self, rig: Value) -> Value {
        if self.streaming {
            stream(rig)
        } else {
            whole(rig)
        }
    }

    /// Whether its errors are of Anthropic's form.
    pub(crate) fn anthropic(self) -> bool {
        self.path.starts_with(MESSAGES)
    }
}

/// Every route with a body of its own in one piece, and those that stream as streams too.
pub(crate) fn forms() -> Vec<Form> {
    let form = |streaming| move |path| Form { path, streaming };
    let wholes = routes().into_iter().map(form(false));
    STREAMS.into_iter().map(form(true)).chain(wholes).collect()
}

/// How a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Closes its connection.
    Fin,
    /// Resets its connection.
    Rst,
    /// Says that it will send no more, and reads on.
    HalfClose,
    /// Resets its HTTP/2 stream; the connection stays.
    Stream,
}

impl Http {
    /// The ways to leave that it has.
    pub(crate) fn ways(self) -> [Way; 3] {
        match self {
            Self::One => [Way::Fin, Way::Rst, Way::HalfClose],
            Self::Two => [Way::Fin, Way::Rst, Way::Stream],
        }
    }

    /// The way that leaves no doubt.
    pub(crate) fn reset(self) -> Way {
        match self {
            Self::One => Way::Rst,
            Self::Two => Way::Stream,
        }
    }
}

/// A gateway in front of a fake upstream, in one of the pairings.
pub(crate) struct Stage {
    pub(crate) down: Http,
    pub(crate) back: Http,
    pub(crate) up: FakeUpstream,
    front: Option<H2Front>,
    pub(crate) gate: Gate,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} to {:?}", self.down, self.back)
    }
}

impl Stage {
    pub(crate) async fn new((down, back): (Http, Http), change: impl FnOnce(&mut Config)) -> Self {
        let up = upstream(Script::default()).await;
        let front = match back {
            Http::One => None,
            Http::Two => {
                let front = H2Front::start(LOCALHOST, up.addr(), H2Options::default()).await;
                Some(front.expect("a loopback port"))
            }
        };
        let addr = front.as_ref().map_or(up.addr(), H2Front::addr);
        let gate = gateway_at(addr, |c| {
            over(c, back);
            change(c);
        });
        Self {
            down,
            back,
            up,
            front,
            gate,
        }
    }

    /// Where the upstream listens, in its version.
    pub(crate) fn upstream_addr(&self) -> SocketAddr {
        self.front.as_ref().map_or(self.up.addr(), H2Front::addr)
    }

    /// Connections that the gateway has opened.
    pub(crate) fn upstream_connections(&self) -> u64 {
        match &self.front {
            Some(front) => front.truth().connections_accepted,
            None => self.up.truth().connections_accepted,
        }
    }

    /// A new connection in the client's version.
    pub(crate) async fn caller(&self) -> Caller {
        Caller::connect(self.down, self.gate.addr()).await
    }

    /// A new connection on which this was posted.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Caller {
        let mut caller = self.caller().await;
        caller.post(path, body).await;
        caller
    }

    /// Waits until so many calls run at the upstream.
    pub(crate) async fn running(&self, n: u64) {
        let there = self.up.wait_for(|t| t.running == n, SOON).await;
        there.unwrap_or_else(|t| panic!("{self}: {n} should run: {t:?}"));
    }

    /// Waits until nothing is left of any call, on either side.
    pub(crate) async fn settled(&self) {
        let Some(front) = &self.front else {
            return self.gate.settled(&self.up).await;
        };
        let left = || {
            let (at, truth) = (front.truth(), self.up.truth());
            let known = self.gate.metric("upstream_connections", &[]);
            let mut left = self.gate.counted();
            if at.streams_running != 0 || truth.running != 0 {
                left.push(format!(
                    "{} streams, {} calls",
                    at.streams_running, truth.running
                ));
            }
            if at.connections_open as f64 != known {
                left.push(format!(
                    "{} connections, {known} known",
                    at.connections_open
                ));
            }
            left
        };
        eventually(&format!("{self} is settled"), || left().is_empty()).await;
        eventually("no half-closed socket", || half_closed(front.addr()) == 0).await;
    }
}

/// Speaks this version to the upstream.
pub(crate) fn over(config: &mut Config, back: Http) {
    if back == Http::Two {
        only(config).pool.http = HttpVersion::Http2;
    }
}

/// Plays the scene in each pairing, all at once; each is settled afterwards.
pub(crate) async fn on_each(change: impl Fn(&mut Config), scene: impl AsyncFn(&Stage)) {
    let play = async |pairing| {
        let stage = Stage::new(pairing, &change).await;
        scene(&stage).await;
        stage.settled().await;
    };
    let [a, b, c, d] = PAIRINGS;
    tokio::join!(
        Box::pin(play(a)),
        Box::pin(play(b)),
        Box::pin(play(c)),
        Box::pin(play(d))
    );
}

/// Plays the scene with clients of each version, in front of an upstream of this one.
pub(crate) async fn on_both(back: Http, change: impl Fn(&mut Config), scene: impl AsyncFn(&Stage)) {
    for down in [Http::One, Http::Two] {
        let stage = Stage::new((down, back), &change).await;
        scene(&stage).await;
        stage.settled().await;
    }
}

/// Plays the scene with clients of this version, in front of upstreams of each.
pub(crate) async fn on_backs(
    down: Http,
    change: impl Fn(&mut Config),
    scene: impl AsyncFn(&Stage),
) {
    for back in [Http::One, Http::Two] {
        let stage = Stage::new((down, back), &change).await;
        scene(&stage).await;
        stage.settled().await;
    }
}

/// All tiers far away, but for those that a case is about.
pub(crate) fn far(config: &mut Config) -> &mut tidegate::config::Timeouts {
    const FAR: Duration = Duration::from_secs(60);
    let timeouts = &mut only(config).timeouts;
    *timeouts = tidegate::config::Timeouts {
        request_head: FAR,
        request_body: FAR,
        queue: FAR,
        pool: FAR,
        connect: FAR,
        tls: FAR,
        response_head: FAR,
        first_event: FAR,
        silence: FAR,
        idle: FAR,
        write: FAR,
        total: None,
    };
    timeouts
}

pub(crate) const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Ends one half of a socket, or both.
pub(crate) fn shut(socket: &std::net::TcpStream, how: Shutdown) {
    socket.shutdown(how).expect("it is open");
}
