//! Where keys and values end: from one place in a text to another.
//!
//! No state but the place is handed on, so that a cursor can live in registers. Containers are gone through with a bit stack of fixed size:
//! hostile nesting costs neither the call stack nor the heap.

use super::{DEPTH_LIMIT, Fault, NO_TEXT, NO_VALUE, TOO_DEEP, behind, eight, fault};

/// Where the text goes on behind white space.
#[inline(never)]
pub(super) fn blank(text: &[u8], mut at: usize) -> usize {
    while let Some(b' ' | b'\n' | b'\t' | b'\r') = text.get(at) {
        at += 1;
    }
    at
}

/// Where the text goes on behind this byte, if it stands next.
#[inline]
pub(super) fn after(text: &[u8], at: usize, wanted: u8) -> Option<usize> {
    match text.get(at) {
        Some(byte) if *byte == wanted => Some(at + 1),
        Some(byte) if *byte > b' ' => None,
        _ => after_blank(text, at, wanted),
    }
}

#[inline(never)]
fn after_blank(text: &[u8], at: usize, wanted: u8) -> Option<usize> {
    let at = blank(text, at);
    (text.get(at) == Some(&wanted)).then_some(at + 1)
}

/// The key that stands here and where its value begins, if it is as nearly all are: plain, at most 16 bytes, no white space about it.
#[inline]
pub(super) fn short_key(text: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let [b'"', window @ ..] = text.get(at..)?.first_chunk::<19>()? else {
        return None;
    };
    let len = eight::short_plain_run(window.first_chunk()?);
    (window.get(len..len + 2)? == b"\":").then_some((window.get(..len)?, at + len + 3))
}

/// The key that stands here, and where its value begins.
#[inline(never)]
pub(super) fn any_key(text: &[u8], at: usize) -> Result<(&[u8], usize), Fault> {
    let Some(start) = after(text, at, b'"') else {
        return fault(blank(text, at), "needs a key in double quotes");
    };
    let end = any_string_end(text, start)?;
    let Some(next) = after(text, end, b':') else {
        return fault(blank(text, end), "needs `:` after a key");
    };
    Ok((text.get(start..end - 1).unwrap_or_default(), next))
}

/// Where the value ends that starts here, within this many containers.
pub(super) fn value_end(text: &[u8], at: usize, depth: usize) -> Result<usize, Fault> {
    match text.get(at) {
        Some(b'"') => string_end(text, at + 1),
        Some(b'{' | b'[') => container_end(text, at, depth),
        Some(b' ' | b'\n' | b'\t' | b'\r') => value_end_behind_blank(text, at, depth),
        _ => scalar_end(text, at),
    }
}

#[inline(never)]
fn value_end_behind_blank(text: &[u8], at: usize, depth: usize) -> Result<usize, Fault> {
    value_end(text, blank(text, at), depth)
}

/// Where a container ends that starts here.
#[inline(never)]
fn container_end(text: &[u8], mut at: usize, depth: usize) -> Result<usize, Fault> {
    let mut open = Brackets::NONE;
    loop {
        at = match text.get(at) {
            Some(b'"') => string_end(text, at + 1)?,
            Some(bracket @ (b'{' | b'[')) => {
                if depth + open.depth >= DEPTH_LIMIT {
                    return fault(at, TOO_DEEP);
                }
                let object = *bracket == b'{';
                match after(text, at + 1, closing(object)) {
                    Some(end) => end,
                    None => {
                        open.push(object);
                        at = value_start(text, at + 1, object)?;
                        continue;
                    }
                }
            }
            Some(b' ' | b'\n' | b'\t' | b'\r') => {
                at = blank(text, at);
                continue;
            }
            _ => scalar_end(text, at)?,
        };
        // Behind a value: closing brackets, or a comma and the next value.
        while let Some(object) = open.top() {
            if let Some(end) = after(text, at, b',') {
                at = value_start(text, end, object)?;
                break;
            }
            match after(text, at, closing(object)) {
                Some(end) => at = end,
                None => return fault(blank(text, at), behind(object)),
            }
            open.pop();
        }
        if open.depth == 0 {
            return Ok(at);
        }
    }
}

/// Where the next value starts: behind its key, if this is an object.
#[inline]
fn value_start(text: &[u8], at: usize, object: bool) -> Result<usize, Fault> {
    if !object {
        return Ok(at);
    }
    match short_key(text, at) {
        Some((_, start)) => Ok(start),
        None => Ok(any_key(text, at)?.1),
    }
}

const fn closing(object: bool) -> u8 {
    if object { b'}' } else { b']' }
}

/// Where a string ends, behind its quote, from a place within it.
#[inline]
pub(crate) fn string_end(text: &[u8], at: usize) -> Result<usize, Fault> {
    let Some(window) = text.get(at..).and_then(<[u8]>::first_chunk::<17>) else {
        return any_string_end(text, at);
    };
    let len = window.first_chunk().map_or(0, eight::short_plain_run);
    if window.get(len) == Some(&b'"') {
        return Ok(at + len + 1);
    }
    any_string_end(text, at + len)
}

