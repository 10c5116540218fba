//! One flat JSON object, written field by field.
//!
//! A line of the access log is the same thirty fields for every call, most of them short; a general serializer spends more on each than on
//! all of the parsing of the call's own JSON.

use std::cell::Cell;
use std::io::Write;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Writes the named fields of `$from`, in this order, under their own names; what is `None` is left out. Names every field of the struct, or
/// does not compile.
macro_rules! object {
    ($out:expr, $from:expr, { $($name:ident $(: $inner:ident { $($field:ident),* })?),* }) => {{
        let Self { $($name $(: $inner { $($field),* })?),* } = $from;
        let out: &mut Vec<u8> = $out;
        let begin = out.len();
        $($crate::telemetry::json::object!(@fields out, $name $(: $($field),*)?);)*
        if let Some(comma) = out.get_mut(begin) {
            *comma = b'{';
        }
        out.push(b'}');
    }};
    (@fields $out:ident, $name:ident) => {
        $crate::telemetry::json::put(
            $out,
            concat!(",\"", stringify!($name), "\":"),
            concat!(",\"", stringify!($name), "\":\""),
            $name,
        )
    };
    (@fields $out:ident, $outer:ident: $($name:ident),*) => {
        $($crate::telemetry::json::object!(@fields $out, $name);)*
    };
}
pub(super) use object;

/// What a field can hold.
pub(super) trait Value {
    /// It stands in quotes. The first of them is written with the field's name.
    const QUOTED: bool = false;

    fn is_absent(&self) -> bool {
        false
    }

    fn write(&self, out: &mut Vec<u8>);
}

/// One field, its name given with all that stands around it, before a bare value and before one in quotes.
#[inline]
pub(super) fn put<V: Value>(out: &mut Vec<u8>, bare: &str, quoted: &str, value: &V) {
    if !value.is_absent() {
        let name = if V::QUOTED { quoted } else { bare };
        out.extend_from_slice(name.as_bytes());
        value.write(out);
    }
}

impl<T: Value> Value for Option<T> {
    const QUOTED: bool = T::QUOTED;

    fn is_absent(&self) -> bool {
        self.is_none()
    }

    fn write(&self, out: &mut Vec<u8>) {
        if let Some(value) = self {
            value.write(out);
        }
    }
}

impl Value for &str {
    const QUOTED: bool = true;

    fn write(&self, out: &mut Vec<u8>) {
        if is_plain(self.as_bytes()) {
            plain(out, self);
        } else {
            // The serializer has quotes of its own. Writing into memory cannot fail.
            out.pop();
            let _ = serde_json::to_writer(out, self);
        }
    }
}

/// Text in which nothing needs an escape: out of a closed set, or of a form that holds nothing of the kind.
#[derive(Clone, Copy, Debug)]
pub struct Word<'a>(pub &'a str);

impl Value for Word<'_> {
    const QUOTED: bool = true;

    fn write(&self, out: &mut Vec<u8>) {
        debug_assert!(is_plain(self.0.as_bytes()), "{}", self.0);
        plain(out, self.0);
    }
}

fn plain(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(text.as_bytes());
    out.push(b'"');
}

/// Nothing in it needs an escape: no control character, no quote, no backslash. Eight bytes at a time, the last eight once more if they are no
/// whole step.
fn is_plain(text: &[u8]) -> bool {
    let (steps, rest) = text.as_chunks::<8>();
    let step = |step: &[u8; 8]| needs_escape(u64::from_le_bytes(*step));
    let in_steps = steps.iter().fold(0, |found, it| found | step(it));
    let in_rest = match (rest.is_empty(), text.last_chunk::<8>()) {
        (true, _) => 0,
        (false, Some(last)) => step(last),
        (false, None) => {
            let word = rest
                .iter()
                .fold(u64::MAX, |word, byte| word << 8 | u64::from(*byte));
            needs_escape(word)
        }
    };
    in_steps | in_rest == 0
}

/// Not zero: one of these eight bytes must not stand in a JSON string as it is.
fn needs_escape(word: u64) -> u64 {
    const ONES: u64 = u64::MAX / 255;
    const HIGH: u64 = ONES << 7;
    // A byte below `least`; one with its high bit set is none.
    let below = |word: u64, least: u64| word.wrapping_sub(ONES * least) & !word & HIGH;
    let is = |byte: u8| below(word ^ (ONES * u64::from(byte)), 1);
    below(word, 0x20) | is(b'"') | is(b'\\')
}

impl Value for bool {
    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(if *self { b"true" } else { b"false" });
    }
}

macro_rules! whole_numbers {
    ($($number:ty)*) => {$(
        impl Value for $number {
            fn write(&self, out: &mut Vec<u8>) {
                whole(out, u64::from(*self));
            }
        }
    )*};
}
whole_numbers!(u16 u32 u64);

fn whole(out: &mut Vec<u8>, number: u64) {
    if number < 10 {
        out.push(digit(number as u32));
    } else {
        out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    }
}

fn digit(number: u32) -> u8 {
    b'0' + number as u8
}

/// Of a number below a thousand.
fn digits(number: u32) -> [u8; 3] {
    [
        digit(number / 100),
        digit(number / 10 % 10),
        digit(number % 10),
    ]
}

/// Finite; anything else is no JSON.
impl Value for f64 {
    fn is_absent(&self) -> bool {
        !self.is_finite()
    }

    fn write(&self, out: &mut Vec<u8>) {
        let _ = write!(out, "{self}");
    }
}

