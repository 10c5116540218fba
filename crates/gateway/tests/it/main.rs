//! The whole gateway on real sockets, between a client that writes every byte by hand and an upstream that counts the truth.
//!
//! One binary, one file for each behaviour. The rules: port 0, every wait is for a condition and has a bound, no sleeps, no retries; a test
//! ends with [`support::Gate::settled`], as most faults of this field are first seen as something that was left behind.

mod support;

mod admission;
mod asks;
mod assembled;
mod attach;
mod binary;
mod books;
mod bounds;
mod calls;
mod cases;
mod confirm;
mod contracts;
mod demo;
mod descriptors;
mod drained;
mod echo;
mod ends;
mod fields;
mod frames;
mod goodbye;
mod graces;
mod h2;
mod h2_bodies;
mod h2_tails;
mod half_closed;
mod heartbeats;
mod http2;
mod journal;
mod kinds;
mod leave;
mod lifecycle;
mod limits;
mod malformed;
mod matrix;
mod memory;
mod models;
mod namespace;
mod network;
mod pool;
mod probe;
mod refusals;
mod reload;
mod resumed;
mod security;
mod starved;
mod storms;
mod streams;
mod timeouts;
mod tls;
mod uploads;
