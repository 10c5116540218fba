//! Helpers that read as sentences.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::app::{Gateway, Listeners};
use tidegate::config::{Config, Endpoint, Upstream};
use tidegate::telemetry::access_log::Memory;
use tidegate_rig::{FakeUpstream, RawClient, Script};

/// Bound of a wait for something that takes milliseconds when nothing is wrong.
pub(crate) const SOON: Duration = Duration::from_secs(30);
/// Within this time of a client's leaving its upstream connection must be gone: less than every timeout that would end the call by itself,
/// and more than a busy machine stands still. How soon it is gone is measured by the rig.
pub(crate) const CANCEL: Duration = Duration::from_secs(2);
/// What the kernel has taken nothing of for this long it will not take.
pub(crate) const STUCK: Duration = Duration::from_millis(500);
pub(crate) const LOCALHOST: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const MESSAGES: &str = "/v1/messages";
pub(crate) const RESPONSES: &str = "/v1/responses";

/// An upstream that does this with every request that says nothing else.
pub(crate) async fn upstream(script: Script) -> FakeUpstream {
    FakeUpstream::start(LOCALHOST, script)
        .await
        .expect("a loopback port")
}

/// A gateway in front of `up`, on any port, with these changes to the smallest configuration.
pub(crate) fn gateway(up: &FakeUpstream, change: impl FnOnce(&mut Config)) -> Gate {
    gateway_at(up.addr(), change)
}

/// As [`gateway`], in front of any address.
pub(crate) fn gateway_at(address: SocketAddr, change: impl FnOnce(&mut Config)) -> Gate {
    let mut config = Config::one_upstream(endpoint(address));
    // A fake stops as it was told to.
    only(&mut config).stops_known = true;
    config.server.listen = LOCALHOST;
    config.server.workers = NonZeroUsize::new(2).expect("two");
    config.admin.listen = None;
    change(&mut config);
    Gate::start(config)
}

pub(crate) fn endpoint(address: SocketAddr) -> Endpoint {
    Endpoint::parse(&format!("http://{address}")).expect("an address is an endpoint")
}

/// The one upstream of a configuration.
pub(crate) fn only(config: &mut Config) -> &mut Upstream {
    &mut config.upstreams[0]
}

pub(crate) fn slots(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).expect("a slot")
}

/// Room for so many calls at a time.
pub(crate) fn room_for(config: &mut Config, n: usize) {
    only(config).slots = slots(n);
    only(config).pool.connections_max = n + 16;
}

/// An upstream that takes connections and reads nothing, for as long as the socket is held.
pub(crate) fn deaf() -> (tokio::net::TcpListener, SocketAddr) {
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(8192).expect("a size");
    socket.bind(LOCALHOST).expect("a port");
    let listener = socket.listen(16).expect("it listens");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

/// A running gateway and its access log.
#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) gateway: Gateway,
    log: Memory,
    config: Config,
}

impl Gate {
    pub(crate) fn start(config: Config) -> Self {
        let log = Memory::default();
        let gateway = Gateway::start(config.clone(), Listeners::default(), log.clone())
            .expect("the gateway starts");
        Self {
            gateway,
            log,
            config,
        }
    }

    /// What it was started with.
    pub(crate) fn config(&self) -> Config {
        self.config.clone()
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.gateway.data_addr()
    }

    /// A new connection.
    pub(crate) async fn client(&self) -> RawClient {
        RawClient::connect(self.addr())
            .await
            .expect("the gateway accepts")
    }

