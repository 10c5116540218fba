//! A cursor over JSON text: walks once, decodes nothing it is not asked for, never recurses.
//!
//! Bodies and events are small and full of short strings, so a member is what costs. What nearly all members look like (a short key, no
//! white space about it) is taken with one look; the rest is read with care, out of the way.
//!
//! Compare keys with `==`, one after the other: that is a load and a comparison each, where a `match` goes through a key byte by byte.

mod eight;
mod ends;

use crate::text::whole;
use ends::{after, any_key, blank, short_key, value_end};
pub(crate) use ends::{plain_number, string_end};

/// Containers nested deeper than this are refused. Python's own reader gives up near 1000.
pub(crate) const DEPTH_LIMIT: usize = 1024;

/// Why the text was refused, and where. Boxed, so that a result fits two registers.
pub(crate) type Fault = Box<Flaw>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flaw {
    /// In bytes from the start of the text.
    pub(crate) at: usize,
    pub(crate) what: &'static str,
}

const TOO_DEEP: &str = "is nested more than 1024 levels deep";
const NO_VALUE: &str = "has something that is not a JSON value";
const NO_TEXT: &str = "ends where a value should be";

#[cold]
#[inline(never)]
fn fault<T>(at: usize, what: &'static str) -> Result<T, Fault> {
    Err(Box::new(Flaw { at, what }))
}

/// What must follow a value in an object, or else in an array.
const fn behind(object: bool) -> &'static str {
    if object {
        "needs `,` or `}` after a value in an object"
    } else {
        "needs `,` or `]` after a value in an array"
    }
}

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
    text: &'a [u8],
    pos: usize,
    depth: usize,
    /// A value of an unexpected type was met and stepped over.
    pub(crate) odd: bool,
}

impl<'a> Cursor<'a> {
    #[inline]
    pub(crate) const fn new(text: &'a [u8]) -> Self {
        Self {
            text,
            pos: 0,
            depth: 0,
            odd: false,
        }
    }

    #[inline]
    pub(crate) const fn pos(&self) -> usize {
        self.pos
    }

    /// The next byte that is not white space, without taking it.
    #[inline]
    pub(crate) fn peek(&mut self) -> Option<u8> {
        match self.text.get(self.pos) {
            Some(byte) if *byte > b' ' => Some(*byte),
            _ => {
                self.pos = blank(self.text, self.pos);
                self.text.get(self.pos).copied()
            }
        }
    }

    /// The kind of the next value, judged by its first byte.
    #[inline]
    pub(crate) fn kind(&mut self) -> Result<Kind, Fault> {
        Ok(match self.peek() {
            Some(b'{') => Kind::Object,
            Some(b'[') => Kind::Array,
            Some(b'"') => Kind::String,
            Some(b'-' | b'0'..=b'9') => Kind::Number,
            Some(b't' | b'f') => Kind::Bool,
            Some(b'n') => Kind::Null,
            Some(_) => return fault(self.pos, NO_VALUE),
            None => return fault(self.pos, NO_TEXT),
        })
    }

    /// Walks an object; `member` gets each key (raw, between its quotes) and must take the value.
    #[inline]
    pub(crate) fn object<E: From<Fault>>(
        &mut self,
        mut member: impl FnMut(&mut Self, &'a [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.open(b'{')?;
        if self.take(b'}') {
            return Ok(());
        }
        self.depth += 1;
        loop {
            let (key, next) = match short_key(self.text, self.pos) {
                Some(found) => found,
                None => any_key(self.text, self.pos)?,
            };
            self.pos = next;
            member(self, key)?;
            if self.take(b',') {
                continue;
            }
            if !self.take(b'}') {
                return Ok(fault(blank(self.text, self.pos), behind(true))?);
            }
            self.depth -= 1;
            return Ok(());
        }
    }

    /// Walks an array; `element` must take each value.
    #[inline]
    pub(crate) fn array<E: From<Fault>>(
        &mut self,
        mut element: impl FnMut(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        self.open(b'[')?;
        if self.take(b']') {
            return Ok(());
        }
        self.depth += 1;
        loop {
            element(self)?;
            if self.take(b',') {
                continue;
            }
            if !self.take(b']') {
                return Ok(fault(blank(self.text, self.pos), behind(false))?);
            }
            self.depth -= 1;
            return Ok(());
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
        Ok(match self.value()? {
            [b'"', raw @ .., b'"'] => Some(raw),
            _ => None,
        })
    }

    /// The next value as a whole number; null is `None`, anything else is `None` and odd.
    #[inline]
    pub(crate) fn whole_number(&mut self) -> Result<Option<u64>, Fault> {
        self.peek();
        if let Some((number, end)) = plain_number(self.text, self.pos) {
            self.pos = end;
            return Ok(Some(number));
        }
        self.other_number()
    }

    #[inline(never)]
    fn other_number(&mut self) -> Result<Option<u64>, Fault> {
        let text = self.value()?;
        let number = whole(text);
        self.odd |= number.is_none() && text != b"null";
        Ok(number)
    }

    /// Steps over a value and tells whether it says something: not null, false, 0, or empty.
    #[inline]
    pub(crate) fn truthy(&mut self) -> Result<bool, Fault> {
        let text = self.value()?;
        Ok(match text.first() {
            Some(b'"') => text.len() > 2,
            Some(b'{') => after(text, 1, b'}').is_none(),
            Some(b'[') => after(text, 1, b']').is_none(),
            _ => text.iter().any(|b| matches!(b, b'1'..=b'9' | b't')),
        })
    }

    /// Takes a string and gives what stands between its quotes, escapes untouched (but checked).
    pub(crate) fn string(&mut self) -> Result<&'a [u8], Fault> {
        if self.peek() != Some(b'"') {
            return fault(self.pos, "needs a string");
        }
        self.string_or_skip().map(Option::unwrap_or_default)
    }

    /// Steps over a value and gives its text.
    #[inline]
    pub(crate) fn value(&mut self) -> Result<&'a [u8], Fault> {
        self.peek();
        let start = self.pos;
        self.skip()?;
        Ok(self.text.get(start..self.pos).unwrap_or_default())
    }

    /// Steps over one value of any kind and checks it on the way.
    #[inline]
    pub(crate) fn skip(&mut self) -> Result<(), Fault> {
        self.pos = value_end(self.text, self.pos, self.depth)?;
        Ok(())
    }

    /// The text is one value and nothing else.
    pub(crate) fn check(mut self) -> Result<(), Fault> {
        self.skip()?;
        self.end()
    }

    /// Nothing but white space may follow.
    #[inline]
    pub(crate) fn end(&mut self) -> Result<(), Fault> {
        match self.peek() {
            None => Ok(()),
            Some(_) => fault(self.pos, "has more text after its end"),
        }
    }

    /// Takes an opening bracket.
    #[inline]
    fn open(&mut self, bracket: u8) -> Result<(), Fault> {
        if self.peek() != Some(bracket) {
            let object = bracket == b'{';
            let what = if object {
                "is not an object"
            } else {
                "is not an array"
            };
            return fault(self.pos, what);
        }
        if self.depth >= DEPTH_LIMIT {
            return fault(self.pos, TOO_DEEP);
        }
        self.pos += 1;
        Ok(())
    }

    /// Takes this byte if it stands next.
    #[inline]
    fn take(&mut self, wanted: u8) -> bool {
        match after(self.text, self.pos, wanted) {
            Some(next) => {
                self.pos = next;
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
