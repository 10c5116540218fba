//! Files, flags and variables together.

use super::*;

fn file_with(folder: &Folder, text: &str) -> Sources {
    Sources::file(folder.write("tidegate.toml", text))
}

fn refusal(sources: &Sources) -> String {
    load(sources).expect_err("this is wrong").to_string()
}

#[test]
fn flags_and_variables_need_no_file() {
    let sources = Sources::default()
        .flag("--upstream", "http://127.0.0.1:8000")
        .flag("--slots", "3")
        .env("TIDEGATE_SLOTS", "5")
        .env("TIDEGATE_QUEUE", "7")
        .env("TIDEGATE_QUEUE_TIMEOUT", "2s")
        .env("TIDEGATE_LISTEN", "127.0.0.1:0")
        .env("TIDEGATE_ADMIN", "off")
        .env("TIDEGATE_API_KEY", "sk-1")
        .env("TIDEGATE_KEYS", "ci: one, laptop: sha256:8b5b9db0c13db24256c829aa364aa90c6d2eba318b9232a4ab9313b954d3555f");
    let Loaded {
        config,
        warnings,
        watch,
        ..
    } = load(&sources).unwrap();
    let upstream = &config.upstreams[0];
    assert_eq!(
        (
            upstream.slots.get(),
            upstream.queue,
            upstream.timeouts.queue
        ),
        (3, 7, Duration::from_secs(2))
    );
    assert_eq!(
        (config.server.listen, config.admin.listen),
        (address("127.0.0.1:0"), None)
    );
    assert_eq!(upstream.api_key, Some(Secret::new("sk-1")));
    let names: Vec<_> = config
        .keys
        .iter()
        .map(|key| (key.name.as_str(), key.sha256))
        .collect();
    assert_eq!(
        names,
        [("ci", keys::hash("one")), ("laptop", keys::hash("three"))]
    );
    let warned: Vec<_> = warnings.iter().map(ToString::to_string).collect();
    assert!(
        matches!(&warned[..], [kind, short] if kind.starts_with("warning: ") && kind.contains("or --kind does")
            && short.contains("the key of \"ci\" is so short that it can be guessed")),
        "{warned:?}"
    );
    assert!(watch.is_empty(), "{watch:?}");
}

#[test]
fn what_kubernetes_sets_for_a_service_is_no_setting() {
    let sources = Sources::default()
        .flag("--upstream", "http://a")
        .env("TIDEGATE_PORT", "tcp://10.0.0.1:8080")
        .env("TIDEGATE_PORT_8080_TCP_ADDR", "10.0.0.1")
        .env("TIDEGATE_SERVICE_HOST", "10.0.0.1");
    assert!(load(&sources).is_ok());
    let said = refusal(&sources.env("TIDEGATE_PORT", "8080"));
    assert!(
        said.starts_with("TIDEGATE_PORT: is not a setting"),
        "{said}"
    );
}

#[test]
fn nothing_to_serve_and_two_things_to_serve() {
    let said = refusal(&Sources::default());
    assert!(
        said.contains(
            "there is no upstream to serve\n    give --upstream http://127.0.0.1:8000, or --config"
        ),
        "{said}"
    );
    let both = Sources::file("tidegate.toml").env("TIDEGATE_UPSTREAM", "http://a");
    assert!(
        refusal(&both)
            .starts_with("TIDEGATE_UPSTREAM: stands beside --config\n    give one of them"),
        "{}",
        refusal(&both)
    );
}

#[test]
fn wrong_flags_and_variables_are_named() {
    let sources = Sources::default()
        .flag("--upstream", "localhost:8000")
        .flag("--queue-timeout", "30")
        .flag("--queue", "-1")
        .env("TIDEGATE_SLOTS", "many")
        .env("TIDEGATE_LISTNE", "127.0.0.1:1")
        .env("TIDEGATE_ADMIN", "");
    let said = refusal(&sources);
    for line in [
        "--upstream: has no http:// or https:// in front",
        "--queue-timeout: \"30\" has no unit",
        "--queue: -1 is too small",
        "TIDEGATE_SLOTS: is not a whole number, or too large",
        "TIDEGATE_LISTNE: is not a setting\n    did you mean TIDEGATE_LISTEN?",
        "TIDEGATE_ADMIN: is not an IP address and a port",
        "6 mistakes in the configuration",
    ] {
        assert!(said.contains(line), "{line} in\n{said}");
    }
}

