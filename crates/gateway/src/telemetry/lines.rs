//! Lines on their way out of the process, for the access log and the program's own.
//!
//! Lines are put into one buffer that a thread of its own empties in batches: no system call and no wake-up per line, and a slow disk or
//! pipe never holds a worker. A line that finds the buffer full is dropped, which its owner counts: losing a line is bad, stopping all
//! streams for it is worse.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;

use super::journal::JournalPlace;

/// How long lines are gathered before they are written.
const GATHER: Duration = Duration::from_millis(50);
/// From this much on the writer is called at once.
const URGENT_BYTES: usize = 256 * 1024;

/// The sending side. Cheap to clone; when the last one is gone and every buffered line is written, the thread ends.
#[derive(Clone, Debug)]
pub struct Lines(Arc<Handle>);

/// Waits for what was sent.
#[derive(Debug)]
pub struct LinesWriter(Arc<Shared>);

/// Shared by all senders; the last one to go ends the writer.
#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    /// Bytes that may wait for the writer.
    room: usize,
}

#[derive(Debug, Default)]
struct Shared {
    buffer: Mutex<Buffer>,
    wake: Condvar,
    written: Condvar,
}

#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    /// Given back when the lines are written.
    places: Vec<JournalPlace>,
    /// The writer waits without a limit: it must be woken.
    asleep: bool,
    /// A batch is on its way.
    writing: bool,
    /// Somebody waits for the end: no more gathering.
    hurry: bool,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Buffer> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.wake.notify_one();
    }
}

impl Lines {
    /// Starts the writer thread. `lost` counts the lines that could not be written; those that [`push`](Self::push) turns away are its
    /// caller's to count.
    pub fn start(
        name: &str,
        room: usize,
        lost: Counter,
        out: impl Write + Send + 'static,
    ) -> (Self, LinesWriter) {
        let shared = Arc::new(Shared::default());
        let reader = Arc::clone(&shared);
        // Without a thread the buffer fills, and lines are dropped and counted.
        let _ = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || write_all(&reader, out, &lost));
        let handle = Handle {
            shared: Arc::clone(&shared),
            room,
        };
        (Self(Arc::new(handle)), LinesWriter(shared))
    }

    /// Takes a whole line, or says that there is no room for it. The line's call keeps its `place` in the journal until it is written.
    #[must_use]
    pub fn push(&self, line: &[u8], place: Option<JournalPlace>) -> bool {
        let mut buffer = self.0.shared.lock();
        let before = buffer.bytes.len();
        if before + line.len() > self.0.room {
            return false;
        }
        buffer.bytes.extend_from_slice(line);
        buffer.places.extend(place);
        let urgent = buffer.bytes.len() >= URGENT_BYTES && before < URGENT_BYTES;
        let wake = std::mem::replace(&mut buffer.asleep, false) || urgent;
        drop(buffer);
        if wake {
            self.0.shared.wake.notify_one();
        }
        true
    }
}

/// The writer's life: sleep until there is something, gather for a moment, write it in one go.
fn write_all(shared: &Shared, mut out: impl Write, lost: &Counter) {
    let mut batch = Vec::new();
    let mut places = Vec::new();
    loop {
        let mut buffer = shared.lock();
        buffer.writing = false;
        shared.written.notify_all();
        while buffer.bytes.is_empty() {
            if buffer.closed {
                return;
            }
            buffer.asleep = true;
            buffer = shared
                .wake
                .wait(buffer)
                .unwrap_or_else(PoisonError::into_inner);
        }
        buffer.asleep = false;
        if !buffer.closed && !buffer.hurry && buffer.bytes.len() < URGENT_BYTES {
            buffer = shared
                .wake
                .wait_timeout(buffer, GATHER)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        std::mem::swap(&mut batch, &mut buffer.bytes);
        std::mem::swap(&mut places, &mut buffer.places);
        buffer.writing = true;
        drop(buffer);
        // A closed pipe must not end the gateway: the lines are lost, as they would be without us.
        if out.write_all(&batch).and_then(|()| out.flush()).is_err() {
            lost.inc_by(memchr::memchr_iter(b'\n', &batch).count() as u64);
        }
        places.clear();
        batch.clear();
        batch.shrink_to(URGENT_BYTES);
    }
}

impl LinesWriter {
    /// Waits until every line that was pushed is written, for so long at most: whoever reads the pipe may have stopped. Whether it came to that.
    pub fn flush(&self, limit: Duration) -> bool {
        let mut buffer = self.0.lock();
        buffer.hurry = true;
        self.0.wake.notify_one();
        let left = |buffer: &mut Buffer| !buffer.bytes.is_empty() || buffer.writing;
        let (mut buffer, waited) = self
            .0
            .written
            .wait_timeout_while(buffer, limit, left)
            .unwrap_or_else(PoisonError::into_inner);
        buffer.hurry = false;
        !waited.timed_out()
    }
}

/// A standard stream without the lock around it: a write that hangs in it would hold up everybody who has a last word to say.
pub fn unlocked(stream: &impl AsFd) -> io::Result<File> {
    stream.as_fd().try_clone_to_owned().map(File::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_stopped_holds_nobody() {
        let (unread, pipe) = io::pipe().expect("a pipe");
        let (lines, writer) = Lines::start("test", 100_000, Counter::default(), pipe);
        let line = [b'x'; 10_000];
        let taken = (0..100).filter(|_| lines.push(&line, None)).count();
        assert!((10..=30).contains(&taken), "{taken}");
        assert!(!writer.flush(Duration::from_millis(100)));
        drop(unread);
        assert!(writer.flush(Duration::from_secs(10)), "it reads again");
    }
}
