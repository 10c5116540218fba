//! What is right, and what it means.

use super::*;

#[test]
fn the_smallest_file_is_one_upstream() {
    let loaded = loaded("[[upstreams]]\nurl = \"http://127.0.0.1:8000\"\n");
    assert_eq!(
        loaded.config,
        Config::one_upstream(address("127.0.0.1:8000"))
    );
    let warned: Vec<_> = loaded.warnings.iter().map(ToString::to_string).collect();
    assert!(
        matches!(&warned[..], [kind] if kind.contains("`tidegate probe http://127.0.0.1:8000` finds out")),
        "{warned:?}"
    );
}

#[test]
fn what_a_server_does_that_is_left_is_known_from_its_kind_or_from_the_operator() {
    for (more, known, warns) in [
        ("", false, true),
        ("kind = \"other\"", false, false),
        ("slots = 2", false, true),
        ("kind = \"vllm\"", true, false),
        ("settle = \"0s\"", true, false),
        ("on_abandon = \"cancel\"", true, false),
    ] {
        let text = format!("[[upstreams]]\nurl = \"http://a\"\n{more}");
        let loaded = loaded(&text);
        assert_eq!(loaded.config.upstreams[0].stops_known, known, "{more}");
        assert_eq!(!loaded.warnings.is_empty(), warns, "{more}");
        let again = loaded_with(&effective::toml(&loaded), &[]);
        assert_eq!(again.config, loaded.config, "{more}");
    }
    let known = loaded("[[upstreams]]\nurl = \"https://api.openai.com\"");
    assert!(known.config.upstreams[0].stops_known);
    assert_eq!(known.warnings, [], "its host tells");
}

#[test]
fn a_settle_that_is_written_is_that_of_every_answer() {
    let text = "[[upstreams]]\nurl = \"http://a\"\nkind = \"llama.cpp\"\n";
    let of_kind = loaded(text);
    let upstream = &of_kind.config.upstreams[0];
    assert_eq!(
        (upstream.settle, upstream.settle_whole),
        (Duration::from_millis(250), Some(Duration::from_secs(1)))
    );
    let printed = effective::toml(&of_kind);
    assert!(
        printed.contains("# settle = \"250ms\", of an answer in one piece \"1s\" # kind llama.cpp"),
        "{printed}"
    );
    assert_eq!(loaded(&printed).config, of_kind.config);
    let written = loaded(&format!("{text}settle = \"2s\""));
    let upstream = &written.config.upstreams[0];
    assert_eq!(
        (upstream.settle, upstream.settle_whole),
        (Duration::from_secs(2), None)
    );
}

/// Case C137: what nobody wrote is safe.
#[test]
fn every_default_is_finite() {
    let config = Config::one_upstream(address("127.0.0.1:8000"));
    let Timeouts {
        request_head,
        request_body,
        queue,
        pool,
        connect,
        tls,
        response_head,
        first_event,
        silence,
        idle,
        write,
        total,
    } = config.upstreams[0].timeouts.clone();
    let waits = [
        request_head,
        request_body,
        queue,
        pool,
        connect,
        tls,
        response_head,
        first_event,
        silence,
        idle,
        write,
    ];
    assert!(
        waits
            .iter()
            .all(|wait| !wait.is_zero() && *wait <= Duration::from_secs(600)),
        "{waits:?}"
    );
    assert_eq!(total, None);
    assert_eq!(
        (config.upstreams[0].slots.get(), config.upstreams[0].queue),
        (64, 64)
    );
    assert!(
        config.server.listen.ip().is_loopback() && config.admin.listen.unwrap().ip().is_loopback()
    );
    assert!(
        config.server.connections_max <= 10_000 && config.server.drain <= Duration::from_secs(30)
    );
    assert_eq!(config.cors, Cors::default());
    assert_eq!(config.limits.request_body_bytes, 64 << 20);
}

