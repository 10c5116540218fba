//! The calls in flight, in a file: what is left of them when the process is killed.
//!
//! A call has one record of [`SLOT`] bytes there from its beginning until its access-log line is written, put at a place of its own with
//! `pwrite`; no record is ever moved, and no byte is flushed to the disk, since what the kernel has taken survives the process (not the
//! machine). The next start finds the records of the calls that were in flight, and each of them gets its line after all. Why like this:
//! decision 0016. No prompt, no answer, no key.

use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::counter::Counter;

/// Bytes of one record, and of what stands before the first.
const SLOT: usize = 512;
/// Calls that have a place; the file is no longer than that many records.
const SLOTS_MAX: u32 = 65_536;
const BYTES_MAX: u64 = (SLOTS_MAX as u64 + 1) * SLOT as u64;
const MAGIC: &[u8; 24] = b"tidegate call journal 1\n";
/// Where the checksum stands: the first byte says whether the record is in use, so that a write of one byte takes it out.
const SUM: std::ops::Range<usize> = 4..12;
const USED: u8 = 1;

/// What is known of a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// Microseconds since 1970.
    pub began: u64,
    /// The request was on its way upstream.
    pub sent: bool,
    pub id: String,
    pub principal: String,
    pub model: String,
    pub upstream: String,
    pub endpoint: String,
}

/// The running journal. Clones share it.
#[derive(Clone, Debug)]
pub struct Journal(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    free: Mutex<Free>,
    missed: Counter,
}

#[derive(Debug, Default)]
struct Free {
    again: Vec<u32>,
    /// No place from here on was ever used.
    next: u32,
}

/// A call's place; given back, its record taken out, when it is dropped.
#[derive(Debug)]
pub struct JournalPlace {
    inner: Arc<Inner>,
    slot: u32,
}

/// What was found at the start.
#[derive(Debug, Default)]
pub struct FoundAtStart {
    /// Calls that were in flight when the process before this one ended, with their places.
    pub lost: Vec<(Noted, JournalPlace)>,
    /// Records that could not be read.
    pub damaged: usize,
    /// The file was none of ours, or none that can be read: it is here now.
    pub set_aside: Option<PathBuf>,
}

/// Why there is no journal.
#[derive(Debug)]
pub enum JournalError {
    /// Another process writes it.
    InUse(PathBuf),
    Io(PathBuf, io::Error),
}

impl fmt::Display for JournalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse(path) => write!(
                f,
                "the journal {} is in use by another process; give each gateway a file of its own (log.journal)",
                path.display()
            ),
            Self::Io(path, error) => write!(
                f,
                "the journal {} cannot be used: {error}; log.journal is a file in a folder that this user may write to",
                path.display()
            ),
        }
    }
}

impl std::error::Error for JournalError {}

// === impl Journal ===

impl Journal {
    /// Opens the file, or makes it, and reads what a process before this one left in it. `missed` counts the calls that get no record.
    ///
    /// # Errors
    ///
    /// Another process has it, or it cannot be made.
    pub fn open(path: &Path, missed: Counter) -> Result<(Self, FoundAtStart), JournalError> {
        let failed = |error| JournalError::Io(path.to_owned(), error);
        let mut found = FoundAtStart::default();
        let mut file = lock(path)?;
        let bytes = read(&file).map_err(failed)?;
        let slots = match bytes.as_deref().map(records) {
            Some(Some(slots)) => slots,
            _ => {
                let aside = aside(path);
                std::fs::rename(path, &aside).map_err(failed)?;
                found.set_aside = Some(aside);
                file = lock(path)?;
                Vec::new()
            }
        };
        let mut head = [0; SLOT];
        head[..MAGIC.len()].copy_from_slice(MAGIC);
        file.write_all_at(&head, 0).map_err(failed)?;
        let journal = Self(Arc::new(Inner {
            file,
            free: Mutex::default(),
            missed,
        }));
        let mut places: Vec<_> = (0u32..)
            .zip(slots)
            .map(|(slot, record)| {
                let inner = Arc::clone(&journal.0);
                (JournalPlace { inner, slot }, record)
            })
            .collect();
        journal.0.free().next = u32::try_from(places.len()).unwrap_or(SLOTS_MAX);
        // What is empty or damaged comes free by its drop.
        for (place, record) in places.drain(..) {
            match record {
                Slot::Call(noted) => found.lost.push((noted, place)),
                Slot::Empty => {}
                Slot::Damaged => found.damaged += 1,
            }
        }
        Ok((journal, found))
    }

    /// A place for a call that has just begun. `None`: there are too many, or the disk is full; it is counted.
    pub fn begin(&self, noted: &Noted) -> Option<JournalPlace> {
        let slot = self.0.free().take();
        let Some(slot) = slot else {
            self.0.missed.inc();
            return None;
        };
        let inner = Arc::clone(&self.0);
        let place = JournalPlace { inner, slot };
        place.note(noted).then_some(place)
    }

