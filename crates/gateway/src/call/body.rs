//! The body of an answer, as hyper sees it.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::downstream::Active;
use super::relay::Relay;

/// Everything that can go downstream.
#[derive(Debug)]
pub struct OutBody {
    kind: Kind,
    /// The connection is busy with this request until its body is gone.
    _active: Option<Active>,
}

#[derive(Debug)]
enum Kind {
    Whole(Option<Bytes>),
    Relay(Box<Relay>),
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
    pub fn whole(bytes: Bytes) -> Self {
        Self {
            kind: Kind::Whole((!bytes.is_empty()).then_some(bytes)),
            _active: None,
        }
    }

    pub fn empty() -> Self {
        Self::whole(Bytes::new())
    }

    pub fn relay(relay: Box<Relay>) -> Self {
        Self {
            kind: Kind::Relay(relay),
            _active: None,
        }
    }

    #[must_use]
    pub fn holding(mut self, active: Active) -> Self {
        self._active = Some(active);
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
        match &mut self.kind {
            Kind::Whole(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Kind::Relay(relay) => relay.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Whole(bytes) => bytes.is_none(),
            Kind::Relay(relay) => relay.is_done(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            Kind::Relay(relay) => relay
                .exact_length()
                .map_or_else(SizeHint::default, SizeHint::with_exact),
        }
    }
}
