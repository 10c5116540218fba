//! The addresses of a name, looked up anew for whoever connects, and once for all who wait at a time.
//!
//! The system's lookup blocks a thread and cannot be given up: where the name server hangs, each call that gives up would leave one behind,
//! and lookups would stand in line for threads that others need. So there is one for an endpoint at a time. Nothing is kept: whoever comes
//! after an answer asks again.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// What a lookup gave; the error as text, since many are told.
type Found = Result<Vec<SocketAddr>, String>;

/// The lookups of one name.
#[derive(Debug, Default)]
pub(super) struct Lookup {
    under_way: Mutex<Option<watch::Receiver<Option<Found>>>>,
}

impl Lookup {
    fn lock(&self) -> MutexGuard<'_, Option<watch::Receiver<Option<Found>>>> {
        self.under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The addresses, from the lookup that is under way or a new one by `resolve`, which may block.
    ///
    /// # Errors
    ///
    /// That of the lookup.
    ///
    /// # Cancel safety
    ///
    /// May be dropped: the lookup goes on for those who still wait.
    pub(super) async fn addresses(
        self: &Arc<Self>,
        resolve: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> io::Result<Vec<SocketAddr>> {
        let mut answer = self.join(resolve);
        let found = match answer.wait_for(Option::is_some).await {
            Ok(found) => found.clone(),
            Err(_ended) => None,
        };
        match found {
            Some(Ok(addresses)) => Ok(addresses),
            Some(Err(why)) => Err(io::Error::other(why)),
            None => Err(io::Error::other("the lookup came to no end")),
        }
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "one at a time for each endpoint; it ends by itself, and nobody has to wait for it"
    )]
    fn join(
        self: &Arc<Self>,
        resolve: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> watch::Receiver<Option<Found>> {
        let mut under_way = self.lock();
        // One whose sender is gone came to no end: its runtime has.
        if let Some(answer) = under_way.as_ref().filter(|a| a.has_changed().is_ok()) {
            return answer.clone();
        }
        let (tell, answer) = watch::channel(None);
        *under_way = Some(answer.clone());
        drop(under_way);
        let own = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            let found = resolve().map_err(|error| error.to_string());
            // Before it is told: whoever comes later asks for himself.
            own.lock().take();
            tell.send_replace(Some(found));
        });
        answer
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    fn here() -> Vec<SocketAddr> {
        vec![SocketAddr::from(([127, 0, 0, 1], 80))]
    }

    /// A runtime as workers have it, with few threads beside it.
    fn worker() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(2)
            .build()
            .expect("a runtime")
    }

    #[test]
    fn while_a_name_server_hangs_one_thread_waits_for_it_and_the_others_are_free() {
        worker().block_on(async {
            let lookup = Arc::new(Lookup::default());
            let asked = Arc::new(AtomicUsize::new(0));
            let (go_on, hangs) = mpsc::channel::<()>();
            let hangs = Arc::new(Mutex::new(hangs));
            let ask = || {
                let (lookup, asked, hangs) =
                    (Arc::clone(&lookup), Arc::clone(&asked), Arc::clone(&hangs));
                async move {
                    let resolve = move || {
                        asked.fetch_add(1, Ordering::Relaxed);
                        let _ = hangs.lock().expect("no panic").recv();
                        Ok(here())
                    };
                    lookup.addresses(resolve).await
                }
            };
            for _ in 0..50 {
                let gave_up = tokio::time::timeout(Duration::from_millis(1), ask()).await;
                assert!(gave_up.is_err());
            }
            // Somebody else's name finds a thread.
            let other = Arc::new(Lookup::default());
            let done = other.addresses(|| Ok(here()));
            let done = tokio::time::timeout(Duration::from_secs(10), done).await;
            assert_eq!(done.expect("in time").expect("an answer"), here());
            // Its thread may have been late to begin; a second one would have begun with it.
            let begun = async {
                while asked.load(Ordering::Relaxed) == 0 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            let begun = tokio::time::timeout(Duration::from_secs(10), begun).await;
            begun.expect("it was asked");
            assert_eq!(asked.load(Ordering::Relaxed), 1);
            drop(go_on);
            assert_eq!(ask().await.expect("an answer"), here());
            let before = asked.load(Ordering::Relaxed);
            assert_eq!(ask().await.expect("an answer"), here());
            assert_eq!(asked.load(Ordering::Relaxed), before + 1, "nothing is kept");
        });
    }

    #[tokio::test]
    async fn an_error_is_told_to_all_and_a_lookup_that_dies_to_nobody_else() {
        let lookup = Arc::new(Lookup::default());
        let failing = || lookup.addresses(|| Err(io::Error::other("no such name")));
        let (one, two) = tokio::join!(failing(), failing());
        assert_eq!(one.expect_err("no name").to_string(), "no such name");
        assert_eq!(two.expect_err("no name").to_string(), "no such name");
        let dies = lookup.addresses(|| panic!("in the resolver"));
        assert!(dies.await.is_err());
        let next = lookup.addresses(|| Ok(here()));
        assert_eq!(next.await.expect("an answer"), here());
    }
}