#[inline(never)]
fn any_string_end(text: &[u8], at: usize) -> Result<usize, Fault> {
    let end = at + text.get(at..).map_or(0, eight::plain_run);
    if text.get(end) == Some(&b'"') {
        return Ok(end + 1);
    }
    escaped_string_end(text, end)
}

/// Where a string ends, from the place of its first escape, or of what is wrong with it.
#[cold]
#[inline(never)]
fn escaped_string_end(text: &[u8], mut at: usize) -> Result<usize, Fault> {
    loop {
        let rest = text.get(at..).unwrap_or_default();
        let run = eight::plain_run(rest);
        at += run;
        at += match rest.get(run..).unwrap_or_default() {
            [b'"', ..] => return Ok(at + 1),
            [b'\\', b'u', digits @ ..] => match digits.first_chunk::<4>() {
                Some(four) if four.iter().all(u8::is_ascii_hexdigit) => 6,
                _ => return fault(at, "has a `\\u` escape without four hex digits"),
            },
            [
                b'\\',
                b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't',
                ..,
            ] => 2,
            [b'\\', ..] => return fault(at, "has an escape JSON does not know"),
            [] => return fault(at, "ends inside a string"),
            _ => return fault(at, "has a raw control character in a string; escape it"),
        };
    }
}

/// Where the number or word ends that starts here.
fn scalar_end(text: &[u8], at: usize) -> Result<usize, Fault> {
    match text.get(at) {
        Some(b'n') => word_end(text, at, b"null"),
        Some(b'-' | b'0'..=b'9') => number_end(text, at),
        Some(b't') => word_end(text, at, b"true"),
        Some(b'f') => word_end(text, at, b"false"),
        Some(_) => fault(at, NO_VALUE),
        None => fault(at, NO_TEXT),
    }
}

#[inline]
fn word_end<const N: usize>(text: &[u8], at: usize, word: &[u8; N]) -> Result<usize, Fault> {
    if text.get(at..).and_then(<[u8]>::first_chunk) == Some(word) {
        return Ok(at + N);
    }
    fault(at, "has a word that is not true, false or null")
}

/// The number that stands here and where it ends, if it is a row of digits, as nearly all are, and surely fits.
#[inline]
pub(crate) fn plain_number(text: &[u8], at: usize) -> Option<(u64, usize)> {
    let (mut number, mut end) = (0_u64, at);
    while let Some(digit @ b'0'..=b'9') = text.get(end) {
        number = number
            .wrapping_mul(10)
            .wrapping_add(u64::from(digit - b'0'));
        end += 1;
    }
    let digits = if text.get(at) == Some(&b'0') {
        1
    } else {
        end - at
    };
    let plain =
        digits < 20 && at + digits == end && !matches!(text.get(end), Some(b'.' | b'e' | b'E'));
    (plain && digits > 0).then_some((number, end))
}

#[inline(never)]
fn number_end(text: &[u8], mut at: usize) -> Result<usize, Fault> {
    if text.get(at) == Some(&b'-') {
        at += 1;
    }
    if text.get(at) == Some(&b'0') {
        at += 1;
    } else {
        at = digits_end(text, at)?;
    }
    if text.get(at) == Some(&b'.') {
        at = digits_end(text, at + 1)?;
    }
    if let Some(b'e' | b'E') = text.get(at) {
        at += 1;
        if let Some(b'+' | b'-') = text.get(at) {
            at += 1;
        }
        at = digits_end(text, at)?;
    }
    Ok(at)
}

#[inline]
fn digits_end(text: &[u8], at: usize) -> Result<usize, Fault> {
    match text.get(at..).map_or(0, eight::digit_run) {
        0 => fault(at, "has a number that JSON does not allow"),
        run => Ok(at + run),
    }
}

/// Open brackets, one bit each: set for an object.
#[derive(Debug)]
struct Brackets {
    words: [u64; DEPTH_LIMIT / 64],
    depth: usize,
}

impl Brackets {
    const NONE: Self = Self {
        words: [0; DEPTH_LIMIT / 64],
        depth: 0,
    };

    /// The innermost of each 64 is the lowest bit of its word.
    fn push(&mut self, object: bool) {
        if let Some(word) = self.words.get_mut(self.depth / 64) {
            *word = *word << 1 | u64::from(object);
        }
        self.depth += 1;
    }

    fn pop(&mut self) {
        self.depth = self.depth.saturating_sub(1);
        if let Some(word) = self.words.get_mut(self.depth / 64) {
            *word >>= 1;
        }
    }

    fn top(&self) -> Option<bool> {
        let at = self.depth.checked_sub(1)?;
        self.words.get(at / 64).map(|word| word & 1 == 1)
    }
}
