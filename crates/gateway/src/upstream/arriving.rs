//! A request's body on its way from the client: all of it at once, or piece by piece from the connection that reads it.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

/// What the client sends behind its request's head.
pub enum Arriving {
    /// It came with the head. `None`: nothing is left of it.
    Whole(Option<Bytes>),
    /// HTTP/1: as the connection reads it.
    Piped(Pipe),
    Http2(Incoming),
}

impl fmt::Debug for Arriving {
    /// Without what came.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Whole(_) => "Whole",
            Self::Piped(_) => "Piped",
            Self::Http2(_) => "Http2",
        })
    }
}

/// Why a body did not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Its client has left.
    Left,
    /// It ended before it was whole, or is framed wrongly.
    Broken,
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request's body was cut")
    }
}

impl std::error::Error for Cut {}

/// The call's end of the pipe. It holds one piece at most: a call that does not read slows its client down.
#[derive(Debug)]
pub struct Pipe {
    shared: Arc<Mutex<Shared>>,
    /// Still to come, where the head announced it.
    left: Option<u64>,
    ended: bool,
}

/// The connection's end of the pipe. Dropped before the body was whole, it cuts it.
#[derive(Debug)]
pub struct Feed(Arc<Mutex<Shared>>);

#[derive(Debug, Default)]
struct Shared {
    piece: Option<Bytes>,
    end: Option<Result<(), Cut>>,
    /// The reader waits for a piece, or is gone.
    asks: Asks,
    reader: Option<Waker>,
    feeder: Option<Waker>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Asks {
    #[default]
    NotYet,
    Piece,
    /// The call needs no more of it.
    Nothing,
}

/// A body of `length` bytes, or chunked where that is `None`.
pub fn pipe(length: Option<u64>) -> (Feed, Pipe) {
    let shared = Arc::new(Mutex::new(Shared::default()));
    let pipe = Pipe {
        shared: Arc::clone(&shared),
        left: length,
        ended: false,
    };
    (Feed(shared), pipe)
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Feed {
    /// Whether the call waits for a piece. If not, the task is woken when it does.
    pub fn poll_asked(&self, cx: &mut Context<'_>) -> bool {
        let mut shared = lock(&self.0);
        if shared.asks == Asks::NotYet {
            shared.feeder = Some(cx.waker().clone());
        }
        shared.asks == Asks::Piece
    }

    /// The call has dropped the body.
    pub fn is_given_up(&self) -> bool {
        lock(&self.0).asks == Asks::Nothing
    }

    /// Gives what [`poll_asked`](Self::poll_asked) asked for.
    pub fn give(&self, piece: Bytes) {
        let mut shared = lock(&self.0);
        shared.piece = Some(piece);
        if shared.asks == Asks::Piece {
            shared.asks = Asks::NotYet;
        }
        wake(shared);
    }

    /// The body is whole, or will never be.
    pub fn end(&self, how: Result<(), Cut>) {
        let mut shared = lock(&self.0);
        shared.end.get_or_insert(how);
        wake(shared);
    }
}

fn wake(mut shared: MutexGuard<'_, Shared>) {
    let reader = shared.reader.take();
    drop(shared);
    if let Some(reader) = reader {
        reader.wake();
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.end(Err(Cut::Left));
    }
}

impl Pipe {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let mut shared = lock(&self.shared);
        if let Some(piece) = shared.piece.take() {
            if let Some(left) = &mut self.left {
                *left = left.saturating_sub(piece.len() as u64);
            }
            self.ended = shared.end == Some(Ok(()));
            return Poll::Ready(Some(Ok(piece)));
        }
        match shared.end {
            Some(how) => {
                self.ended = true;
                Poll::Ready(how.err().map(Err))
            }
            None => {
                shared.asks = Asks::Piece;
                shared.reader = Some(cx.waker().clone());
                let feeder = shared.feeder.take();
                drop(shared);
                if let Some(feeder) = feeder {
                    feeder.wake();
                }
                Poll::Pending
            }
        }
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        let mut shared = lock(&self.shared);
        shared.asks = Asks::Nothing;
        shared.piece = None;
        let feeder = shared.feeder.take();
        drop(shared);
        if let Some(feeder) = feeder {
            feeder.wake();
        }
    }
}

impl Cut {
    /// What h2 itself found wrong with a stream is not the client's leaving. Neither is told to anybody: the stream is over.
    fn of_http2(error: &hyper::Error) -> Self {
        let source = std::error::Error::source(error).and_then(|e| e.downcast_ref::<h2::Error>());
        if source.is_some_and(h2::Error::is_library) {
            Self::Broken
        } else {
            Self::Left
        }
    }
}

impl Arriving {
    /// What is to come of it; nothing is left.
    #[must_use]
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Whole(None))
    }
}

impl Body for Arriving {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        Poll::Ready(match &mut *self {
            Self::Whole(bytes) => bytes.take().map(|bytes| Ok(Frame::data(bytes))),
            Self::Piped(pipe) => ready!(pipe.poll_piece(cx)).map(|piece| piece.map(Frame::data)),
            Self::Http2(body) => match ready!(Pin::new(&mut *body).poll_frame(cx)) {
                Some(frame) => Some(frame.map_err(|error| Cut::of_http2(&error))),
                // hyper ends a body like this also when it was reset with NO_ERROR, or went with a connection that did not answer pings.
                None if !body.is_end_stream() => Some(Err(Cut::Left)),
                None => None,
            },
        })
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::Piped(pipe) => pipe.ended,
            Self::Http2(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            Self::Piped(pipe) => pipe
                .left
                .map_or_else(SizeHint::default, SizeHint::with_exact),
            Self::Http2(body) => body.size_hint(),
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    fn asked(feed: &Feed) -> bool {
        feed.poll_asked(&mut Context::from_waker(Waker::noop()))
    }

    #[tokio::test]
    async fn a_piece_at_a_time_and_only_when_it_is_asked_for() {
        let (feed, pipe) = pipe(Some(5));
        let mut body = Arriving::Piped(pipe);
        assert!(!asked(&feed), "nobody reads yet");
        let reader = tokio::spawn(async move {
            let first = body.frame().await.expect("a frame").expect("whole");
            assert_eq!(body.size_hint().exact(), Some(2));
            let second = body.frame().await.expect("a frame").expect("whole");
            assert!(body.frame().await.is_none() && body.is_end_stream());
            [first, second].map(|f| f.into_data().expect("data"))
        });
        for piece in ["abc", "de"] {
            let waits = |cx: &mut Context<'_>| match feed.poll_asked(cx) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            };
            std::future::poll_fn(waits).await;
            feed.give(piece.into());
            assert!(!asked(&feed), "one at a time");
        }
        feed.end(Ok(()));
        assert_eq!(reader.await.expect("read"), ["abc", "de"]);
    }

    #[tokio::test]
    async fn a_connection_that_ends_cuts_the_body() {
        let (feed, pipe) = pipe(None);
        let mut body = Arriving::Piped(pipe);
        feed.give("abc".into());
        drop(feed);
        assert!(
            body.frame().await.expect("a frame").is_ok(),
            "what came is read"
        );
        assert_eq!(
            body.frame().await.expect("a frame").expect_err("cut"),
            Cut::Left
        );
        assert!(body.frame().await.is_none());
    }

    #[tokio::test]
    async fn a_call_that_needs_no_more_says_so() {
        let (feed, pipe) = pipe(None);
        drop(Arriving::Piped(pipe));
        assert!(!asked(&feed) && feed.is_given_up());
    }
}
