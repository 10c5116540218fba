//! What a person types, and what comes of it.

use super::*;
use crate::config::sources::SOURCES;
use crate::config::tests::docs::up_to_date;

fn parsed(line: &str) -> Command {
    parse(line.split_whitespace(), Sources::default())
        .unwrap_or_else(|error| panic!("{line}: {error}"))
}

#[test]
fn the_command_tree_is_sound() {
    command().debug_assert();
}

#[test]
fn flags_become_sources() {
    let line = "tidegate serve --upstream http://127.0.0.1:8000 --listen 127.0.0.1:1 --admin off --slots 2 --queue 3 --queue-timeout 4s";
    let Command::Serve(sources) = parsed(line) else {
        panic!("not serve")
    };
    let config = config::load(&sources).unwrap().config;
    assert_eq!(
        (config.upstreams[0].slots.get(), config.upstreams[0].queue),
        (2, 3)
    );
    assert_eq!(
        config.upstreams[0].timeouts.queue,
        std::time::Duration::from_secs(4)
    );
    assert_eq!(config.admin.listen, None);
}

/// One list of sources: the flags of the command line, those that a configuration reads, and what `--help` says.
#[test]
fn every_flag_is_a_source_with_a_variable() {
    let command = command();
    let serve = command.find_subcommand("serve").unwrap();
    let long: Vec<_> = serve
        .get_arguments()
        .filter_map(|arg| Some((arg.get_long()?, arg.get_help()?.to_string())))
        .collect();
    for (flag, help) in long.iter().filter(|(flag, _)| *flag != "help") {
        let source = SOURCES
            .iter()
            .find(|source| source.flag == Some(&format!("--{flag}")))
            .unwrap_or_else(|| panic!("{flag}"));
        assert!(
            help.contains(&format!("[env: {}]", source.env)),
            "{flag}: {help}"
        );
    }
    for source in SOURCES {
        match source.flag {
            Some(flag) => assert!(
                long.iter().any(|(long, _)| format!("--{long}") == flag),
                "{flag}"
            ),
            None => assert!(SERVE_HELP.contains(source.env), "{}", source.env),
        }
    }
}

#[test]
fn every_command_has_help_with_examples() {
    for verb in command().get_subcommands() {
        let help = Output::from(
            parse(["tidegate", verb.get_name(), "--help"], Sources::default()).unwrap_err(),
        );
        assert_eq!(help.exit, Exit::Ok);
        assert!(
            help.stdout.contains("Examples:\n") && help.stderr.is_empty(),
            "{}",
            help.stdout
        );
    }
}

/// Whoever says neither is told of both ways.
#[test]
fn a_kill_needs_an_id_or_an_upstream() {
    for (line, said) in [
        ("tidegate kill", "<ID|--upstream <NAME>>"),
        ("tidegate kill req_1 --upstream gpu", "cannot be used with"),
    ] {
        let words = line.split(' ');
        let refused = Output::from(parse(words, Sources::default()).unwrap_err());
        assert_eq!(refused.exit, Exit::Usage, "{line}");
        assert!(refused.stderr.contains(said), "{}", refused.stderr);
    }
    parsed("tidegate kill req_1");
    parsed("tidegate kill --upstream gpu");
}

#[test]
fn wrong_command_lines_exit_with_2() {
    for line in [
        "tidegate",
        "tidegate srve",
        "tidegate serve --uptream http://a",
        "tidegate demo --listen x",
        "tidegate serve a",
    ] {
        let output = Output::from(parse(line.split_whitespace(), Sources::default()).unwrap_err());
        assert_eq!(
            (output.exit, output.stdout.as_str()),
            (Exit::Usage, ""),
            "{line}"
        );
    }
    let typo = Output::from(
        parse(["tidegate", "serve", "--uptream", "a"], Sources::default()).unwrap_err(),
    );
    assert!(typo.stderr.contains("--upstream"), "{}", typo.stderr);
}

#[test]
fn check_prints_or_refuses() {
    let could_start = |_: &config::Config| Ok::<(), String>(());
    let Command::Check(sources) = parsed("tidegate check --upstream http://a --kind vllm") else {
        panic!("not check")
    };
    let good = check(&sources, could_start);
    assert!(
        good.exit == Exit::Ok
            && good
                .stdout
                .contains("endpoints = [\"http://a:80\"] # --upstream"),
        "{good:?}"
    );
    let bad = check(&sources.clone().flag("--slots", "0"), could_start);
    assert_eq!((bad.exit, bad.stdout.as_str()), (Exit::Usage, ""));
    assert_eq!(
        bad.stderr,
        "--slots: 0 is too small\n    the least is 1\n1 mistake in the configuration\n"
    );
    let bad = check(&sources, |_| Err("no such key"));
    assert_eq!((bad.exit, bad.stdout.as_str()), (Exit::Usage, ""));
    assert_eq!(bad.stderr, "no such key\n");
}

