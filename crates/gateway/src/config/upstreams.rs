//! Upstreams: endpoints, the defaults that depend on the kind of server, and what contradicts itself inside one of them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use super::file;
use super::findings::Findings;
use super::keys;
use super::units::Time;
use super::validate::{check_readable, check_tiers, name};
use super::{Endpoint, HttpVersion, Kind, Pool, Timeouts, Upstream, UpstreamTls, abandon};

/// Name of an upstream that stands alone and has none.
pub(super) const ONLY: &str = "default";

pub(super) fn build(
    written: &[file::Upstream],
    timeouts: &Timeouts,
    several_keys: bool,
    findings: &mut Findings,
) -> Vec<Upstream> {
    if written.is_empty() && !findings.is_broken("upstreams") {
        findings.wrong(
            "upstreams",
            "there is no upstream",
            "add [[upstreams]] with url = \"http://127.0.0.1:8000\"",
        );
    }
    let alone = written.len() == 1;
    let upstreams: Vec<_> = written
        .iter()
        .enumerate()
        .map(|(index, one)| upstream(one, (index, alone), timeouts, several_keys, findings))
        .collect();
    check_names(&upstreams, findings);
    check_shared_endpoints(&upstreams, findings);
    upstreams
}

fn upstream(
    written: &file::Upstream,
    (index, alone): (usize, bool),
    timeouts: &Timeouts,
    several_keys: bool,
    findings: &mut Findings,
) -> Upstream {
    let path = format!("upstreams[{index}]");
    let name = upstream_name(written.name.as_deref(), &path, alone, findings);
    let endpoints = endpoints(written, &path, findings);
    let guess = || Kind::of_hosts(endpoints.iter().map(|endpoint| endpoint.host.as_str()));
    let kind = written.kind.unwrap_or_else(guess);
    let mut built = Upstream::new(name, kind, endpoints);
    built.api_key = keys::of_upstream(written, &path, findings);
    built.models.clone_from(&written.models);
    built.aliases.clone_from(&written.aliases);
    built.auth = written.auth.unwrap_or(built.auth);
    built.slots = written.slots;
    built.queue = written.queue.unwrap_or(written.slots.get());
    if let Some(settle) = &written.settle {
        (built.settle, built.settle_whole) = (settle.0, None);
    }
    built.stops_known |= written.settle.is_some() || written.on_abandon.is_some();
    warn_of_unknown(written, &built, &path, findings);
    built.attach = abandon::attach(written, &path, findings);
    built.abandon = abandon::build(written, &built, several_keys, &path, findings);
    built.heartbeat = written.heartbeat.duration();
    built.ask_stream = written.ask_stream.unwrap_or(built.ask_stream);
    built.ask_usage = written.ask_usage.unwrap_or(built.ask_usage);
    built.timeouts = merge(timeouts, &written.timeouts);
    built.pool = pool(&written.pool, &built, &path, findings);
    built.tls = tls(&written.tls, &built.endpoints, &path, findings);
    let tier = |tier: &str| {
        let own = format!("{path}.timeouts.{tier}");
        if findings.is_given(&own) {
            own
        } else {
            format!("timeouts.{tier}")
        }
    };
    // The tiers of [timeouts] were checked on their own.
    if findings.is_given(&format!("{path}.timeouts")) {
        let at: Vec<_> = TIERS.iter().map(|name| (*name, tier(name))).collect();
        let path = |name: &str| {
            at.iter()
                .find(|(n, _)| *n == name)
                .map(|(_, path)| path.clone())
                .unwrap_or_default()
        };
        check_tiers(&built.timeouts, path, findings);
    }
    built
}

/// Warns of a server of which nothing was said: what it does when it is left is a guess.
fn warn_of_unknown(
    written: &file::Upstream,
    built: &Upstream,
    path: &str,
    findings: &mut Findings,
) {
    let at = format!("{path}.kind");
    let Some(endpoint) = built.endpoints.first() else {
        return;
    };
    if built.stops_known || written.kind.is_some() || findings.is_broken(&at) {
        return;
    }
    findings.warn(
        &at,
        "the kind is not given, so nothing is known of what this server does when a client leaves",
        format!("say what it is, as kind = \"vllm\" or --kind does; `tidegate probe {endpoint}` finds out"),
    );
}

