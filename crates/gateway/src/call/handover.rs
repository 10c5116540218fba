//! A call whose waiter leaves before its answer began goes on in a task of its own.
//!
//! The connection drops the future of an answer when its client is gone (HTTP/1: FIN or RST; HTTP/2: RST_STREAM or a lost connection). Dropping the
//! call there would drop the slot with it and leave its record unwritten. [`Handover`] moves the future, as it is, into a tracked task and
//! marks the waiter as gone; the call sees the mark in whatever wait it is in and ends itself along the same line as always.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::downstream::Client;

/// Boxes what `make` gives. `Box::new` builds it on the stack and copies all of it, and a call's future is some KiB, nearly all of them for
/// later: here they are not touched before they are needed.
#[inline]
pub fn boxed<T>(make: impl FnOnce() -> T) -> Box<T> {
    Box::write(Box::new_uninit(), make())
}

/// A boxed call in the hands of the connection that waits for it.
pub struct Handover<T: 'static> {
    call: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    client: Arc<Client>,
}

impl<T: 'static> std::fmt::Debug for Handover<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handover")
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Handover<T> {
    pub fn new<F>(call: impl FnOnce() -> F, client: Arc<Client>) -> Self
    where
        F: Future<Output = T> + Send + 'static,
    {
        Self {
            call: Some(Box::into_pin(boxed(call))),
            client,
        }
    }
}

impl<T: 'static> Future for Handover<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let Some(call) = &mut self.call else {
            return Poll::Pending;
        };
        let polled = call.as_mut().poll(cx);
        if polled.is_ready() {
            self.call = None;
        }
        polled
    }
}

impl<T: 'static> Drop for Handover<T> {
    fn drop(&mut self) {
        let Some(call) = self.call.take() else { return };
        self.client.set_gone();
        // Outside a runtime (a worker that is being torn down) the call is dropped; its record's own drop still writes it.
        if tokio::runtime::Handle::try_current().is_ok() && !std::thread::panicking() {
            self.client.tasks().spawn(Forget(call));
        }
    }
}

/// Runs a call whose result nobody will see.
struct Forget<T>(Pin<Box<dyn Future<Output = T> + Send>>);

impl<T> Future for Forget<T> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use tokio::sync::oneshot;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::call::downstream::Downstream;

    fn client(tasks: &TaskTracker) -> Arc<Client> {
        let peer = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let downstream = Arc::new(Downstream::new(peer, false, tasks.clone()));
        Arc::new(downstream.enter(None))
    }

    #[tokio::test]
    async fn a_dropped_call_goes_on_and_knows_it() {
        let tasks = TaskTracker::new();
        let client = client(&tasks);
        let (tell, told) = oneshot::channel();
        let seen = Arc::clone(&client);
        let call = async move {
            tokio::task::yield_now().await;
            let _ = tell.send(seen.is_gone());
        };
        let mut handover = Handover::new(|| call, client);
        assert!(
            std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut handover).poll(cx)))
                .await
                .is_pending()
        );
        drop(handover);
        assert!(told.await.expect("the call ran on"));
        tasks.close();
        tasks.wait().await;
    }

    #[tokio::test]
    async fn a_finished_call_is_not_spawned() {
        let tasks = TaskTracker::new();
        let handover = Handover::new(|| async { 7 }, client(&tasks));
        assert_eq!(handover.await, 7);
        assert!(tasks.is_empty());
    }
}
