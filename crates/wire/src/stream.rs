//! The scanner beside the pass-through path.

use crate::inspect::Inspector;
use crate::sse::Boundaries;
use crate::watch::Watch;
use crate::{Dialect, Usage};
use bytes::{Bytes, BytesMut};
use std::collections::VecDeque;

/// Room for the end of a common event, so that joining it takes one allocation.
const HELD_ROOM: usize = 256;

/// Cuts an upstream's event stream at event boundaries and tells what is in each cut.
///
/// The concatenated bytes of all pieces are the bytes that were pushed, always.
#[derive(Debug)]
pub struct StreamScanner {
    /// An event longer than this passes in pieces.
    event_bytes: usize,
    /// Pushed and not looked at.
    input: Few<Bytes>,
    /// The start of an unfinished event from earlier chunks; already searched.
    held: BytesMut,
    /// The chunk being looked at.
    chunk: Bytes,
    /// How the start of `chunk` is to be cut into pieces.
    ready: Few<Ready>,
    boundaries: Boundaries,
    inspector: Inspector,
    /// Watches the event being passed, if it is longer than `event_bytes`.
    oversize: Option<Watch>,
    /// The last whole event was `usage_only`: so is the LF of its CRLF, should that come late.
    usage_only_before: bool,
    /// What was popped last ended an event.
    popped_whole: bool,
}

#[derive(Debug)]
struct Ready {
    len: usize,
    facts: Facts,
    whole: bool,
}

/// A queue that rarely holds more than one: the first needs no memory of its own, which would be cold for each chunk of each stream.
#[derive(Debug)]
struct Few<T> {
    first: Option<T>,
    rest: VecDeque<T>,
}

impl<T> Default for Few<T> {
    fn default() -> Self {
        Self {
            first: None,
            rest: VecDeque::new(),
        }
    }
}

impl<T> Few<T> {
    fn push(&mut self, next: T) {
        if self.first.is_none() && self.rest.is_empty() {
            self.first = Some(next);
        } else {
            self.rest.push_back(next);
        }
    }

    fn pop(&mut self) -> Option<T> {
        self.first.take().or_else(|| self.rest.pop_front())
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.rest)
    }
}

/// What the gateway may send downstream next.
#[derive(Debug)]
pub struct Piece {
    /// A run of upstream bytes, unchanged.
    pub bytes: Bytes,
    /// What they say.
    pub facts: Facts,
}

/// What was seen in a piece.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Events with something in them. Comments, pings, keep-alives and empty blocks are not.
    pub events: u32,
    /// The stream's first delta that says something is in this piece. True once per stream.
    pub content: bool,
    /// Content, reasoning and tool deltas that say something. A delta may hold several tokens.
    pub deltas: u32,
    /// A `finish_reason` or `stop_reason` was given, or a Responses stream completed.
    pub finished: bool,
    /// The event after which nothing more belongs to the stream. It is the last event of its piece.
    pub terminal: Option<Terminal>,
    /// An error event. It is a piece of its own.
    pub error: Option<Box<StreamError>>,
    /// Usage reported so far in this piece, latest values.
    pub usage: Option<Usage>,
    /// The one event here is the extra chunk `include_usage` asks for: no choices, only usage. Also set, with no
    /// events, on the LF that completes such an event's blank line late: it may be left out in the same way.
    pub usage_only: bool,
    /// Events that could not be read, or had a field of an unexpected type. Their bytes passed all the same.
    pub malformed: u32,
}

/// How the stream said that it is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Terminal {
    /// `[DONE]`, `message_stop`, `response.completed`, `response.incomplete`.
    Done,
    /// `response.failed`.
    Failed,
}

/// An error the upstream sent within the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamError {
    /// Its text, at most 1 KiB of it.
    pub message: String,
    /// Its `type`.
    pub kind: Option<String>,
    /// Its `code`, numbers as text.
    pub code: Option<String>,
    /// It has a shape this dialect's clients know. If not, they go on as if nothing happened.
    pub native: bool,
}

impl Facts {
    fn absorb(&mut self, next: Self) {
        self.events = self.events.saturating_add(next.events);
        self.deltas = self.deltas.saturating_add(next.deltas);
        self.malformed = self.malformed.saturating_add(next.malformed);
        self.content |= next.content;
        self.finished |= next.finished;
        self.usage_only |= next.usage_only;
        self.terminal = next.terminal.or(self.terminal);
        self.error = next.error.or(self.error.take());
        if let Some(usage) = next.usage {
            self.usage.get_or_insert_default().merge(&usage);
        }
    }
}

impl StreamScanner {
    /// A scanner for one stream. An event longer than `event_bytes` is passed as it comes instead of held whole.
    #[must_use]
    pub fn new(dialect: Dialect, event_bytes: usize) -> Self {
        Self {
            event_bytes,
            input: Few::default(),
            held: BytesMut::new(),
            chunk: Bytes::new(),
            ready: Few::default(),
            boundaries: Boundaries::new(),
            inspector: Inspector::new(dialect),
            oversize: None,
            usage_only_before: false,
            popped_whole: true,
        }
    }