/// The tiers that an upstream may set for itself.
pub(super) const TIERS: [&str; 9] = [
    "queue",
    "pool",
    "connect",
    "tls",
    "response_head",
    "first_event",
    "silence",
    "idle",
    "total",
];

fn upstream_name(
    written: Option<&str>,
    path: &str,
    alone: bool,
    findings: &mut Findings,
) -> String {
    let at = format!("{path}.name");
    match written {
        Some(text) => {
            name(text, &at, findings);
            text.to_owned()
        }
        None if alone => ONLY.to_owned(),
        None => {
            if !findings.is_broken(&at) && !findings.is_broken(path) {
                findings.wrong(
                    path,
                    "an upstream without a name",
                    "add name = \"...\": it appears in logs and metrics",
                );
            }
            String::new()
        }
    }
}

fn endpoints(written: &file::Upstream, path: &str, findings: &mut Findings) -> Vec<Endpoint> {
    let (url, list) = (format!("{path}.url"), format!("{path}.endpoints"));
    if findings.is_broken(path) || findings.is_broken(&url) || findings.is_broken(&list) {
        return Vec::new();
    }
    let given: Vec<(String, &str)> = match (&written.url, written.endpoints.as_slice()) {
        (Some(_), [_, ..]) => {
            findings.wrong(
                &list,
                "stands beside url",
                "keep one: url for one address, endpoints for several",
            );
            return Vec::new();
        }
        (None, []) => {
            findings.wrong(
                path,
                "an upstream without an address",
                "add url = \"http://127.0.0.1:8000\"",
            );
            return Vec::new();
        }
        (Some(one), []) => vec![(url, one)],
        (None, several) => several
            .iter()
            .enumerate()
            .map(|(i, text)| (format!("{list}[{i}]"), text.as_str()))
            .collect(),
    };
    let mut endpoints = Vec::new();
    let mut seen = HashSet::new();
    for (path, text) in given {
        match Endpoint::parse(text) {
            Ok(endpoint) if !seen.insert(endpoint.clone()) => {
                findings.wrong(
                    &path,
                    "this address stands here for the second time",
                    "keep one of them",
                );
            }
            Ok(endpoint) => endpoints.push(endpoint),
            Err(wrong) => findings.wrong(&path, wrong.what, wrong.help),
        }
    }
    endpoints
}

fn merge(all: &Timeouts, own: &file::UpstreamTimeouts) -> Timeouts {
    let pick = |own: Option<super::units::Time>, all| own.map_or(all, |time| time.0);
    Timeouts {
        request_head: all.request_head,
        request_body: all.request_body,
        queue: pick(own.queue, all.queue),
        pool: pick(own.pool, all.pool),
        connect: pick(own.connect, all.connect),
        tls: pick(own.tls, all.tls),
        response_head: pick(own.response_head, all.response_head),
        first_event: pick(own.first_event, all.first_event),
        silence: pick(own.silence, all.silence),
        idle: pick(own.idle, all.idle),
        write: all.write,
        total: own
            .total
            .map_or(all.total, super::units::TimeOrOff::duration),
    }
}

fn pool(written: &file::Pool, upstream: &Upstream, path: &str, findings: &mut Findings) -> Pool {
    let default = Pool::of(upstream.kind, upstream.slots, &upstream.endpoints);
    let pool = Pool {
        connections_max: written.connections_max.unwrap_or(default.connections_max),
        idle: written.idle.map_or(default.idle, |idle| idle.0),
        http: written.http.unwrap_or(default.http),
        eject: written.eject.0,
    };
    let room = pool
        .connections_max
        .saturating_mul(upstream.endpoints.len().max(1));
    if room < upstream.slots.get() && pool.http == HttpVersion::Http1 {
        let what = format!(
            "{room} connections in all are fewer than {} slots",
            upstream.slots
        );
        findings.warn(
            &format!("{path}.pool.connections_max"),
            what,
            "calls with a slot will wait for a connection (timeout `pool`)",
        );
    }
    let row = upstream.kind.row();
    if let Some(limit) = row.idle.filter(|limit| pool.idle >= *limit) {
        let (idle, limit) = (Time(pool.idle), Time(limit));
        let own = Time(row.pool_idle());
        findings.warn(
            &format!("{path}.pool.idle"),
            format!("{idle} is not shorter than {}'s own {limit}", row.name),
            format!(
                "calls will run into connections that the server is closing: keep it at \"{own}\""
            ),
        );
    }
    pool
}

