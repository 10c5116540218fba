//! What the gateway calls a call.

use std::fmt;

/// The text itself: 32 hexadecimal digits behind `req_`, out of a generator of 64 bits. Not a secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id([u8; 36]);

impl Id {
    #[expect(clippy::new_without_default, reason = "no two are the same")]
    pub fn new() -> Self {
        let mut text = *b"req_00000000000000000000000000000000";
        let digit = |value: u8| value + if value < 10 { b'0' } else { b'a' - 10 };
        let bytes = fastrand::u128(..).to_le_bytes();
        for (pair, byte) in text[4..].as_chunks_mut().0.iter_mut().zip(bytes) {
            *pair = [digit(byte >> 4), digit(byte & 15)];
        }
        Self(text)
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_another_text_of_digits() {
        let ids: std::collections::BTreeSet<Id> = (0..1000).map(|_| Id::new()).collect();
        assert_eq!(ids.len(), 1000);
        let mut seen = std::collections::BTreeSet::new();
        for id in &ids {
            let digits = id.text().strip_prefix("req_").expect("its mark");
            assert_eq!(digits.len(), 32);
            seen.extend(digits.chars());
        }
        assert_eq!(String::from_iter(seen), "0123456789abcdef");
    }
}
