//! What really happened, as the fake upstream saw it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::clock::now_ns;

/// Counts over the life of a fake upstream.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Truth {
    /// Connections accepted.
    pub connections_accepted: u64,
    /// Connections open now.
    pub connections_open: u64,
    /// Calls whose head was read.
    pub calls_begun: u64,
    /// Calls being worked on now, whether or not anybody waits.
    pub running: u64,
    /// Of those running, the ones whose last event is made: what is left of them is writing.
    pub finishing: u64,
    /// Most calls ever worked on at once, those that finish not among them: whoever has the last event may send the next call before the
    /// writer's task has ended.
    pub max_running: u64,
    /// Of those running, the ones that wait for a slot.
    pub waiting: u64,
    /// Most calls that ever waited for a slot at once.
    pub max_waiting: u64,
    /// Of those running, the ones whose peer has left.
    pub unattended: u64,
    /// Most calls ever running at once whose peer had left.
    pub max_unattended: u64,
    /// Of those running, the ones that [`Pages`](crate::script::Pages) hide.
    pub hidden: u64,
    /// Answered to the end.
    pub ended_complete: u64,
    /// Stopped because the peer closed (FIN).
    pub ended_peer_fin: u64,
    /// Stopped because the peer reset.
    pub ended_peer_rst: u64,
    /// Worked to the planned end although the peer had left.
    pub ended_ran_on: u64,
    /// Cut by the script.
    pub ended_script: u64,
    /// The request was not understood.
    pub ended_bad_request: u64,
    /// Tokens generated.
    pub tokens: u64,
    /// Tokens generated after the peer had left.
    pub tokens_after_peer_left: u64,
    /// Tokens of prompts that were worked on.
    pub prompt_tokens: u64,
    /// Bytes the kernel accepted.
    pub bytes_written: u64,
}

impl Truth {
    /// Calls that have ended, for whatever reason.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.ended_complete
            + self.ended_peer_fin
            + self.ended_peer_rst
            + self.ended_ran_on
            + self.ended_script
            + self.ended_bad_request
    }
}

/// How a peer left.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum PeerEnd {
    /// Read end of file.
    Fin,
    /// Connection reset.
    Rst,
}

/// Why the work on a call ended.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// Answered to the end.
    Complete,
    /// The peer closed.
    PeerFin,
    /// The peer reset.
    PeerRst,
    /// The peer had left, the work ran to its end.
    RanOn,
    /// The script cut it.
    Script,
    /// The request was not understood.
    BadRequest,
}

/// One call. Times are [`crate::clock::now_ns`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CallTruth {
    /// Number of the call, from 1.
    pub id: u64,
    /// Header `x-test-id`, or `test_id` or `rig.id` of the body.
    pub test_id: Option<String>,
    /// Number of this call among those of the same test id, from 1.
    pub attempt: u32,
    /// Number of the connection, from 1.
    pub connection: u64,
    /// Number of the request on its connection, from 1.
    pub nth_on_connection: u32,
    /// Method.
    pub method: String,
    /// Request target as received.
    pub path: String,
    /// Headers as received, in order.
    pub headers: Vec<(String, String)>,
    /// Length of the body.
    pub body_len: u64,
    /// FNV-1a of the body.
    pub body_hash: u64,
    /// The body, if shorter than 1 MiB and if all that are kept are not more
    /// than 256 MiB.
    #[serde(skip)]
    pub body: Option<Vec<u8>>,
    /// Status answered (0: none).
    pub status: u16,
    /// Tokens generated.
    pub tokens: u64,
    /// Tokens generated after the peer had left.
    pub tokens_after_peer_left: u64,
    /// Events generated.
    pub events: u64,
    /// Bytes the kernel accepted.
    pub bytes_written: u64,
    /// Connection accepted.
    pub accepted_ns: u64,
    /// Head read.
    pub head_ns: u64,
    /// Body read.
    pub body_ns: Option<u64>,
    /// First byte written.
    pub first_write_ns: Option<u64>,
    /// All events written, terminal one included.
    pub terminal_ns: Option<u64>,
    /// Peer seen to be gone.
    pub peer_gone_ns: Option<u64>,
    /// Work ended.
    pub ended_ns: Option<u64>,
    /// How the peer left, if it did before the end.
    pub peer: Option<PeerEnd>,
    /// Why the work ended.
    pub ended: Option<Ended>,
}

