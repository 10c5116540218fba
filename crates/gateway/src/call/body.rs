//! The body of an answer, as hyper sees it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::attach::attached::Attached;
use super::attach::tapped::Tapped;
use super::downstream::{Active, Reader};
use super::relay::Relay;

/// Everything that can go downstream.
#[derive(Debug)]
pub struct OutBody {
    kind: Kind,
    /// The connection is busy with this request until its body is gone.
    active: Option<Active>,
    /// Whose reading it is, on HTTP/2. On HTTP/1 the socket tells, and nothing is noted for each frame.
    reader: Option<Arc<Reader>>,
}

#[derive(Debug)]
enum Kind {
    Whole(Option<Bytes>),
    Relay(Box<Relay>),
    Tapped(Box<Tapped>),
    Attached(Box<Attached>),
    Broken,
}

/// A body that ends abnormally: hyper closes the connection without the terminator (HTTP/1) or resets the stream (HTTP/2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the answer was cut")
    }
}

impl std::error::Error for Broken {}

impl OutBody {
    fn of(kind: Kind) -> Self {
        Self {
            kind,
            active: None,
            reader: None,
        }
    }

    pub fn whole(bytes: Bytes) -> Self {
        Self::of(Kind::Whole((!bytes.is_empty()).then_some(bytes)))
    }

    pub fn empty() -> Self {
        Self::whole(Bytes::new())
    }

    pub fn relay(relay: Box<Relay>) -> Self {
        Self::of(Kind::Relay(relay))
    }

    /// Of a call that a retry can take up.
    pub fn tapped(tapped: Box<Tapped>) -> Self {
        Self::of(Kind::Tapped(tapped))
    }

    /// Of a retry that has.
    pub fn attached(attached: Box<Attached>) -> Self {
        Self::of(Kind::Attached(attached))
    }

    /// For a client whose retry has the answer.
    pub fn broken() -> Self {
        Self::of(Kind::Broken)
    }

    #[must_use]
    pub fn holding(mut self, active: Active, reader: Arc<Reader>) -> Self {
        self.reader = active.is_http2().then_some(reader);
        self.active = Some(active);
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
        if let Some(reader) = &this.reader {
            reader.asked();
        }
        let polled = match &mut this.kind {
            Kind::Whole(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Kind::Relay(relay) => relay.poll_frame(cx),
            Kind::Tapped(tapped) => tapped.poll_frame(cx),
            Kind::Attached(attached) => attached.poll_frame(cx),
            Kind::Broken => Poll::Ready(Some(Err(Broken))),
        };
        if let (Some(reader), Poll::Ready(Some(Ok(_)))) = (&this.reader, &polled) {
            reader.handed();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Whole(bytes) => bytes.is_none(),
            Kind::Relay(relay) => relay.is_done(),
            Kind::Tapped(tapped) => tapped.is_done(),
            Kind::Attached(attached) => attached.is_done(),
            Kind::Broken => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            Kind::Relay(relay) => sized(relay.exact_length()),
            Kind::Tapped(tapped) => sized(tapped.exact_length()),
            Kind::Attached(attached) => sized(attached.exact_length()),
            Kind::Broken => SizeHint::default(),
        }
    }
}

fn sized(length: Option<u64>) -> SizeHint {
    length.map_or_else(SizeHint::default, SizeHint::with_exact)
}