/// Milliseconds with three digits behind the point.
impl Value for Duration {
    fn write(&self, out: &mut Vec<u8>) {
        // What is rounded up may make a whole second of it.
        let micros = (self.subsec_nanos() + 500) / 1000;
        let [a, b, c] = digits(micros % 1000);
        let seconds = self.as_secs().saturating_mul(1000);
        let millis = seconds.saturating_add(u64::from(micros / 1000));
        if millis < 10 {
            out.extend_from_slice(&[digit(millis as u32), b'.', a, b, c]);
        } else {
            whole(out, millis);
            out.extend_from_slice(&[b'.', a, b, c]);
        }
    }
}

/// Of RFC 3339 as far as the second, with the point behind it.
type Date = [u8; 20];

thread_local! {
    /// The last second that was written: the next line is mostly of the same.
    static SECOND: Cell<(u64, Date)> = const { Cell::new((0, *b"1970-01-01T00:00:00.")) };
}

/// RFC 3339 knows no year beyond 9999.
const LAST_SECOND: u64 = 253_402_300_799;

/// RFC 3339, UTC, with milliseconds.
impl Value for SystemTime {
    const QUOTED: bool = true;

    fn write(&self, out: &mut Vec<u8>) {
        let since = self.duration_since(UNIX_EPOCH).unwrap_or_default();
        let [a, b, c] = digits(since.subsec_millis());
        out.extend_from_slice(&date(since.as_secs().min(LAST_SECOND)));
        out.extend_from_slice(&[a, b, c, b'Z', b'"']);
    }
}

fn date(second: u64) -> Date {
    let (known, date) = SECOND.get();
    if known == second {
        return date;
    }
    let time = UNIX_EPOCH + Duration::from_secs(second);
    let text = humantime::format_rfc3339_millis(time).to_string();
    let Some(date) = text.as_bytes().first_chunk() else {
        return date;
    };
    SECOND.set((second, *date));
    *date
}

impl Value for SocketAddr {
    const QUOTED: bool = true;

    fn write(&self, out: &mut Vec<u8>) {
        let Self::V4(v4) = self else {
            let _ = write!(out, "{self}\"");
            return;
        };
        // Each with the point behind it; the last one's is a colon.
        for (part, end) in v4.ip().octets().into_iter().zip(*b"...:") {
            let [a, b, c] = digits(part.into());
            match part {
                0..10 => out.extend_from_slice(&[c, end]),
                10..100 => out.extend_from_slice(&[b, c, end]),
                100.. => out.extend_from_slice(&[a, b, c, end]),
            }
        }
        whole(out, u64::from(v4.port()));
        out.push(b'"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As it stands behind a name.
    fn text(value: &impl Value) -> String {
        let mut out = Vec::new();
        put(&mut out, "", "\"", value);
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn text_is_quoted_as_a_json_parser_reads_it() {
        for given in ["", "plain", "a\"b", "a\\b", "a\nb\u{1}", "ü\u{7f}\u{2028}"] {
            let read: String = serde_json::from_str(&text(&given)).expect("JSON");
            assert_eq!(read, given);
        }
    }

    #[test]
    fn what_needs_an_escape_is_found_wherever_it_stands() {
        for length in 0..40 {
            let plain = "ü~ ".chars().cycle().take(length).collect::<String>();
            assert!(is_plain(plain.as_bytes()), "{plain}");
            for place in 0..length {
                for bad in (0..0x20).chain([b'"', b'\\']) {
                    let mut text = vec![b'a'; length];
                    text[place] = bad;
                    assert!(!is_plain(&text), "{text:?}");
                }
            }
        }
        for byte in (0x20..=0xff).filter(|byte| !b"\"\\".contains(byte)) {
            assert!(is_plain(&[byte; 11]), "{byte}");
        }
    }

    #[test]
    fn moments_are_as_rfc_3339_has_them() {
        for (millis, shown) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (1_709_210_096_789, "2024-02-29T12:34:56.789Z"),
            (1_709_210_096_007, "2024-02-29T12:34:56.007Z"),
            (1_709_210_097_000, "2024-02-29T12:34:57.000Z"),
            (999, "1970-01-01T00:00:00.999Z"),
            (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
            (253_402_300_800_000, "9999-12-31T23:59:59.000Z"),
        ] {
            let time = UNIX_EPOCH + Duration::from_millis(millis);
            assert_eq!(text(&time), format!("\"{shown}\""));
        }
        let before = UNIX_EPOCH - Duration::from_secs(1);
        assert_eq!(text(&before), "\"1970-01-01T00:00:00.000Z\"");
    }

    #[test]
    fn numbers_are_whole() {
        for number in [0, 9, 10, 99, 65_535, u64::MAX] {
            assert_eq!(text(&number), number.to_string());
        }
    }

    #[test]
    fn times_are_milliseconds_rounded_to_the_microsecond() {
        for (nanos, shown) in [
            (0, "0.000"),
            (499, "0.000"),
            (500, "0.001"),
            (1_234_567, "1.235"),
            (9_999_499, "9.999"),
            (9_999_500, "10.000"),
            (999_999_500, "1000.000"),
            (61_000_040_000, "61000.040"),
        ] {
            assert_eq!(text(&Duration::from_nanos(nanos)), shown);
        }
    }

    #[test]
    fn addresses_are_as_everybody_writes_them() {
        for address in [
            "127.0.0.1:80",
            "255.10.0.99:65535",
            "9.100.199.250:9",
            "[::1]:8080",
            "[2001:db8::7]:1",
        ] {
            assert_eq!(
                text(&address.parse::<SocketAddr>().expect("one")),
                format!("\"{address}\"")
            );
        }
    }
}
