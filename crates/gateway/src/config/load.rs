//! From sources to a configuration, or to everything that is wrong with it.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::Config;
use super::file;
use super::findings::Findings;
use super::mistake::{Mistakes, Origin, Warning};
use super::schema::Shape;
use super::sources::{Env, SOURCES, Sources};
use super::tree::{self, Raw};
use super::validate;

/// A configuration that is ready to use.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub config: Config,
    pub warnings: Vec<Warning>,
    /// Files whose change may change the configuration: itself, keys, certificates.
    pub watch: Vec<PathBuf>,
    /// Where each setting was given, by path; what is not here is a default.
    pub origins: std::collections::BTreeMap<String, Origin>,
}

/// How often a configuration can be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    /// The first time: a pipe will do.
    First,
    Again,
}

/// Reads everything that `sources` name. Blocks on files.
pub fn load(sources: &Sources) -> Result<Loaded, Mistakes> {
    read_all(sources, Reading::First)
}

/// As [`load`], for a reload: what came through a pipe at the start is not there a second time, and would be waited for.
pub fn load_again(sources: &Sources) -> Result<Loaded, Mistakes> {
    read_all(sources, Reading::Again)
}

fn read_all(sources: &Sources, reading: Reading) -> Result<Loaded, Mistakes> {
    let mut findings = Findings::default();
    let config_file = sources.by_env_name("TIDEGATE_CONFIG");
    let upstream = sources.by_env_name("TIDEGATE_UPSTREAM");
    let text = match (&config_file, &upstream) {
        (Some(file), Some(upstream)) => {
            let what = format!("stands beside {}", file.place);
            findings.wrong_at(
                upstream.place.clone(),
                "",
                what,
                "give one of them: with a file, the upstream is an [[upstreams]] in it",
            );
            None
        }
        (None, None) => {
            let help = "give --upstream http://127.0.0.1:8000, or --config tidegate.toml";
            findings.wrong_at(Origin::Whole, "", "there is no upstream to serve", help);
            None
        }
        (Some(given), None) => {
            let file = PathBuf::from(given.text);
            findings.file = Some(file.clone());
            findings.watch(file.clone());
            read(&file, reading, &mut findings)
        }
        (None, Some(_)) => Some(String::new()),
    };
    let Some(text) = text else {
        sources.check_names(&BTreeSet::new(), &mut findings);
        return Err(findings.into_mistakes());
    };
    from_text(&text, sources, findings)
}

/// Reads a configuration from text, with relative paths as from the working folder. For tests and fuzzing.
pub fn parse(text: &str, env: &Env) -> Result<Loaded, Mistakes> {
    let findings = Findings {
        file: Some(PathBuf::from("tidegate.toml")),
        ..Findings::default()
    };
    from_text(text, &Sources::of_env(env.clone()), findings)
}

fn from_text(text: &str, sources: &Sources, mut findings: Findings) -> Result<Loaded, Mistakes> {
    let shape = Shape::of_file();
    let tree::Tree {
        mut values,
        used,
        readable,
    } = tree::read(text, shape, &sources.env, &mut findings);
    overlay(&mut values, sources, shape, &used, &mut findings);
    sources.check_names(&used, &mut findings);
    if !readable {
        return Err(findings.into_mistakes());
    }
    let written = match serde_json::from_value::<file::File>(Value::Object(values)) {
        Ok(written) => written,
        Err(error) => {
            // The tree was checked against the same types, so this is a gap in that check; the text may quote a value.
            debug_assert!(false, "{error}");
            findings.wrong_at(findings.place(""), "", "cannot be read", "");
            file::File::default()
        }
    };
    let config = validate::build(&written, sources, &mut findings);
    if !findings.mistakes.is_empty() {
        return Err(findings.into_mistakes());
    }
    findings.warnings.sort();
    Ok(Loaded {
        config,
        warnings: findings.warnings,
        watch: findings.watch,
        origins: findings.places,
    })
}

