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

/// Reads everything again and puts it in place. A configuration with a mistake changes nothing and says why.
pub fn reload(gateway: &Gateway, sources: &Sources, watched: &mut Watched) {
    let loaded = match config::load(sources) {
        Ok(loaded) => loaded,
        Err(mistakes) => {
            gateway.reload_failed();
            tracing::error!("configuration not reloaded, the old one goes on:\n{mistakes}");
            return;
        }
    };
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    match gateway.reload(loaded.config) {
        Ok(restart) => {
            *watched = Watched::new(loaded.watch);
            tracing::info!("configuration reloaded");
            for what in restart {
                tracing::warn!("{what} changed: takes effect after a restart");
            }
        }
        Err(error) => tracing::error!("configuration not reloaded, the old one goes on: {error}"),
    }
}
