//! Load on any gateway, and what it does to the gateway's process.

mod calls;
mod conn;
mod control;
mod leave;
mod report;
mod sample;
mod streams;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

pub use calls::{CallsPlan, calls};
pub(crate) use conn::{Conn, events, stamps};
pub use control::Control;
pub use leave::{LeavePlan, Told, ToldBars, Way, leave};
pub(crate) use report::histogram;
pub use report::{Bars, Quantiles, Report, Waste};
pub(crate) use sample::family;
pub use sample::{ProcessUse, Sampler, Sockets, Watch, Watched};
pub use streams::{StreamsPlan, streams};

/// Where a load goes and what is watched meanwhile.
#[derive(Clone, Debug)]
pub struct Target {
    /// The gateway (or the upstream itself).
    pub addr: SocketAddr,
    /// The fake upstream behind it, for the truth and the socket states.
    pub upstream: Option<SocketAddr>,
    /// The gateway's process; its children are counted with it.
    pub pid: Option<u32>,
    /// Request path.
    pub path: String,
    /// Further request headers.
    pub headers: Vec<(String, String)>,
    /// Progress lines on standard error.
    pub progress: bool,
}

impl Target {
    /// A plain target.
    #[must_use]
    pub fn new(addr: SocketAddr) -> Self {
        Self {
            addr,
            upstream: None,
            pid: None,
            path: "/v1/chat/completions".to_owned(),
            headers: Vec::new(),
            progress: false,
        }
    }

    /// The bytes of a `POST` with this JSON.
    #[must_use]
    pub fn request(&self, json: &str) -> Vec<u8> {
        let headers: Vec<(&str, &str)> = self
            .headers
            .iter()
            .map(|(n, v)| (n.as_str(), v.as_str()))
            .collect();
        crate::raw::request_bytes("POST", &self.path, &headers, json.as_bytes())
    }

    fn watched(&self) -> Watched {
        Watched {
            pid: self.pid,
            listen: self.addr.port(),
            upstream: self.upstream.filter(|a| *a != self.addr).map(|a| a.port()),
        }
    }

    #[expect(
        clippy::print_stderr,
        reason = "progress of a long run is for the person who waits"
    )]
    fn say(&self, text: std::fmt::Arguments<'_>) {
        if self.progress {
            eprintln!("rig: {text}");
        }
    }
}

/// Allows as many descriptors as the system lets this process have; at least
/// `needed`, or it says so.
pub fn raise_descriptors(needed: u64) -> io::Result<u64> {
    let have = rlimit::increase_nofile_limit(u64::MAX)?;
    if have < needed {
        return Err(io::Error::other(format!(
            "{needed} descriptors are needed, the system allows {have}"
        )));
    }
    Ok(have)
}

/// Milliseconds as a float, for reports.
pub(crate) fn millis(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64() * 1000.0
}

/// A count as a float, for reports.
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
pub(crate) fn float(n: u64) -> f64 {
    n as f64
}
