//! When and how the configuration is read again: SIGHUP, or a change of any file it was made of.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, SystemTime};

use crate::app::Generations;
use crate::config::{self, Sources};

/// How often the files are looked at. Asking the file system is cheap and works with every kind of mount, symlinked ConfigMaps included.
const LOOK_EVERY: Duration = Duration::from_secs(2);

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
    fn have_changed(&mut self) -> bool {
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

/// The thread that looks at the files and reads them again, one reload at a time. A file can hang (on a mount whose server is gone): nothing
/// else waits for it then. Dropping this ends the thread, which is not waited for.
#[derive(Debug)]
pub struct Reloads {
    wanted: SyncSender<()>,
    is_reading: Arc<AtomicBool>,
}

impl Reloads {
    /// # Errors
    ///
    /// No thread could be started.
    pub fn start(
        generations: Arc<Generations>,
        sources: Sources,
        watched: Watched,
    ) -> io::Result<Self> {
        // One that waits reads whatever is there by then: more need not wait.
        let (wanted, asked) = sync_channel(1);
        let is_reading = Arc::new(AtomicBool::new(false));
        let reading = Arc::clone(&is_reading);
        std::thread::Builder::new()
            .name("reload".into())
            .spawn(move || look(&generations, &sources, watched, &asked, &reading))?;
        Ok(Self { wanted, is_reading })
    }

    /// Reads the files again, changed or not, as soon as the reload before it is over.
    pub fn want(&self) {
        if self.is_reading.load(Ordering::Relaxed) {
            tracing::warn!("the files are still being read for the reload before this one");
        }
        let _ = self.wanted.try_send(());
    }
}

fn look(
    generations: &Generations,
    sources: &Sources,
    mut watched: Watched,
    asked: &Receiver<()>,
    is_reading: &AtomicBool,
) {
    loop {
        let cause = match asked.recv_timeout(LOOK_EVERY) {
            Ok(()) => Cause::Signal,
            Err(RecvTimeoutError::Timeout) => Cause::FileChange,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        is_reading.store(true, Ordering::Relaxed);
        if watched.have_changed() || cause == Cause::Signal {
            reload(generations, sources, &mut watched, cause);
        }
        is_reading.store(false, Ordering::Relaxed);
    }
}

/// Why the configuration is read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
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
fn reload(generations: &Generations, sources: &Sources, watched: &mut Watched, cause: Cause) {
    let cause = cause.name();
    let loaded = match config::load_again(sources) {
        Ok(loaded) => loaded,
        Err(mistakes) => {
            generations.reload_failed();
            tracing::error!(
                cause,
                "configuration not reloaded, the old one goes on:\n{mistakes}"
            );
            watched.add(mistakes.watch);
            return;
        }
    };
    for warning in &loaded.warnings {
        tracing::warn!("{}", warning.0);
    }
    match generations.reload(loaded.config) {
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
