//! What the operator sees: metrics, the access log, the program's own log.
//!
//! Metric names live in [`metrics`] only. Nothing here ever receives a prompt, an answer or a key.

pub mod access_log;
mod histogram;
pub mod journal;
mod json;
mod limiters;
pub mod lines;
pub mod log;
pub mod metrics;
mod process;
mod shares;
pub mod upstream;

#[cfg(test)]
mod tests;