    /// The next bytes from the upstream, cut anywhere.
    pub fn push(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.input.push(bytes);
        }
    }

    /// The next piece that may go downstream. `None`: more bytes are needed.
    pub fn pop(&mut self) -> Option<Piece> {
        loop {
            if let Some(ready) = self.ready.pop() {
                let len = ready.len.min(self.chunk.len());
                self.popped_whole = ready.whole;
                return Some(Piece {
                    bytes: self.chunk.split_to(len),
                    facts: ready.facts,
                });
            }
            if self.chunk.is_empty() {
                self.chunk = self.input.pop()?;
            }
            if self.oversize.is_some() {
                self.pass_oversize();
            } else if self.held.is_empty() {
                self.run_of_events();
            } else if let Some(piece) = self.complete_held() {
                return Some(piece);
            }
        }
    }

    /// The upstream ended cleanly: what is left, read as if its blank line had come. Call it until `None`.
    ///
    /// The piece has no bytes if they passed already as part of an event longer than `event_bytes`.
    pub fn finish(&mut self) -> Option<Piece> {
        if let Some(piece) = self.pop() {
            return Some(piece);
        }
        let bytes = std::mem::take(&mut self.held).freeze();
        let facts = match self.oversize.take() {
            Some(watch) => self.inspector.watched(&watch),
            None if bytes.is_empty() => return None,
            None => self.inspector.event(&bytes),
        };
        self.popped_whole = false;
        Some(Piece { bytes, facts })
    }

    /// All that was popped ends where an event ends, or nothing was popped: a comment or an error event may be
    /// put in here. Between the CR and the LF of a blank line it may not.
    #[must_use]
    pub fn at_boundary(&self) -> bool {
        self.popped_whole && !(self.held.is_empty() && self.boundaries.expects_lf())
    }

    /// Bytes pushed and not yet popped.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held.len() + self.chunk.len() + self.input.iter().map(Bytes::len).sum::<usize>()
    }

    /// The `sequence_number` that an event added now would carry (Responses).
    #[must_use]
    pub fn next_sequence(&self) -> Option<u64> {
        self.inspector.next_sequence()
    }

    /// Cuts a chunk that starts between events into runs of whole events.
    fn run_of_events(&mut self) {
        // Taken, not cloned: a clone would make it shared.
        let mut chunk = std::mem::take(&mut self.chunk);
        let cut = self.cut(&chunk);
        chunk.truncate(cut);
        self.chunk = chunk;
    }

    /// Says in `ready` how the chunk is to be cut. How much of it is left: the rest is held.
    fn cut(&mut self, chunk: &[u8]) -> usize {
        let mut run = Ready {
            len: 0,
            facts: Facts::default(),
            whole: true,
        };
        if self.boundaries.take_lf(chunk) {
            run.len = 1;
            if self.usage_only_before {
                run.facts.usage_only = true;
                self.ready.push(run);
                return chunk.len();
            }
        }
        while let Some(rest) = chunk.get(run.len..).filter(|rest| !rest.is_empty()) {
            let Some(len) = self.boundaries.next(rest) else {
                if rest.len() <= self.event_bytes {
                    self.held.reserve(rest.len() + HELD_ROOM);
                    self.held.extend_from_slice(rest);
                    let cut = run.len;
                    self.ready_run(run);
                    return cut;
                }
                self.oversize
                    .insert(Watch::new(self.inspector.first()))
                    .feed(rest);
                let start = Ready {
                    len: rest.len(),
                    facts: Facts::default(),
                    whole: false,
                };
                self.ready_run(run);
                self.ready.push(start);
                return chunk.len();
            };
            let facts = self.whole_event(rest.get(..len).unwrap_or_default());
            if facts.usage_only || facts.error.is_some() {
                self.ready_run(run);
                self.ready.push(Ready {
                    len,
                    facts,
                    whole: true,
                });
                return chunk.len();
            }
            let last = facts.terminal.is_some();
            run.facts.absorb(facts);
            run.len += len;
            if last {
                break;
            }
        }
        self.ready_run(run);
        chunk.len()
    }

    fn ready_run(&mut self, run: Ready) {
        if run.len > 0 {
            self.ready.push(run);
        }
    }

    /// Joins the held start of an event with its end, if that has come.
    fn complete_held(&mut self) -> Option<Piece> {
        let Some(len) = self.boundaries.next(&self.chunk) else {
            if self.held.len() + self.chunk.len() <= self.event_bytes {
                self.held.extend_from_slice(&self.chunk);
                self.chunk.clear();
                return None;
            }
            let watch = self.oversize.insert(Watch::new(self.inspector.first()));
            watch.feed(&self.held);
            watch.feed(&self.chunk);
            self.ready.push(Ready {
                len: self.chunk.len(),
                facts: Facts::default(),
                whole: false,
            });
            self.popped_whole = false;
            return Some(Piece {
                bytes: std::mem::take(&mut self.held).freeze(),
                facts: Facts::default(),
            });
        };
        let end = self.chunk.split_to(len.min(self.chunk.len()));
        self.held.extend_from_slice(&end);
        let bytes = std::mem::take(&mut self.held).freeze();
        let facts = self.whole_event(&bytes);
        self.popped_whole = true;
        Some(Piece { bytes, facts })
    }

    /// Passes a chunk, or the part of it that still belongs to an event too long to hold.
    fn pass_oversize(&mut self) {
        let Some(mut watch) = self.oversize.take() else {
            return;
        };
        let end = self.boundaries.next(&self.chunk);
        let len = end.unwrap_or(self.chunk.len());
        watch.feed(self.chunk.get(..len).unwrap_or_default());
        let facts = if end.is_some() {
            self.usage_only_before = false;
            self.inspector.watched(&watch)
        } else {
            self.oversize = Some(watch);
            Facts::default()
        };
        self.ready.push(Ready {
            len,
            facts,
            whole: end.is_some(),
        });
    }

    fn whole_event(&mut self, event: &[u8]) -> Facts {
        // The LF of a last CRLF does not count: it may come late, and the cut must not depend on that.
        let len = event.len() - usize::from(event.ends_with(b"\r\n"));
        let facts = if len > self.event_bytes {
            let mut watch = Watch::new(self.inspector.first());
            watch.feed(event);
            self.inspector.watched(&watch)
        } else {
            self.inspector.event(event)
        };
        self.usage_only_before = facts.usage_only;
        facts
    }
}
