//! From what is written to what is ready to use, with every mistake that spans more than one value.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::file;
use super::findings::Findings;
use super::keys;
use super::sources::Sources;
use super::tree::join;
use super::units::{Time, shown};
use super::{Admin, Config, Cors, Limits, Log, Price, Server, ServerTls, Timeouts};
use super::{abandon, routes, upstreams};

/// Builds the configuration. What is wrong is added to `findings`; the result is only good if nothing was.
pub(super) fn build(file: &file::File, sources: &Sources, findings: &mut Findings) -> Config {
    let keys = keys::of_clients(&file.keys, sources, findings);
    let server = server(&file.server, file.timeouts.tls, findings);
    let admin = admin(&file.admin, server.listen, findings);
    let keyed = !keys.is_empty() || !file.keys.is_empty();
    check_open_door(&server, keyed, findings);
    let timeouts = timeouts(&file.timeouts, findings);
    let upstreams = upstreams::build(&file.upstreams, &timeouts, keys.len() > 1, findings);
    let default_upstream =
        routes::default_upstream(file.default_upstream.as_deref(), &upstreams, findings);
    routes::check(&upstreams, findings);
    let own = [
        ("server.listen", Some(server.listen)),
        ("admin.listen", admin.listen),
    ];
    let own: Vec<_> = own
        .into_iter()
        .filter_map(|(name, at)| Some((name, at?)))
        .collect();
    upstreams::check_own_ports(&upstreams, &own, findings);
    let limits = limits(&file.limits, findings);
    abandon::check_room(&upstreams, &limits, findings);
    Config {
        limits,
        cors: cors(&file.cors, findings),
        log: log(&file.log, findings),
        prices: prices(&file.prices, findings),
        unknown_models: file
            .unknown_models
            .unwrap_or_else(|| routes::unknown_models(&upstreams)),
        server,
        admin,
        keys,
        upstreams,
        default_upstream,
    }
}

fn server(written: &file::Server, tls_handshake: Time, findings: &mut Findings) -> Server {
    let listen = address(&written.listen, "server.listen", false, findings);
    if written.keep_alive < Time::secs(60) {
        let help = "balancers in front keep connections for 60 to 75 s and then send into a closing one: keep it at \"75s\" or more";
        findings.warn(
            "server.keep_alive",
            format!("{} is short", written.keep_alive),
            help,
        );
    }
    let mut server = Server::from(written);
    server.tls_handshake = tls_handshake.0;
    if let Some(listen) = listen {
        server.listen = listen;
    }
    server.tls = written
        .tls
        .as_ref()
        .and_then(|tls| server_tls(tls, findings));
    server
}

fn server_tls(written: &file::ServerTls, findings: &mut Findings) -> Option<ServerTls> {
    let mut readable = |name: &str, value: &Option<String>| {
        let path = format!("server.tls.{name}");
        let Some(value) = value else {
            if !findings.is_broken(&path) {
                findings.wrong(
                    "server.tls",
                    format!("{name} is missing"),
                    "TLS needs cert_file and key_file, both PEM",
                );
            }
            return None;
        };
        let file = findings.resolve(&path, value);
        check_readable(&file, &path, findings);
        if name == "key_file" {
            keys::warn_if_open_to_all(&file, &path, findings);
        }
        findings.watch(file.clone());
        Some(file)
    };
    let cert_file = readable("cert_file", &written.cert_file);
    let key_file = readable("key_file", &written.key_file);
    Some(ServerTls {
        cert_file: cert_file?,
        key_file: key_file?,
    })
}

/// Complains about a file that cannot be opened.
pub(super) fn check_readable(file: &std::path::Path, path: &str, findings: &mut Findings) {
    let opened = std::fs::metadata(file).and_then(|about| match about.is_file() {
        true => std::fs::File::open(file).map(drop),
        false => Err(std::io::Error::other("not a regular file")),
    });
    if let Err(error) = opened {
        keys::unreadable(&error.to_string(), path, findings);
    }
}

