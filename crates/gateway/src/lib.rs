//! Tidegate: the gateway as a library, for its binary and its tests.
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