impl CallTruth {
    /// Value of the first header of this name, in any case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, v)| v.as_str())
    }
}

/// FNV-1a, 64 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fnv(u64);

impl Fnv {
    pub(crate) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = (self.0 ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    pub(crate) const fn finish(self) -> u64 {
        self.0
    }
}

#[derive(Debug, Default)]
struct Book {
    truth: Truth,
    calls: VecDeque<CallTruth>,
    first_id: u64,
    attempts: HashMap<String, u32>,
    /// Numbers of the calls that [`Truth::finishing`] counts.
    finishing: HashSet<u64>,
    body_bytes: usize,
}

impl Book {
    fn call(&mut self, id: u64) -> Option<&mut CallTruth> {
        let index = usize::try_from(id.checked_sub(self.first_id)?).ok()?;
        self.calls.get_mut(index)
    }
}

/// Counts one in a field of the truth until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted<'a> {
    ledger: &'a Ledger,
    which: fn(&mut Truth) -> &mut u64,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.ledger.edit(|b| *(self.which)(&mut b.truth) -= 1);
    }
}

/// The book all connections of one fake upstream write into.
#[derive(Debug)]
pub(crate) struct Ledger {
    book: Mutex<Book>,
    changed: Notify,
    keep: usize,
}

impl Ledger {
    /// Keeps the last `keep` calls one by one; the counts go on regardless.
    pub(crate) fn new(keep: usize) -> Self {
        let book = Book {
            first_id: 1,
            ..Book::default()
        };
        Self {
            book: Mutex::new(book),
            changed: Notify::new(),
            keep,
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn truth(&self) -> Truth {
        self.book().truth
    }

    pub(crate) fn calls(&self) -> Vec<CallTruth> {
        self.book().calls.iter().cloned().collect()
    }

    pub(crate) fn call(&self, id: u64) -> Option<CallTruth> {
        self.book().call(id).map(|c| c.clone())
    }

    /// Forgets counts and calls; what is open or running stays counted.
    pub(crate) fn reset(&self) {
        let mut book = self.book();
        let old = book.truth;
        book.truth = Truth {
            connections_open: old.connections_open,
            running: old.running,
            max_running: old.running,
            waiting: old.waiting,
            max_waiting: old.waiting,
            unattended: old.unattended,
            max_unattended: old.unattended,
            hidden: old.hidden,
            ..Truth::default()
        };
        book.attempts.clear();
        drop(book);
        self.changed.notify_waiters();
    }

    fn edit<T>(&self, change: impl FnOnce(&mut Book) -> T) -> T {
        let result = change(&mut self.book());
        self.changed.notify_waiters();
        result
    }

    pub(crate) fn connection_opened(&self) -> u64 {
        self.edit(|b| {
            b.truth.connections_accepted += 1;
            b.truth.connections_open += 1;
            b.truth.connections_accepted
        })
    }

    pub(crate) fn connection_closed(&self) {
        self.edit(|b| b.truth.connections_open -= 1);
    }

    /// Takes a call into the book and returns its number.
    pub(crate) fn call_begun(&self, mut call: CallTruth) -> u64 {
        self.edit(|b| {
            b.truth.calls_begun += 1;
            b.truth.running += 1;
            let working = b.truth.running - b.truth.finishing;
            b.truth.max_running = b.truth.max_running.max(working);
            let id = b.first_id + b.calls.len() as u64;
            call.id = id;
            if self.keep == 0 {
                b.first_id += 1;
                return id;
            }
            if b.calls.len() == self.keep {
                let oldest = b.calls.pop_front();
                b.body_bytes -= oldest.and_then(|c| c.body).map_or(0, |body| body.len());
                b.first_id += 1;
            }
            b.calls.push_back(call);
            id
        })
    }

    /// Number of this attempt among those of the same test id.
    pub(crate) fn attempt(&self, test_id: &str) -> u32 {
        const IDS_KEPT: usize = 100_000;
        self.edit(|b| {
            if b.attempts.len() >= IDS_KEPT {
                b.attempts.clear();
            }
            let n = b.attempts.entry(test_id.to_owned()).or_insert(0);
            *n += 1;
            *n
        })
    }

    pub(crate) fn note(&self, id: u64, change: impl FnOnce(&mut CallTruth)) {
        if self.keep > 0 {
            self.edit(|b| b.call(id).map(change));
        }
    }

    /// Notes that the peer of a running call has left; once a call.
    pub(crate) fn peer_gone(&self, id: u64, how: PeerEnd) {
        self.edit(|b| {
            b.truth.unattended += 1;
            b.truth.max_unattended = b.truth.max_unattended.max(b.truth.unattended);
            if let Some(call) = b.call(id) {
                call.peer_gone_ns = Some(now_ns());
                call.peer = Some(how);
            }
        });
    }

    /// Counts a call that waits for a slot until the guard is dropped.
    pub(crate) fn waits(&self) -> Counted<'_> {
        let most = |t: &mut Truth| t.max_waiting = t.max_waiting.max(t.waiting);
        self.counted(|t| &mut t.waiting, most)
    }

    /// Counts a call that no page shows until the guard is dropped.
    pub(crate) fn hides(&self) -> Counted<'_> {
        self.counted(|t| &mut t.hidden, |_| {})
    }

