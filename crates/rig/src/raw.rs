//! A client by hand: every byte, pause and way of leaving is the test's choice.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use memchr::memmem;
use socket2::SockRef;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::http1::{BodyDecoder, Framed, Head};
use crate::sse::Event;

/// A response head as received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseHead {
    /// `HTTP/1.1`
    pub version: String,
    /// The status.
    pub status: u16,
    /// Headers in order, as written.
    pub headers: Vec<(String, String)>,
}

impl ResponseHead {
    /// Value of the first header of this name, in any case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, v)| v.as_str())
    }
}

/// How a body ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyEnd {
    /// By its terminator or its declared length.
    Clean,
    /// By the close of the connection, which was how it was to end.
    Closed,
    /// FIN before the terminator.
    Fin,
    /// RST before the terminator.
    Rst,
    /// Broken framing.
    Garbage,
}

impl BodyEnd {
    /// Whether a client may take the body for whole.
    #[must_use]
    pub fn looks_whole(self) -> bool {
        matches!(self, Self::Clean | Self::Closed)
    }
}

/// How a connection was seen to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// FIN.
    Fin,
    /// RST.
    Rst,
    /// Not at all, within the time given.
    Open,
}

/// One connection to a server under test. Every read has a limit, so that a
/// test fails instead of hanging.
#[derive(Debug)]
pub struct RawClient {
    stream: TcpStream,
    buf: Vec<u8>,
    body: Vec<u8>,
    taken: usize,
    decoder: Option<BodyDecoder>,
    until_close: bool,
    end: Option<BodyEnd>,
    limit: Duration,
}

/// An address that no other connection to this loopback address has had, port
/// 0: the kernel gives the port of a connection that was reset to the next one,
/// and a log that names its clients would name two alike.
///
/// Nothing if `to` is no IPv4 loopback address.
#[must_use]
pub fn own_address(to: SocketAddr) -> Option<SocketAddr> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let near = to.is_ipv4() && to.ip().is_loopback();
    near.then(|| {
        // 127.1.0.0 to 127.253.255.255, one after the other.
        let n = NEXT.fetch_add(1, Ordering::Relaxed) % (253 << 16);
        let [_, high, middle, low] = ((1 << 16) + n).to_be_bytes();
        SocketAddr::from(([127, high, middle, low], 0))
    })
}

impl RawClient {
    /// Connects from an [`own_address`]; `TCP_NODELAY` is on.
    pub async fn connect(addr: SocketAddr) -> io::Result<Self> {
        Self::connect_with(addr, None).await
    }

    /// Connects with a small receive buffer, for a reader that will stop.
    pub async fn connect_slow(addr: SocketAddr, receive_buffer: u32) -> io::Result<Self> {
        Self::connect_with(addr, Some(receive_buffer)).await
    }

