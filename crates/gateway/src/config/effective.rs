//! The settings that are in force, as a file that says the same, with secrets masked.
//!
//! Every line that is not a default says where it was given. Each struct is taken apart by name, so that a new setting cannot be
//! forgotten here.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::time::Duration;

use serde::Serialize;

use super::mistake::Origin;
use super::tree::join;
use super::units::{Size, Time, TimeOrOff};
use super::upstreams::TIERS;
use super::{
    Abandon, Admin, Attach, ClientKey, Config, Confirm, Contract, Cors, Kind, Limits, Loaded, Log,
    Pool, Price, Server, ServerTls, Timeouts, Upstream, UpstreamTls,
};

/// What `tidegate check` prints.
pub fn toml(loaded: &Loaded) -> String {
    let Config {
        server,
        admin,
        limits,
        cors,
        log,
        prices,
        keys,
        upstreams,
        default_upstream,
        unknown_models,
    } = &loaded.config;
    let mut page = Page {
        text: String::new(),
        origins: &loaded.origins,
    };
    let default_name = upstreams
        .get(*default_upstream)
        .map_or("", |upstream| upstream.name.as_str());
    page.line("default_upstream", "default_upstream", quoted(default_name));
    page.line("unknown_models", "unknown_models", name(unknown_models));
    page.server(server);
    let Admin { listen } = admin;
    page.section("[admin]");
    page.line(
        "listen",
        "admin.listen",
        quoted(listen.map_or("off".to_owned(), |listen| listen.to_string())),
    );
    page.limits(limits);
    page.timeouts(
        loaded.config.edge_timeouts(),
        loaded.config.server.tls_handshake,
    );
    let Cors { origins } = cors;
    page.section("[cors]");
    page.line("origins", "cors.origins", list(origins));
    page.log(log);
    if !prices.is_empty() {
        page.section("[prices]");
    }
    for (model, Price { input, output }) in prices {
        let price = quoted(format!("{input}/{output}"));
        page.line(&quoted(model), &join("prices", model), price);
    }
    for (index, ClientKey { name, sha256: _ }) in keys.iter().enumerate() {
        page.section("[[keys]]");
        page.line("name", &format!("keys[{index}].name"), quoted(name));
        let forms = ["sha256", "key", "key_file"].map(|form| format!("keys[{index}].{form}"));
        let given = forms
            .iter()
            .find(|form| loaded.origins.contains_key(*form))
            .unwrap_or(&forms[0]);
        page.line("sha256", given, quoted("***"));
    }
    for (index, upstream) in upstreams.iter().enumerate() {
        page.upstream(upstream, &format!("upstreams[{index}]"));
    }
    page.text
}

struct Page<'a> {
    text: String,
    origins: &'a BTreeMap<String, Origin>,
}

// === impl Page ===

