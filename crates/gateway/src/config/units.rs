//! Durations and sizes as people write them: a whole number and a unit.
//!
//! A bare number is refused on purpose: nobody can tell whether `30` means seconds or milliseconds.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

const TIME_UNITS: [(&str, u64); 4] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)];
const SIZE_UNITS: [(&str, u64); 7] = [
    ("B", 1),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
];

/// A duration: `"500ms"`, `"30s"`, `"5m"`, `"1h"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub Duration);

/// A duration or `"off"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeOrOff {
    Off,
    On(Time),
}

/// A number of bytes: `"64KiB"`, `"64MB"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub usize);

/// Why a text is no duration or size, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    pub what: String,
    pub help: String,
}

// === impl Time ===

impl Time {
    pub const fn millis(ms: u64) -> Self {
        Self(Duration::from_millis(ms))
    }

    pub const fn secs(s: u64) -> Self {
        Self(Duration::from_secs(s))
    }

    pub fn parse(text: &str) -> Result<Self, Wrong> {
        let help = "write a whole number and a unit: \"500ms\", \"30s\", \"5m\" or \"1h\"";
        let ms = number_and_unit(text, &TIME_UNITS, help, |n| {
            format!("\"{n}s\" is {n} seconds, \"{n}ms\" is {n} milliseconds")
        })?;
        Ok(Self::millis(ms))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX);
        match ms {
            0 => f.write_str("0s"),
            _ if ms % 1_000 != 0 => write!(f, "{ms}ms"),
            // Up to ten minutes people compare in seconds.
            _ if ms % 60_000 != 0 || ms <= 600_000 => write!(f, "{}s", ms / 1_000),
            _ if ms % 3_600_000 != 0 => write!(f, "{}m", ms / 60_000),
            _ => write!(f, "{}h", ms / 3_600_000),
        }
    }
}

// === impl TimeOrOff ===

impl TimeOrOff {
    pub fn parse(text: &str) -> Result<Self, Wrong> {
        if text == "off" {
            return Ok(Self::Off);
        }
        Time::parse(text).map(Self::On).map_err(|wrong| Wrong {
            help: format!("{}, or \"off\"", wrong.help),
            ..wrong
        })
    }

    pub fn duration(self) -> Option<Duration> {
        match self {
            Self::Off => None,
            Self::On(time) => Some(time.0),
        }
    }
}

impl fmt::Display for TimeOrOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::On(time) => time.fmt(f),
        }
    }
}

impl From<Option<Duration>> for TimeOrOff {
    fn from(value: Option<Duration>) -> Self {
        value.map_or(Self::Off, |d| Self::On(Time(d)))
    }
}

// === impl Size ===

impl Size {
    pub const fn kib(n: usize) -> Self {
        Self(n << 10)
    }

    pub const fn mib(n: usize) -> Self {
        Self(n << 20)
    }

    pub fn parse(text: &str) -> Result<Self, Wrong> {
        let help = "write a whole number and a unit: \"64KiB\", \"64MiB\", \"1GiB\" (powers of 1024) or \"64KB\", \"64MB\", \"1GB\" (of 1000)";
        let bytes = number_and_unit(text, &SIZE_UNITS, help, |n| {
            format!("\"{n}KiB\", \"{n}MiB\", or \"{n}B\" for bytes")
        })?;
        usize::try_from(bytes).map(Self).map_err(|_| Wrong {
            what: "too large for this machine".into(),
            help: help.into(),
        })
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as u64;
        let exact = |(_, unit): &&(&str, u64)| bytes != 0 && bytes.is_multiple_of(*unit);
        // The shortest text: "64MB", not "62500KiB".
        let texts = SIZE_UNITS
            .iter()
            .filter(exact)
            .map(|(name, unit)| format!("{}{name}", bytes / unit));
        f.write_str(&texts.min_by_key(String::len).unwrap_or_else(|| "0B".into()))
    }
}

