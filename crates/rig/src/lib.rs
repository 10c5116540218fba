//! The judge: a fake upstream that counts the truth, a raw client, and load.
//!
//! It shares no code with what it judges. Everything here speaks HTTP/1.1 by
//! hand over plain sockets, so that a fault can be made on purpose at any byte
//! and nothing is tidied up on the way.
#![forbid(unsafe_code)]

mod answer;
pub mod bench;
pub mod cli;
pub mod clock;
pub mod compare;
mod http1;
pub mod load;
mod naive;
mod ports;
pub mod raw;
pub mod script;
pub mod sse;
pub mod storm;
mod truth;
mod upstream;

pub use naive::NaiveProxy;
pub use ports::free_port;
pub use raw::{BodyEnd, Closed, RawClient, ResponseHead, own_address};
pub use script::Script;
pub use sse::Event;
pub use truth::{CallTruth, Ended, PeerEnd, Truth};
pub use upstream::{BlackHole, FakeUpstream, H2Front, H2Options, H2Truth};
