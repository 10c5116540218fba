//! A cursor over JSON text: walks once, decodes nothing it is not asked for, never recurses.
//!
//! Containers that nobody looks into are skipped with a bit stack of fixed size, so hostile nesting costs
//! neither the call stack nor the heap. Every slice is taken with `get`; a fault carries its byte offset.

use crate::text::whole;

/// Containers nested deeper than this are refused. Python's own reader gives up near 1000.
pub(crate) const DEPTH_LIMIT: usize = 1024;

/// Why the text was refused, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) at: usize,
    pub(crate) what: &'static str,
}

pub(crate) const TOO_DEEP: &str = "is nested more than 1024 levels deep";

/// What kind of value stands next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Object,
    Array,
    String,
    Number,
    Bool,
    Null,
}

/// A read position in JSON text.
#[derive(Debug, Clone)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
    depth: usize,
    /// A value of an unexpected type was met and stepped over.
    pub(crate) odd: bool,
}

impl<'a> Cursor<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            pos: 0,
            depth: 0,
            odd: false,
        }
    }

    pub(crate) const fn pos(&self) -> usize {
        self.pos
    }

    const fn fault<T>(&self, what: &'static str) -> Result<T, Fault> {
        Err(Fault { at: self.pos, what })
    }

    /// The next byte that is not white space, without taking it.
    #[inline]
    pub(crate) fn peek(&mut self) -> Option<u8> {
        loop {
            match self.bytes.get(self.pos) {
                Some(b' ' | b'\n' | b'\t' | b'\r') => self.pos += 1,
                other => return other.copied(),
            }
        }
    }

    /// The kind of the next value, judged by its first byte.
    pub(crate) fn kind(&mut self) -> Result<Kind, Fault> {
        Ok(match self.peek() {
            Some(b'{') => Kind::Object,
            Some(b'[') => Kind::Array,
            Some(b'"') => Kind::String,
            Some(b'-' | b'0'..=b'9') => Kind::Number,
            Some(b't' | b'f') => Kind::Bool,
            Some(b'n') => Kind::Null,
            Some(_) => return self.fault("has something that is not a JSON value"),
            None => return self.fault("ends where a value should be"),
        })
    }

    /// Walks an object; `member` gets each key (raw, between its quotes) and must take the value.
    #[inline]
    pub(crate) fn object<E: From<Fault>>(
        &mut self,
        mut member: impl FnMut(&mut Self, &'a [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.open(b'{')?;
        if self.close(b'}') {
            return Ok(());
        }
        loop {
            let key = self.key()?;
            member(self, key)?;
            match self.peek() {
                Some(b',') => self.pos += 1,
                Some(b'}') => {
                    self.close(b'}');
                    return Ok(());
                }
                _ => return Ok(self.fault("needs `,` or `}` after a value in an object")?),
            }
        }
    }

    /// Walks an array; `element` must take each value.
    #[inline]
    pub(crate) fn array<E: From<Fault>>(
        &mut self,
        mut element: impl FnMut(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        self.open(b'[')?;
        if self.close(b']') {
            return Ok(());
        }
        loop {
            element(self)?;
            match self.peek() {
                Some(b',') => self.pos += 1,
                Some(b']') => {
                    self.close(b']');
                    return Ok(());
                }
                _ => return Ok(self.fault("needs `,` or `]` after a value in an array")?),
            }
        }
    }

    /// Like [`object`](Self::object), but steps over null, and over another type while noting it as odd.
    #[inline]
    pub(crate) fn object_or_skip(
        &mut self,
        member: impl FnMut(&mut Self, &'a [u8]) -> Result<(), Fault>,
    ) -> Result<bool, Fault> {
        if self.peek() == Some(b'{') {
            return self.object(member).map(|()| true);
        }
        self.odd |= self.peek() != Some(b'n');
        self.skip().map(|()| false)
    }

    /// Like [`array`](Self::array), but steps over null, and over another type while noting it as odd.
    #[inline]
    pub(crate) fn array_or_skip(
        &mut self,
        element: impl FnMut(&mut Self) -> Result<(), Fault>,
    ) -> Result<bool, Fault> {
        if self.peek() == Some(b'[') {
            return self.array(element).map(|()| true);
        }
        self.odd |= self.peek() != Some(b'n');
        self.skip().map(|()| false)
    }

    /// The next value if it is a string (raw, between its quotes); another type is stepped over.
    #[inline]
    pub(crate) fn string_or_skip(&mut self) -> Result<Option<&'a [u8]>, Fault> {
        match self.peek() {
            Some(b'"') => self.quoted().map(Some),
            _ => self.skip().map(|()| None),
        }
    }

    /// The next value as a whole number; null is `None`, anything else is `None` and odd.
    pub(crate) fn whole_number(&mut self) -> Result<Option<u64>, Fault> {
        let null = self.peek() == Some(b'n');
        let text = self.value()?;
        let number = whole(text);
        self.odd |= number.is_none() && !null;
        Ok(number)
    }

    /// Steps over a value and tells whether it says something: not null, false, 0, or empty.
    #[inline]
    pub(crate) fn truthy(&mut self) -> Result<bool, Fault> {
        match self.peek() {
            Some(b'"') => self.quoted().map(|s| !s.is_empty()),
            Some(open @ (b'{' | b'[')) => {
                let mut ahead = Self {
                    bytes: self.bytes,
                    pos: self.pos + 1,
                    depth: 0,
                    odd: false,
                };
                let close = if open == b'{' { b'}' } else { b']' };
                let full = ahead.peek() != Some(close);
                self.skip().map(|()| full)
            }
            Some(b'n' | b'f') => self.skip().map(|()| false),
            _ => {
                let text = self.value()?;
                Ok(text.iter().any(|b| matches!(b, b'1'..=b'9' | b't')))
            }
        }
    }

    /// Steps over a value and gives its text.
    pub(crate) fn value(&mut self) -> Result<&'a [u8], Fault> {
        self.peek();
        let start = self.pos;
        self.skip()?;
        Ok(self.bytes.get(start..self.pos).unwrap_or_default())
    }

    /// The text is one value and nothing else.
    pub(crate) fn check(mut self) -> Result<(), Fault> {
        self.skip()?;
        self.end()
    }

    /// Nothing but white space may follow.
    pub(crate) fn end(&mut self) -> Result<(), Fault> {
        match self.peek() {
            None => Ok(()),
            Some(_) => self.fault("has more text after its end"),
        }
    }

    /// Takes a `"key":` and gives the key, raw.
    #[inline]
    fn key(&mut self) -> Result<&'a [u8], Fault> {
        if self.peek() != Some(b'"') {
            return self.fault("needs a key in double quotes");
        }
        let key = self.quoted()?;
        if self.peek() != Some(b':') {
            return self.fault("needs `:` after a key");
        }
        self.pos += 1;
        Ok(key)
    }

    fn open(&mut self, bracket: u8) -> Result<(), Fault> {
        if self.peek() != Some(bracket) {
            return self.fault(if bracket == b'{' {
                "is not an object"
            } else {
                "is not an array"
            });
        }
        if self.depth >= DEPTH_LIMIT {
            return self.fault(TOO_DEEP);
        }
        self.pos += 1;
        self.depth += 1;
        Ok(())
    }

    fn close(&mut self, bracket: u8) -> bool {
        let closed = self.peek() == Some(bracket);
        if closed {
            self.pos += 1;
            self.depth = self.depth.saturating_sub(1);
        }
        closed
    }

    /// Takes a string and gives what stands between its quotes, escapes untouched (but checked).
    #[inline]
    pub(crate) fn string(&mut self) -> Result<&'a [u8], Fault> {
        if self.peek() != Some(b'"') {
            return self.fault("needs a string");
        }
        self.quoted()
    }

    /// Takes the string whose opening quote stands here.
    #[inline]
    fn quoted(&mut self) -> Result<&'a [u8], Fault> {
        let start = self.pos + 1;
        let text = self.bytes.get(start..).unwrap_or_default();
        let run = plain_run(text);
        self.pos = start + run;
        // Nearly all strings are plain up to their end.
        if text.get(run) == Some(&b'"') {
            self.pos += 1;
            return Ok(text.get(..run).unwrap_or_default());
        }
        self.quoted_rest(start)
    }

    /// Goes on behind the plain beginning of a string.
    #[cold]
    fn quoted_rest(&mut self, start: usize) -> Result<&'a [u8], Fault> {
        loop {
            let rest = self.bytes.get(self.pos..).unwrap_or_default();
            self.pos += plain_run(rest);
            match self.bytes.get(self.pos) {
                Some(b'"') => {
                    let raw = self.bytes.get(start..self.pos).unwrap_or_default();
                    self.pos += 1;
                    return Ok(raw);
                }
                Some(b'\\') => self.escape()?,
                Some(_) => return self.fault("has a raw control character in a string; escape it"),
                None => return self.fault("ends inside a string"),
            }
        }
    }

    fn escape(&mut self) -> Result<(), Fault> {
        match self.bytes.get(self.pos + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.pos += 2,
            Some(b'u') => {
                let digits = self.bytes.get(self.pos + 2..self.pos + 6);
                if !digits.is_some_and(|d| d.iter().all(u8::is_ascii_hexdigit)) {
                    return self.fault("has a `\\u` escape without four hex digits");
                }
                self.pos += 6;
            }
            _ => return self.fault("has an escape JSON does not know"),
        }
        Ok(())
    }

    fn scalar(&mut self) -> Result<(), Fault> {
        match self.peek() {
            Some(b'"') => self.quoted().map(|_| ()),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.literal(b"true"),
            Some(b'f') => self.literal(b"false"),
            Some(b'n') => self.literal(b"null"),
            Some(_) => self.fault("has something that is not a JSON value"),
            None => self.fault("ends where a value should be"),
        }
    }

    fn literal(&mut self, word: &[u8]) -> Result<(), Fault> {
        if self.bytes.get(self.pos..self.pos + word.len()) != Some(word) {
            return self.fault("has a word that is not true, false or null");
        }
        self.pos += word.len();
        Ok(())
    }

    fn number(&mut self) -> Result<(), Fault> {
        if self.bytes.get(self.pos) == Some(&b'-') {
            self.pos += 1;
        }
        if self.bytes.get(self.pos) == Some(&b'0') {
            self.pos += 1;
        } else {
            self.digits()?;
        }
        if self.bytes.get(self.pos) == Some(&b'.') {
            self.pos += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.bytes.get(self.pos) {
            self.pos += 1;
            if let Some(b'+' | b'-') = self.bytes.get(self.pos) {
                self.pos += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), Fault> {
        let rest = self.bytes.get(self.pos..).unwrap_or_default();
        let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
        if digits == 0 {
            return self.fault("has a number that JSON does not allow");
        }
        self.pos += digits;
        Ok(())
    }

    /// Steps over one value of any kind and checks it on the way.
    #[inline]
    pub(crate) fn skip(&mut self) -> Result<(), Fault> {
        match self.peek() {
            Some(b'{' | b'[') => self.skip_container(),
            _ => self.scalar(),
        }
    }

    fn skip_container(&mut self) -> Result<(), Fault> {
        let mut open = Brackets::default();
        loop {
            match self.peek() {
                Some(bracket @ (b'{' | b'[')) => {
                    if self.depth + open.depth >= DEPTH_LIMIT {
                        return self.fault(TOO_DEEP);
                    }
                    self.pos += 1;
                    open.push(bracket == b'{');
                    let close = if bracket == b'{' { b'}' } else { b']' };
                    if self.peek() != Some(close) {
                        if bracket == b'{' {
                            self.key()?;
                        }
                        continue;
                    }
                    self.pos += 1;
                    open.pop();
                }
                _ => self.scalar()?,
            }
            if self.after_value(&mut open)? {
                return Ok(());
            }
        }
    }

    /// Takes what may follow a value: closing brackets, or a comma (and the next key). True: all is closed.
    fn after_value(&mut self, open: &mut Brackets) -> Result<bool, Fault> {
        while let Some(object) = open.top() {
            match (self.peek(), object) {
                (Some(b','), _) => {
                    self.pos += 1;
                    if object {
                        self.key()?;
                    }
                    return Ok(false);
                }
                (Some(b'}'), true) | (Some(b']'), false) => {
                    self.pos += 1;
                    open.pop();
                }
                (_, true) => return self.fault("needs `,` or `}` after a value in an object"),
                (_, false) => return self.fault("needs `,` or `]` after a value in an array"),
            }
        }
        Ok(true)
    }
}

/// Open brackets, one bit each: set for an object.
#[derive(Debug, Default)]
struct Brackets {
    words: [u64; DEPTH_LIMIT / 64],
    depth: usize,
}

impl Brackets {
    fn push(&mut self, object: bool) {
        let bit = 1u64 << (self.depth % 64);
        if let Some(word) = self.words.get_mut(self.depth / 64) {
            *word = if object { *word | bit } else { *word & !bit };
        }
        self.depth += 1;
    }

    const fn pop(&mut self) {
        self.depth = self.depth.saturating_sub(1);
    }

    fn top(&self) -> Option<bool> {
        let at = self.depth.checked_sub(1)?;
        self.words
            .get(at / 64)
            .map(|word| word >> (at % 64) & 1 == 1)
    }
}

const fn repeat(byte: u8) -> u64 {
    u64::from_le_bytes([byte; 8])
}

/// How many leading bytes need no thought inside a string: no quote, backslash or control character.
#[inline]
fn plain_run(bytes: &[u8]) -> usize {
    let mut run = 0;
    let mut rest = bytes;
    while let Some((eight, tail)) = rest.split_first_chunk::<8>() {
        let word = u64::from_le_bytes(*eight);
        let quote = word ^ repeat(b'"');
        let slash = word ^ repeat(b'\\');
        // The lowest set bit is exact: a borrow can only disturb bytes above a true hit.
        let hit = (quote.wrapping_sub(repeat(1)) & !quote
            | slash.wrapping_sub(repeat(1)) & !slash
            | word.wrapping_sub(repeat(0x20)) & !word)
            & repeat(0x80);
        if hit != 0 {
            return run + (hit.trailing_zeros() / 8) as usize;
        }
        run += 8;
        rest = tail;
    }
    run + rest
        .iter()
        .position(|b| matches!(b, b'"' | b'\\' | 0..0x20))
        .unwrap_or(rest.len())
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
