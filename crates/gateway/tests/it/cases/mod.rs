//! Known failure cases of streaming proxies, each as a test that carries its number; `docs/cases.md` has them all in a table.
//!
//! Here are those that have to hold for both versions of HTTP on either side, every dialect and every route. Those that fit one place only
//! stand with their kind in the other files of this binary and of the other crates.

mod breaks;
pub(crate) mod caller;
mod chain;
mod crossing;
mod disconnect;
mod framing;
mod hidden;
mod meter;
mod pooled;
mod process;
mod readers;
mod repeats;
mod room;
mod shares;
pub(crate) mod stage;
mod surplus;
mod versions;
mod waits;
