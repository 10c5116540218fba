//! JSON scalars to and from text.

use std::borrow::Cow;

/// JSON number text as a whole number, if it is one and not negative.
pub(crate) fn whole(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    if let Ok(number) = text.parse::<u64>() {
        return Some(number);
    }
    let float = text.parse::<f64>().ok()?;
    let exact = (0.0..=9_007_199_254_740_992.0).contains(&float) && float.fract() == 0.0;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked just above"
    )]
    exact.then_some(float as u64)
}

/// The text of a raw JSON string; bytes that are no UTF-8, or escapes that are no text, come out replaced.
pub(crate) fn decode(raw: &[u8]) -> String {
    let text = String::from_utf8_lossy(raw);
    if !text.contains('\\') {
        return text.into_owned();
    }
    serde_json::from_str::<String>(&format!("\"{text}\"")).unwrap_or_else(|_| text.into_owned())
}

/// What a raw key says, escapes considered.
pub(crate) fn key(raw: &[u8]) -> Cow<'_, [u8]> {
    if raw.contains(&b'\\') {
        Cow::Owned(decode(raw).into_bytes())
    } else {
        Cow::Borrowed(raw)
    }
}

/// A JSON string literal that survives even line splitters with Unicode rules.
pub(crate) fn quote(text: &str) -> String {
    let plain = serde_json::Value::from(text).to_string();
    if plain.contains(['\u{85}', '\u{2028}', '\u{2029}']) {
        return plain
            .replace('\u{85}', "\\u0085")
            .replace('\u{2028}', "\\u2028")
            .replace('\u{2029}', "\\u2029");
    }
    plain
}

/// The longest prefix of at most `limit` bytes that ends between characters.
pub(crate) fn clip(text: &str, limit: usize) -> &str {
    let mut end = limit.min(text.len());
    while !text.is_char_boundary(end) {
        end = end.saturating_sub(1);
    }
    text.get(..end).unwrap_or_default()
}

#[cfg(test)]
#[path = "text_tests.rs"]
mod tests;
