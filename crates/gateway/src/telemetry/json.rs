//! One flat JSON object, written field by field.
//!
//! A line of the access log is the same thirty fields for every call, most of them short; a general serializer spends more on each than on
//! all of the parsing of the call's own JSON.

use std::io::Write;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

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
        $crate::telemetry::json::put($out, concat!(",\"", stringify!($name), "\":"), $name)
    };
    (@fields $out:ident, $outer:ident: $($name:ident),*) => {
        $($crate::telemetry::json::object!(@fields $out, $name);)*
    };
}
pub(super) use object;

/// What a field can hold.
pub(super) trait Value {
    fn is_absent(&self) -> bool {
        false
    }

    fn write(&self, out: &mut Vec<u8>);
}

/// One field, its name given with all that stands around it.
#[inline]
pub(super) fn put(out: &mut Vec<u8>, name: &str, value: &impl Value) {
    if !value.is_absent() {
        out.extend_from_slice(name.as_bytes());
        value.write(out);
    }
}

impl<T: Value> Value for Option<T> {
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
    fn write(&self, out: &mut Vec<u8>) {
        let plain = |b: u8| (b >= b' ') & (b != b'"') & (b != b'\\');
        // No early way out: so the compiler looks at many bytes at once.
        if self.bytes().fold(true, |all, b| all & plain(b)) {
            out.push(b'"');
            out.extend_from_slice(self.as_bytes());
            out.push(b'"');
        } else {
            // Writing into memory cannot fail.
            let _ = serde_json::to_writer(out, self);
        }
    }
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
                out.extend_from_slice(itoa::Buffer::new().format(*self).as_bytes());
            }
        }
    )*};
}
whole_numbers!(u16 u32 u64);

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
        let micros = u64::try_from(self.as_nanos().saturating_add(500) / 1000).unwrap_or(u64::MAX);
        (micros / 1000).write(out);
        let digit = |unit: u64| b'0' + (micros / unit % 10) as u8;
        out.extend_from_slice(&[b'.', digit(100), digit(10), digit(1)]);
    }
}

/// RFC 3339, UTC, with milliseconds.
impl Value for SystemTime {
    fn write(&self, out: &mut Vec<u8>) {
        let _ = write!(out, "\"{}\"", humantime::format_rfc3339_millis(*self));
    }
}

impl Value for SocketAddr {
    fn write(&self, out: &mut Vec<u8>) {
        let Self::V4(v4) = self else {
            let _ = write!(out, "\"{self}\"");
            return;
        };
        let mut separator = b'"';
        for part in v4.ip().octets() {
            out.push(separator);
            u16::from(part).write(out);
            separator = b'.';
        }
        out.push(b':');
        v4.port().write(out);
        out.push(b'"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: &impl Value) -> String {
        let mut out = Vec::new();
        value.write(&mut out);
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
    fn times_are_milliseconds_rounded_to_the_microsecond() {
        for (nanos, shown) in [
            (0, "0.000"),
            (499, "0.000"),
            (500, "0.001"),
            (1_234_567, "1.235"),
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
