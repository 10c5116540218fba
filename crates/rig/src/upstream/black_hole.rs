//! A port that accepts no connection and refuses none.

use std::io;
use std::net::SocketAddr;

use socket2::{Domain, Socket, Type};

/// Connections to it are never completed: its queue of completed handshakes
/// is full and nobody accepts.
#[derive(Debug)]
pub struct BlackHole {
    addr: SocketAddr,
    _listener: Socket,
    _fill: Vec<Socket>,
}

impl BlackHole {
    /// Opens one on a port of `addr`'s address.
    pub fn start(addr: SocketAddr) -> io::Result<Self> {
        /// More than a queue of zero holds, whatever the kernel makes of zero.
        const FILL: usize = 4;
        let listener = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
        listener.bind(&addr.into())?;
        listener.listen(0)?;
        let addr = listener
            .local_addr()?
            .as_socket()
            .ok_or(io::ErrorKind::Unsupported)?;
        let mut fill = Vec::new();
        for _ in 0..FILL {
            let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            // In progress, and meant to stay so.
            let _ = socket.connect(&addr.into());
            fill.push(socket);
        }
        Ok(Self {
            addr,
            _listener: listener,
            _fill: fill,
        })
    }

    /// Where it does not accept.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}