#[test]
fn a_full_file_says_what_it_says() {
    let config = loaded_with(include_str!("full.toml"), &[("ANTHROPIC_API_KEY", "sk-1")]).config;
    assert_eq!(
        (config.default_upstream, config.unknown_models),
        (1, UnknownModels::Default)
    );
    assert_eq!(
        (config.server.listen, config.server.workers.get()),
        (address("127.0.0.1:8081"), 3)
    );
    assert_eq!(
        (config.server.half_close, config.admin.listen),
        (HalfClose::Serve, None)
    );
    assert_eq!(config.limits.request_body_bytes, 8_000_000);
    assert_eq!(
        config.log,
        Log {
            format: LogFormat::Json,
            level: Level::Debug,
            access: false,
            journal: None,
        }
    );
    let [gpu, cloud] = &config.upstreams[..] else {
        panic!("two upstreams")
    };
    assert_eq!(
        gpu.endpoints[1],
        Endpoint {
            tls: false,
            host: "::1".into(),
            port: 8000,
            base_path: String::new()
        }
    );
    assert_eq!(
        (
            gpu.slots.get(),
            gpu.queue,
            gpu.pool.connections_max,
            gpu.pool.http
        ),
        (8, 8, 9, HttpVersion::Http2)
    );
    assert_eq!(
        (gpu.timeouts.connect, gpu.timeouts.total),
        (Duration::from_millis(500), None)
    );
    assert_eq!(
        (gpu.heartbeat, gpu.ask_usage),
        (Some(Duration::from_secs(10)), true)
    );
    assert_eq!(gpu.aliases["gpt-4o"], "llama-3");
    assert_eq!(
        (cloud.kind, cloud.auth, cloud.pool.http),
        (Kind::Anthropic, AuthStyle::XApiKey, HttpVersion::Auto)
    );
    assert_eq!(
        (cloud.queue, cloud.settle, cloud.ask_usage),
        (0, Duration::from_secs(2), false)
    );
    assert_eq!(
        (cloud.timeouts.connect, cloud.timeouts.total),
        (Duration::from_secs(1), Some(Duration::from_secs(1200)))
    );
    assert_eq!(cloud.api_key.as_ref().map(Secret::expose), Some("sk-1"));
}

#[test]
fn unknown_models_are_refused_where_models_are_listed() {
    let one = loaded("[[upstreams]]\nurl = \"http://a\"\nmodels = [\"m\"]");
    assert_eq!(one.config.unknown_models, UnknownModels::Refuse);
}

#[test]
fn warnings_are_no_mistakes() {
    let upstream = "[[upstreams]]\nurl = \"http://a\"\nsettle = \"0s\"\n";
    for (text, expected) in [
        (
            format!("[server]\nkeep_alive = \"5s\"\n{upstream}"),
            "tidegate.toml:2:14: server.keep_alive: 5s is short",
        ),
        (
            format!("[admin]\nlisten = \"0.0.0.0:9090\"\n{upstream}"),
            "admin.listen: admin listens on 0.0.0.0:9090",
        ),
        (
            format!("[admin]\nlisten = \"8.8.8.8:9090\"\n{upstream}"),
            "admin.listen: admin listens on 8.8.8.8:9090",
        ),
        (
            format!("[timeouts]\nidle = \"1s\"\nsilence = \"2s\"\n{upstream}"),
            "silence (2s) is longer than idle (1s)",
        ),
        (
            format!("{upstream}pool.connections_max = 4"),
            "4 connections in all are fewer than 64 slots",
        ),
        (
            format!("{upstream}kind = \"vllm\"\npool.idle = \"5s\""),
            "not shorter than vllm's own 4800ms",
        ),
        (
            format!("{upstream}tls.server_name = \"b\""),
            "no endpoint is https://",
        ),
        (
            format!("{upstream}[upstreams.aliases]\na = \"b\"\nb = \"c\""),
            "\"b\" is an alias itself",
        ),
        (
            format!("{upstream}api_key = \"sk-MARKER\""),
            "a secret is written out in the configuration file",
        ),
        (
            format!("[cors]\norigins = [\"*\", \"https://a\"]\n{upstream}"),
            "\"*\" allows every origin",
        ),
    ] {
        let warnings = loaded(&text).warnings;
        assert_eq!(warnings.len(), 1, "{text}\n{warnings:?}");
        let said = warnings[0].to_string();
        assert!(
            said.starts_with("warning: tidegate.toml:") && said.contains(expected),
            "{said}"
        );
        assert!(!said.contains("MARKER"));
    }
    let shared = "[[upstreams]]\nname = \"a\"\nkind = \"vllm\"\nurl = \"http://h\"\nmodels = [\"a\"]\n[[upstreams]]\nname = \"b\"\nkind = \"vllm\"\nurl = \"http://h\"\nmodels = [\"b\"]";
    assert!(
        loaded(shared).warnings[0]
            .to_string()
            .contains("share an endpoint")
    );
    assert_eq!(
        loaded(&format!("[admin]\nlisten = \"10.0.0.1:9090\"\n{upstream}")).warnings,
        []
    );
}