    async fn connect_with(addr: SocketAddr, receive_buffer: Option<u32>) -> io::Result<Self> {
        let socket = match addr {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        if let Some(bytes) = receive_buffer {
            socket.set_recv_buffer_size(bytes)?;
        }
        if let Some(own) = own_address(addr) {
            socket.bind(own)?;
        }
        let stream = socket.connect(addr).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buf: Vec::new(),
            body: Vec::new(),
            taken: 0,
            decoder: None,
            until_close: false,
            end: None,
            limit: Duration::from_secs(30),
        })
    }

    /// Sets the limit of each single wait (30 s).
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// The address of this end.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Sends bytes as they are.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        let send = self.stream.write_all(bytes.as_ref());
        timeout(self.limit, send).await.map_err(too_late)?
    }

    /// Sends bytes in pieces of `size` with a pause after each.
    pub async fn dribble(
        &mut self,
        bytes: impl AsRef<[u8]>,
        size: usize,
        pause: Duration,
    ) -> io::Result<()> {
        for piece in bytes.as_ref().chunks(size.max(1)) {
            self.send(piece).await?;
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }

    /// Sends a `POST` with a JSON body.
    pub async fn post(&mut self, path: &str, json: &str) -> io::Result<()> {
        self.request("POST", path, &[], json.as_bytes()).await
    }

    /// Sends a request with these headers and a declared length.
    pub async fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<()> {
        self.send(request_bytes(method, path, headers, body)).await
    }

    /// Reads the next response head, interim (1xx) ones included.
    pub async fn head(&mut self) -> io::Result<ResponseHead> {
        loop {
            if let Some((head, used)) = Head::parse(&self.buf) {
                self.buf.drain(..used);
                let head = response(head)?;
                self.begin_body(&head)?;
                return Ok(head);
            }
            self.fill().await?;
        }
    }

    /// Reads the next final head, skipping interim ones.
    pub async fn final_head(&mut self) -> io::Result<ResponseHead> {
        loop {
            let head = self.head().await?;
            if head.status >= 200 {
                return Ok(head);
            }
        }
    }

    fn begin_body(&mut self, head: &ResponseHead) -> io::Result<()> {
        self.body.clear();
        self.taken = 0;
        self.end = None;
        self.until_close = false;
        let chunked = head.headers.iter().any(|(n, v)| {
            n.eq_ignore_ascii_case("transfer-encoding") && v.eq_ignore_ascii_case("chunked")
        });
        let bodiless = head.status < 200 || matches!(head.status, 204 | 304);
        let framed = match head.header("content-length") {
            _ if bodiless => Framed::Length(0),
            _ if chunked => Framed::Chunked,
            Some(length) => Framed::Length(length.parse().map_err(bad)?),
            None => {
                self.until_close = true;
                Framed::UntilClose
            }
        };
        let decoder = BodyDecoder::new(framed);
        if decoder.done() {
            self.end = Some(BodyEnd::Clean);
        }
        self.decoder = Some(decoder);
        Ok(())
    }

    /// The next head answers `HEAD`: it has no body whatever it says.
    pub fn expect_no_body(&mut self) {
        self.decoder = None;
        self.end = Some(BodyEnd::Clean);
    }

    /// Reads more of the body once; how it ended, if it has.
    async fn more(&mut self) -> io::Result<Option<BodyEnd>> {
        if self.end.is_some() {
            return Ok(self.end);
        }
        let Some(decoder) = &mut self.decoder else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "no head has been read: call `head` before the body",
            ));
        };
        let Ok(used) = decoder.decode(&self.buf, &mut self.body) else {
            self.end = Some(BodyEnd::Garbage);
            return Ok(self.end);
        };
        self.buf.drain(..used);
        if decoder.done() {
            self.end = Some(BodyEnd::Clean);
            return Ok(self.end);
        }
        if used > 0 {
            return Ok(None);
        }
        match self.fill().await {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::TimedOut => return Err(e),
            Err(e) => {
                self.end = Some(match (e.kind(), self.until_close) {
                    (io::ErrorKind::UnexpectedEof, true) => BodyEnd::Closed,
                    (io::ErrorKind::UnexpectedEof, false) => BodyEnd::Fin,
                    _ => BodyEnd::Rst,
                });
            }
        }
        Ok(self.end)
    }

    /// Reads the rest of the body; also what `events` has already given out.
    /// Like all that read the body, it is an error before a head was read.
    pub async fn rest(&mut self) -> io::Result<(Vec<u8>, BodyEnd)> {
        loop {
            if let Some(end) = self.more().await? {
                return Ok((self.body.clone(), end));
            }
        }
    }

    /// Body bytes so far.
    #[must_use]
    pub fn body_so_far(&self) -> &[u8] {
        &self.body
    }

    /// Reads until the body holds `n` bytes or ends.
    pub async fn body_bytes(&mut self, n: usize) -> io::Result<usize> {
        while self.body.len() < n {
            if self.more().await?.is_some() {
                break;
            }
        }
        Ok(self.body.len())
    }

    /// Reads `n` further events; fewer if the body ends before.
    pub async fn events(&mut self, n: usize) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        while events.len() < n {
            if let Some((event, used)) = Event::parse(&self.body[self.taken..]) {
                self.taken += used;
                events.extend(event);
            } else if self.more().await?.is_some()
                && Event::parse(&self.body[self.taken..]).is_none()
            {
                break;
            }
        }
        Ok(events)
    }

    /// Reads all further events and how the body ended.
    pub async fn all_events(&mut self) -> io::Result<(Vec<Event>, BodyEnd)> {
        let events = self.events(usize::MAX).await?;
        let end = self.end.unwrap_or(BodyEnd::Clean);
        Ok((events, end))
    }

    /// Waits for the connection's end, reading and throwing away.
    pub async fn closed(&mut self, within: Duration) -> Closed {
        let look = async {
            loop {
                self.buf.clear();
                if let Err(e) = self.fill().await {
                    match e.kind() {
                        io::ErrorKind::TimedOut => {}
                        io::ErrorKind::UnexpectedEof => return Closed::Fin,
                        _ => return Closed::Rst,
                    }
                }
            }
        };
        timeout(within, look).await.unwrap_or(Closed::Open)
    }

    async fn fill(&mut self) -> io::Result<()> {
        let read = async {
            loop {
                // See `load::conn`: a faster sender must not stop the timers.
                tokio::task::coop::consume_budget().await;
                self.stream.readable().await?;
                self.buf.reserve(16 * 1024);
                match self.stream.try_read_buf(&mut self.buf) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(_) => return Ok(()),
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    Err(e) => return Err(e),
                }
            }
        };
        timeout(self.limit, read).await.map_err(too_late)?
    }

    /// Leaves by FIN. The kernel makes it a reset if bytes are unread.
    pub fn leave_fin(self) {
        drop(self);
    }

    /// Leaves by RST.
    pub fn leave_rst(self) -> io::Result<()> {
        SockRef::from(&self.stream).set_linger(Some(Duration::ZERO))
    }

    /// Shuts down writing at once, where nothing waits to be written; reading
    /// goes on.
    pub(crate) fn shut_write(&self) -> io::Result<()> {
        SockRef::from(&self.stream).shutdown(std::net::Shutdown::Write)
    }

    /// Shuts down writing; reading goes on.
    pub async fn half_close(&mut self) -> io::Result<()> {
        self.stream.shutdown().await
    }
}

/// The bytes of a request with a declared length.
#[must_use]
pub fn request_bytes(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\n");
    let given = |name: &str| headers.iter().any(|(n, _)| n.eq_ignore_ascii_case(name));
    if !given("host") {
        text.push_str("Host: localhost\r\n");
    }
    if !given("content-type") && !body.is_empty() {
        text.push_str("Content-Type: application/json\r\n");
    }
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    if !given("content-length") && !given("transfer-encoding") && method != "GET" {
        text.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    text.push_str("\r\n");
    let mut bytes = text.into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

fn response(head: Head) -> io::Result<ResponseHead> {
    let mut words = head.line.splitn(3, ' ');
    let version = words.next().unwrap_or_default().to_owned();
    let status = words.next().unwrap_or_default().parse().map_err(bad)?;
    Ok(ResponseHead {
        version,
        status,
        headers: head.headers,
    })
}

fn bad(e: std::num::ParseIntError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, e)
}

fn too_late(_: tokio::time::error::Elapsed) -> io::Error {
    io::ErrorKind::TimedOut.into()
}

/// Where a byte string first is in another.
#[must_use]
pub fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    memmem::find(bytes, what)
}
