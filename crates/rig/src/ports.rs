//! Ports for programs that are told where to listen.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Ports below are for services that somebody knows by number.
const LOWEST: u16 = 10_000;

/// A loopback address on which nobody listens, never the same one twice.
///
/// A port that the kernel picks (port 0) is free again as soon as it is known,
/// and the kernel may give it to the next who asks, or to a client's socket.
/// These lie outside the range that it picks from.
///
/// # Errors
///
/// `AddrInUse` if all of them are taken.
pub fn free_port() -> io::Result<SocketAddr> {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    let ports = ports();
    // Two processes that begin at the same place meet at the `bind` below.
    let begin = std::process::id() as usize * 97;
    for _ in 0..ports.len() {
        let turn = begin.wrapping_add(TURN.fetch_add(1, Ordering::Relaxed));
        let offset = turn % ports.len();
        let port = ports.start + offset;
        let Ok(port) = u16::try_from(port) else { break };
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpListener::bind(addr).is_ok() {
            return Ok(addr);
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        format!("no port of {}-{} is free", ports.start, ports.end - 1),
    ))
}

fn ports() -> &'static Range<usize> {
    static PORTS: OnceLock<Range<usize>> = OnceLock::new();
    PORTS.get_or_init(|| {
        let range = "/proc/sys/net/ipv4/ip_local_port_range";
        outside(&std::fs::read_to_string(range).unwrap_or_default())
    })
}

/// The longer of the two ranges that `kernel` ("low high") leaves.
fn outside(kernel: &str) -> Range<usize> {
    let mut bounds = kernel.split_whitespace().map(str::parse::<u16>);
    // Linux's own default, where the file cannot be read.
    let (low, high) = match (bounds.next(), bounds.next()) {
        (Some(Ok(low)), Some(Ok(high))) => (low, high),
        _ => (32_768, 60_999),
    };
    let below = usize::from(LOWEST)..usize::from(low.max(LOWEST));
    let above = usize::from(high.max(LOWEST)) + 1..usize::from(u16::MAX) + 1;
    if above.len() > below.len() {
        above
    } else {
        below
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_given_once_and_not_by_the_kernel() {
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..200 {
            let addr = free_port().expect("a port");
            assert!(seen.insert(addr), "{addr} twice");
            assert!(ports().contains(&usize::from(addr.port())), "{addr}");
        }
    }

    #[test]
    fn the_longer_range_that_the_kernel_leaves() {
        assert_eq!(outside("32768\t60999\n"), 10_000..32_768);
        assert_eq!(outside("10500 50000"), 50_001..65_536);
        assert_eq!(outside("1024 65000"), 65_001..65_536);
        assert_eq!(outside(""), 10_000..32_768);
    }
}