    fn counted(&self, which: fn(&mut Truth) -> &mut u64, then: fn(&mut Truth)) -> Counted<'_> {
        self.edit(|b| {
            *which(&mut b.truth) += 1;
            then(&mut b.truth);
        });
        Counted {
            ledger: self,
            which,
        }
    }

    pub(crate) fn prompt(&self, tokens: u64) {
        self.edit(|b| b.truth.prompt_tokens += tokens);
    }

    /// Keeps a body as long as there is room.
    pub(crate) fn body(&self, id: u64, body: Option<Vec<u8>>) {
        const BODIES_MAX: usize = 256 * 1024 * 1024;
        let Some(body) = body.filter(|_| self.keep > 0) else {
            return;
        };
        self.edit(|b| {
            if b.body_bytes + body.len() <= BODIES_MAX
                && let Some(call) = b.call(id)
            {
                let len = body.len();
                let before = call.body.replace(body).map_or(0, |old| old.len());
                b.body_bytes = b.body_bytes + len - before;
            }
        });
    }

    pub(crate) fn tokens(&self, id: u64, tokens: u64, peer_left: bool) {
        let late = if peer_left { tokens } else { 0 };
        self.edit(|b| {
            b.truth.tokens += tokens;
            b.truth.tokens_after_peer_left += late;
            if let Some(call) = b.call(id) {
                call.events += 1;
                call.tokens += tokens;
                call.tokens_after_peer_left += late;
            }
        });
    }

    /// The last event of a running call is made, and is written next.
    pub(crate) fn finishes(&self, id: u64) {
        self.edit(|b| {
            if b.finishing.insert(id) {
                b.truth.finishing += 1;
            }
        });
    }

    pub(crate) fn wrote(&self, id: u64, bytes: u64) {
        self.edit(|b| {
            b.truth.bytes_written += bytes;
            if let Some(call) = b.call(id) {
                call.bytes_written += bytes;
                call.first_write_ns.get_or_insert_with(now_ns);
            }
        });
    }

    pub(crate) fn call_ended(&self, id: u64, ended: Ended, peer: Option<PeerEnd>) {
        self.edit(|b| {
            let t = &mut b.truth;
            t.running -= 1;
            t.finishing -= u64::from(b.finishing.remove(&id));
            t.unattended -= u64::from(peer.is_some());
            *match ended {
                Ended::Complete => &mut t.ended_complete,
                Ended::PeerFin => &mut t.ended_peer_fin,
                Ended::PeerRst => &mut t.ended_peer_rst,
                Ended::RanOn => &mut t.ended_ran_on,
                Ended::Script => &mut t.ended_script,
                Ended::BadRequest => &mut t.ended_bad_request,
            } += 1;
            if let Some(call) = b.call(id) {
                call.ended = Some(ended);
                call.ended_ns = Some(now_ns());
                call.peer = peer;
            }
        });
    }

    /// Waits until `seen` finds what it looks for; it is asked at each change.
    pub(crate) async fn wait_for<T>(
        &self,
        within: Duration,
        seen: impl Fn(&Truth, &VecDeque<CallTruth>) -> Option<T>,
    ) -> Option<T> {
        let look = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                let found = {
                    let book = self.book();
                    seen(&book.truth, &book.calls)
                };
                if let Some(found) = found {
                    return found;
                }
                changed.await;
            }
        };
        tokio::time::timeout(within, look).await.ok()
    }
}