fn admin(written: &file::Admin, server: SocketAddr, findings: &mut Findings) -> Admin {
    let path = "admin.listen";
    if written.listen == "off" {
        return Admin { listen: None };
    }
    let Some(listen) = address(&written.listen, path, true, findings) else {
        return Admin { listen: None };
    };
    let same_ip =
        listen.ip() == server.ip() || listen.ip().is_unspecified() || server.ip().is_unspecified();
    if listen.port() == server.port() && listen.port() != 0 && same_ip {
        let help = "give each a port of its own, or switch admin \"off\"";
        match findings.is_given(path) || !findings.is_given("server.listen") {
            true => findings.wrong(path, format!("{listen} is the data plane's own port"), help),
            false => findings.wrong(
                "server.listen",
                format!("{server} is the address of admin"),
                help,
            ),
        }
    } else if is_public(listen.ip()) {
        let help = "it has no keys: listen on 127.0.0.1 or a private address, or let a firewall or network policy guard the port";
        findings.warn(
            path,
            format!("admin listens on {listen}, where others may reach it"),
            help,
        );
    }
    Admin {
        listen: Some(listen),
    }
}

fn is_public(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => !(ip.is_loopback() || ip.is_private() || ip.is_link_local()),
        IpAddr::V6(ip) => !(ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local()),
    }
}

fn address(text: &str, path: &str, off: bool, findings: &mut Findings) -> Option<SocketAddr> {
    if let Ok(address) = text.parse() {
        return Some(address);
    }
    let port = text
        .rsplit(':')
        .next()
        .filter(|port| port.parse::<u16>().is_ok());
    let off = if off { ", or \"off\"" } else { "" };
    let (what, help) = match port {
        Some(port) if text == port || text.len() == port.len() + 1 => (
            "has no address in front of the port",
            format!(
                "write \"127.0.0.1:{port}\" for this machine or \"0.0.0.0:{port}\" for all{off}"
            ),
        ),
        Some(port) if text.matches(':').count() > 1 => (
            "is not an IPv6 address and a port",
            format!("write it like \"[::1]:{port}\"{off}"),
        ),
        Some(port) => (
            "is not an IP address and a port",
            format!("write the address as a number: \"127.0.0.1:{port}\"{off}"),
        ),
        None => (
            "is not an IP address and a port",
            format!("write it like \"127.0.0.1:8080\"{off}"),
        ),
    };
    findings.wrong(path, what, help);
    None
}

fn check_open_door(server: &Server, keyed: bool, findings: &mut Findings) {
    let loopback = server.listen.ip().to_canonical().is_loopback();
    if loopback || keyed || server.allow_unauthenticated {
        return;
    }
    let what = format!(
        "{} can be reached from other machines and no client needs a key",
        server.listen
    );
    let help =
        "add [[keys]] (or --keys-file), listen on 127.0.0.1, or say allow_unauthenticated = true";
    findings.wrong("server.listen", what, help);
}

fn limits(written: &file::Limits, findings: &mut Findings) -> Limits {
    let w = written;
    let pairs = [
        (
            ("request_body", w.request_body),
            ("request_bodies_total", w.request_bodies_total),
            "the bound of all bodies must have room for one",
        ),
        (
            ("assembled", w.assembled),
            ("answers_total", w.answers_total),
            "the bound of all answers must have room for one",
        ),
    ];
    for ((name, one), (total, all), help) in pairs {
        if one.0 <= all.0 {
            continue;
        }
        let given = if findings.is_given(&format!("limits.{name}")) {
            name
        } else {
            total
        };
        let what = format!("{name} ({one}) is more than {total} ({all})");
        findings.wrong(&format!("limits.{given}"), what, help);
    }
    Limits::from(written)
}