#[test]
fn variables_fill_in_any_text() {
    let text = "[server]\ndrain = \"${DRAIN}\"\n[[upstreams]]\nurl = \"http://${HOST:-127.0.0.1}:8000\"\nslots = \"${SLOTS}\"\nask_usage = \"${USAGE}\"";
    let config = loaded_with(text, &[("DRAIN", "7s"), ("SLOTS", "3"), ("USAGE", "true")]).config;
    assert_eq!(config.server.drain, Duration::from_secs(7));
    assert_eq!(
        (
            config.upstreams[0].slots.get(),
            config.upstreams[0].ask_usage
        ),
        (3, true)
    );
    assert_eq!(config.upstreams[0].endpoints[0].host, "127.0.0.1");
    let said = refused_with(text, &[("DRAIN", "seven"), ("SLOTS", "x"), ("USAGE", "1")]);
    assert!(
        said.contains("server.drain: the value has no number") && said.contains("3 mistakes"),
        "{said}"
    );
}

/// `tidegate check` prints a file that means the same.
#[test]
fn the_effective_settings_are_a_file_that_says_the_same() {
    let full = "[server]\nlisten = \"127.0.0.1:1\"\nworkers = 2\ndrain = \"90s\"\nallow_unauthenticated = true\n[admin]\nlisten = \"off\"\n\
        [limits]\nevent = \"12345B\"\nrequest_body = \"3MB\"\n[timeouts]\ntotal = \"20m\"\nconnect = \"1500ms\"\n[cors]\norigins = [\"*\"]\n\
        [log]\naccess = false\n[[upstreams]]\nname = \"a\"\nkind = \"llama.cpp\"\nurl = \"http://[::1]:9/p/v1\"\nmodels = [\"m\\\"\\u0041$${x}*\"]\n\
        heartbeat = \"10s\"\naliases.\"a.b\" = \"m$$${c}\"\ntimeouts.idle = \"3s\"\n[[upstreams]]\nname = \"b\"\nmodels = [\"b\"]\nurl = \"https://b\"\n\
        tls.server_name = \"c\"\npool.eject = \"1m\"\nauth = \"x-api-key\"";
    for text in ["[[upstreams]]\nurl = \"http://127.0.0.1:8000\"", full] {
        let first = loaded(text);
        let printed = effective::toml(&first);
        assert_eq!(loaded(&printed).config, first.config, "{printed}");
    }
    let printed = effective::toml(&loaded(full));
    for line in [
        "connect = \"1500ms\" # tidegate.toml:13",
        "drain = \"90s\" # tidegate.toml:4",
        "keep_alive = \"75s\"\n",
    ] {
        assert!(printed.contains(line), "{line} in\n{printed}");
    }
}

/// A client's connection serves calls to every upstream: no upstream can have a say in its limits.
#[test]
fn the_limits_of_client_connections_belong_to_no_upstream() {
    let loaded = loaded(
        "[timeouts]\ntls = \"7s\"\nwrite = \"9s\"\n[[upstreams]]\nurl = \"https://a\"\ntimeouts.tls = \"3s\"\n",
    );
    assert_eq!(loaded.config.server.tls_handshake, Duration::from_secs(7));
    assert_eq!(loaded.config.edge_timeouts().write, Duration::from_secs(9));
    assert_eq!(
        loaded.config.upstreams[0].timeouts.tls,
        Duration::from_secs(3)
    );
    let text = "[[upstreams]]\nurl = \"http://a\"\ntimeouts.write = \"3s\"\n";
    assert!(refused(text).contains("upstreams[0].timeouts.write"));
}

#[test]
fn a_kind_fills_in_what_nobody_wrote() {
    let upstream = "[[upstreams]]\nurl = \"http://a\"\n";
    let all = loaded(&format!("{upstream}kind = \"vllm\""));
    let vllm = &all.config.upstreams[0];
    assert_eq!(
        (vllm.abandon.contract, vllm.settle, vllm.ask_usage),
        (Contract::Cancel, Duration::from_millis(250), true)
    );
    let printed = effective::toml(&all);
    for line in [
        "on_abandon = \"cancel\" # kind vllm\n",
        "settle = \"250ms\" # kind vllm\n",
        "idle = \"4s\" # kind vllm\n",
        "ask_usage = true # kind vllm\n",
    ] {
        assert!(printed.contains(line), "{line} in\n{printed}");
    }
    let own = loaded(&format!(
        "{upstream}kind = \"groq\"\nslots = 5\nsettle = \"3s\"\nabandon.tokens = 9\n"
    ));
    let groq = &own.config.upstreams[0];
    assert_eq!(
        (groq.abandon.contract, groq.settle, groq.abandon.tokens),
        (Contract::Drain, Duration::from_secs(3), Some(9))
    );
    assert_eq!(groq.abandon.at_once, 3, "half of the slots, rounded up");
    let printed = effective::toml(&own);
    for line in [
        "on_abandon = \"drain\" # kind groq\n",
        "settle = \"3s\" # tidegate.toml:5\n",
        "time = \"60s\" # kind groq\n",
        "at_once = 3\n",
    ] {
        assert!(printed.contains(line), "{line} in\n{printed}");
    }
    assert_eq!(loaded(&printed).config, own.config);
    let plain = &loaded(upstream).config.upstreams[0];
    assert_eq!(
        (plain.kind, plain.abandon.contract, plain.settle),
        (Kind::Other, Contract::Cancel, Duration::ZERO)
    );
}

