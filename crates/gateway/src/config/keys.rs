//! Secrets from files and environment, and client keys, which are kept as hashes only.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::ClientKey;
use super::file;
use super::findings::Findings;
use super::mistake::Origin;
use super::secret::Secret;
use super::sources::Sources;

/// A key or list of keys longer than this is a mistake.
const SECRET_BYTES_MAX: u64 = 1 << 20;

/// The SHA-256 of a client key, as the configuration holds it.
pub fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

/// Lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    let digit = |n: u8| char::from_digit(u32::from(n), 16).unwrap_or('0');
    bytes
        .iter()
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])
        .collect()
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> = text
        .chars()
        .map(|c| c.to_digit(16).map(|n| n as u8))
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits
        .chunks_exact(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect();
    if digits.len() == 64 {
        bytes.try_into().ok()
    } else {
        None
    }
}

/// Reads a text file that holds something secret, and watches it.
fn read_file(name: &str, path: &str, findings: &mut Findings) -> Option<String> {
    if name.is_empty() {
        findings.wrong(path, "is empty", "write the path of a file");
        return None;
    }
    let file = findings.resolve(path, name);
    findings.watch(file.clone());
    warn_if_open_to_all(&file, path, findings);
    match read_bounded(&file) {
        Ok(text) => Some(text),
        Err(why) => {
            unreadable(&why, path, findings);
            None
        }
    }
}

/// The text is not shown: it may be the secret itself, in the wrong place.
pub(super) fn unreadable(why: &str, path: &str, findings: &mut Findings) {
    let folder = findings.resolve(path, "");
    let from = match folder.as_os_str().is_empty() {
        true => String::new(),
        false => format!("; a relative path starts at {}", folder.display()),
    };
    findings.wrong(
        path,
        format!("the file cannot be read: {why}"),
        format!("write the path of a readable file{from}"),
    );
}

fn read_bounded(file: &Path) -> Result<String, String> {
    let about = fs::metadata(file).map_err(|error| error.to_string())?;
    if !about.is_file() {
        return Err("not a regular file".into());
    }
    let mut text = String::new();
    let opened = File::open(file).map_err(|error| error.to_string())?;
    opened
        .take(SECRET_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(|error| error.to_string())?;
    if text.len() as u64 > SECRET_BYTES_MAX {
        Err("longer than 1 MiB".into())
    } else {
        Ok(text)
    }
}

/// Warns when every user of the machine can read the file.
pub(super) fn warn_if_open_to_all(file: &Path, path: &str, findings: &mut Findings) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        if fs::metadata(file).is_ok_and(|about| about.is_file() && about.mode() & 0o004 != 0) {
            let what = format!("every user of this machine can read {}", file.display());
            findings.warn(path, what, format!("chmod o-r {}", file.display()));
        }
    }
}

/// One secret in a file of its own.
fn from_file(name: &str, path: &str, findings: &mut Findings) -> Option<String> {
    let text = read_file(name, path, findings)?;
    checked(text.trim(), path, findings)
}

/// A secret must be able to stand in a header.
fn checked(text: &str, path: &str, findings: &mut Findings) -> Option<String> {
    let help = "a key is one word of printable ASCII characters";
    if text.is_empty() {
        findings.wrong(path, "the key is empty", help);
    } else if !text.chars().all(|c| c.is_ascii_graphic()) {
        findings.wrong(
            path,
            "the key has a space, a line break or another character that cannot be sent",
            help,
        );
    } else {
        return Some(text.to_owned());
    }
    None
}

/// Characters below which a key can be found by trial.
const SHORT: usize = 16;

/// Whether a key can be guessed from its hash, or by asking.
pub fn is_short(key: &str) -> bool {
    key.len() < SHORT
}

/// The hash of a client's key.
fn hashed(text: &str, name: Option<&str>, path: &str, findings: &mut Findings) -> Option<[u8; 32]> {
    let key = checked(text, path, findings)?;
    if is_short(&key) {
        let help = "make one that is random, such as `openssl rand -hex 24` does";
        let whose = name.map(|name| format!(" of {name:?}")).unwrap_or_default();
        let what = format!("the key{whose} is so short that it can be guessed");
        findings.warn(path, what, help);
    }
    Some(hash(&key))
}

/// A secret written in the file should only be a reference to the environment.
fn warn_if_literal(path: &str, findings: &mut Findings) {
    let in_file = matches!(findings.place(path), Origin::File { .. });
    if in_file && !findings.filled_in.contains(path) {
        findings.warn(
            path,
            "a secret is written out in the configuration file",
            "use \"${NAME}\" or a file of its own",
        );
    }
}

/// The key of an upstream, from `api_key` or `api_key_file`.
pub(super) fn of_upstream(
    upstream: &file::Upstream,
    path: &str,
    findings: &mut Findings,
) -> Option<Secret> {
    let (literal, by_file) = (format!("{path}.api_key"), format!("{path}.api_key_file"));
    match (&upstream.api_key, &upstream.api_key_file) {
        (Some(_), Some(_)) => {
            findings.wrong(&by_file, "stands beside api_key", "keep one of the two");
            None
        }
        (Some(key), None) => {
            warn_if_literal(&literal, findings);
            checked(&key.0, &literal, findings).map(Secret::new)
        }
        (None, Some(name)) => from_file(name, &by_file, findings).map(Secret::new),
        (None, None) => None,
    }
}

