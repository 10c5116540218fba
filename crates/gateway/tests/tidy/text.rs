//! The repository as text.

use std::fs;
use std::path::{Path, PathBuf};

/// A file, by its path from the root of the repository.
pub(crate) struct File {
    pub(crate) path: String,
    pub(crate) text: String,
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

pub(crate) fn files_under(folder: &str, extension: &str) -> Vec<File> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                let text = fs::read_to_string(&path).unwrap();
                let path = path.strip_prefix(root()).unwrap().display().to_string();
                found.push(File { path, text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

impl File {
    /// `(number, line)` of what the compiler sees: no comments, no inline test module.
    pub(crate) fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        self.lines()
            .filter(|(_, line)| !line.trim_start().starts_with("//"))
            .map(|(number, line)| (number, line.split(" // ").next().unwrap_or(line)))
    }

    /// `(number, line)` without the inline test module.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let tests = self.text.find("\n#[cfg(test)]\nmod tests {");
        let text = self.text.get(..tests.unwrap_or(self.text.len()));
        (1..).zip(text.unwrap_or_default().lines())
    }

    pub(crate) fn is_test(&self) -> bool {
        self.path.contains("/tests/")
            || self.path.ends_with("/tests.rs")
            || self.path.ends_with("_tests.rs")
    }
}

/// Source of the gateway without its tests.
pub(crate) fn gateway() -> Vec<File> {
    let mut files = files_under("crates/gateway/src", "rs");
    files.retain(|file| !file.is_test());
    assert!(files.len() > 40, "{} files are few", files.len());
    files
}

pub(crate) fn all_crates() -> Vec<File> {
    files_under("crates", "rs")
}

/// Pages that people read.
pub(crate) fn pages() -> Vec<File> {
    let mut pages = files_under("docs", "md");
    let top = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap());
    for name in top.map(|entry| entry.file_name().into_string().unwrap()) {
        if name.ends_with(".md") {
            pages.push(File {
                text: read(&name),
                path: name,
            });
        }
    }
    pages
}

/// The maximal runs of `[A-Za-z0-9_]`.
pub(crate) fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
}

/// Fails with every breach at once.
pub(crate) fn none(breaches: &[String], rule: &str) {
    assert!(breaches.is_empty(), "\n{}\n\n{rule}\n", breaches.join("\n"));
}

pub(crate) fn first_word(text: &str) -> Option<String> {
    words(text).next().map(str::to_owned)
}

/// `path:line: text` for every line of code that holds `what` as a whole word or path.
pub(crate) fn found(file: &File, what: &str) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    file.code()
        .filter(|(_, line)| {
            line.match_indices(what).any(|(at, _)| {
                !line[..at].ends_with(is_part) && !line[at + what.len()..].starts_with(is_part)
            })
        })
        .map(|(number, line)| format!("{}:{number}: {}", file.path, line.trim()))
        .collect()
}

pub(crate) fn module_of(path: &str) -> &str {
    let inner = path.strip_prefix("crates/gateway/src/").unwrap();
    let end = inner.find(['/', '.']).unwrap();
    &inner[..end]
}
