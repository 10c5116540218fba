//! Where a configuration comes from: a file, flags, the environment.
//!
//! A flag wins over the environment, the environment over the file. Every flag has a variable; secrets have no flag, since a
//! process list shows flags. A variable with our prefix that nobody reads is a mistake, for it is a setting that does nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::findings::Findings;
use super::mistake::Origin;
use super::near;

/// Prefix of all variables that are ours.
pub const PREFIX: &str = "TIDEGATE_";

/// A setting that can be given without a file.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// `None`: a secret.
    pub flag: Option<&'static str>,
    pub env: &'static str,
    /// The setting in the file. Empty for those that name a file or hold client keys.
    pub path: &'static str,
    /// Describes the one upstream of `--upstream`, so it has no meaning beside `--config`.
    pub one_upstream: bool,
}

const fn source(
    flag: &'static str,
    env: &'static str,
    path: &'static str,
    one_upstream: bool,
) -> Source {
    Source {
        flag: Some(flag),
        env,
        path,
        one_upstream,
    }
}

/// All of them.
pub const SOURCES: [Source; 16] = [
    source("--config", "TIDEGATE_CONFIG", "", false),
    source("--upstream", "TIDEGATE_UPSTREAM", "upstreams[0].url", true),
    source("--listen", "TIDEGATE_LISTEN", "server.listen", false),
    source("--admin", "TIDEGATE_ADMIN", "admin.listen", false),
    source("--slots", "TIDEGATE_SLOTS", "upstreams[0].slots", true),
    source("--queue", "TIDEGATE_QUEUE", "upstreams[0].queue", true),
    source(
        "--queue-timeout",
        "TIDEGATE_QUEUE_TIMEOUT",
        "upstreams[0].timeouts.queue",
        true,
    ),
    source("--kind", "TIDEGATE_KIND", "upstreams[0].kind", true),
    source(
        "--on-abandon",
        "TIDEGATE_ON_ABANDON",
        "upstreams[0].on_abandon",
        true,
    ),
    source(
        "--api-key-file",
        "TIDEGATE_API_KEY_FILE",
        "upstreams[0].api_key_file",
        true,
    ),
    source("--keys-file", "TIDEGATE_KEYS_FILE", "", false),
    source(
        "--allow-unauthenticated",
        "TIDEGATE_ALLOW_UNAUTHENTICATED",
        "server.allow_unauthenticated",
        false,
    ),
    source("--log-level", "TIDEGATE_LOG_LEVEL", "log.level", false),
    source("--log-format", "TIDEGATE_LOG_FORMAT", "log.format", false),
    Source {
        flag: None,
        env: "TIDEGATE_API_KEY",
        path: "upstreams[0].api_key",
        one_upstream: true,
    },
    Source {
        flag: None,
        env: "TIDEGATE_KEYS",
        path: "",
        one_upstream: false,
    },
];

/// Flags as given and the environment as it was at the start. Reload reads the same sources again.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    flags: BTreeMap<&'static str, String>,
    pub env: Env,
}

/// Environment variables. `Debug` shows no value.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Env(BTreeMap<String, String>);

/// A value that was given without a file.
#[derive(Clone, Debug)]
pub struct Given<'a> {
    pub place: Origin,
    pub text: &'a str,
}

// === impl Sources ===

impl Sources {
    /// No flags, with the environment of this process.
    pub fn of_process() -> Self {
        Self::of_env(Env::of_process())
    }

    /// No flags, with this environment.
    pub fn of_env(env: Env) -> Self {
        Self {
            flags: BTreeMap::new(),
            env,
        }
    }

    /// A file and nothing else; for tests.
    pub fn file(path: impl Into<String>) -> Self {
        Self::default().flag("--config", path)
    }

    /// Adds a flag of [`SOURCES`] as it was given.
    #[must_use]
    pub fn flag(mut self, flag: &'static str, value: impl Into<String>) -> Self {
        debug_assert!(
            SOURCES.iter().any(|s| s.flag == Some(flag)),
            "{flag} is not in SOURCES"
        );
        self.flags.insert(flag, value.into());
        self
    }

    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.0.insert(name.into(), value.into());
        self
    }

    /// The value of a source, the flag before the variable.
    pub fn given(&self, source: &Source) -> Option<Given<'_>> {
        let by_flag = source.flag.and_then(|flag| {
            self.flags
                .get(flag)
                .map(|text| (Origin::Flag(flag.into()), text.as_str()))
        });
        let by_env = || {
            self.env
                .get(source.env)
                .map(|text| (Origin::Env(source.env.into()), text))
        };
        by_flag
            .or_else(by_env)
            .map(|(place, text)| Given { place, text })
    }

    /// As [`Self::given`], by the name of the variable.
    pub fn by_env_name(&self, env: &str) -> Option<Given<'_>> {
        SOURCES
            .iter()
            .find(|source| source.env == env)
            .and_then(|source| self.given(source))
    }

    /// Refuses variables with our prefix that are no settings. `used` are those that the file names.
    pub(super) fn check_names(&self, used: &BTreeSet<String>, findings: &mut Findings) {
        for (name, value) in &self.env.0 {
            let known = SOURCES.iter().any(|source| source.env == name) || used.contains(name);
            if known || !name.starts_with(PREFIX) || is_service_link(name, value) {
                continue;
            }
            let help = near::nearest(name, SOURCES.iter().map(|source| source.env)).map_or_else(
                || format!("unset it, or give it a name without {PREFIX}; the known names are in `tidegate serve --help`"),
                |near| format!("did you mean {near}?"),
            );
            findings.wrong_at(Origin::Env(name.clone()), "", "is not a setting", help);
        }
    }
}