impl Page<'_> {
    fn section(&mut self, title: &str) {
        self.put(format_args!("\n{title}\n"));
    }

    fn line(&mut self, name: &str, path: &str, value: impl Display) {
        let origin = self.origins.get(path).cloned();
        self.line_from(name, origin.as_ref(), value);
    }

    /// A setting that the kind fills in where nobody wrote it.
    fn of_kind(&mut self, kind: Kind, name: &str, path: &str, value: impl Display) {
        if kind == Kind::Other || self.origins.contains_key(path) {
            self.line(name, path, value);
        } else {
            let of = kind.row().name;
            self.put(format_args!("{name} = {value} # kind {of}\n"));
        }
    }

    fn line_from(&mut self, name: &str, origin: Option<&Origin>, value: impl Display) {
        match origin {
            Some(origin) => self.put(format_args!("{name} = {value} # {}\n", short(origin))),
            None => self.put(format_args!("{name} = {value}\n")),
        }
    }

    fn put(&mut self, text: std::fmt::Arguments<'_>) {
        self.text
            .write_fmt(text)
            .expect("a String takes every text");
    }

    fn log(&mut self, log: &Log) {
        let Log {
            format,
            level,
            access,
            journal,
        } = log;
        self.section("[log]");
        self.line("format", "log.format", name(format));
        self.line("level", "log.level", name(level));
        self.line("access", "log.access", access);
        if let Some(journal) = journal {
            self.line("journal", "log.journal", quoted(journal.display()));
        }
    }

    fn server(&mut self, server: &Server) {
        let Server {
            listen,
            allow_unauthenticated,
            tls,
            tls_handshake: _,
            workers,
            connections_max,
            keep_alive,
            half_close,
            tcp_user_timeout,
            tcp_keep_alive,
            drain_lag,
            drain,
        } = server;
        self.section("[server]");
        self.line("listen", "server.listen", quoted(listen));
        self.line(
            "allow_unauthenticated",
            "server.allow_unauthenticated",
            allow_unauthenticated,
        );
        self.line("workers", "server.workers", workers);
        self.line("connections_max", "server.connections_max", connections_max);
        self.line("keep_alive", "server.keep_alive", time(*keep_alive));
        self.line("half_close", "server.half_close", name(half_close));
        self.line(
            "tcp_user_timeout",
            "server.tcp_user_timeout",
            time(*tcp_user_timeout),
        );
        self.line(
            "tcp_keep_alive",
            "server.tcp_keep_alive",
            time(*tcp_keep_alive),
        );
        self.line("drain_lag", "server.drain_lag", time(*drain_lag));
        self.line("drain", "server.drain", time(*drain));
        if let Some(ServerTls {
            cert_file,
            key_file,
        }) = tls
        {
            self.section("[server.tls]");
            self.line(
                "cert_file",
                "server.tls.cert_file",
                quoted(cert_file.display()),
            );
            self.line(
                "key_file",
                "server.tls.key_file",
                quoted(key_file.display()),
            );
        }
    }

    fn limits(&mut self, limits: &Limits) {
        let Limits {
            request_head_bytes,
            request_body_bytes,
            request_bodies_total_bytes,
            event_bytes,
            stream_buffer_bytes,
            error_body_bytes,
            assembled_bytes,
            answers_total_bytes,
            attach_total_bytes,
        } = limits;
        self.section("[limits]");
        for (name, bytes) in [
            ("request_head", request_head_bytes),
            ("request_body", request_body_bytes),
            ("request_bodies_total", request_bodies_total_bytes),
            ("event", event_bytes),
            ("stream_buffer", stream_buffer_bytes),
            ("error_body", error_body_bytes),
            ("assembled", assembled_bytes),
            ("answers_total", answers_total_bytes),
            ("attach_total", attach_total_bytes),
        ] {
            self.line(name, &format!("limits.{name}"), quoted(Size(*bytes)));
        }
    }

    /// The tiers of the listener; the others are printed with each upstream.
    fn timeouts(&mut self, timeouts: &Timeouts, tls_handshake: Duration) {
        self.section("[timeouts]");
        self.line("tls", "timeouts.tls", time(tls_handshake));
        self.line("write", "timeouts.write", time(timeouts.write));
        self.line(
            "request_head",
            "timeouts.request_head",
            time(timeouts.request_head),
        );
        self.line(
            "request_body",
            "timeouts.request_body",
            time(timeouts.request_body),
        );
    }

    fn upstream(&mut self, upstream: &Upstream, path: &str) {
        let Upstream {
            name: own_name,
            kind,
            endpoints,
            models,
            aliases,
            api_key,
            auth,
            slots,
            queue,
            settle: _,
            settle_whole: _,
            stops_known: _,
            abandon,
            attach,
            timeouts,
            pool,
            tls,
            heartbeat,
            ask_stream,
            ask_usage,
        } = upstream;
        let at = |name: &str| format!("{path}.{name}");
        self.section("[[upstreams]]");
        self.line("name", &at("name"), quoted(own_name));
        self.line("kind", &at("kind"), name(kind));
        let urls: Vec<_> = endpoints.iter().map(ToString::to_string).collect();
        let given = if self.origins.contains_key(&at("url")) {
            at("url")
        } else {
            at("endpoints")
        };
        self.line("endpoints", &given, list(&urls));
        self.line("models", &at("models"), list(models));
        if api_key.is_some() {
            let given = if self.origins.contains_key(&at("api_key")) {
                at("api_key")
            } else {
                at("api_key_file")
            };
            self.line("api_key", &given, quoted("***"));
        }
        self.of_kind(*kind, "auth", &at("auth"), name(auth));
        self.line("slots", &at("slots"), slots);
        self.line("queue", &at("queue"), queue);
        self.ending(upstream, path);
        self.line(
            "heartbeat",
            &at("heartbeat"),
            quoted(TimeOrOff::from(*heartbeat)),
        );
        self.of_kind(*kind, "ask_stream", &at("ask_stream"), ask_stream);
        self.of_kind(*kind, "ask_usage", &at("ask_usage"), ask_usage);
        if !aliases.is_empty() {
            self.section("[upstreams.aliases]");
            for (alias, model) in aliases {
                self.line(&quoted(alias), &join(&at("aliases"), alias), quoted(model));
            }
        }
        self.abandon((*kind, attach.is_some()), abandon, path);
        self.attach(attach.as_ref(), path);
        self.upstream_timeouts(timeouts, path);
        self.pool(*kind, pool, path);
        self.upstream_tls(tls, path);
    }

    /// What becomes of a call that is left, and how long its slot is kept.
    fn ending(&mut self, upstream: &Upstream, path: &str) {
        let at = |name: &str| format!("{path}.{name}");
        let (kind, contract) = (upstream.kind, upstream.abandon.contract);
        if upstream.stops_known {
            self.of_kind(kind, "on_abandon", &at("on_abandon"), name(contract));
        } else {
            // Written out, it would be the operator's word.
            self.put(format_args!(
                "# on_abandon = {} # a guess: nothing is known of this server\n",
                name(contract)
            ));
        }
        match upstream.settle_whole {
            _ if contract == Contract::Linger || !upstream.stops_known => {}
            None => self.of_kind(kind, "settle", &at("settle"), time(upstream.settle)),
            Some(whole) => self.put(format_args!(
                "# settle = {}, of an answer in one piece {} # kind {}\n",
                time(upstream.settle),
                time(whole),
                kind.row().name
            )),
        }
    }

    fn abandon(&mut self, (kind, grace): (Kind, bool), abandon: &Abandon, path: &str) {
        let at = |name: &str| format!("{path}.abandon.{name}");
        let Abandon {
            contract,
            time: longest,
            bytes,
            tokens,
            at_once,
            per_key,
            confirm,
            confirm_within,
        } = abandon;
        self.section("[upstreams.abandon]");
        if *contract != Contract::Cancel {
            self.of_kind(kind, "time", &at("time"), time(*longest));
        }
        if *contract == Contract::Drain || grace {
            let size = Size(usize::try_from(*bytes).unwrap_or(usize::MAX));
            self.line("bytes", &at("bytes"), quoted(size));
            if let Some(tokens) = tokens {
                self.line("tokens", &at("tokens"), tokens);
            }
            self.line("at_once", &at("at_once"), at_once);
        }
        if let Some(per_key) = per_key {
            self.line("per_key", &at("per_key"), per_key);
        }
        self.line("confirm", &at("confirm"), quoted(confirm.name()));
        if *confirm != Confirm::Off {
            let within = time(*confirm_within);
            self.line("confirm_within", &at("confirm_within"), within);
        }
    }

    fn attach(&mut self, attach: Option<&Attach>, path: &str) {
        let Some(Attach { grace, bytes }) = attach else {
            return;
        };
        let at = |name: &str| format!("{path}.attach.{name}");
        self.section("[upstreams.attach]");
        self.line("grace", &at("grace"), time(*grace));
        self.line("bytes", &at("bytes"), quoted(Size(*bytes)));
    }

    fn pool(&mut self, kind: Kind, pool: &Pool, path: &str) {
        let at = |name: &str| format!("{path}.{name}");
        let Pool {
            connections_max,
            idle,
            http,
            eject,
        } = pool;
        self.section("[upstreams.pool]");
        self.line(
            "connections_max",
            &at("pool.connections_max"),
            connections_max,
        );
        self.of_kind(kind, "idle", &at("pool.idle"), time(*idle));
        self.line("http", &at("pool.http"), name(http));
        self.line("eject", &at("pool.eject"), time(*eject));
    }

    fn upstream_tls(&mut self, tls: &UpstreamTls, path: &str) {
        let at = |name: &str| format!("{path}.{name}");
        let UpstreamTls {
            ca_file,
            server_name,
        } = tls;
        if ca_file.is_some() || server_name.is_some() {
            self.section("[upstreams.tls]");
        }
        if let Some(file) = ca_file {
            self.line("ca_file", &at("tls.ca_file"), quoted(file.display()));
        }
        if let Some(name) = server_name {
            self.line("server_name", &at("tls.server_name"), quoted(name));
        }
    }

    fn upstream_timeouts(&mut self, timeouts: &Timeouts, path: &str) {
        let Timeouts {
            request_head: _,
            request_body: _,
            queue,
            pool,
            connect,
            tls,
            response_head,
            first_event,
            silence,
            idle,
            write: _,
            total,
        } = timeouts;
        self.section("[upstreams.timeouts]");
        let limits = [
            queue,
            pool,
            connect,
            tls,
            response_head,
            first_event,
            silence,
            idle,
        ]
        .map(|limit| Some(*limit));
        for (tier, limit) in TIERS.iter().zip(limits.into_iter().chain([*total])) {
            let own = self.origins.get(&format!("{path}.timeouts.{tier}"));
            let origin = own
                .or_else(|| self.origins.get(&format!("timeouts.{tier}")))
                .cloned();
            self.line_from(tier, origin.as_ref(), quoted(TimeOrOff::from(limit)));
        }
    }
}

/// `tidegate.toml:12`, `--listen`, `TIDEGATE_LISTEN`.
fn short(place: &Origin) -> String {
    match place {
        Origin::File { file, line, .. } => {
            format!("{}:{line}", file.display()).replace(char::is_control, "?")
        }
        place => place.to_string(),
    }
}

fn time(duration: Duration) -> String {
    quoted(Time(duration))
}

/// The name of a choice as it is written in the file.
fn name(choice: impl Serialize) -> String {
    quoted(
        serde_json::to_value(choice)
            .ok()
            .and_then(|value| value.as_str().map(str::to_owned))
            .unwrap_or_default(),
    )
}

fn list(items: &[String]) -> String {
    let items: Vec<_> = items.iter().map(quoted).collect();
    format!("[{}]", items.join(", "))
}

/// A TOML basic string.
pub fn quoted(text: impl Display) -> String {
    let mut quoted = String::from('"');
    for c in text.to_string().chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            c if c.is_control() => {
                write!(quoted, "\\u{:04X}", u32::from(c)).expect("a String takes every text")
            }
            c => quoted.push(c),
        }
    }
    // The characters `${` would be read as a variable.
    quoted.replace("${", "$${") + "\""
}
