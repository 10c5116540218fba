//! Writing: framing, cutting and counting.

use std::io;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::sleep;

use super::Shared;
use super::gone::Gone;
use crate::http1::chunk_size;
use crate::script::{Script, Segment};
use crate::truth::PeerEnd;

/// Writes one answer. Once the peer is gone it takes everything and writes
/// nothing, as a server does that has not noticed.
#[derive(Debug)]
pub(super) struct Pen<'a> {
    pub(super) stream: &'a TcpStream,
    pub(super) gone: &'a Gone,
    pub(super) shared: &'a Shared,
    pub(super) script: &'a Script,
    pub(super) call: u64,
    pub(super) chunked: bool,
    pending: Vec<u8>,
    held_events: u64,
    position: u64,
}

impl<'a> Pen<'a> {
    pub(super) fn new(
        stream: &'a TcpStream,
        gone: &'a Gone,
        shared: &'a Shared,
        script: &'a Script,
        call: u64,
    ) -> Self {
        Self {
            stream,
            gone,
            shared,
            script,
            call,
            chunked: false,
            pending: Vec::new(),
            held_events: 0,
            position: 0,
        }
    }

    /// Writes bytes as they are.
    pub(super) async fn raw(&mut self, bytes: &[u8]) {
        if self.script.segment == Segment::Once {
            self.pending.extend_from_slice(bytes);
            return;
        }
        self.put(bytes).await;
    }

    async fn put(&self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.gone.get().is_none() {
            // A reader that is always faster would keep this thread for itself.
            tokio::task::coop::consume_budget().await;
            match self.stream.try_write(bytes) {
                Ok(n) => {
                    self.shared.ledger.wrote(self.call, n as u64);
                    bytes = &bytes[n..];
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    tokio::select! {
                        _ = self.stream.writable() => {}
                        _ = self.gone.wait() => {}
                    }
                }
                Err(_) => {
                    if self.gone.set(PeerEnd::Rst) {
                        self.shared.ledger.peer_gone(self.call, PeerEnd::Rst);
                    }
                }
            }
        }
    }

    /// Writes body bytes, framed and cut as scripted.
    pub(super) async fn body(&mut self, bytes: &[u8]) {
        let script = self.script;
        match &script.segment {
            Segment::Event => self.framed(bytes).await,
            Segment::Once => {
                let mut framed = Vec::new();
                self.frame(bytes, &mut framed);
                self.pending.append(&mut framed);
            }
            Segment::Byte => self.pieces(bytes, 1).await,
            Segment::Size(n) => self.pieces(bytes, (*n).max(1)).await,
            Segment::CutAt(cuts) => self.cut(bytes, cuts).await,
            Segment::Wire(n) => {
                let mut framed = Vec::new();
                self.frame(bytes, &mut framed);
                for piece in framed.chunks((*n).max(1)) {
                    self.put(piece).await;
                    self.breathe().await;
                }
            }
            Segment::Events(n) => {
                self.pending.extend_from_slice(bytes);
                self.held_events += 1;
                if self.held_events >= *n {
                    self.flush().await;
                }
            }
        }
        self.position += bytes.len() as u64;
    }

    fn frame(&self, bytes: &[u8], out: &mut Vec<u8>) {
        if self.chunked {
            out.reserve(bytes.len() + 24);
            chunk_size(out, bytes.len(), self.script.chunk_extension);
            out.extend_from_slice(bytes);
            out.extend_from_slice(b"\r\n");
        } else {
            out.extend_from_slice(bytes);
        }
    }

    /// One chunk, one write.
    pub(super) async fn framed(&mut self, bytes: &[u8]) {
        if !self.chunked {
            return self.put(bytes).await;
        }
        let mut out = std::mem::take(&mut self.pending);
        self.frame(bytes, &mut out);
        self.put(&out).await;
        out.clear();
        self.pending = out;
    }

    async fn pieces(&mut self, bytes: &[u8], size: usize) {
        for piece in bytes.chunks(size) {
            self.framed(piece).await;
            self.breathe().await;
        }
    }

    async fn cut(&mut self, bytes: &[u8], cuts: &[u64]) {
        let mut start = 0;
        let mut cuts: Vec<usize> = cuts
            .iter()
            .filter_map(|c| usize::try_from(c.checked_sub(self.position)?).ok())
            .filter(|c| *c > 0 && *c < bytes.len())
            .collect();
        cuts.sort_unstable();
        for cut in cuts {
            self.framed(&bytes[start..cut]).await;
            self.breathe().await;
            start = cut;
        }
        self.framed(&bytes[start..]).await;
    }

    /// The pause between pieces; at least one turn of the loop, so that two
    /// pieces are two segments.
    async fn breathe(&self) {
        match self.script.segment_pause_us {
            0 => tokio::task::yield_now().await,
            us => sleep(Duration::from_micros(us)).await,
        }
    }

    /// Writes what was held back.
    pub(super) async fn flush(&mut self) {
        self.held_events = 0;
        let held = std::mem::take(&mut self.pending);
        if held.is_empty() {
            return;
        }
        if matches!(self.script.segment, Segment::Events(_)) {
            self.framed(&held).await;
        } else {
            self.put(&held).await;
        }
    }
}
