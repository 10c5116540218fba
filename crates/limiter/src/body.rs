//! The slot of a streamed answer, kept to the end of the stream.

use std::pin::Pin;
use std::task::{Context, Poll};

use http_body::{Body, Frame, SizeHint};

use crate::call::{Slot, Started, Waiter};
use crate::snapshot::Ended;

/// A body that owns the slot of the call it comes from.
///
/// The slot is given back when the stream ends ([`Ended::Ok`]), fails ([`Ended::Error`]) or is dropped
/// before its end ([`Ended::Cancelled`]) — never at the response head. The inner body is dropped before
/// the slot is given back, so an exchange that ends with its body has ended by then.
#[derive(Debug)]
#[must_use = "dropping the body ends the call"]
pub struct SlotBody<B> {
    inner: Option<B>,
    slot: Option<Slot>,
    waiter: Option<Waiter>,
}

// === impl SlotBody ===

impl<B: Body> SlotBody<B> {
    /// Keeps `slot` as long as `inner` streams. The waiter stays with the caller.
    pub fn new(inner: B, slot: Slot) -> Self {
        Self::guard(inner, slot, None)
    }

    /// Keeps the whole call: whoever holds the body is the waiter.
    pub fn whole(inner: B, started: Started) -> Self {
        Self::guard(inner, started.slot, Some(started.waiter))
    }

    fn guard(inner: B, slot: Slot, waiter: Option<Waiter>) -> Self {
        let mut body = Self {
            inner: Some(inner),
            slot: Some(slot),
            waiter,
        };
        if body.inner.as_ref().is_some_and(Body::is_end_stream) {
            body.end(Ended::Ok);
        }
        body
    }
}

impl<B> SlotBody<B> {
    fn end(&mut self, ended: Ended) {
        self.inner = None;
        if let Some(slot) = self.slot.take() {
            slot.finish(ended);
        }
        if let Some(waiter) = self.waiter.take() {
            waiter.done();
        }
    }
}

impl<B: Body + Unpin> Body for SlotBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let Some(inner) = &mut self.inner else {
            return Poll::Ready(None);
        };
        let polled = Pin::new(inner).poll_frame(cx);
        match &polled {
            Poll::Pending => {}
            Poll::Ready(None) => self.end(Ended::Ok),
            Poll::Ready(Some(Err(_))) => self.end(Ended::Error),
            Poll::Ready(Some(Ok(_))) => {
                if self.inner.as_ref().is_some_and(Body::is_end_stream) {
                    self.end(Ended::Ok);
                }
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Some(inner) => inner.size_hint(),
            None => SizeHint::with_exact(0),
        }
    }
}

impl<B> Drop for SlotBody<B> {
    fn drop(&mut self) {
        if self.slot.is_some() && !std::thread::panicking() {
            self.end(Ended::Cancelled);
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle, protocol))))]
mod tests {
    use std::collections::VecDeque;
    use std::num::NonZeroUsize;
    use std::task::Waker;

    use bytes::Bytes;
    use http_body_util::{Empty, Full};

    use super::*;
    use crate::{Ask, Limiter, Limits, Snapshot};

    struct Script(VecDeque<Result<&'static str, &'static str>>);

    impl Body for Script {
        type Data = Bytes;
        type Error = &'static str;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
            let next = self.0.pop_front();
            Poll::Ready(next.map(|step| step.map(|text| Frame::data(Bytes::from(text)))))
        }
    }

    fn started() -> (Limiter, Started) {
        let limits = Limits::new(NonZeroUsize::new(1).expect("not zero"));
        let limiter = Limiter::new(limits).expect("sound limits");
        let place = limiter.offer(Ask::default()).expect("free");
        let started = place.expire().expect("free");
        (limiter, started)
    }

    fn step<B: Body + Unpin>(body: &mut SlotBody<B>) -> Option<Result<(), B::Error>> {
        match Pin::new(body).poll_frame(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(frame) => frame.map(|frame| frame.map(drop)),
            Poll::Pending => panic!("the script never waits"),
        }
    }

    fn check(limiter: &Limiter) -> Snapshot {
        let snapshot = limiter.snapshot();
        assert_eq!(snapshot.broken_identity(), None, "{snapshot:?}");
        snapshot
    }

    #[test]
    fn the_slot_is_held_to_the_end_of_the_stream() {
        let (limiter, started) = started();
        let script = Script(VecDeque::from([Ok("a"), Ok("b")]));
        let mut body = SlotBody::whole(script, started);
        assert_eq!(step(&mut body), Some(Ok(())));
        assert_eq!(step(&mut body), Some(Ok(())));
        assert_eq!(check(&limiter).attended, 1);
        assert_eq!(step(&mut body), None);
        let now = check(&limiter);
        assert_eq!((now.running, now.ended.ok.attended), (0, 1));
        assert_eq!(step(&mut body), None);
        assert!(body.is_end_stream());
    }

    #[test]
    fn a_broken_stream_is_an_error() {
        let (limiter, started) = started();
        let script = Script(VecDeque::from([Err("reset"), Ok("never")]));
        let mut body = SlotBody::whole(script, started);
        assert_eq!(step(&mut body), Some(Err("reset")));
        assert_eq!(step(&mut body), None);
        assert_eq!(check(&limiter).ended.error.attended, 1);
    }

    #[test]
    fn a_stream_dropped_before_its_end_is_cancelled() {
        let (limiter, Started { slot, waiter, .. }) = started();
        let mut body = SlotBody::new(Script(VecDeque::from([Ok("a"), Ok("b")])), slot);
        assert_eq!(step(&mut body), Some(Ok(())));
        drop(waiter);
        assert_eq!(check(&limiter).abandoned, 1);
        drop(body);
        assert_eq!(check(&limiter).ended.cancelled.abandoned, 1);
    }

    #[test]
    fn a_body_that_knows_its_end_does_not_wait_to_be_asked() {
        let (limiter, call) = started();
        let body = SlotBody::whole(Empty::<Bytes>::new(), call);
        assert_eq!(check(&limiter).ended.ok.attended, 1);
        assert_eq!(body.size_hint().exact(), Some(0));
        let (limiter, call) = started();
        let mut body = SlotBody::whole(Full::new(Bytes::from("all")), call);
        assert_eq!(body.size_hint().exact(), Some(3));
        assert!(matches!(step(&mut body), Some(Ok(()))));
        assert_eq!(check(&limiter).ended.ok.attended, 1);
    }
}
