//! Collects mistakes, warnings and the files to watch while a configuration is read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::mistake::{Mistake, Mistakes, Origin, Warning};

/// More than this many mistakes are not listed.
const MISTAKES_MAX: usize = 200;

/// What is known so far.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// Where each setting was given, by path. What is not here is a default.
    pub(super) places: BTreeMap<String, Origin>,
    /// Settings whose value was refused; nothing more is said about them.
    pub(super) broken: BTreeSet<String>,
    /// Settings with a value from the environment, given by `${NAME}`.
    pub(super) filled_in: BTreeSet<String>,
    pub(super) mistakes: Vec<Mistake>,
    pub(super) warnings: Vec<Warning>,
    /// Files whose change changes the configuration.
    pub(super) watch: Vec<PathBuf>,
    /// The configuration file, if there is one.
    pub(super) file: Option<PathBuf>,
}

impl Findings {
    pub(super) fn wrong(&mut self, path: &str, what: impl Into<String>, help: impl Into<String>) {
        self.wrong_at(self.place(path), path, what, help);
    }

    pub(super) fn wrong_at(
        &mut self,
        place: Origin,
        path: &str,
        what: impl Into<String>,
        help: impl Into<String>,
    ) {
        if self.is_full() {
            return;
        }
        self.mistakes.push(Mistake {
            place,
            path: path.to_owned(),
            what: what.into(),
            help: help.into(),
        });
        if self.is_full() {
            let (what, help) = (
                format!("only the first {MISTAKES_MAX} mistakes are shown"),
                "is this the right file?",
            );
            self.mistakes.push(Mistake {
                place: Origin::Whole,
                path: String::new(),
                what,
                help: help.into(),
            });
        }
    }

    /// Enough mistakes for one reading: what follows is not worth the work.
    pub(super) fn is_full(&self) -> bool {
        self.mistakes.len() >= MISTAKES_MAX
    }

    pub(super) fn warn(&mut self, path: &str, what: impl Into<String>, help: impl Into<String>) {
        let place = self.place(path);
        self.warnings.push(Warning(Mistake {
            place,
            path: path.to_owned(),
            what: what.into(),
            help: help.into(),
        }));
    }

    /// The place of a setting, or of the table it would stand in.
    pub(super) fn place(&self, path: &str) -> Origin {
        let mut path = path;
        loop {
            if let Some(place) = self.places.get(path) {
                return place.clone();
            }
            let Some(at) = path.rfind(['.', '[']) else {
                return self.file.clone().map_or(Origin::Whole, Origin::WholeFile);
            };
            path = &path[..at];
        }
    }

    /// Whether somebody wrote this setting, rightly or not.
    pub(super) fn is_given(&self, path: &str) -> bool {
        self.places.contains_key(path)
    }

    pub(super) fn is_broken(&self, path: &str) -> bool {
        self.broken.contains(path)
    }

    /// A path in the file is relative to the file's folder, one from a flag to the working folder.
    pub(super) fn resolve(&self, path: &str, text: &str) -> PathBuf {
        let folder = match self.place(path) {
            Origin::File { file, .. } => file.parent().map(Path::to_path_buf),
            _ => None,
        };
        folder.map_or_else(|| PathBuf::from(text), |folder| folder.join(text))
    }

    pub(super) fn watch(&mut self, file: PathBuf) {
        if !self.watch.contains(&file) {
            self.watch.push(file);
        }
    }

    /// The mistakes in the order of the file.
    pub(super) fn into_mistakes(mut self) -> Mistakes {
        self.mistakes.sort();
        self.mistakes.dedup();
        Mistakes {
            all: self.mistakes,
            watch: self.watch,
        }
    }
}
