//! The ledger of `tidegate-limiter` as Python's `tidegate._core`.
//!
//! What this module keeps to, so that no process hangs or aborts in it:
//!
//! - It never runs Python code, never waits, and never detaches from the interpreter. The ledger's lock is a leaf
//!   that is held for some list operations, so taking it while attached is cheap; and a fork, which happens
//!   attached too, finds it free. A thread that the interpreter ends while it finalises is never inside Rust.
//! - It owns no Python object. Calls are known here by number; whoever made a step that gave others their slots gets
//!   their numbers, and dispatches them.
//! - Every transition is made once, whoever asks: [`entry::Entry`] is the arbiter between the thread that starts a
//!   call, the waiter that leaves and the timer.

mod audit;
mod entry;
mod ledger;
mod sever;

use pyo3::pymodule;

/// The ledger, one call's part in it, and what ends a blocked call.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::audit::install_audit;
    #[pymodule_export]
    use crate::entry::{Entry, Refusal};
    #[pymodule_export]
    use crate::ledger::{Crew, Ledger};
}
