//! What a model server shows of its own work: how many calls it has in hand.

use std::fmt;

use crate::json::{Cursor, Fault};

/// A page that does not say how many calls the server has in hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShownError {
    what: &'static str,
}

impl fmt::Display for ShownError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)
    }
}

impl std::error::Error for ShownError {}

impl From<Fault> for ShownError {
    fn from(_: Fault) -> Self {
        Self {
            what: "it is not the JSON of llama.cpp's slots",
        }
    }
}

/// The most that is believed of one number: more is no count of calls.
const CALLS_MAX: u64 = 1_000_000_000;

const RUNNING: &[u8] = b"vllm:num_requests_running";
const WAITING: &[u8] = b"vllm:num_requests_waiting";

/// Calls that run or wait in a vLLM, by the Prometheus text at `/metrics`: all of its engines together. The gauges are set after a step of
/// the engine, so they say nothing of what arrived since the last one.
///
/// # Errors
/// If one of the two gauges is missing or is no count.
pub fn vllm_in_hand(page: &[u8]) -> Result<u64, ShownError> {
    let (mut running, mut waiting) = (None, None);
    for line in page.split(|byte| *byte == b'\n') {
        if let Some(rest) = line.strip_prefix(RUNNING) {
            add(&mut running, rest)?;
        } else if let Some(rest) = line.strip_prefix(WAITING) {
            add(&mut waiting, rest)?;
        }
    }
    running
        .zip(waiting)
        .map(|(running, waiting)| running + waiting)
        .ok_or(ShownError {
            what: "it has no vllm:num_requests_running and vllm:num_requests_waiting",
        })
}

/// Adds the value of a line, given from the end of its name on. The line of a longer name adds nothing.
fn add(sum: &mut Option<u64>, rest: &[u8]) -> Result<(), ShownError> {
    let value = match rest.first() {
        Some(b'{') => after_labels(rest),
        Some(b' ' | b'\t') => Some(rest),
        _ => return Ok(()),
    };
    let count = value.and_then(count).ok_or(ShownError {
        what: "its number of requests is no count",
    })?;
    let before = sum.unwrap_or(0);
    *sum = Some((before + count).min(CALLS_MAX));
    Ok(())
}

/// What follows `{…}`, whose quoted values may hold anything.
fn after_labels(text: &[u8]) -> Option<&[u8]> {
    let (mut quoted, mut escaped) = (false, false);
    for (at, byte) in text.iter().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return text.get(at + 1..),
            _ => {}
        }
    }
    None
}

/// `3`, `3.0` or `3e0`; a timestamp may follow.
fn count(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    let value: f64 = text.split_ascii_whitespace().next()?.parse().ok()?;
    let whole = value.is_finite() && value >= 0.0 && value.fract() == 0.0;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "whole, not negative and within the bound"
    )]
    (whole && value <= CALLS_MAX as f64).then_some(value as u64)
}

/// Slots at work in a llama.cpp server, and all of its slots, by the JSON at `/slots`. Calls that wait for a slot are not shown there; none
/// does while one is free.
///
/// # Errors
/// If it is not a list of slots, each with `is_processing`.
pub fn llama_in_hand(page: &[u8]) -> Result<(u64, u64), ShownError> {
    let mut busy = 0;
    let mut slots: u64 = 0;
    let mut c = Cursor::new(page);
    c.array(|c| {
        let mut processing = None;
        c.object(|c, key| {
            if key != b"is_processing" {
                return c.skip().map_err(ShownError::from);
            }
            processing = match c.value()? {
                b"true" => Some(true),
                b"false" => Some(false),
                _ => None,
            };
            Ok(())
        })?;
        slots += 1;
        busy += u64::from(processing.ok_or(ShownError {
            what: "it has a slot without is_processing",
        })?);
        Ok::<(), ShownError>(())
    })?;
    c.end()?;
    if slots == 0 {
        return Err(ShownError {
            what: "it lists no slot",
        });
    }
    Ok((busy, slots))
}
