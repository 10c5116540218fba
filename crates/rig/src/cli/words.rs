//! What values of flags look like.

use std::str::FromStr;

use crate::script::OnClose;

/// A time: `20ms`, `1.5s`, `2m`; a bare number is milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TimeMs(pub(super) f64);

impl TimeMs {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "parsed to be between nothing and ten days"
    )]
    pub(super) fn whole(self) -> u64 {
        self.0.round() as u64
    }
}

impl FromStr for TimeMs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const TEN_DAYS: f64 = 864_000_000.0;
        let split = text.find(|c: char| c.is_ascii_alphabetic());
        let (number, unit) = text.split_at(split.unwrap_or(text.len()));
        let times = match unit {
            "" | "ms" => 1.0,
            "us" => 0.001,
            "s" => 1000.0,
            "m" => 60_000.0,
            _ => return Err(format!("{unit:?} is no unit: us, ms, s or m")),
        };
        match number.parse::<f64>() {
            Ok(n) if (0.0..=TEN_DAYS).contains(&(n * times)) => Ok(Self(n * times)),
            _ => Err("a time looks like 20ms or 1.5s".to_owned()),
        }
    }
}

/// A way of treating a close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WayOfClosing(pub(super) OnClose);

impl FromStr for WayOfClosing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (way, value) = match text.split_once(':') {
            Some((way, value)) => (way, Some(value)),
            None => (text, None),
        };
        let time = || match value {
            Some(value) => Ok(value.parse::<TimeMs>()?.whole()),
            None => Err(format!("how long? {way}:500ms")),
        };
        Ok(Self(match (way, value) {
            ("stop", None) => OnClose::Stop,
            ("step", None) => OnClose::Step,
            ("never", None) => OnClose::Never,
            ("bills", None) => OnClose::Bills,
            ("late", _) => OnClose::LateMs(time()?),
            ("poll", _) => OnClose::PollMs(time()?),
            ("tokens", Some(n)) => {
                OnClose::AfterTokens(n.parse().map_err(|_| format!("{n:?} is no number"))?)
            }
            _ => {
                return Err("stop, step, late:TIME, tokens:N, poll:TIME, never or bills".to_owned());
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_ways_are_read() {
        for (text, ms) in [
            ("20", 20.0),
            ("20ms", 20.0),
            ("1.5s", 1500.0),
            ("2m", 120_000.0),
        ] {
            assert_eq!(text.parse(), Ok(TimeMs(ms)), "{text}");
        }
        for text in ["", "s", "-1s", "1h", "1e300s", "NaN", "20 ms"] {
            assert!(text.parse::<TimeMs>().is_err(), "{text}");
        }
        for (text, way) in [
            ("stop", OnClose::Stop),
            ("late:1s", OnClose::LateMs(1000)),
            ("poll:250", OnClose::PollMs(250)),
            ("tokens:5", OnClose::AfterTokens(5)),
            ("bills", OnClose::Bills),
        ] {
            assert_eq!(text.parse(), Ok(WayOfClosing(way)), "{text}");
        }
        for text in ["", "late", "late:x", "tokens:-1", "stop:5", "halt"] {
            assert!(text.parse::<WayOfClosing>().is_err(), "{text}");
        }
    }
}