/// Variables that Kubernetes puts into every container for a service called `tidegate` or `tidegate-…`.
fn is_service_link(name: &str, value: &str) -> bool {
    let is_url = |v: &str| {
        ["tcp://", "udp://", "sctp://"]
            .iter()
            .any(|scheme| v.starts_with(scheme))
    };
    if name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || (name.ends_with("_PORT") && is_url(value))
    {
        return true;
    }
    // ..._PORT_8080_TCP, ..._PORT_8080_TCP_ADDR
    name.rsplit_once("_PORT_").is_some_and(|(_, rest)| {
        let mut parts = rest.split('_');
        let number = parts.next().is_some_and(|n| n.parse::<u16>().is_ok());
        number
            && parts
                .next()
                .is_some_and(|p| ["TCP", "UDP", "SCTP"].contains(&p))
    })
}

// === impl Env ===

impl Env {
    /// Variables that are not Unicode are left out.
    pub fn of_process() -> Self {
        let unicode = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self(std::env::vars_os().filter_map(unicode).collect())
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }
}

impl fmt::Debug for Env {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Env({} variables)", self.0.len())
    }
}

impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for Env {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(iter: I) -> Self {
        Self(
            iter.into_iter()
                .map(|(name, value)| (name.into(), value.into()))
                .collect(),
        )
    }
}

// === interpolation ===

/// A text with its variables filled in.
#[derive(Debug, PartialEq, Eq)]
pub struct Expanded {
    pub text: String,
    /// Variables that were named, set or not. Empty: the text is literal.
    pub variables: Vec<String>,
}

/// Why a text cannot be filled in.
#[derive(Debug, PartialEq, Eq)]
pub enum Unexpanded {
    /// Variables that are not set and have no default.
    Unset(Vec<String>),
    /// `${` without a name or without `}`.
    Malformed,
}

/// Fills in `${NAME}` and `${NAME:-default}`; `$${` stands for `${`.
pub fn expand(text: &str, env: &Env) -> Result<Expanded, Unexpanded> {
    let mut done = Expanded {
        text: String::with_capacity(text.len()),
        variables: Vec::new(),
    };
    let mut unset = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        let (before, from) = rest.split_at(at);
        if let Some(before) = before.strip_suffix('$') {
            done.text.push_str(before);
            done.text.push_str("${");
            rest = &from[2..];
            continue;
        }
        done.text.push_str(before);
        let (inside, after) = from[2..].split_once('}').ok_or(Unexpanded::Malformed)?;
        let (name, default) = inside
            .split_once(":-")
            .map_or((inside, None), |(name, default)| (name, Some(default)));
        if !is_variable(name) {
            return Err(Unexpanded::Malformed);
        }
        match (env.get(name), default) {
            (None | Some(""), Some(default)) => done.text.push_str(default),
            (Some(value), _) => done.text.push_str(value),
            (None, None) => unset.push(name.to_owned()),
        }
        done.variables.push(name.to_owned());
        rest = after;
    }
    done.text.push_str(rest);
    if unset.is_empty() {
        Ok(done)
    } else {
        Err(Unexpanded::Unset(unset))
    }
}

fn is_variable(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_filled_in() {
        let env: Env = [("A", "one"), ("EMPTY", ""), ("NEST", "${A}")]
            .into_iter()
            .collect();
        let text = |t: &str| expand(t, &env).map(|e| e.text);
        assert_eq!(text("x ${A} y").unwrap(), "x one y");
        assert_eq!(text("${A}${A}").unwrap(), "oneone");
        assert_eq!(text("${NONE:-two}").unwrap(), "two");
        assert_eq!(text("${NONE:-}").unwrap(), "");
        assert_eq!(text("${EMPTY:-two}").unwrap(), "two");
        assert_eq!(text("${EMPTY}").unwrap(), "");
        assert_eq!(text("$${A} costs $5").unwrap(), "${A} costs $5");
        assert_eq!(
            text("${NEST}").unwrap(),
            "${A}",
            "a value is not filled in again"
        );
        assert_eq!(
            text("${A} ${B} ${C}"),
            Err(Unexpanded::Unset(vec!["B".into(), "C".into()]))
        );
        for bad in ["${", "${A", "${}", "${1A}", "${A B}", "${A-x}"] {
            assert_eq!(text(bad), Err(Unexpanded::Malformed), "{bad}");
        }
    }

    #[test]
    fn what_kubernetes_sets_for_a_service_is_not_ours() {
        for (name, value) in [
            ("TIDEGATE_SERVICE_HOST", "10.0.0.1"),
            ("TIDEGATE_SERVICE_PORT", "8080"),
            ("TIDEGATE_SERVICE_PORT_HTTP", "8080"),
            ("TIDEGATE_PORT", "tcp://10.0.0.1:8080"),
            ("TIDEGATE_PORT_8080_TCP", "tcp://10.0.0.1:8080"),
            ("TIDEGATE_PORT_8080_TCP_ADDR", "10.0.0.1"),
            ("TIDEGATE_ADMIN_PORT_9090_TCP_PROTO", "tcp"),
        ] {
            assert!(is_service_link(name, value), "{name}");
        }
        assert!(!is_service_link("TIDEGATE_PORT", "8080"));
        assert!(!is_service_link("TIDEGATE_LISTNE", "127.0.0.1:1"));
    }

    #[test]
    fn debug_shows_no_value() {
        let sources = Sources::default().env("TIDEGATE_API_KEY", "sk-MARKER");
        assert!(!format!("{sources:?}").contains("MARKER"));
    }
}