#[test]
fn what_describes_one_upstream_has_no_meaning_beside_a_file() {
    let folder = Folder::new("beside");
    let text = "[server]\nlisten = \"127.0.0.1:1\"\n[[upstreams]]\nurl = \"http://a\"\n";
    let sources = file_with(&folder, text)
        .flag("--slots", "3")
        .env("TIDEGATE_API_KEY", "sk-MARKER")
        .flag("--listen", "127.0.0.1:2");
    let said = refusal(&sources);
    assert!(said.contains("--slots: goes with --upstream, and there is a configuration file\n    set slots in the file"), "{said}");
    assert!(
        said.contains("write api_key = \"${TIDEGATE_API_KEY}\" in the file")
            && !said.contains("MARKER"),
        "{said}"
    );

    let used = file_with(
        &folder,
        &format!("{text}api_key = \"${{TIDEGATE_API_KEY}}\""),
    )
    .env("TIDEGATE_API_KEY", "sk-1");
    assert_eq!(
        load(&used).unwrap().config.upstreams[0].api_key,
        Some(Secret::new("sk-1"))
    );
    let over = load(&file_with(&folder, text).flag("--listen", "127.0.0.1:2")).unwrap();
    assert_eq!(
        over.config.server.listen,
        address("127.0.0.1:2"),
        "a flag wins over the file"
    );
    let named = file_with(&folder, &format!("{text}name = \"${{TIDEGATE_NAME}}\""))
        .env("TIDEGATE_NAME", "n");
    assert_eq!(
        load(&named).unwrap().config.upstreams[0].name,
        "n",
        "a variable that the file names is known"
    );
}

#[test]
fn secrets_in_files_are_read_trimmed_and_watched() {
    let folder = Folder::new("secrets");
    let key = folder.write("upstream.key", "sk-1\n");
    folder.write("client.key", "  two-and-sixteen-characters \r\n");
    let keys_file = folder.write("keys.txt", "# comment\n\nci: one-and-sixteen-characters\n");
    let text = "[[keys]]\nname = \"file\"\nkey_file = \"client.key\"\n[[upstreams]]\nurl = \"http://a\"\nkind = \"vllm\"\napi_key_file = \"upstream.key\"";
    let sources = file_with(&folder, text).flag("--keys-file", keys_file);
    let Loaded {
        config,
        warnings,
        watch,
        ..
    } = load(&sources).unwrap();
    assert_eq!(config.upstreams[0].api_key, Some(Secret::new("sk-1")));
    assert_eq!(
        config.keys.iter().map(|key| key.sha256).collect::<Vec<_>>(),
        [
            keys::hash("two-and-sixteen-characters"),
            keys::hash("one-and-sixteen-characters")
        ]
    );
    assert_eq!(warnings, []);
    let mut watched: Vec<_> = watch
        .iter()
        .filter_map(|file| file.file_name()?.to_str())
        .collect();
    watched.sort_unstable();
    assert_eq!(
        watched,
        ["client.key", "keys.txt", "tidegate.toml", "upstream.key"]
    );
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
        let warnings = load(&sources).unwrap().warnings;
        assert!(
            warnings[0]
                .to_string()
                .contains("every user of this machine can read"),
            "{warnings:?}"
        );
    }
    // Reload: the same sources, another content.
    folder.write("upstream.key", "sk-2");
    assert_eq!(
        load(&sources).unwrap().config.upstreams[0].api_key,
        Some(Secret::new("sk-2"))
    );
    folder.write("upstream.key", " \n");
    assert!(
        refusal(&sources).contains("upstreams[0].api_key_file: the key is empty"),
        "{}",
        refusal(&sources)
    );
}

