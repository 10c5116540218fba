//! Reading one request.

use tokio::io::Interest;
use tokio::net::TcpStream;

use super::gone::{Gone, fill};
use crate::http1::{BodyDecoder, Head};
use crate::truth::{Fnv, PeerEnd};

const HEAD_MAX: usize = 1024 * 1024;
const PARSED_MAX: usize = 80 * 1024 * 1024;
/// Bodies below this are kept for the caller to look at.
const KEPT_MAX: usize = 1024 * 1024;
const PIPELINE_MAX: usize = 1024 * 1024;

/// Why there is no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRequest {
    Gone(PeerEnd),
    Bad,
}

/// Reads a head; `buf` keeps what follows.
pub(super) async fn read_head(stream: &TcpStream, buf: &mut Vec<u8>) -> Result<Head, NoRequest> {
    loop {
        if let Some((head, used)) = Head::parse(buf) {
            buf.drain(..used);
            return Ok(head);
        }
        if buf.len() > HEAD_MAX {
            return Err(NoRequest::Bad);
        }
        fill(stream, buf).await.map_err(NoRequest::Gone)?;
    }
}

/// A body as it arrived.
#[derive(Debug)]
pub(super) struct BodyRead {
    pub(super) len: u64,
    pub(super) hash: Fnv,
    pub(super) bytes: Vec<u8>,
}

impl BodyRead {
    pub(super) fn new() -> Self {
        Self {
            len: 0,
            hash: Fnv::new(),
            bytes: Vec::new(),
        }
    }

    pub(super) fn kept(self) -> Option<Vec<u8>> {
        (self.len < KEPT_MAX as u64).then_some(self.bytes)
    }
}

/// Reads the body that `decoder` frames; `buf` keeps what follows.
pub(super) async fn read_body(
    stream: &TcpStream,
    buf: &mut Vec<u8>,
    decoder: &mut BodyDecoder,
    body: &mut BodyRead,
) -> Result<(), NoRequest> {
    let mut piece = Vec::new();
    loop {
        piece.clear();
        let used = decoder
            .decode(buf, &mut piece)
            .map_err(|_| NoRequest::Bad)?;
        buf.drain(..used);
        body.len += piece.len() as u64;
        body.hash.update(&piece);
        if body.bytes.len() < PARSED_MAX {
            body.bytes.extend_from_slice(&piece);
        }
        if decoder.done() {
            return Ok(());
        }
        fill(stream, buf).await.map_err(NoRequest::Gone)?;
    }
}

/// Watches the peer while an answer is under way: never returns.
pub(super) async fn watch(
    stream: &TcpStream,
    buf: &mut Vec<u8>,
    gone: &Gone,
    seen: impl Fn(PeerEnd),
) {
    while gone.get().is_none() && buf.len() < PIPELINE_MAX {
        if let Err(how) = fill(stream, buf).await
            && gone.set(how)
        {
            seen(how);
        }
    }
    std::future::pending().await
}

/// Watches a peer from whom nothing is read: only a reset can be seen.
pub(super) async fn watch_unread(stream: &TcpStream, gone: &Gone, seen: impl Fn(PeerEnd)) {
    let reset = stream.ready(Interest::ERROR).await;
    let reset = reset.is_err() || reset.is_ok_and(|r| r.is_error());
    if reset && gone.set(PeerEnd::Rst) {
        seen(PeerEnd::Rst);
    }
    std::future::pending().await
}
