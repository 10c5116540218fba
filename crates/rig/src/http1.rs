//! The little HTTP/1.1 both ends of the rig need, by hand and lenient on
//! purpose: the judge records what it got instead of repairing it.

use memchr::memmem;

/// A request or status line and its headers, as received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) line: String,
    pub(crate) headers: Vec<(String, String)>,
}

impl Head {
    /// Parses a head at the start of `bytes`; also returns its length.
    pub(crate) fn parse(bytes: &[u8]) -> Option<(Self, usize)> {
        let end = memmem::find(bytes, b"\r\n\r\n")?;
        let text = latin1(&bytes[..end]);
        let mut lines = text.split("\r\n");
        let line = lines.next().unwrap_or_default().to_owned();
        let headers = lines
            .map(|l| {
                let (name, value) = l.split_once(':').unwrap_or((l, ""));
                (name.to_owned(), value.trim().to_owned())
            })
            .collect();
        Some((Self { line, headers }, end + 4))
    }

    /// Value of the first header of this name.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, v)| v.as_str())
    }

    /// Whether a comma-separated header holds this word.
    pub(crate) fn has(&self, name: &str, word: &str) -> bool {
        self.headers
            .iter()
            .filter(|(n, _)| n.eq_ignore_ascii_case(name))
            .flat_map(|(_, v)| v.split(','))
            .any(|w| w.trim().eq_ignore_ascii_case(word))
    }

    /// How the body that follows a request with this head is framed.
    pub(crate) fn request_framing(&self) -> Option<Framed> {
        if self.has("transfer-encoding", "chunked") {
            return Some(Framed::Chunked);
        }
        match self.get("content-length") {
            Some(length) => length.parse().ok().map(Framed::Length),
            None => Some(Framed::Length(0)),
        }
    }

    /// The three words of the first line.
    pub(crate) fn words(&self) -> Option<(&str, &str, &str)> {
        let mut words = self.line.splitn(3, ' ');
        Some((words.next()?, words.next()?, words.next()?))
    }
}

fn latin1(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().map(|b| char::from(*b)).collect(),
    }
}

/// How a body is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framed {
    Length(u64),
    Chunked,
    UntilClose,
}

/// What is wrong with a body's framing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadChunk;

/// Takes a body out of a byte stream, piece by piece.
#[derive(Clone, Debug)]
pub(crate) struct BodyDecoder {
    framed: Framed,
    state: ChunkState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkState {
    Size,
    Data(u64),
    DataEnd,
    Trailer,
    Done,
}

impl BodyDecoder {
    pub(crate) fn new(framed: Framed) -> Self {
        let state = match framed {
            Framed::Length(0) => ChunkState::Done,
            _ => ChunkState::Size,
        };
        Self { framed, state }
    }

    pub(crate) fn done(&self) -> bool {
        self.state == ChunkState::Done
    }

    /// Moves body bytes from the front of `input` to `out`; returns how many
    /// bytes of `input` were used.
    pub(crate) fn decode(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<usize, BadChunk> {
        match self.framed {
            Framed::UntilClose => {
                out.extend_from_slice(input);
                Ok(input.len())
            }
            Framed::Length(left) => {
                let take = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
                out.extend_from_slice(&input[..take]);
                let left = left - take as u64;
                self.framed = Framed::Length(left);
                if left == 0 {
                    self.state = ChunkState::Done;
                }
                Ok(take)
            }
            Framed::Chunked => self.chunked(input, out),
        }
    }

    fn chunked(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<usize, BadChunk> {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            match self.state {
                ChunkState::Done => return Ok(used),
                ChunkState::Data(left) => {
                    let take = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                    out.extend_from_slice(&rest[..take]);
                    used += take;
                    let left = left - take as u64;
                    if left > 0 {
                        self.state = ChunkState::Data(left);
                        return Ok(used);
                    }
                    self.state = ChunkState::DataEnd;
                }
                ChunkState::DataEnd => {
                    if rest.len() < 2 {
                        return Ok(used);
                    }
                    if &rest[..2] != b"\r\n" {
                        return Err(BadChunk);
                    }
                    used += 2;
                    self.state = ChunkState::Size;
                }
                ChunkState::Size | ChunkState::Trailer => {
                    let Some(end) = memmem::find(rest, b"\r\n") else {
                        return if rest.len() > 16 * 1024 {
                            Err(BadChunk)
                        } else {
                            Ok(used)
                        };
                    };
                    self.state = self.after_line(&rest[..end])?;
                    used += end + 2;
                }
            }
        }
    }

    fn after_line(&self, line: &[u8]) -> Result<ChunkState, BadChunk> {
        if self.state == ChunkState::Trailer {
            return Ok(if line.is_empty() {
                ChunkState::Done
            } else {
                ChunkState::Trailer
            });
        }
        let size = line.split(|b| *b == b';').next().unwrap_or_default();
        let size = std::str::from_utf8(size).map_err(|_| BadChunk)?;
        match u64::from_str_radix(size.trim(), 16) {
            Ok(0) => Ok(ChunkState::Trailer),
            Ok(n) => Ok(ChunkState::Data(n)),
            Err(_) => Err(BadChunk),
        }
    }
}

/// Appends a chunk-size line.
pub(crate) fn chunk_size(out: &mut Vec<u8>, len: usize, extension: bool) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut digits = [0_u8; 16];
    let mut at = digits.len();
    let mut rest = len;
    loop {
        at -= 1;
        digits[at] = DIGITS[rest & 15];
        rest >>= 4;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
    if extension {
        out.extend_from_slice(b";rig=1");
    }
    out.extend_from_slice(b"\r\n");
}

/// Words that go with a status.
pub(crate) fn reason(status: u16) -> &'static str {
    match status {
        100 => "Continue",
        102 => "Processing",
        103 => "Early Hints",
        200 => "OK",
        204 => "No Content",
        304 => "Not Modified",
        307 => "Temporary Redirect",
        308 => "Permanent Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Payload Too Large",
        417 => "Expectation Failed",
        422 => "Unprocessable Entity",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        529 => "Overloaded",
        _ => "Status",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunked_bodies_decode_at_every_cut() {
        let wire = b"5;x=1\r\nhello\r\n1\r\n!\r\n0\r\nt: 1\r\n\r\nrest";
        for cut in 0..wire.len() {
            let mut decoder = BodyDecoder::new(Framed::Chunked);
            let mut out = Vec::new();
            let mut pending = wire[..cut].to_vec();
            let used = decoder.decode(&pending, &mut out).expect("sound");
            pending.drain(..used);
            pending.extend_from_slice(&wire[cut..]);
            let used = decoder.decode(&pending, &mut out).expect("sound");
            assert!(decoder.done());
            assert_eq!(out, b"hello!");
            assert_eq!(&pending[used..], b"rest");
        }
    }

    #[test]
    fn a_chunk_size_that_is_no_number_is_refused() {
        let mut decoder = BodyDecoder::new(Framed::Chunked);
        assert_eq!(decoder.decode(b"zz\r\n", &mut Vec::new()), Err(BadChunk));
    }

    #[test]
    fn chunk_sizes_are_hexadecimal() {
        for (len, text) in [(0, "0\r\n"), (10, "a\r\n"), (0x101, "101\r\n")] {
            let mut out = Vec::new();
            chunk_size(&mut out, len, false);
            assert_eq!(out, text.as_bytes());
        }
    }
}
