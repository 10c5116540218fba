//! HTTP/2 frames by hand: what no library would send.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::SOON;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub(crate) const HEADERS: u8 = 1;
const DATA: u8 = 0;
const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
pub(crate) const ACK: u8 = 1;

/// RFC 9113 §4.1.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a frame is small");
    let mut frame = length.to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// A header block, each field literal and in no table (RFC 7541 §6.2.3).
pub(crate) fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0x10);
        for text in [name, value] {
            // A length in seven bits, and what is over in groups of seven.
            let mut over = text.len();
            if over < 127 {
                block.push(over as u8);
            } else {
                block.push(127);
                over -= 127;
                while over >= 128 {
                    block.push((over % 128) as u8 | 128);
                    over /= 128;
                }
                block.push(over as u8);
            }
            block.extend(text.as_bytes());
        }
    }
    block
}

/// What came.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Status(u16),
    Reset,
    /// GOAWAY, or the end of the connection.
    Closed,
}

/// A connection with prior knowledge.
pub(crate) struct Frames {
    socket: TcpStream,
    read: Vec<u8>,
}

impl Frames {
    /// The preface and empty settings are sent.
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        let socket = TcpStream::connect(addr).await.expect("accepted");
        socket.set_nodelay(true).expect("an option");
        let read = Vec::new();
        let mut frames = Self { socket, read };
        frames.send(PREFACE).await;
        frames.send(&frame(SETTINGS, 0, 0, &[])).await;
        frames
    }

    /// Sends these bytes; whether the connection takes them.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> bool {
        self.socket.write_all(bytes).await.is_ok()
    }

    /// A request on the first stream.
    pub(crate) async fn request(&mut self, fields: &[(&str, &str)], body: &[u8]) {
        self.request_on(1, fields, body).await;
    }

    pub(crate) async fn request_on(&mut self, stream: u32, fields: &[(&str, &str)], body: &[u8]) {
        self.send(&frame(HEADERS, END_HEADERS, stream, &block(fields)))
            .await;
        self.send(&frame(DATA, END_STREAM, stream, body)).await;
    }

    /// The next frame. `None`: the connection has ended.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(head) = self.read.first_chunk::<9>() {
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
                let (kind, flags) = (head[3], head[4]);
                let stream = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
                if self.read.len() >= 9 + length {
                    let payload = self.read[9..9 + length].to_vec();
                    self.read.drain(..9 + length);
                    return Some(Frame {
                        kind,
                        flags,
                        stream,
                        payload,
                    });
                }
            }
            let read = self.socket.read_buf(&mut self.read);
            let read = tokio::time::timeout(SOON, read).await.expect("in time");
            if read.unwrap_or(0) == 0 {
                return None;
            }
        }
    }

    /// What became of the first stream.
    pub(crate) async fn answer(&mut self) -> Answer {
        loop {
            let Some(next) = self.next().await else {
                return Answer::Closed;
            };
            match (next.kind, next.flags) {
                (GOAWAY, _) => return Answer::Closed,
                (RST_STREAM, _) => return Answer::Reset,
                (HEADERS, _) => return Answer::Status(status(&next.payload)),
                (SETTINGS, 0) => {
                    self.send(&frame(SETTINGS, ACK, 0, &[])).await;
                }
                _ => {}
            }
        }
    }

    /// Waits until the other side has closed.
    pub(crate) async fn closed(&mut self) {
        while self.next().await.is_some() {}
    }
}

/// The status of a block that begins with one (RFC 7541 appendices A and B).
fn status(block: &[u8]) -> u16 {
    const KNOWN: [u16; 7] = [200, 204, 206, 304, 400, 404, 500];
    let index = block[0] & 0x7f;
    if block[0] & 0x80 != 0 {
        return KNOWN[usize::from(index) - 8];
    }
    let (length, text) = (usize::from(block[1] & 0x7f), &block[2..]);
    if block[1] & 0x80 == 0 {
        let text = std::str::from_utf8(&text[..length]).expect("digits");
        return text.parse().expect("a status");
    }
    // 0, 1 and 2 have five bits each, the other digits six.
    let bits = text[..length]
        .iter()
        .fold(0_u32, |all, b| all << 8 | u32::from(*b));
    let (mut left, mut status) = (8 * length, 0);
    for _ in 0..3 {
        let five = bits >> (left - 5) & 0x1f;
        if five < 3 {
            (left, status) = (left - 5, 10 * status + five);
        } else {
            (left, status) = (left - 6, 10 * status + (bits >> (left - 6) & 0x3f) - 0x16);
        }
    }
    u16::try_from(status).expect("three digits")
}
