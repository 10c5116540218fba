//! A client connection that costs little: it reads just enough to know where
//! an answer ends and where its events are.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use memchr::memmem;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};

use crate::http1::{BodyDecoder, Framed, Head};

/// One connection of a load.
#[derive(Debug)]
pub(crate) struct Conn {
    stream: TcpStream,
    buf: Vec<u8>,
    body: Vec<u8>,
    decoder: BodyDecoder,
    pub(crate) close: bool,
    /// Only the close ends the body, so that a cut looks like its end.
    pub(crate) until_close: bool,
    /// `Retry-After` of the last head, up to the minute that SDKs obey.
    pub(crate) retry_after: Option<Duration>,
}

impl Conn {
    pub(crate) async fn connect(addr: SocketAddr, receive_buffer: Option<u32>) -> io::Result<Self> {
        let socket = match addr {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        if let Some(bytes) = receive_buffer {
            socket.set_recv_buffer_size(bytes)?;
        }
        let stream = socket.connect(addr).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buf: Vec::with_capacity(2048),
            body: Vec::new(),
            decoder: BodyDecoder::new(Framed::Length(0)),
            close: false,
            until_close: false,
            retry_after: None,
        })
    }

    pub(crate) async fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.stream.try_write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.stream.writable().await?;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    async fn fill(&mut self) -> io::Result<usize> {
        loop {
            // A sender that is always faster would never let go of this thread,
            // and no timer of the judge would fire.
            tokio::task::coop::consume_budget().await;
            self.stream.readable().await?;
            self.buf.reserve(2048);
            match self.stream.try_read_buf(&mut self.buf) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => return Ok(n),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Reads a final head; the status.
    pub(crate) async fn head(&mut self) -> io::Result<u16> {
        loop {
            if memmem::find(&self.buf, b"\r\n\r\n").is_none() {
                if !looks_like_http(&self.buf) || self.buf.len() > HEAD_MAX {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                self.fill().await?;
                continue;
            }
            let Some((head, used)) = Head::parse(&self.buf) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            self.buf.drain(..used);
            let status = head.words().and_then(|(_, s, _)| s.parse().ok());
            let status: u16 = status.ok_or(io::ErrorKind::InvalidData)?;
            if status < 200 {
                continue;
            }
            let framed = match head.get("content-length") {
                _ if head.has("transfer-encoding", "chunked") => Framed::Chunked,
                Some(n) => Framed::Length(n.parse().map_err(io::Error::other)?),
                None if matches!(status, 204 | 304) => Framed::Length(0),
                None => Framed::UntilClose,
            };
            self.until_close = framed == Framed::UntilClose;
            self.close = head.has("connection", "close") || self.until_close;
            self.retry_after = head
                .get("retry-after")
                .and_then(|v| v.parse().ok())
                .filter(|seconds| (1..=60).contains(seconds))
                .map(Duration::from_secs);
            self.decoder = BodyDecoder::new(framed);
            self.body.clear();
            return Ok(status);
        }
    }

    /// Body bytes that came; none at its end.
    pub(crate) async fn body(&mut self) -> io::Result<Option<&[u8]>> {
        self.body.clear();
        loop {
            let used = self
                .decoder
                .decode(&self.buf, &mut self.body)
                .map_err(|_| io::ErrorKind::InvalidData)?;
            if used == self.buf.len() {
                self.buf.clear();
            } else {
                self.buf.drain(..used);
            }
            if !self.body.is_empty() {
                return Ok(Some(&self.body));
            }
            if self.decoder.done() {
                return Ok(None);
            }
            if let Err(e) = self.fill().await {
                let clean = self.until_close && e.kind() == io::ErrorKind::UnexpectedEof;
                return if clean { Ok(None) } else { Err(e) };
            }
        }
    }

    /// One call from first to last byte; the status.
    pub(crate) async fn call(&mut self, request: &[u8]) -> io::Result<u16> {
        self.send(request).await?;
        let status = self.head().await?;
        while self.body().await?.is_some() {}
        Ok(status)
    }

    /// Says that nothing more will be sent.
    pub(crate) fn finish(&self) -> io::Result<()> {
        SockRef::from(&self.stream).shutdown(Shutdown::Write)
    }

    /// Makes the close that follows a reset.
    pub(crate) fn reset(&self) -> io::Result<()> {
        SockRef::from(&self.stream).set_linger(Some(Duration::ZERO))
    }
}

/// A head longer than this is none.
const HEAD_MAX: usize = 1024 * 1024;

fn looks_like_http(start: &[u8]) -> bool {
    start
        .iter()
        .zip(b"HTTP/1.")
        .all(|(is, should)| is == should)
}

/// Events whose end is in `bytes`.
pub(crate) fn events(bytes: &[u8]) -> u64 {
    memmem::find_iter(bytes, b"\n\n").count() as u64
}

/// The stamps in `bytes`; one that the end may have cut is left out.
pub(crate) fn stamps(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    const KEY: &[u8] = b"\"stamp\":";
    memmem::find_iter(bytes, KEY).filter_map(|at| {
        let digits = &bytes[at + KEY.len()..];
        let end = digits.iter().position(|b| !b.is_ascii_digit())?;
        let number = std::str::from_utf8(&digits[..end]).ok()?;
        number.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// On a thread of its own: what it looks for would never come to an end.
    #[test]
    fn a_sender_that_is_always_faster_does_not_stop_the_timers() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("bound");
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().expect("a client");
            let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
            client.write_all(head).expect("taken");
            // More work to read than to write.
            let chunks = b"1\r\nx\r\n".repeat(10_000);
            while client.write_all(&chunks).is_ok() {}
        });
        let (over, is_over) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.expect("a runtime").block_on(async {
                let mut conn = Conn::connect(addr, None).await.expect("connected");
                let call = tokio::time::timeout(Duration::from_millis(50), conn.call(b""));
                assert!(call.await.is_err(), "an answer without an end has ended");
            });
            over.send(()).expect("awaited");
        });
        is_over
            .recv_timeout(Duration::from_secs(30))
            .expect("the timer fires");
    }

    #[test]
    fn stamps_are_found_whole() {
        let bytes = b"x\"stamp\":12}\n\n\"stamp\":345}\n\n\"stamp\":6";
        assert_eq!(stamps(bytes).collect::<Vec<_>>(), [12, 345]);
        assert_eq!(events(bytes), 2);
    }
}