#[test]
fn files_that_cannot_be_read() {
    let folder = Folder::new("unreadable");
    let missing = Sources::file("/nonexistent/tidegate.toml");
    assert!(
        refusal(&missing).starts_with("/nonexistent/tidegate.toml: cannot be read: "),
        "{}",
        refusal(&missing)
    );
    let directory = Sources::file(folder.0.display().to_string());
    assert!(
        refusal(&directory).contains("cannot be read: is a directory"),
        "{}",
        refusal(&directory)
    );
    let binary = Sources::file(folder.write("binary.toml", b"a = 1\nb = \"\xff\""));
    assert!(
        refusal(&binary).contains("binary.toml:2:1: is not UTF-8 text"),
        "{}",
        refusal(&binary)
    );
    let huge = Sources::file(folder.write("huge.toml", vec![b'#'; tree::FILE_BYTES_MAX + 1]));
    assert!(refusal(&huge).contains("is longer than 4 MiB"));

    let text = "[server.tls]\ncert_file = \"none.pem\"\n[[upstreams]]\nurl = \"https://a\"\napi_key_file = \"sk-MARKER\"\ntls.ca_file = \".\"";
    let said = refusal(&file_with(&folder, text));
    for line in [
        "tidegate.toml:1:1: server.tls: key_file is missing",
        "tidegate.toml:2:13: server.tls.cert_file: the file cannot be read",
        "tidegate.toml:5:16: upstreams[0].api_key_file: the file cannot be read",
        "tidegate.toml:6:15: upstreams[0].tls.ca_file: the file cannot be read: not a regular file",
        "4 mistakes",
    ] {
        assert!(said.contains(line), "{line} in\n{said}");
    }
    assert!(
        !said.contains("MARKER"),
        "a key in place of a file name is not shown\n{said}"
    );
}

#[test]
fn lists_of_keys() {
    let wrong = |list: &str| {
        refusal(
            &Sources::default()
                .flag("--upstream", "http://a")
                .env("TIDEGATE_KEYS", list),
        )
    };
    for (list, what) in [
        ("sk-MARKER", "entry 1 is not `name: key`"),
        (
            "a: b, c: sha256:MARKER",
            "entry 2 has no SHA-256 of 64 hex digits",
        ),
        ("a: ", "the key is empty"),
        ("a: b, a: c", "the name \"a\" is given to two keys"),
        ("anonymous: b", "the name \"anonymous\" is taken"),
    ] {
        let said = wrong(list);
        assert!(
            said.starts_with(&format!("TIDEGATE_KEYS: {what}")) && !said.contains("MARKER"),
            "{said}"
        );
    }
    let open = Sources::default()
        .flag("--upstream", "http://a")
        .flag("--listen", "0.0.0.0:8080");
    assert!(
        refusal(&open).starts_with("--listen: 0.0.0.0:8080 can be reached from other machines")
    );
    assert!(load(&open.clone().env("TIDEGATE_KEYS", "a: b")).is_ok());
    assert!(load(&open.flag("--allow-unauthenticated", "true")).is_ok());
}

/// What stands at the journal's path and is no journal is set aside at the start.
#[test]
fn a_journal_is_no_file_that_the_configuration_reads_and_no_folder() {
    for (journal, named) in [
        ("tidegate.toml", "tidegate.toml"),
        ("link", "tidegate.toml"),
        ("hard", "tidegate.toml"),
        ("client.key", "client.key"),
        ("upstream.key", "upstream.key"),
        ("ca.pem", "ca.pem"),
    ] {
        let folder = Folder::new(&format!("journal-{journal}"));
        folder.write("client.key", "a-key-of-a-client-1");
        folder.write("upstream.key", "a-key-of-an-upstream-1");
        folder.write("ca.pem", "roots");
        let text = format!(
            "[log]\njournal = \"{journal}\"\n[[keys]]\nname = \"ci\"\nkey_file = \"client.key\"\n\
             [[upstreams]]\nurl = \"https://a\"\napi_key_file = \"upstream.key\"\ntls.ca_file = \"ca.pem\"\n"
        );
        let sources = file_with(&folder, &text);
        let file = folder.0.join("tidegate.toml");
        std::os::unix::fs::symlink(&file, folder.0.join("link")).unwrap();
        std::fs::hard_link(&file, folder.0.join("hard")).unwrap();
        let said = refusal(&sources);
        assert!(
            said.contains(&format!("{named} is a file of the configuration")),
            "{journal}: {said}"
        );
        assert!(said.contains("log.journal"), "{said}");
    }
    let folder = Folder::new("journal-folder");
    let text = "[log]\njournal = \".\"\n[[upstreams]]\nurl = \"http://a\"\n";
    let said = refusal(&file_with(&folder, text));
    assert!(said.contains("log.journal: is no file"), "{said}");
}
