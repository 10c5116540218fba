//! What the kernel knows of the other machine: how many bytes it has acknowledged, and when it was last heard of. The one question that no
//! safe crate asks.

use std::io;
use std::mem::{MaybeUninit, offset_of, size_of};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// Bytes of data sent by us that the peer's kernel has acknowledged, over the life of a connection that we opened.
pub(super) fn acknowledged(socket: &impl AsFd) -> io::Result<u64> {
    let (info, length) = tcp_info(socket)?;
    if length < offset_of!(libc::tcp_info, tcpi_bytes_acked) + size_of::<u64>() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // The SYN of the side that opens counts as one.
    Ok(info.tcpi_bytes_acked.saturating_sub(1))
}

/// How long nothing has come from the peer's kernel, be it data, an acknowledgement or the answer to a probe.
pub(super) fn silence(socket: &impl AsFd) -> io::Result<Duration> {
    let (info, _) = tcp_info(socket)?;
    let last = info.tcpi_last_data_recv.min(info.tcpi_last_ack_recv);
    Ok(Duration::from_millis(last.into()))
}

/// The kernel's answer and how many bytes of it there are.
#[expect(
    unsafe_code,
    reason = "one getsockopt; socket2, rustix and nix have no TCP_INFO with these fields"
)]
fn tcp_info(socket: &impl AsFd) -> io::Result<(libc::tcp_info, usize)> {
    const SIZE: usize = size_of::<libc::tcp_info>();
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = SIZE as libc::socklen_t;
    // SAFETY: the descriptor is open for as long as it is borrowed. The kernel writes at most `length` bytes, which is the size of `info`, and
    // keeps no pointer. `tcp_info` holds integers only, for which the zeroed bytes that an older kernel leaves are valid.
    let (result, info) = unsafe {
        let result = libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        );
        (result, info.assume_init())
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((info, length as usize))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn what_the_peer_has_answered_to_is_acknowledged_to_the_byte() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        assert_eq!(acknowledged(&ours).unwrap(), 0);
        let mut space = [0; 64];
        for round in 1..=3 {
            ours.write_all(b"hello").unwrap();
            theirs.read_exact(&mut space[..5]).unwrap();
            theirs.write_all(b"world!").unwrap();
            ours.read_exact(&mut space[..6]).unwrap();
            assert_eq!(acknowledged(&ours).unwrap(), 5 * round);
        }
    }
}
