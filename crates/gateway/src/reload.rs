//! When and how the configuration is read again: SIGHUP, or a change of any file it was made of.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use crate::app::Gateway;
use crate::config::{self, Sources};

/// How often the files are looked at. Asking the file system is cheap and works with every kind of mount, symlinked ConfigMaps included.
pub const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The files of a configuration and when they last changed.
#[derive(Debug, Default)]
pub struct Watched {
    files: Vec<(PathBuf, Option<Stamp>)>,
}

type Stamp = (SystemTime, u64);

fn stamp(path: &PathBuf) -> Option<Stamp> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.modified().ok()?, meta.len()))
}

impl Watched {
    pub fn new(files: Vec<PathBuf>) -> Self {
        Self {
            files: files
                .into_iter()
                .map(|path| {
                    let stamp = stamp(&path);
                    (path, stamp)
                })
                .collect(),
        }
    }

    /// Looks at these too; as they are now.
    fn add(&mut self, files: Vec<PathBuf>) {
        let new = |file: &PathBuf| !self.files.iter().any(|(known, _)| known == file);
        let files = files.into_iter().filter(new).collect();
        let mut added = Self::new(files);
        self.files.append(&mut added.files);
    }

    /// Whether a file is not as it was at the last look.
    pub fn have_changed(&mut self) -> bool {
        let mut changed = false;
        for (path, known) in &mut self.files {
            let now = stamp(path);
            if now != *known {
                *known = now;
                changed = true;
            }
        }
        changed
    }
}

/// Why the configuration is read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Signal,
    FileChange,
}

impl Cause {
    fn name(self) -> &'static str {
        match self {
            Self::Signal => "signal",
            Self::FileChange => "file change",
        }
    }
}

/// Reads everything again and puts it in place. A configuration with a mistake changes nothing and says why; the files that it names are
/// looked at from then on too, since a change of them may mend it.
pub fn reload(gateway: &Gateway, sources: &Sources, watched: &mut Watched, cause: Cause) {
    let cause = cause.name();
    let loaded = match config::load(sources) {
        Ok(loaded) => loaded,
        Err(mistakes) => {
            gateway.reload_failed();
            tracing::error!(
                cause,
                "configuration not reloaded, the old one goes on:\n{mistakes}"
            );
            watched.add(mistakes.watch);
            return;
        }
    };
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    match gateway.reload(loaded.config) {
        Ok(done) => {
            *watched = Watched::new(loaded.watch);
            tracing::info!(
                generation = done.generation,
                cause,
                "configuration reloaded"
            );
            if !done.needs_restart.is_empty() {
                tracing::warn!(
                    settings = done.needs_restart.join(", "),
                    "these differ from what runs; they take effect after a restart"
                );
            }
        }
        Err(error) => {
            watched.add(loaded.watch);
            tracing::error!(
                cause,
                "configuration not reloaded, the old one goes on: {error}"
            );
        }
    }
}