    /// Cuts the file down to its head, if no call is left in it.
    pub fn finish(&self) {
        let free = self.0.free();
        if free.again.len() as u64 == u64::from(free.next) {
            // What cannot be cut holds no call either way.
            let _ = self.0.file.set_len(SLOT as u64);
        }
    }
}

// === impl Inner ===

impl Inner {
    fn free(&self) -> std::sync::MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Free {
    fn take(&mut self) -> Option<u32> {
        if let Some(slot) = self.again.pop() {
            return Some(slot);
        }
        let slot = self.next;
        (slot < SLOTS_MAX).then(|| {
            self.next += 1;
            slot
        })
    }
}

// === impl JournalPlace ===

impl JournalPlace {
    /// Writes what is known now. Whether the kernel took it.
    pub fn note(&self, noted: &Noted) -> bool {
        let done = self.inner.file.write_all_at(&encode(noted), self.offset());
        if done.is_err() {
            self.inner.missed.inc();
        }
        done.is_ok()
    }

    fn offset(&self) -> u64 {
        (u64::from(self.slot) + 1) * SLOT as u64
    }
}

impl Drop for JournalPlace {
    fn drop(&mut self) {
        // One that stays although its call has ended is read as lost: better once too often than never.
        let _ = self.inner.file.write_all_at(&[0], self.offset());
        self.inner.free().again.push(self.slot);
    }
}

// === the file ===

fn lock(path: &Path) -> Result<File, JournalError> {
    let failed = |error| JournalError::Io(path.to_owned(), error);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .map_err(|error| match error.raw_os_error() {
            Some(libc::ELOOP) => failed(io::Error::other(
                "it is a symbolic link, and none is followed",
            )),
            _ => failed(error),
        })?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(failed(io::Error::other("it is no file")));
    }
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(JournalError::InUse(path.to_owned())),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

/// All of it; `None` if that is more than a journal is.
fn read(file: &File) -> io::Result<Option<Vec<u8>>> {
    let len = file.metadata()?.len();
    if len > BYTES_MAX {
        return Ok(None);
    }
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(Some(bytes))
}

/// Where a file that is no journal goes: beside it, under the time of now.
fn aside(path: &Path) -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let micros = now.unwrap_or(Duration::ZERO).as_micros();
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".set-aside-{micros}"));
    name.into()
}

/// What stands at a place.
#[derive(Debug, PartialEq, Eq)]
enum Slot {
    Empty,
    Call(Noted),
    Damaged,
}

/// The records of a file, in their order. `None`: it is no journal. A new, empty file is one without records.
fn records(bytes: &[u8]) -> Option<Vec<Slot>> {
    if bytes.is_empty() {
        return Some(Vec::new());
    }
    let (head, rest) = bytes.split_at_checked(SLOT)?;
    if !head.starts_with(MAGIC) {
        return None;
    }
    Some(rest.chunks(SLOT).map(decode).collect())
}

// === one record ===

const TEXTS: [usize; 5] = [64, 96, 128, 64, 96];

fn encode(noted: &Noted) -> [u8; SLOT] {
    let mut record = [0; SLOT];
    let mut at = SUM.end;
    let mut put = |bytes: &[u8]| {
        record[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    put(&[u8::from(noted.sent)]);
    put(&noted.began.to_le_bytes());
    let Noted {
        id,
        principal,
        model,
        upstream,
        endpoint,
        ..
    } = noted;
    for (text, most) in [id, principal, model, upstream, endpoint]
        .into_iter()
        .zip(TEXTS)
    {
        let cut = (0..=most.min(text.len()))
            .rev()
            .find(|at| text.is_char_boundary(*at));
        let cut = cut.unwrap_or(0);
        let bytes = &text.as_bytes()[..cut];
        put(&[u8::try_from(cut).unwrap_or(0)]);
        put(bytes);
    }
    let sum = sum(&record[SUM.end..]);
    record[SUM].copy_from_slice(&sum.to_le_bytes());
    record[0] = USED;
    record
}

fn decode(record: &[u8]) -> Slot {
    match record.first() {
        Some(0) | None => return Slot::Empty,
        Some(_) => {}
    }
    read_record(record).map_or(Slot::Damaged, Slot::Call)
}

fn read_record(record: &[u8]) -> Option<Noted> {
    if record.len() != SLOT || record[0] != USED {
        return None;
    }
    let (_, body) = record.split_at_checked(SUM.end)?;
    if record.get(SUM)? != sum(body).to_le_bytes() {
        return None;
    }
    let (sent, rest) = body.split_first()?;
    let (began, mut rest) = rest.split_first_chunk::<8>()?;
    let mut texts = TEXTS.map(|_| String::new());
    for text in &mut texts {
        let (len, after) = rest.split_first()?;
        let (bytes, after) = after.split_at_checked(usize::from(*len))?;
        std::str::from_utf8(bytes).ok()?.clone_into(text);
        rest = after;
    }
    let [id, principal, model, upstream, endpoint] = texts;
    Some(Noted {
        began: u64::from_le_bytes(*began),
        sent: *sent != 0,
        id,
        principal,
        model,
        upstream,
        endpoint,
    })
}

/// FNV-1a: against a record half written or half another's, not against an attacker.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
