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
// In this order: what each chunk touches stands together, as a gateway of many streams finds none of it in the cache.
#[repr(C)]
#[derive(Debug)]
pub struct StreamScanner {
    /// The chunk being looked at.
    chunk: Bytes,
    /// The start of an unfinished event from earlier chunks; already searched.
    held: BytesMut,
    later: Option<Box<Later>>,
    /// Watches the event being passed, if it is longer than `event_bytes`.
    oversize: Option<Box<Watch>>,
    /// An event longer than this passes in pieces.
    event_bytes: usize,
    boundaries: Boundaries,
    /// The last whole event was `usage_only`: so is the LF of its CRLF, should that come late.
    usage_only_before: bool,
    /// What was popped last ended an event.
    popped_whole: bool,
    inspector: Inspector,
}

#[derive(Debug)]
struct Ready {
    len: usize,
    facts: Facts,
    whole: bool,
}

/// What waits its turn behind the start of the chunk. Rare: nearly every chunk is one piece, and is taken before the next comes.
#[derive(Debug, Default)]
struct Later {
    /// How the start of the chunk is to be cut into pieces.
    ready: VecDeque<Ready>,
    /// Pushed and not looked at.
    input: VecDeque<Bytes>,
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
    /// Those of most events: there is a text, and it is not the first.
    pub(crate) const TEXT: Self = Self {
        events: 1,
        content: false,
        deltas: 1,
        finished: false,
        terminal: None,
        error: None,
        usage: None,
        usage_only: false,
        malformed: 0,
    };

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
            chunk: Bytes::new(),
            held: BytesMut::new(),
            later: None,
            oversize: None,
            event_bytes,
            boundaries: Boundaries::new(),
            usage_only_before: false,
            popped_whole: true,
            inspector: Inspector::new(dialect),
        }
    }

    /// The next bytes from the upstream, cut anywhere.
    pub fn push(&mut self, bytes: Bytes) {
        if self.chunk.is_empty() && self.later.is_none() {
            self.chunk = bytes;
        } else if !bytes.is_empty() {
            self.later.get_or_insert_default().input.push_back(bytes);
        }
    }

    /// The next piece that may go downstream. `None`: more bytes are needed.
    pub fn pop(&mut self) -> Option<Piece> {
        loop {
            if self.later.is_some()
                && let Some(ready) = self.next_in_line()
            {
                return Some(self.take(ready));
            }
            if self.chunk.is_empty() {
                return None;
            }
            let ready = if self.oversize.is_some() {
                self.pass_oversize()
            } else if self.held.is_empty() {
                self.run_of_events()
            } else if let Some(piece) = self.complete_held() {
                return Some(piece);
            } else {
                None
            };
            if let Some(ready) = ready {
                return Some(self.take(ready));
            }
        }
    }

    fn take(&mut self, ready: Ready) -> Piece {
        let len = ready.len.min(self.chunk.len());
        self.popped_whole = ready.whole;
        Piece {
            bytes: self.chunk.split_to(len),
            facts: ready.facts,
        }
    }

    /// What waited longest: a cut of the chunk, or the next chunk, once there is nothing left of this one.
    fn next_in_line(&mut self) -> Option<Ready> {
        let later = self.later.as_mut()?;
        let ready = later.ready.pop_front();
        if ready.is_none() && self.chunk.is_empty() {
            self.chunk = later.input.pop_front().unwrap_or_default();
        }
        if later.ready.is_empty() && later.input.is_empty() {
            self.later = None;
        }
        ready
    }

    /// The next cut of the chunk, behind the ones before.
    fn ready(&mut self, first: &mut Option<Ready>, next: Ready) {
        if next.len == 0 {
            return;
        }
        if first.is_none() {
            *first = Some(next);
        } else {
            self.later.get_or_insert_default().ready.push_back(next);
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
            None => self.inspector.event(&bytes, false),
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
        let later = self.later.iter().flat_map(|later| &later.input);
        self.held.len() + self.chunk.len() + later.map(Bytes::len).sum::<usize>()
    }

    /// The `sequence_number` that an event added now would carry (Responses).
    #[must_use]
    pub fn next_sequence(&self) -> Option<u64> {
        self.inspector.next_sequence()
    }

    /// Cuts a chunk that starts between events into runs of whole events. The first of them.
    fn run_of_events(&mut self) -> Option<Ready> {
        // Taken, not cloned: a clone would make it shared.
        let mut chunk = std::mem::take(&mut self.chunk);
        let mut first = None;
        let cut = self.cut(&chunk, &mut first);
        chunk.truncate(cut);
        self.chunk = chunk;
        first
    }

    /// Says how the chunk is to be cut. How much of it is left: the rest is held.
    fn cut(&mut self, chunk: &[u8], first: &mut Option<Ready>) -> usize {
        let mut run = Ready {
            len: 0,
            facts: Facts::default(),
            whole: true,
        };
        if self.boundaries.take_lf(chunk) {
            run.len = 1;
            if self.usage_only_before {
                run.facts.usage_only = true;
                self.ready(first, run);
                return chunk.len();
            }
        }
        while let Some(rest) = chunk.get(run.len..).filter(|rest| !rest.is_empty()) {
            if let Some(len) = self.inspector.another_text(rest, self.event_bytes) {
                run.facts.absorb(Facts::TEXT);
                run.len += len;
                continue;
            }
            let Some(len) = self.boundaries.next(rest) else {
                if rest.len() <= self.event_bytes {
                    self.held.reserve(rest.len() + HELD_ROOM);
                    self.held.extend_from_slice(rest);
                    let cut = run.len;
                    self.ready(first, run);
                    return cut;
                }
                self.oversize
                    .insert(Box::new(Watch::new(self.inspector.first())))
                    .feed(rest);
                let start = Ready {
                    len: rest.len(),
                    facts: Facts::default(),
                    whole: false,
                };
                self.ready(first, run);
                self.ready(first, start);
                return chunk.len();
            };
            let facts = self.whole_event(rest.get(..len).unwrap_or_default());
            if facts.usage_only || facts.error.is_some() {
                self.ready(first, run);
                let alone = Ready {
                    len,
                    facts,
                    whole: true,
                };
                self.ready(first, alone);
                return chunk.len();
            }
            let last = facts.terminal.is_some();
            run.facts.absorb(facts);
            run.len += len;
            if last {
                break;
            }
        }
        self.ready(first, run);
        chunk.len()
    }

    /// Joins the held start of an event with its end, if that has come.
    fn complete_held(&mut self) -> Option<Piece> {
        let Some(len) = self.boundaries.next(&self.chunk) else {
            if self.held.len() + self.chunk.len() <= self.event_bytes {
                self.held.extend_from_slice(&self.chunk);
                self.chunk.clear();
                return None;
            }
            let watch = Box::new(Watch::new(self.inspector.first()));
            let watch = self.oversize.insert(watch);
            watch.feed(&self.held);
            watch.feed(&self.chunk);
            let rest = Ready {
                len: self.chunk.len(),
                facts: Facts::default(),
                whole: false,
            };
            self.later.get_or_insert_default().ready.push_back(rest);
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
    fn pass_oversize(&mut self) -> Option<Ready> {
        let mut watch = self.oversize.take()?;
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
        Some(Ready {
            len,
            facts,
            whole: end.is_some(),
        })
    }

    fn whole_event(&mut self, event: &[u8]) -> Facts {
        // The LF of a last CRLF does not count: it may come late, and the cut must not depend on that.
        let len = event.len() - usize::from(event.ends_with(b"\r\n"));
        let facts = if len > self.event_bytes {
            let mut watch = Watch::new(self.inspector.first());
            watch.feed(event);
            self.inspector.watched(&watch)
        } else {
            self.inspector.event(event, self.boundaries.one_line())
        };
        self.usage_only_before = facts.usage_only;
        facts
    }
}