#[test]
fn a_key_of_several_has_a_share_of_the_leftovers() {
    let upstream = "[[upstreams]]\nurl = \"http://a\"\nslots = 8\n";
    let key = |name: &str| {
        format!(
            "[[keys]]\nname = \"{name}\"\nsha256 = \"{}\"\n",
            "ab".repeat(32)
        )
    };
    let share = |text: &str| {
        loaded(text).config.upstreams[0]
            .abandon
            .per_key
            .map(|n| n.get())
    };
    assert_eq!(share(upstream), None);
    assert_eq!(share(&format!("{}{upstream}", key("a"))), None);
    let two = format!("{}{}{upstream}", key("a"), key("b").replace("ab", "cd"));
    assert_eq!(share(&two), Some(4));
    assert_eq!(share(&format!("{two}abandon.per_key = 1")), Some(1));
}

#[test]
fn the_count_that_is_asked_for_is_one_that_the_server_keeps() {
    let upstream = "[[upstreams]]\nurl = \"http://a\"\n";
    for (text, expected) in [
        (
            "abandon.confirm = \"vllm-metric\"",
            "did you mean \"vllm-metrics\"?",
        ),
        (
            "kind = \"llama.cpp\"\nabandon.confirm = \"vllm-metrics\"",
            "is not what a server of kind \"llama.cpp\" shows\n    write confirm = \"llama-slots\"",
        ),
        (
            "abandon.confirm_within = \"5s\"",
            "bounds nothing where confirm is \"off\"",
        ),
        (
            "abandon.confirm = \"llama-slots\"\nabandon.confirm_within = \"2h\"",
            "2h is too large",
        ),
    ] {
        let said = refused(&format!("{upstream}{text}"));
        assert!(said.contains(expected), "{text}\n{said}");
        assert!(said.contains("tidegate.toml:"), "{said}");
    }
    let asks = loaded(&format!(
        "{upstream}kind = \"vllm\"\nabandon.confirm = \"vllm-metrics\"\nabandon.confirm_within = \"5s\""
    ));
    let abandon = &asks.config.upstreams[0].abandon;
    let seen = (abandon.confirm, abandon.confirm_within);
    assert_eq!(seen, (Confirm::VllmMetrics, Duration::from_secs(5)));
    let printed = effective::toml(&asks);
    assert!(
        printed.contains("confirm = \"vllm-metrics\" # tidegate.toml:4"),
        "{printed}"
    );
    assert!(
        printed.contains("confirm_within = \"5s\" # tidegate.toml:5"),
        "{printed}"
    );
}

#[test]
fn a_grace_for_retries_is_the_operators_choice() {
    let upstream = "[[upstreams]]\nurl = \"http://a\"\nsettle = \"0s\"\n";
    assert_eq!(loaded(upstream).config.upstreams[0].attach, None);
    let text = format!("{upstream}attach.grace = \"30s\"\nabandon.tokens = 9");
    let graced = loaded(&text);
    let attach = graced.config.upstreams[0].attach.unwrap();
    assert_eq!(attach.grace, Duration::from_secs(30));
    assert_eq!(attach.bytes, 1024 * 1024);
    assert!(graced.warnings.is_empty(), "{:?}", graced.warnings);
    let much = loaded(&format!("{text}\nattach.bytes = \"65MiB\""));
    let warned = much.warnings[0].to_string();
    assert!(warned.contains("more than limits.attach_total (64MiB)"));
}