fn tls(
    written: &file::UpstreamTls,
    endpoints: &[Endpoint],
    path: &str,
    findings: &mut Findings,
) -> UpstreamTls {
    let given = findings.is_given(&format!("{path}.tls"));
    if given && !endpoints.is_empty() && !endpoints.iter().any(|endpoint| endpoint.tls) {
        findings.warn(
            &format!("{path}.tls"),
            "no endpoint is https://, so this is without effect",
            "",
        );
    }
    let ca_file = written.ca_file.as_ref().map(|name| {
        let path = format!("{path}.tls.ca_file");
        let file = findings.resolve(&path, name);
        check_readable(&file, &path, findings);
        findings.watch(file.clone());
        file
    });
    if let Some(name) = &written.server_name {
        let host = Endpoint::parse(&format!("https://{name}"));
        if name.contains([':', '/']) || host.is_err() {
            findings.wrong(
                &format!("{path}.tls.server_name"),
                "is not a host name",
                "write a name like \"models.example\", without a port",
            );
        }
    }
    UpstreamTls {
        ca_file,
        server_name: written.server_name.clone(),
    }
}

fn check_names(upstreams: &[Upstream], findings: &mut Findings) {
    let mut names = BTreeMap::new();
    for (index, upstream) in upstreams
        .iter()
        .enumerate()
        .filter(|(_, upstream)| !upstream.name.is_empty())
    {
        let first = *names.entry(upstream.name.as_str()).or_insert(index);
        if first != index {
            let place = findings.place(&format!("upstreams[{first}].name"));
            let what = format!(
                "the name {:?} is taken by upstreams[{first}] ({place})",
                upstream.name
            );
            findings.wrong(
                &format!("upstreams[{index}].name"),
                what,
                "every upstream needs a name of its own",
            );
        }
    }
}

fn check_shared_endpoints(upstreams: &[Upstream], findings: &mut Findings) {
    let mut owners = HashMap::new();
    for (index, upstream) in upstreams.iter().enumerate() {
        let owner = |endpoint| *owners.entry(endpoint).or_insert(index);
        let firsts: BTreeSet<usize> = upstream
            .endpoints
            .iter()
            .map(owner)
            .filter(|first| *first != index)
            .collect();
        for first in firsts {
            let what = format!(
                "{:?} and {:?} share an endpoint, and each counts its own slots",
                upstreams[first].name, upstream.name
            );
            let help = "one upstream with both lists of models holds the limit for both";
            findings.warn(&format!("upstreams[{index}]"), what, help);
        }
    }
}

/// Refuses an upstream that is one of our own ports: each call would become the next, until no slot is left.
pub(super) fn check_own_ports(
    upstreams: &[Upstream],
    ports: &[(&'static str, SocketAddr)],
    findings: &mut Findings,
) {
    for (index, upstream) in upstreams.iter().enumerate() {
        for endpoint in &upstream.endpoints {
            let own = ports.iter().find(|(_, port)| is_at(endpoint, *port));
            if let Some((name, port)) = own {
                let what = format!("{endpoint} is the gateway itself ({name} = {port})");
                let help = "give the address of the model server, or listen on another port";
                findings.wrong(&format!("upstreams[{index}]"), what, help);
            }
        }
    }
}

/// Whether a connection to this endpoint would reach that socket of ours, as far as can be told without asking the network.
fn is_at(endpoint: &Endpoint, socket: SocketAddr) -> bool {
    let (host, here) = (endpoint.host.as_str(), socket.ip().to_canonical());
    let same_ip = match host.parse::<IpAddr>() {
        Ok(ip) => {
            let ip = ip.to_canonical();
            ip == here || (here.is_unspecified() && (ip.is_loopback() || ip.is_unspecified()))
        }
        Err(_) => {
            host.eq_ignore_ascii_case("localhost") && (here.is_loopback() || here.is_unspecified())
        }
    };
    same_ip && socket.port() != 0 && endpoint.port == socket.port()
}
