//! Faults of the network itself, between machines of their own: frames that are lost or late, a cable that is cut and mended, machines that
//! vanish, and machines that come back and know of nothing. Each for either version of HTTP on either side.

pub(crate) mod ground;

mod forgotten;
mod lossy;
mod partition;
mod rebooted;
mod vanished;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::config::Config;
use tokio::time::Instant;

use self::ground::{Cable, GATE, Net, Server};
use crate::cases::caller::Caller;
use crate::cases::stage::{Http, PAIRINGS, STREAMS, far, over};
use crate::support::{CHAT, Gate, eventually, gateway_at, half_closed, slots, stream, whole};

/// The gateway probes a silent connection after this, and 5 s later again.
const KEEP_ALIVE: Duration = Duration::from_secs(1);
/// A peer that has said nothing for this long when a probe or a byte is due is gone.
const USER_TIMEOUT: Duration = Duration::from_secs(2);
/// So a peer that is gone has been noticed: two probes, and what the machine's other work takes.
const NOTICED: Duration = Duration::from_secs(12);

/// Three machines: clients, gateways of which one speaks HTTP/1.1 and one HTTP/2 to the upstream, and the upstream.
struct World {
    net: Net,
    server: Server,
    gates: [Gate; 2],
}

impl World {
    /// The test is at the client's machine from now on.
    fn new(net: Net, change: impl Fn(&mut Config)) -> Self {
        let server = net.serve();
        let gates = [Http::One, Http::Two].map(|back| {
            gateway_at(Server::addr(back), |c| {
                over(c, back);
                far(c);
                c.server.listen = SocketAddr::new(IpAddr::V4(GATE), 0);
                c.server.allow_unauthenticated = true;
                c.server.workers = slots(1);
                c.server.tcp_keep_alive = KEEP_ALIVE;
                c.server.tcp_user_timeout = USER_TIMEOUT;
                change(c);
            })
        });
        net.at_the_client();
        Self { net, server, gates }
    }

    /// The one that speaks this version to the upstream.
    fn gate(&self, back: Http) -> &Gate {
        &self.gates[usize::from(back == Http::Two)]
    }

    async fn post(&self, (down, back): (Http, Http), path: &str, body: &Value) -> Caller {
        let mut caller = Caller::connect(down, self.gate(back).addr()).await;
        caller.post(path, body).await;
        caller
    }

    /// A call that is answered at once, in each pairing.
    async fn answers(&self) {
        for pairing in PAIRINGS {
            let mut caller = self.post(pairing, CHAT, &whole(json!({}))).await;
            let (head, rest) = caller.answer().await;
            assert!(
                head.status == 200 && rest.whole,
                "{pairing:?}: {}",
                rest.text()
            );
        }
    }

    /// A call of each pairing that waits for a slot.
    async fn wait_in_the_queue(&self) -> Vec<Caller> {
        let mut waiting = Vec::new();
        for pairing in PAIRINGS {
            waiting.push(self.post(pairing, CHAT, &whole(json!({}))).await);
        }
        let queued = |g: &Gate| g.metric("queued", &[]) == 2.0;
        eventually("they wait", || self.gates.iter().all(queued)).await;
        waiting
    }

    /// Waits, so long as a peer that is gone may take to be noticed, until this holds.
    async fn noticed(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let end = Instant::now() + NOTICED;
        while !holds(self) {
            assert!(
                Instant::now() < end,
                "not noticed: {what}: {:?}",
                self.counted()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn running(&self, n: u64) {
        eventually(&format!("{n} calls at the server"), || {
            self.server.up.truth().running == n
        })
        .await;
    }

    fn counted(&self) -> Vec<String> {
        self.gates.iter().flat_map(Gate::counted).collect()
    }

    /// Waits until nothing is left of any call on any machine.
    async fn settled(&self) {
        eventually("all gauges are zero", || self.counted().is_empty()).await;
        eventually("no call runs at the server", || {
            self.server.up.truth().running == 0 && self.server.front.truth().streams_running == 0
        })
        .await;
        eventually("no half-closed socket", || {
            [Http::One, Http::Two]
                .iter()
                .all(|back| half_closed(Server::addr(*back)) == 0)
        })
        .await;
    }

    /// Cuts the server off, has it come back with no memory of any connection, and gives it time to be found out.
    fn reboot_server(self) -> Self {
        let Self {
            mut net,
            server,
            gates,
        } = self;
        net.cut(Cable::Server);
        drop(server);
        net.reboot(Cable::Server);
        let server = net.serve();
        net.mend(Cable::Server);
        Self { net, server, gates }
    }
}

/// Calls in each phase that a server's or a client's end can meet, all on the way: none will end by itself.
struct Phases {
    /// Nothing was answered: (streams, in one piece).
    unanswered: Vec<Caller>,
    /// Streams that have begun: one flows, one is silent.
    begun: Vec<Caller>,
}

impl Phases {
    /// So many calls for each pairing.
    const EACH: u64 = 4;

    async fn begin(world: &World) -> Self {
        let (mut unanswered, mut begun) = (Vec::new(), Vec::new());
        for (n, pairing) in PAIRINGS.into_iter().enumerate() {
            let path = STREAMS[n];
            for body in [
                stream(json!({"stall": {"at": "head"}})),
                whole(json!({"stall": {"at": "head"}})),
            ] {
                unanswered.push(world.post(pairing, path, &body).await);
            }
            for script in [
                json!({"end": "never", "pace_ms": 20, "tokens": 100_000}),
                json!({"tokens": 5, "stall": {"at": {"event": 3}}}),
            ] {
                let mut caller = world.post(pairing, path, &stream(script)).await;
                caller.accepted().await;
                assert_eq!(caller.events(2).await.len(), 2, "{pairing:?}, {path}");
                begun.push(caller);
            }
        }
        world.running(Self::EACH * PAIRINGS.len() as u64).await;
        Self { unanswered, begun }
    }

    /// Each client is told, in the way of its phase.
    async fn are_told(self) {
        for mut caller in self.unanswered {
            let (head, rest) = caller.answer().await;
            let begun = head.header("x-tidegate-started");
            assert_eq!((head.status, begun), (502, Some("true")), "{}", rest.text());
        }
        for mut caller in self.begun {
            let rest = caller.rest().await;
            assert!(
                !rest.whole && rest.text().contains("error"),
                "{}",
                rest.text()
            );
        }
    }
}

/// The access-log lines of all, by outcome.
async fn outcomes(world: &World, each: usize) -> Vec<String> {
    let mut outcomes = Vec::new();
    for gate in &world.gates {
        for line in gate.logged(each).await {
            outcomes.push(line["outcome"].as_str().expect("a word").to_owned());
        }
    }
    outcomes.sort_unstable();
    outcomes
}

/// What a server says anew each time is blanked: identifiers and times.
fn without_identity(body: &[u8]) -> String {
    let text = String::from_utf8(body.to_vec()).expect("text");
    let mut rest = text.as_str();
    let mut out = String::new();
    let marks = ["id\":\"", "\"created\":", "\"created_at\":"];
    while let Some((at, mark)) = marks.iter().filter_map(|m| Some((rest.find(m)?, m))).min() {
        let after = at + mark.len();
        out.push_str(&rest[..after]);
        let end = rest[after..].find(['"', ',', '}']).expect("an end");
        rest = &rest[after + end..];
    }
    out + rest
}