fn timeouts(written: &file::Timeouts, findings: &mut Findings) -> Timeouts {
    let timeouts = Timeouts::from(written);
    check_tiers(&timeouts, |tier| format!("timeouts.{tier}"), findings);
    timeouts
}

/// Complains about limits that never bite. Only where both were written: a default that is longer than a `total` is no mistake.
pub(super) fn check_tiers(
    timeouts: &Timeouts,
    path: impl Fn(&str) -> String,
    findings: &mut Findings,
) {
    let given =
        |tier: &str, findings: &Findings| findings.is_given(&path(tier)).then(|| path(tier));
    let t = timeouts;
    if let Some(total) = t.total {
        let tiers = [
            ("queue", t.queue),
            ("pool", t.pool),
            ("connect", t.connect),
            ("tls", t.tls),
            ("response_head", t.response_head),
            ("first_event", t.first_event),
            ("silence", t.silence),
            ("idle", t.idle),
            ("write", t.write),
        ];
        for (tier, limit) in tiers {
            if let (true, Some(at), Some(_)) = (
                limit > total,
                given(tier, findings),
                given("total", findings),
            ) {
                let what = format!(
                    "{tier} ({}) is longer than total ({})",
                    Time(limit),
                    Time(total)
                );
                findings.wrong(
                    &at,
                    what,
                    format!("{tier} would never end a call: make it shorter, or total longer"),
                );
            }
        }
    }
    if let (true, Some(at), Some(_)) = (
        t.silence > t.idle,
        given("silence", findings),
        given("idle", findings),
    ) {
        let what = format!(
            "silence ({}) is longer than idle ({})",
            Time(t.silence),
            Time(t.idle)
        );
        findings.warn(
            &at,
            what,
            "no byte at all is also no event, so idle always ends the call first",
        );
    }
}

fn prices(written: &BTreeMap<String, String>, findings: &mut Findings) -> BTreeMap<String, Price> {
    let mut prices = BTreeMap::new();
    for (model, text) in written {
        routes::check_pattern(model, &join("prices", model), findings);
        match price(text) {
            Some(price) => drop(prices.insert(model.clone(), price)),
            None => findings.wrong(
                &join("prices", model),
                format!("{} is not a price", shown(text)),
                "write the prices of a million tokens of input and output: \"2.50/10\"",
            ),
        }
    }
    prices
}

fn price(text: &str) -> Option<Price> {
    let number = |text: &str| {
        let number: f64 = text.trim().parse().ok()?;
        (number.is_finite() && (0.0..=1e9).contains(&number)).then_some(number)
    };
    let (input, output) = text.split_once('/')?;
    Some(Price {
        input: number(input)?,
        output: number(output)?,
    })
}

fn cors(written: &file::Cors, findings: &mut Findings) -> Cors {
    for (index, origin) in written.origins.iter().enumerate() {
        let path = format!("cors.origins[{index}]");
        let authority = origin
            .strip_prefix("https://")
            .or_else(|| origin.strip_prefix("http://"));
        let plain = |rest: &str| {
            !rest.is_empty()
                && rest
                    .chars()
                    .all(|c| c.is_ascii_graphic() && !"/?#@*,".contains(c))
        };
        if origin == "*" {
            if written.origins.len() > 1 {
                findings.warn(
                    &path,
                    "\"*\" allows every origin, the others are without effect",
                    "keep only one of them",
                );
            }
        } else if !authority.is_some_and(plain) {
            findings.wrong(
                &path,
                "is not an origin",
                "write \"https://app.example\", without a path or slash at the end, or \"*\"",
            );
        }
    }
    Cors {
        origins: written.origins.clone(),
    }
}