#[test]
fn a_journal_has_a_path_and_a_log_to_tell_of_it() {
    let upstream = "[[upstreams]]\nurl = \"http://a\"\n";
    let said = refused(&format!("[log]\njournal = \"\"\n{upstream}"));
    assert!(said.contains("log.journal: is empty"), "{said}");
    let silent = format!("[log]\naccess = false\njournal = \"calls\"\n{upstream}");
    let said = refused(&silent);
    assert!(
        said.contains("is of no use where log.access is false"),
        "{said}"
    );
    let all = loaded(&format!("[log]\njournal = \"calls\"\n{upstream}"));
    let path = all.config.log.journal.clone().unwrap();
    assert!(path.ends_with("calls"));
    let printed = effective::toml(&all);
    assert!(printed.contains("journal = \""), "{printed}");
}

/// Bounds of zero, bounds that nothing obeys, contracts that say two things.
#[test]
fn contracts_that_contradict_themselves_are_refused() {
    let upstream = "[[upstreams]]\nurl = \"http://a\"\n";
    for (text, expected) in [
        ("on_abandon = \"drian\"", "did you mean \"drain\"?"),
        ("kind = \"vlm\"", "did you mean \"vllm\"?"),
        ("kind = \"llama-cpp\"", "did you mean \"llama.cpp\"?"),
        (
            "on_abandon = \"drain\"\nabandon.time = \"0s\"",
            "0s is too small\n    the least is 100ms",
        ),
        (
            "on_abandon = \"drain\"\nabandon.bytes = \"0B\"",
            "0B is too small\n    the least is 1KiB",
        ),
        (
            "on_abandon = \"drain\"\nabandon.tokens = 0",
            "0 is too small\n    the least is 1",
        ),
        (
            "on_abandon = \"drain\"\nabandon.at_once = 0",
            "0 is too small\n    the least is 1",
        ),
        ("abandon.per_key = 0", "0 is too small\n    the least is 1"),
        (
            "abandon.time = \"5s\"",
            "bounds nothing where on_abandon is \"cancel\"",
        ),
        (
            "on_abandon = \"linger\"\nabandon.tokens = 5",
            "bounds nothing where on_abandon is \"linger\"",
        ),
        (
            "on_abandon = \"linger\"\nsettle = \"1s\"",
            "say it with abandon.time (60s now)",
        ),
        (
            "attach.grace = \"0s\"",
            "0s is too small\n    the least is 100ms",
        ),
        (
            "attach.bytes = \"1MiB\"",
            "bounds nothing without attach.grace",
        ),
        (
            "attach.grace = \"9s\"\nabandon.time = \"5s\"",
            "bounds nothing where on_abandon is \"cancel\"",
        ),
    ] {
        let said = refused(&format!("{upstream}{text}"));
        assert!(said.contains(expected), "{text}\n{said}");
        assert!(said.contains("tidegate.toml:"), "{said}");
    }
    let never = loaded(&format!(
        "{upstream}slots = 2\non_abandon = \"drain\"\nabandon.at_once = 3"
    ));
    assert!(
        never.warnings[0]
            .to_string()
            .contains("3 is more than 2 slots")
    );
}

/// Each call through it would become the next.
#[test]
fn an_upstream_that_is_the_gateway_is_refused() {
    for (listen, admin, url) in [
        ("127.0.0.1:8080", "127.0.0.1:9090", "http://127.0.0.1:8080"),
        (
            "127.0.0.1:8080",
            "127.0.0.1:9090",
            "http://LOCALHOST:8080/v1",
        ),
        (
            "127.0.0.1:8080",
            "127.0.0.1:9090",
            "http://[::ffff:127.0.0.1]:8080",
        ),
        ("[::1]:8080", "127.0.0.1:9090", "http://[::1]:8080"),
        ("0.0.0.0:8080", "127.0.0.1:9090", "http://127.0.0.1:8080"),
        ("127.0.0.1:8080", "127.0.0.1:9090", "http://127.0.0.1:9090"),
    ] {
        let text = format!(
            "[server]\nlisten = {listen:?}\nallow_unauthenticated = true\n[admin]\nlisten = {admin:?}\n[[upstreams]]\nurl = {url:?}"
        );
        let said = refused(&text);
        let named = said.contains("is the gateway itself") && said.contains("tidegate.toml:6:1");
        assert!(named && said.contains("1 mistake"), "{said}");
    }
    for (listen, url) in [
        ("127.0.0.1:8080", "http://127.0.0.1:8081"),
        ("127.0.0.1:8080", "http://127.0.0.2:8080"),
        ("127.0.0.1:8080", "http://model:8080"),
        ("127.0.0.1:0", "http://127.0.0.1:8080"),
    ] {
        loaded(&format!(
            "[server]\nlisten = {listen:?}\n[[upstreams]]\nurl = {url:?}"
        ));
    }
}