/// Splits `30s` in number and unit and multiplies them. `bare` suggests what a number without a unit may have meant.
fn number_and_unit(
    text: &str,
    units: &[(&str, u64)],
    help: &str,
    bare: impl Fn(u64) -> String,
) -> Result<u64, Wrong> {
    let wrong = |what: String| {
        Err(Wrong {
            what,
            help: help.to_owned(),
        })
    };
    if text.is_empty() {
        return wrong("is empty".into());
    }
    if text.starts_with('-') {
        return wrong(format!("{} is negative", shown(text)));
    }
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    if text == "off" {
        return wrong("\"off\" is not possible here: this always has a limit".into());
    }
    if number.is_empty() {
        return wrong(format!("{} has no number", shown(text)));
    }
    let Ok(number) = number.parse::<u64>() else {
        return wrong(format!("{} is too large", shown(text)));
    };
    if unit.is_empty() && number == 0 {
        return wrong("\"0\" has no unit".into());
    }
    if unit.is_empty() {
        return Err(Wrong {
            what: format!("{} has no unit", shown(text)),
            help: bare(number),
        });
    }
    if unit.starts_with(['.', 'e', 'E', '_', ',']) {
        return wrong(format!("{} is not a whole number with a unit", shown(text)));
    }
    let Some(&(_, factor)) = units.iter().find(|(name, _)| *name == unit) else {
        let near = units
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit.trim()));
        return Err(Wrong {
            what: format!(
                "{} has the unit {}, which is not known",
                shown(text),
                shown(unit)
            ),
            help: near.map_or(help.to_owned(), |(name, _)| {
                format!("write \"{number}{name}\"")
            }),
        });
    };
    number
        .checked_mul(factor)
        .map_or_else(|| wrong(format!("{} is too large", shown(text))), Ok)
}

/// The text in quotes if it is short; a long one may be a secret in the wrong place.
pub fn shown(text: &str) -> Cow<'static, str> {
    if text.chars().count() <= 16 {
        Cow::Owned(format!("{text:?}"))
    } else {
        Cow::Borrowed("this text")
    }
}

// === serde and schema: all three are strings ===

macro_rules! as_text {
    ($type:ty, $name:literal, $kind:literal, $pattern:literal) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                Self::parse(&text).map_err(|wrong| de::Error::custom(wrong.what))
            }
        }

        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                $name.into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "pattern": $pattern, "x-kind": $kind })
            }
        }
    };
}

as_text!(Time, "Time", "time", "^[0-9]+(ms|s|m|h)$");
as_text!(
    TimeOrOff,
    "TimeOrOff",
    "time-or-off",
    "^([0-9]+(ms|s|m|h)|off)$"
);
as_text!(Size, "Size", "size", "^[0-9]+(B|KB|MB|GB|KiB|MiB|GiB)$");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_print_as_they_are_read() {
        for text in ["0s", "500ms", "30s", "90s", "600s", "15m", "24h", "1500ms"] {
            assert_eq!(Time::parse(text).unwrap().to_string(), text);
        }
        for text in ["64KiB", "64MiB", "1GiB", "64MB", "3KB", "17B", "0B"] {
            assert_eq!(Size::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Time::parse("30000ms"), Ok(Time::secs(30)));
        assert_eq!(TimeOrOff::parse("off"), Ok(TimeOrOff::Off));
    }

    #[test]
    fn what_has_no_clear_meaning_is_refused_with_a_way_out() {
        let table = [
            ("30", "\"30\" has no unit", "\"30s\" is 30 seconds"),
            ("", "is empty", "\"30s\""),
            ("-1", "\"-1\" is negative", "\"30s\""),
            ("-1s", "is negative", "\"30s\""),
            ("1e9", "not a whole number", "\"500ms\""),
            ("1.5s", "not a whole number", "\"500ms\""),
            ("30 s", "has the unit \" s\"", "\"30s\""),
            ("30S", "has the unit \"S\"", "\"30s\""),
            ("30sec", "has the unit \"sec\"", "\"30s\""),
            ("1m30s", "has the unit", "\"30s\""),
            ("soon", "has no number", "\"30s\""),
            ("99999999999999999999s", "too large", "\"30s\""),
            ("18446744073709551615h", "too large", "\"30s\""),
        ];
        for (text, what, help) in table {
            let wrong = Time::parse(text).unwrap_err();
            assert!(
                wrong.what.contains(what) && wrong.help.contains(help),
                "{text}: {wrong:?}"
            );
        }
        assert_eq!(Size::parse("64mib").unwrap_err().help, "write \"64MiB\"");
        assert!(Size::parse("64").unwrap_err().help.contains("\"64MiB\""));
        assert!(
            !Time::parse("sk-a-long-secret-in-the-wrong-place")
                .unwrap_err()
                .what
                .contains("secret")
        );
    }
}
