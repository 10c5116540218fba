//! Line ends, event boundaries and fields of an event stream, by the WHATWG rules.

use memchr::memchr2;
use std::borrow::Cow;

pub(crate) const BOM: &[u8] = b"\xEF\xBB\xBF";

/// Finds the blank lines that end events, over any chunking.
#[derive(Debug)]
pub(crate) struct Boundaries {
    /// Nothing has been seen of the current line.
    line_empty: bool,
    /// The last byte was a CR: an LF that follows belongs to it.
    after_cr: bool,
    /// The stream has shown a CRLF: a CR alone is probably half of one.
    crlf: bool,
    /// Lines of the current event.
    lines: usize,
    /// The event that ended last was a single line, as nearly all are.
    one_line: bool,
}

impl Boundaries {
    pub(crate) const fn new() -> Self {
        Self {
            line_empty: true,
            after_cr: false,
            crlf: false,
            lines: 0,
            one_line: false,
        }
    }

    /// The event that ended last was a single line.
    pub(crate) const fn one_line(&self) -> bool {
        self.one_line
    }

    /// The last byte was a CR, and from what this stream did so far an LF is to be expected.
    pub(crate) const fn expects_lf(&self) -> bool {
        self.after_cr && self.crlf
    }

    /// Takes the LF that completes an earlier CR, if it stands first.
    pub(crate) fn take_lf(&mut self, bytes: &[u8]) -> bool {
        let Some(first) = bytes.first() else {
            return false;
        };
        let lf = self.after_cr && *first == b'\n';
        self.after_cr = false;
        self.crlf |= lf;
        lf
    }

    /// The offset just behind the next blank line. `None`: all is taken and none was found.
    #[inline]
    pub(crate) fn next(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = usize::from(self.take_lf(bytes));
        loop {
            let rest = bytes.get(at..).unwrap_or_default();
            // The blank line behind a line is seen without a search.
            let run = match rest {
                [b'\n' | b'\r', ..] => 0,
                _ => match memchr2(b'\n', b'\r', rest) {
                    Some(run) => run,
                    None => {
                        self.line_empty &= rest.is_empty();
                        return None;
                    }
                },
            };
            self.line_empty &= run == 0;
            at += run + 1;
            if rest.get(run) == Some(&b'\r') {
                match bytes.get(at) {
                    Some(b'\n') => {
                        self.crlf = true;
                        at += 1;
                    }
                    Some(_) => {}
                    None => self.after_cr = true,
                }
            }
            if self.line_empty {
                self.one_line = self.lines == 1;
                self.lines = 0;
                return Some(at);
            }
            self.line_empty = true;
            self.lines += 1;
        }
    }
}

/// The fields of one event that matter here.
#[derive(Debug, Default)]
pub(crate) struct Block<'a> {
    /// The `event:` name, empty if none.
    pub(crate) name: &'a [u8],
    /// All `data:` lines, joined with LF. `None`: no such line, so no event.
    pub(crate) data: Option<Cow<'a, [u8]>>,
}

impl<'a> Block<'a> {
    /// Reads one event. `first`: it opens the stream and may start with a byte order mark. `one_line`: it is known to be a single line.
    #[inline]
    pub(crate) fn read(bytes: &'a [u8], first: bool, one_line: bool) -> Self {
        let mut rest = match bytes.strip_prefix(BOM) {
            Some(tail) if first => tail,
            _ => bytes,
        };
        let mut block = Self::default();
        if one_line {
            while let [line @ .., b'\n' | b'\r'] = rest {
                rest = line;
            }
            block.line(rest);
            return block;
        }
        while !rest.is_empty() {
            let end = memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
            let (line, tail) = rest.split_at_checked(end).unwrap_or((rest, &[]));
            block.line(line);
            rest = match tail {
                [b'\r', b'\n', after @ ..] | [_, after @ ..] => after,
                [] => tail,
            };
        }
        block
    }

    #[inline]
    fn line(&mut self, line: &'a [u8]) {
        if let Some(value) = field(line, b"data") {
            match &mut self.data {
                None => self.data = Some(Cow::Borrowed(value)),
                Some(data) => {
                    let data = data.to_mut();
                    data.push(b'\n');
                    data.extend_from_slice(value);
                }
            }
        } else if let Some(value) = field(line, b"event") {
            self.name = value;
        }
    }
}

/// The value of a line if it is this field: split at the first colon, one space after it dropped.
#[inline]
fn field<'a, const N: usize>(line: &'a [u8], name: &[u8; N]) -> Option<&'a [u8]> {
    match line.split_first_chunk()? {
        (start, _) if start != name => None,
        (_, [b':', b' ', value @ ..] | [b':', value @ ..]) => Some(value),
        (_, []) => Some(&[]),
        _ => None,
    }
}

#[cfg(test)]
#[path = "sse_tests.rs"]
mod tests;
