//! A secret is in no text that a person or a log can see.

use super::*;

const MARKER: &str = "sk-MARKER-0123456789";

#[test]
fn no_debug_no_display_no_effective_settings() {
    let text = format!(
        "[[keys]]\nname = \"a\"\nkey = \"{MARKER}\"\n[[keys]]\nname = \"b\"\nkey = \"${{CLIENT}}\"\n[[upstreams]]\nurl = \"http://a\"\napi_key = \"${{UPSTREAM}}\""
    );
    let env: Env = [
        ("CLIENT", format!("{MARKER}-c")),
        ("UPSTREAM", format!("{MARKER}-u")),
    ]
    .into_iter()
    .collect();
    let loaded = parse(&text, &env).unwrap();
    let sources = Sources::of_env(env);
    let upstream = &loaded.config.upstreams[0];
    let warnings: String = loaded.warnings.iter().map(ToString::to_string).collect();
    let key = upstream.api_key.clone().unwrap();
    for shown in [
        format!("{loaded:?}"),
        format!("{sources:?}"),
        effective::toml(&loaded),
        warnings,
        format!("{key} {key:?}"),
    ] {
        assert!(!shown.contains("MARKER"), "{shown}");
    }
    let printed = effective::toml(&loaded);
    assert!(
        printed.contains("api_key = \"***\" # tidegate.toml:9"),
        "{printed}"
    );
    assert!(!printed.contains(&keys::hex(&loaded.config.keys[0].sha256)));
}

/// The secret as the value of every setting, written out and from the environment, in every form of TOML.
#[test]
fn no_complaint_quotes_a_value_that_may_be_a_secret() {
    let forms = [
        format!("\"{MARKER}\""),
        "\"${SECRET}\"".into(),
        format!("[\"{MARKER}\"]"),
        format!("{{ a = \"{MARKER}\" }}"),
        MARKER.into(),
        format!("\"{MARKER}"),
    ];
    for path in docs::every_setting() {
        for form in &forms {
            let text = docs::one_setting(&path, form);
            let env: Env = [("SECRET", MARKER)].into_iter().collect();
            let said = match parse(&text, &env) {
                Ok(loaded) => loaded.warnings.iter().map(ToString::to_string).collect(),
                Err(mistakes) => mistakes.to_string(),
            };
            let is_name = path == "upstreams.name" || path == "keys.name";
            assert!(is_name || !said.contains("MARKER"), "{text}\n{said}");
        }
    }
}

#[test]
fn short_values_from_the_environment_are_not_quoted_either() {
    let settings = [
        "timeouts.idle",
        "limits.event",
        "log.level",
        "server.connections_max",
        "log.access",
        "server.listen",
    ];
    for path in settings {
        let text = docs::one_setting(path, "\"${SECRET}\"");
        for value in ["pw1", "30", "-1", "1pw1", "0pw1", "pw1:8080"] {
            let said = match parse(&text, &[("SECRET", value)].into_iter().collect()) {
                Ok(_) => continue,
                Err(mistakes) => mistakes.to_string(),
            };
            assert!(!said.contains("pw1"), "{text}\n{said}");
        }
    }
}
