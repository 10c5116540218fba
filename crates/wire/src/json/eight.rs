//! Runs of bytes, looked at eight at a time: as one number, the first of them lowest.

const fn repeat(byte: u8) -> u64 {
    u64::from_le_bytes([byte; 8])
}

/// Sets the highest bit of each byte that is a quote, a backslash or a control character, and clears the other bits. What it says of those
/// behind the first may be wrong (a borrow out of it).
#[inline]
const fn not_plain(eight: u64) -> u64 {
    // A flipped 2 makes the quote a neighbour of the control characters, and keeps those among themselves.
    let low = (eight ^ repeat(0x02)).wrapping_sub(repeat(0x21));
    let slash = (eight ^ repeat(b'\\')).wrapping_sub(repeat(1));
    (low | slash) & !eight & repeat(0x80)
}

/// The same for all that is no digit.
#[inline]
const fn no_digit(eight: u64) -> u64 {
    let digits = eight ^ repeat(b'0');
    (digits.wrapping_add(repeat(0x80 - 10)) | digits) & repeat(0x80)
}

/// How many bytes come before the first that is marked.
#[inline]
const fn before(marks: u64) -> usize {
    (marks.trailing_zeros() / 8) as usize
}

/// How many of these bytes need no thought inside a string: come before a quote, a backslash or a control character.
#[inline]
pub(super) fn short_plain_run(text: &[u8; 16]) -> usize {
    let ([low, high], []) = text.as_chunks::<8>() else {
        return 0;
    };
    let marks = not_plain(u64::from_le_bytes(*low));
    if marks != 0 {
        return before(marks);
    }
    8 + before(not_plain(u64::from_le_bytes(*high)))
}

/// The same of a text of any length.
#[inline]
pub(super) fn plain_run(text: &[u8]) -> usize {
    run(text, not_plain)
}

/// How many bytes come before one that is no digit.
#[inline]
pub(super) fn digit_run(text: &[u8]) -> usize {
    run(text, no_digit)
}

#[inline]
fn run(text: &[u8], marks: impl Fn(u64) -> u64) -> usize {
    let mut at = 0;
    let mut rest = text;
    while let Some((eight, tail)) = rest.split_first_chunk::<8>() {
        let run = before(marks(u64::from_le_bytes(*eight)));
        if run < 8 {
            return at + run;
        }
        at += 8;
        rest = tail;
    }
    let unmarked = |byte: &&u8| marks(u64::from(**byte)) & 0x80 == 0;
    at + rest.iter().take_while(unmarked).count()
}
