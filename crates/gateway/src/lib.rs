//! Tidegate: the LLM gateway that knows what is really running.
#![forbid(unsafe_code)]

pub mod admin;
pub mod admission;
pub mod app;
pub mod auth;
pub mod call;
pub mod cli;
pub mod config;
pub mod front;
pub mod reload;
pub mod serve;
pub mod signal;
pub mod telemetry;
pub mod upstream;
pub mod usage;