#[test]
fn hash_key_prints_what_the_file_takes() {
    let args = HashKey {
        name: Some("ci".into()),
    };
    let output = hash_key(&args, &b" sk-MARKER-0123456789\n"[..]);
    assert!(
        !output.stdout.contains("MARKER") && output.stderr.is_empty(),
        "{output:?}"
    );
    let text = format!("[[upstreams]]\nurl = \"http://a\"\n{}", output.stdout);
    let config = config::parse(&text, &config::Env::default())
        .unwrap()
        .config;
    assert_eq!(config.keys[0].sha256, keys::hash("sk-MARKER-0123456789"));
    for bad in ["", " \n", "two words", "\u{e9}"] {
        assert_eq!(hash_key(&args, bad.as_bytes()).exit, Exit::Usage, "{bad:?}");
    }
    assert!(
        hash_key(&HashKey { name: None }, &b"short"[..])
            .stderr
            .contains("guessed")
    );
}

#[test]
fn the_schema_is_json() {
    let schema: serde_json::Value = serde_json::from_str(&schema().stdout).unwrap();
    assert!(
        schema["properties"]["upstreams"].is_object() && schema["additionalProperties"] == false
    );
}

#[test]
fn the_page_is_up_to_date() {
    let mut page = include_str!("cli.head.md").to_owned();
    for source in SOURCES {
        let flag = source
            .flag
            .map_or("none, it is a secret".into(), |flag| format!("`{flag}`"));
        let setting = match source.path {
            "" => "",
            path => &path.replace("[0]", "[]"),
        };
        page += &format!(
            "| `{}` | {flag} | {} |\n",
            source.env,
            if setting.is_empty() {
                String::new()
            } else {
                format!("`{setting}`")
            }
        );
    }
    let mut command = command();
    command.build();
    page += &format!("\n## tidegate\n\n```text\n{}```\n", help(&mut command));
    for verb in command.get_subcommands_mut() {
        let name = verb.get_name().to_owned();
        page += &format!(
            "
## tidegate {name}

```text
{}```
",
            help(verb)
        );
    }
    up_to_date("docs/cli.md", &page);
}

fn help(command: &mut clap::Command) -> String {
    let text = command.render_long_help().to_string();
    text.lines()
        .map(|line| format!("{}\n", line.trim_end()))
        .collect()
}

/// What newcomers type, and the words that must come back.
#[test]
fn slips_are_answered_with_what_was_meant() {
    for (line, words, exit) in [
        ("tidegate help", "Usage: tidegate <COMMAND>", Exit::Ok),
        ("tidegate help serve", "Run the gateway\n", Exit::Ok),
        (
            "tidegate version",
            concat!("tidegate ", env!("CARGO_PKG_VERSION"), "\n"),
            Exit::Ok,
        ),
        (
            "tidegate serve --upstream http://a --api-key sk-123",
            "tip: keys have no flag, since a process list shows flags: set TIDEGATE_API_KEY",
            Exit::Usage,
        ),
        (
            "tidegate serve --port 8081",
            "tip: address and port are given together: --listen 127.0.0.1:8080",
            Exit::Usage,
        ),
        (
            "tidegate check nope.toml",
            "tip: the configuration file is given with --config",
            Exit::Usage,
        ),
        (
            "tidegate probe 127.0.0.1:8000",
            "Usage: tidegate probe [OPTIONS] <URL>",
            Exit::Usage,
        ),
        ("tidegate serve --lisen a", "'--listen'", Exit::Usage),
    ] {
        let output = Output::from(parse(line.split(' '), Sources::default()).unwrap_err());
        assert_eq!(output.exit, exit, "{line}");
        let said = output.stdout + &output.stderr;
        assert!(said.contains(words), "{line}: {said}");
        assert!(!said.contains("sk-123"), "{said}");
        let aside = words.contains("no flag") && said.contains("similar");
        assert!(!aside, "the next slip is not suggested: {said}");
    }
}