/// All client keys: `[[keys]]`, then the keys file, then `TIDEGATE_KEYS`.
pub(super) fn of_clients(
    written: &[file::Key],
    sources: &Sources,
    findings: &mut Findings,
) -> Vec<ClientKey> {
    let mut keys: Vec<(String, ClientKey)> = Vec::new();
    for (index, key) in written.iter().enumerate() {
        let path = format!("keys[{index}]");
        if let Some(key) = of_client(key, &path, findings) {
            keys.push((path, key));
        }
    }
    for (env, name) in [
        ("TIDEGATE_KEYS_FILE", "keys_file"),
        ("TIDEGATE_KEYS", "keys_variable"),
    ] {
        let Some(given) = sources.by_env_name(env) else {
            continue;
        };
        findings.places.insert(name.to_owned(), given.place.clone());
        let text = match name {
            "keys_file" => read_file(given.text, name, findings),
            _ => Some(given.text.replace(',', "\n")),
        };
        for key in of_list(&text.unwrap_or_default(), name, findings) {
            // For `tidegate check`, which numbers all keys in one row.
            for part in ["name", "sha256"] {
                findings
                    .places
                    .insert(format!("keys[{}].{part}", keys.len()), given.place.clone());
            }
            keys.push((name.to_owned(), key));
        }
    }
    check_clients(&keys, findings);
    keys.into_iter().map(|(_, key)| key).collect()
}

fn check_clients(keys: &[(String, ClientKey)], findings: &mut Findings) {
    let (mut names, mut hashes) = (BTreeSet::new(), BTreeMap::new());
    for (path, key) in keys {
        let other = *hashes.entry(key.sha256).or_insert(&key.name);
        if !names.insert(&key.name) {
            let what = format!("the name {:?} is given to two keys", key.name);
            findings.wrong(path, what, "every key needs a name of its own");
        } else if *other != key.name {
            findings.wrong(
                path,
                format!("{other:?} and {:?} are the same key", key.name),
                "remove one of them",
            );
        }
    }
}

fn of_client(key: &file::Key, path: &str, findings: &mut Findings) -> Option<ClientKey> {
    let at = |name: &str| format!("{path}.{name}");
    let broken = ["name", "sha256", "key", "key_file"]
        .iter()
        .any(|name| findings.is_broken(&at(name)));
    if findings.is_broken(path) || broken {
        return None;
    }
    let name = match &key.name {
        Some(name) => client_name(name, &at("name"), findings),
        None => {
            findings.wrong(
                path,
                "a key without a name",
                "add name = \"...\": it appears in logs and metrics",
            );
            None
        }
    };
    let sha256 = match (&key.sha256, &key.key, &key.key_file) {
        (Some(text), None, None) => {
            let sha256 = unhex(text);
            if sha256.is_none() {
                findings.wrong(
                    &at("sha256"),
                    "is not a SHA-256 of 64 hex digits",
                    "`tidegate hash-key` prints the line",
                );
            }
            sha256
        }
        (None, Some(text), None) => {
            warn_if_literal(&at("key"), findings);
            hashed(&text.0, name.as_deref(), &at("key"), findings)
        }
        (None, None, Some(file)) => {
            let path = at("key_file");
            read_file(file, &path, findings)
                .and_then(|text| hashed(text.trim(), name.as_deref(), &path, findings))
        }
        (None, None, None) => {
            findings.wrong(
                path,
                "a key without a value",
                "add one of sha256, key = \"${NAME}\" and key_file",
            );
            None
        }
        _ => {
            findings.wrong(
                path,
                "more than one of sha256, key and key_file",
                "keep one of them",
            );
            None
        }
    };
    Some(ClientKey {
        name: name?,
        sha256: sha256?,
    })
}

/// Lines `name: sha256:HEX` or `name: KEY`; `#` begins a comment line.
fn of_list(text: &str, path: &str, findings: &mut Findings) -> Vec<ClientKey> {
    let mut keys = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let number = index + 1;
        let Some((name, value)) = line.split_once(':') else {
            findings.wrong(
                path,
                format!("entry {number} is not `name: key`"),
                "write `name: sha256:HEX` or `name: KEY`",
            );
            continue;
        };
        let value = value.trim();
        let name = client_name(name.trim(), path, findings);
        let sha256 = match value.strip_prefix("sha256:") {
            None => hashed(value, name.as_deref(), path, findings),
            Some(digits) => unhex(digits.trim()).or_else(|| {
                let what = format!("entry {number} has no SHA-256 of 64 hex digits");
                findings.wrong(path, what, "`tidegate hash-key` prints it");
                None
            }),
        };
        if let (Some(name), Some(sha256)) = (name, sha256) {
            keys.push(ClientKey { name, sha256 });
        }
    }
    keys
}

fn client_name(name: &str, path: &str, findings: &mut Findings) -> Option<String> {
    if name == "anonymous" {
        findings.wrong(
            path,
            "the name \"anonymous\" is taken: it stands for callers without a key",
            "choose another name",
        );
        return None;
    }
    super::validate::name(name, path, findings).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_and_hash() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(hex(&hash("")), empty);
        assert_eq!(unhex(empty), Some(hash("")));
        assert_eq!(unhex(&empty.to_uppercase()), Some(hash("")));
        for bad in [
            "",
            "e3",
            &empty[1..],
            &format!("{empty}00"),
            &empty.replace('e', "g"),
            "ümlaut",
        ] {
            assert_eq!(unhex(bad), None, "{bad}");
        }
    }
}