fn log(written: &file::Log, findings: &mut Findings) -> Log {
    let at = "log.journal";
    let name = written.journal.as_ref();
    if name.is_some() && !written.access {
        let what = "is of no use where log.access is false";
        findings.wrong(at, what, "leave it out, or write access = true");
    }
    if name.is_some_and(String::is_empty) {
        let help = "write a path such as \"/var/lib/tidegate/calls\", or leave it out";
        findings.wrong(at, "is empty", help);
    }
    let journal = name.map(|name| findings.resolve(at, name));
    if let Some(path) = journal.as_deref().filter(|_| name != Some(&String::new())) {
        check_journal(path, at, findings);
    }
    Log {
        journal,
        ..Log::from(written)
    }
}

/// What stands where the journal is to be is replaced at the start if it is no journal: it must be nothing that the configuration reads.
/// Called after all of it was read.
fn check_journal(path: &Path, at: &str, findings: &mut Findings) {
    use std::os::unix::fs::MetadataExt as _;
    let Ok(here) = std::fs::metadata(path) else {
        return;
    };
    let is_here = |file: &PathBuf| {
        let there = std::fs::metadata(file);
        there.is_ok_and(|there| (there.dev(), there.ino()) == (here.dev(), here.ino()))
    };
    let read = findings.watch.iter().find(|file| is_here(file));
    if let Some(read) = read {
        let what = format!("{} is a file of the configuration", read.display());
        findings.wrong(
            at,
            what,
            "give the journal a file of its own, which is made if it is not there",
        );
    } else if !here.is_file() {
        findings.wrong(
            at,
            "is no file",
            "write the path of a file, which is made if it is not there",
        );
    }
}

/// A name that is safe in logs and metric labels.
pub(super) fn name(name: &str, path: &str, findings: &mut Findings) -> bool {
    let valid = (1..=64).contains(&name.len())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.@".contains(c));
    if !valid {
        findings.wrong(
            path,
            "is not a name",
            "use 1 to 64 letters, digits and - _ . @",
        );
    }
    valid
}

// === from the values as written, where nothing can be wrong any more ===

impl From<&file::Server> for Server {
    /// Without `tls`, which needs its files looked at.
    fn from(w: &file::Server) -> Self {
        let cores = || thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        Self {
            listen: w
                .listen
                .parse()
                .unwrap_or(SocketAddr::from(([127, 0, 0, 1], 8080))),
            allow_unauthenticated: w.allow_unauthenticated,
            tls: None,
            tls_handshake: file::Timeouts::default().tls.0,
            workers: w.workers.unwrap_or_else(cores),
            connections_max: w.connections_max,
            keep_alive: w.keep_alive.0,
            half_close: w.half_close,
            tcp_user_timeout: w.tcp_user_timeout.0,
            tcp_keep_alive: w.tcp_keep_alive.0,
            drain_lag: w.drain_lag.0,
            drain: w.drain.0,
        }
    }
}

impl From<&file::Limits> for Limits {
    fn from(w: &file::Limits) -> Self {
        Self {
            request_head_bytes: w.request_head.0,
            request_body_bytes: w.request_body.0,
            request_bodies_total_bytes: w.request_bodies_total.0,
            event_bytes: w.event.0,
            stream_buffer_bytes: w.stream_buffer.0,
            error_body_bytes: w.error_body.0,
            assembled_bytes: w.assembled.0,
            answers_total_bytes: w.answers_total.0,
            attach_total_bytes: w.attach_total.0,
        }
    }
}

impl From<&file::Timeouts> for Timeouts {
    fn from(w: &file::Timeouts) -> Self {
        let total: Option<Duration> = w.total.duration();
        Self {
            request_head: w.request_head.0,
            request_body: w.request_body.0,
            queue: w.queue.0,
            pool: w.pool.0,
            connect: w.connect.0,
            tls: w.tls.0,
            response_head: w.response_head.0,
            first_event: w.first_event.0,
            silence: w.silence.0,
            idle: w.idle.0,
            write: w.write.0,
            total,
        }
    }
}

impl From<&file::Log> for Log {
    fn from(w: &file::Log) -> Self {
        Self {
            format: w.format,
            level: w.level,
            access: w.access,
            journal: None,
        }
    }
}