fn read(file: &Path, reading: Reading, findings: &mut Findings) -> Option<String> {
    let place = Origin::WholeFile(file.to_path_buf());
    let mut bytes = Vec::new();
    let mut help = "check the path given by --config or TIDEGATE_CONFIG";
    let opened = fs::metadata(file).and_then(|about| {
        if about.is_dir() {
            return Err(std::io::Error::other("is a directory"));
        }
        if reading == Reading::Again && !about.is_file() {
            help = "it is no regular file, and could be read once; give a file, or start the gateway anew";
            return Err(std::io::Error::other("not a second time"));
        }
        fs::File::open(file)
    });
    let limit = tree::FILE_BYTES_MAX as u64 + 1;
    if let Err(error) = opened.and_then(|open| open.take(limit).read_to_end(&mut bytes)) {
        findings.wrong_at(place, "", format!("cannot be read: {error}"), help);
        return None;
    }
    if bytes.len() > tree::FILE_BYTES_MAX {
        findings.wrong_at(place, "", "is longer than 4 MiB", "is this the right file?");
        return None;
    }
    String::from_utf8(bytes)
        .map_err(|error| {
            let before = error.utf8_error().valid_up_to();
            let line = error.as_bytes()[..before]
                .iter()
                .filter(|byte| **byte == b'\n')
                .count()
                + 1;
            let place = Origin::File {
                file: file.to_path_buf(),
                line,
                column: 1,
            };
            findings.wrong_at(place, "", "is not UTF-8 text", "save the file as UTF-8");
        })
        .ok()
}

/// Puts flags and variables over what the file says.
fn overlay(
    values: &mut Map<String, Value>,
    sources: &Sources,
    shape: &Shape,
    used: &BTreeSet<String>,
    findings: &mut Findings,
) {
    let with_file = findings.file.is_some();
    for source in SOURCES.iter().filter(|source| !source.path.is_empty()) {
        let Some(given) = sources.given(source) else {
            continue;
        };
        if with_file && source.one_upstream {
            // `api_key = "${TIDEGATE_API_KEY}"` in the file is a fine use of the variable.
            if !used.contains(source.env) {
                let setting = source
                    .path
                    .rsplit_once("].")
                    .map_or(source.path, |(_, setting)| setting);
                let what = "goes with --upstream, and there is a configuration file";
                let help = match source.flag {
                    Some(_) => format!("set {setting} in the file, at the upstream that is meant"),
                    None => format!(
                        "write {setting} = \"${{{}}}\" in the file, at the upstream that is meant",
                        source.env
                    ),
                };
                findings.wrong_at(given.place, "", what, help);
            }
            continue;
        }
        findings
            .places
            .insert(source.path.to_owned(), given.place.clone());
        findings.broken.remove(source.path);
        let of = shape.at(source.path).expect("SOURCES name settings");
        match tree::scalar(
            of,
            Raw::Text {
                text: given.text,
                typed: matches!(given.place, Origin::Flag(_)) && !is_number(of),
            },
        ) {
            Ok(value) => set(values, source.path, value),
            Err(wrong) => {
                findings.wrong_at(given.place, source.path, wrong.what, wrong.help);
                findings.broken.insert(source.path.to_owned());
            }
        }
    }
    if findings.is_given("upstreams[0].url") && !with_file {
        for path in ["upstreams", "upstreams[0]"] {
            let place = findings.place("upstreams[0].url");
            findings.places.insert(path.to_owned(), place);
        }
    }
}

/// Flags are text; a number or a yes in them has no quotes to be told apart by.
fn is_number(shape: &Shape) -> bool {
    matches!(shape, Shape::Count { .. } | Shape::Flag)
}

/// Sets the value at `a.b` or `a[0].b`, where only index 0 occurs.
fn set(values: &mut Map<String, Value>, path: &str, value: Value) {
    let Some((first, rest)) = path.split_once('.') else {
        values.insert(path.to_owned(), value);
        return;
    };
    let (name, in_list) = first
        .strip_suffix("[0]")
        .map_or((first, false), |name| (name, true));
    let empty = if in_list {
        Value::Array(vec![Value::Object(Map::new())])
    } else {
        Value::Object(Map::new())
    };
    let below = values.entry(name).or_insert(empty);
    let below = if in_list {
        below.get_mut(0)
    } else {
        Some(below)
    };
    if let Some(Value::Object(below)) = below {
        set(below, rest, value);
    }
}
