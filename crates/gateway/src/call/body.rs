//! The body of an answer, as the client's connection sees it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::attach::attached::Attached;
use super::attach::tapped::Tapped;
use super::downstream::Client;
use super::relay::Relay;

/// Everything that can go downstream.
#[derive(Debug)]
pub struct OutBody {
    kind: BodyKind,
    /// Who reads it; the connection is busy with the request until its body is gone.
    client: Option<Arc<Client>>,
}

#[derive(Debug)]
enum BodyKind {
    Whole(Option<Bytes>),
    Relay(Box<Relay>),
    Tapped(Box<Tapped>),
    Attached(Box<Attached>),
    Broken,
}

/// A body that ends abnormally: the connection is closed without the terminator (HTTP/1) or resets the stream (HTTP/2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the answer was cut")
    }
}

impl std::error::Error for Broken {}

impl OutBody {
    fn of(kind: BodyKind) -> Self {
        Self { kind, client: None }
    }

    pub fn whole(bytes: Bytes) -> Self {
        Self::of(BodyKind::Whole((!bytes.is_empty()).then_some(bytes)))
    }

    pub fn empty() -> Self {
        Self::whole(Bytes::new())
    }

    pub fn relay(relay: Box<Relay>) -> Self {
        Self::of(BodyKind::Relay(relay))
    }

    /// Of a call that a retry can take up.
    pub fn tapped(tapped: Box<Tapped>) -> Self {
        Self::of(BodyKind::Tapped(tapped))
    }

    /// Of a retry that has.
    pub fn attached(attached: Box<Attached>) -> Self {
        Self::of(BodyKind::Attached(attached))
    }

    /// For a client whose retry has the answer.
    pub fn broken() -> Self {
        Self::of(BodyKind::Broken)
    }

    #[must_use]
    pub fn holding(mut self, client: Arc<Client>) -> Self {
        self.client = Some(client);
        self
    }
}

impl Body for OutBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let this = &mut *self;
        match &mut this.kind {
            BodyKind::Whole(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            BodyKind::Relay(relay) => relay.poll_frame(cx),
            BodyKind::Tapped(tapped) => tapped.poll_frame(cx),
            BodyKind::Attached(attached) => attached.poll_frame(cx),
            BodyKind::Broken => Poll::Ready(Some(Err(Broken))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            BodyKind::Whole(bytes) => bytes.is_none(),
            BodyKind::Relay(relay) => relay.is_done(),
            BodyKind::Tapped(tapped) => tapped.is_done(),
            BodyKind::Attached(attached) => attached.is_done(),
            BodyKind::Broken => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            BodyKind::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            BodyKind::Relay(relay) => sized(relay.exact_length()),
            BodyKind::Tapped(tapped) => sized(tapped.exact_length()),
            BodyKind::Attached(attached) => sized(attached.exact_length()),
            BodyKind::Broken => SizeHint::default(),
        }
    }
}

fn sized(length: Option<u64>) -> SizeHint {
    length.map_or_else(SizeHint::default, SizeHint::with_exact)
}