    /// A new connection on which this was posted.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> RawClient {
        let mut client = self.client().await;
        client.post(path, &body.to_string()).await.expect("sent");
        client
    }

    /// The sum of a metric's series that carry all of these labels.
    pub(crate) fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let text = self.gateway.metrics.encode();
        let name = format!("tidegate_{name}");
        let rows = text.lines().filter_map(|line| {
            let rest = line.strip_prefix(&name)?;
            let (series, value) = rest.rsplit_once(' ')?;
            let carried = series.is_empty() || series.starts_with('{');
            let wanted = labels
                .iter()
                .all(|(label, is)| series.contains(&format!("{label}=\"{is}\"")));
            (carried && wanted).then(|| value.parse::<f64>().expect("a number"))
        });
        rows.sum()
    }

    /// Waits until `what` holds.
    pub(crate) async fn eventually(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        eventually_or(
            || holds(self),
            || {
                let lines = self.lines();
                let last: Vec<_> = lines.iter().rev().take(3).collect();
                format!(
                    "never: {what}; counted: {:?}; last in the log: {last:?}",
                    self.counted()
                )
            },
        )
        .await;
    }

    /// The access-log lines so far, oldest first.
    pub(crate) fn lines(&self) -> Vec<Value> {
        parse_lines(&self.log)
    }

    /// Waits for `n` access-log lines.
    pub(crate) async fn logged(&self, n: usize) -> Vec<Value> {
        self.eventually(&format!("{n} lines in the log"), |g| g.lines().len() >= n)
            .await;
        let lines = self.lines();
        assert_eq!(lines.len(), n, "{lines:#?}");
        lines
    }

    /// Waits for the line of the call that came from this client.
    pub(crate) async fn line_of(&self, peer: SocketAddr) -> Value {
        let peer = peer.to_string();
        let find = || self.lines().into_iter().find(|l| l["peer"] == *peer);
        eventually(&format!("a line of {peer}"), || find().is_some()).await;
        find().expect("seen")
    }

    /// Ends the gateway. All lines that were ever written: one for each call.
    pub(crate) fn stop(self) -> Vec<Value> {
        let Self { gateway, log, .. } = self;
        gateway.stop();
        parse_lines(&log)
    }

    /// What is still counted of calls.
    pub(crate) fn counted(&self) -> Vec<String> {
        let gauges = [
            "running",
            "queued",
            "abandoned",
            "lingering",
            "attended",
            "request_bodies_bytes",
            "answers_bytes",
        ];
        gauges
            .iter()
            .map(|name| (name, self.metric(name, &[])))
            .filter(|(_, value)| *value != 0.0)
            .map(|(name, value)| format!("{name} {value}"))
            .collect()
    }

    /// Waits until nothing is left of any call: no slot, no place in a queue, no work at the upstream, no socket but idle ones.
    pub(crate) async fn settled(&self, up: &FakeUpstream) {
        self.settled_with(up, usize::MAX).await;
    }

    /// As [`Gate::settled`], and at most `idle` connections to the upstream are kept.
    pub(crate) async fn settled_with(&self, up: &FakeUpstream, idle: usize) {
        let left = || {
            let truth = up.truth();
            let mut left = self.counted();
            if truth.running != 0 {
                left.push(format!("{} calls at the upstream", truth.running));
            }
            let open = truth.connections_open as usize;
            let known = self.metric("upstream_connections", &[]) as usize;
            if open > idle || open != known {
                left.push(format!(
                    "{open} upstream connections, {known} known, at most {idle} expected"
                ));
            }
            left
        };
        let end = tokio::time::Instant::now() + SOON;
        loop {
            let left = left();
            if left.is_empty() {
                break;
            }
            assert!(tokio::time::Instant::now() < end, "not settled: {left:?}");
            tick().await;
        }
        eventually("no half-closed socket to the upstream", || {
            half_closed(up.addr()) == 0
        })
        .await;
    }
}

/// Waits until `holds`, looking each few milliseconds.
pub(crate) async fn eventually(what: &str, holds: impl Fn() -> bool) {
    eventually_or(holds, || format!("never: {what}")).await;
}

async fn eventually_or(holds: impl Fn() -> bool, otherwise: impl Fn() -> String) {
    let end = tokio::time::Instant::now() + SOON;
    while !holds() {
        assert!(tokio::time::Instant::now() < end, "{}", otherwise());
        tick().await;
    }
}

pub(crate) async fn tick() {
    tokio::time::sleep(Duration::from_millis(2)).await;
}

/// Sockets of this machine to `peer` that one side has closed and the other has not (CLOSE_WAIT, FIN_WAIT2).
pub(crate) fn half_closed(peer: SocketAddr) -> usize {
    let IpAddr::V4(ip) = peer.ip() else { return 0 };
    let hex = format!(
        "{:08X}:{:04X}",
        u32::from_ne_bytes(ip.octets()),
        peer.port()
    );
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let rows = table.lines().skip(1).filter(|row| {
        let mut words = row.split_whitespace().skip(2);
        words.next() == Some(&hex) && matches!(words.next(), Some("05" | "08"))
    });
    rows.count()
}

fn parse_lines(log: &Memory) -> Vec<Value> {
    let text = log.text();
    // The last line may be half written.
    let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
    let lines = whole.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("a line is JSON"))
        .collect()
}

/// A request body that any route takes, with these fields added or changed.
pub(crate) fn ask(fields: Value) -> Value {
    let mut body = json!({
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "prompt": "hi",
        "input": "hi",
        "max_tokens": 64,
    });
    let (Some(body_fields), Value::Object(fields)) = (body.as_object_mut(), fields) else {
        panic!("fields are an object");
    };
    body_fields.extend(fields);
    body
}

/// A streaming request whose answer goes by this script.
pub(crate) fn stream(rig: Value) -> Value {
    let mut body = ask(json!({"stream": true}));
    body["rig"] = rig;
    body
}

/// A request for an answer in one piece that goes by this script.
pub(crate) fn whole(rig: Value) -> Value {
    let mut body = ask(json!({"stream": false}));
    body["rig"] = rig;
    body
}
