//! A limiter whose slots are owned by the work and whose queue is owned by the waiter.
//!
//! A **call** is work; a **waiter** is somebody interested in it. They end at different times. A
//! limiter that gives the slot back when the *waiter* gives up lets a limit of one run three: the
//! timeout ended the wait, not the work. Here a started call has two handles with lives of their own:
//!
//! | handle | owned by | drop means | holds |
//! |---|---|---|---|
//! | [`Place`] | the waiter | leaves the queue at once | a place in the queue |
//! | [`Waiter`] | the waiter | "I leave": the call is *abandoned* | nothing |
//! | [`Slot`] | the work | "it is over" | the slot |
//! | [`Linger`] | a timer, a probe | the remote has ended too | the slot |
//!
//! ```
//! use std::num::NonZeroUsize;
//! use tidegate_limiter::{Ask, Ended, Limiter, Limits, Started};
//!
//! # fn now<F: Future + Unpin>(mut f: F) -> F::Output {
//! #     let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
//! #     match std::pin::Pin::new(&mut f).poll(&mut cx) {
//! #         std::task::Poll::Ready(out) => out,
//! #         std::task::Poll::Pending => panic!("no slot yet"),
//! #     }
//! # }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let one = NonZeroUsize::new(1).ok_or("zero")?;
//! let limiter = Limiter::new(Limits::new(one))?;
//!
//! let place = limiter.offer(Ask::new("first", 0))?;
//! let Started { waiter, slot, .. } = now(place)?; // `.await` elsewhere
//!
//! drop(waiter); // the caller timed out, the work runs on ..
//! assert_eq!(limiter.snapshot().abandoned, 1);
//!
//! let second = limiter.offer(Ask::new("second", 0))?;
//! assert_eq!(second.position(), Some(0)); // .. and nobody else starts beside it
//!
//! slot.finish(Ended::Ok); // now it is over, and the slot goes to the next
//! now(second)?.slot.finish(Ended::Ok);
//! assert_eq!(limiter.snapshot().ended.ok.abandoned, 1);
//! # Ok(())
//! # }
//! ```
//!
//! # Two limits
//!
//! A queued call starts when `attended < limit` **and** `running + lingering < hard_limit`, where
//! `running = attended + abandoned`. With `hard_limit = limit`, the default, leftovers take the place
//! of attended calls and nothing ever runs above the limit. `hard_limit - limit` is the number of
//! leftovers that do not cost attended calls their slots. A lingering call holds a slot as an abandoned
//! one does. No time limit takes a slot from running work: that would be the old bug with a delay.
//!
//! When leftovers block (fewer than `limit` calls are attended, yet the hard limit is reached) offers
//! are still queued, as leftovers usually end soon; once the queue is full they are rejected with
//! [`Reason::LeftoverFull`] instead of [`Reason::QueueFull`], and [`Snapshot::leftovers_block`] says
//! so at any time, for health checks and breakers.
//!
//! After a shrinking [`Limiter::resize`] more may run than the new limits allow; the bound is then
//! "nothing starts until below", and the snapshot says `over_limit`.
//!
//! # Order
//!
//! A slot that comes free is handed to the next in the queue in the same transition, so nobody can barge
//! in, and no slot is free while the next in the queue fits. Who is next:
//!
//! - The higher [`Class`] first; a lower one that waits gets at least every tenth slot.
//! - Within a class, the flow ([`Ask::flow`]) that has spent the least slot time, counting the work it
//!   has running. A flow that was away starts level with the others.
//! - Within a flow, first in, first out. Only with a [`Limits::target_delay`], and only while the queue
//!   stands, the newest first, and those that waited too long are sent away.
//!
//! A flow can be kept to a number of slots ([`Limits::flow_limit`]) and of abandoned calls
//! ([`Limits::flow_abandoned`]); at either, the others are served past it.
//!
//! Asks that say nothing of these are first in, first out. A [`Ask::deadline`] is known to the queue:
//! what cannot start in time is rejected at once, with the predicted wait. A call may take several slots
//! ([`Ask::weight`]). Keep the queue short: in front of slots that are really held, a long one turns a
//! brown-out of half a minute into one that never ends (`cargo run --release --example brownout`), one as
//! long as the limit, the default, does not.
//!
//! # What else there is
//!
//! [`Threads`] runs blocking work; [`Adaptive`] finds a limit; [`Limiter::idle`] hears the end of it all.
//! With the feature `tokio`: `acquire_until`, `run`, `drain` and timers for [`Linger`]. With `http-body`:
//! `SlotBody` keeps a slot to the end of a body. With `tower`: `LimitLayer`, both for HTTP services.
//!
//! # Errors
//!
//! [`Rejected`] and [`Refused`] say whether work had started (it had not, so a retry doubles nothing)
//! and carry a retry-after from the measured drain rate.
//!
//! # Units
//!
//! Limits and gauges are in calls, sizes in bytes, times in [`Duration`](std::time::Duration) at a
//! resolution of one microsecond.
//!
//! # Cost
//!
//! One short lock per transition, held for a few list and map operations: some 200 ns for a call from
//! offer to end, 50 ns for a snapshot. Wakers are woken, and labels and wakers dropped, outside it. The
//! clock is read before it. A call that has left holds no memory.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod adaptive;
mod arena;
mod blocking;
#[cfg(feature = "http-body")]
mod body;
mod call;
mod clock;
mod error;
#[cfg(feature = "tower")]
mod layer;
mod ledger;
mod limiter;
mod limits;
mod place;
mod snapshot;
mod sync;
#[cfg(all(test, not(any(loom, shuttle, protocol))))]
mod tests;
#[cfg(feature = "tokio")]
mod timed;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(feature = "http-body")]
pub use self::body::SlotBody;
#[cfg(feature = "tower")]
pub use self::layer::{Limit, LimitError, LimitLayer};
#[cfg(feature = "tokio")]
pub use self::timed::{DrainReport, NotStarted, RunError};
pub use self::{
    adaptive::{Adaptive, Sample},
    blocking::{BlockingCall, BlockingError, Threads},
    call::{Abandoned, CannotReturn, Linger, Slot, Started, Waiter},
    clock::{Clock, ManualClock},
    error::{Reason, Refused, Rejected},
    limiter::{Idle, Limiter},
    limits::{Ask, Class, Limits, LimitsError, MAX_CALLS},
    place::Place,
    snapshot::{Ended, EndedCounts, LeftCounts, RejectedCounts, RunningCall, Snapshot, Split},
};
