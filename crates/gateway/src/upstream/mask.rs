//! The operator's key for an upstream, kept from clients: servers quote in their errors what they were sent.

use std::fmt;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

use crate::config::Secret;
use crate::fields::Fields;

/// Shorter keys are stand-ins (`EMPTY`, `none`); to hide them would tear up texts.
const KEY_BYTES_MIN: usize = 6;

/// Finds a key, as it is and as it stands in JSON.
pub struct Mask(Vec<Finder<'static>>);

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mask")
    }
}

impl Mask {
    pub fn new(key: Option<&Secret>) -> Self {
        let Some(key) = key.map(Secret::expose).filter(|k| k.len() >= KEY_BYTES_MIN) else {
            return Self(Vec::new());
        };
        let quoted = key.replace('\\', "\\\\").replace('"', "\\\"");
        let slashed = quoted.replace('/', "\\/");
        let mut forms = vec![key.to_owned(), quoted, slashed];
        forms.dedup();
        let finders = forms.iter().map(|form| Finder::new(form).into_owned());
        Self(finders.collect())
    }

    /// The same bytes with a star for each byte of the key. Of the same length: it may be announced already.
    pub fn hide(&self, bytes: Bytes) -> Bytes {
        let found = self.find(&bytes);
        if found.is_empty() {
            return bytes;
        }
        let mut copy = BytesMut::from(&*bytes);
        cover(&mut copy, found);
        copy.freeze()
    }

    /// Where the key stands.
    fn find(&self, bytes: &[u8]) -> Vec<Range<usize>> {
        let found = self.0.iter().flat_map(|form| {
            let all = form.find_iter(bytes);
            all.map(|at| at..at + form.needle().len())
        });
        found.collect()
    }

    /// The same text without the key.
    pub fn hide_text(&self, text: String) -> String {
        let hidden = self.hide(Bytes::from(text));
        // Whole characters became stars.
        String::from_utf8_lossy(&hidden).into_owned()
    }

    /// There is no key to be hidden.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Hides the key in the values of all fields.
    pub fn hide_in(&self, fields: &mut Fields) {
        if !self.is_empty() {
            fields.values_mut(|value| cover(value, self.find(value)));
        }
    }
}

fn cover(bytes: &mut [u8], found: Vec<Range<usize>>) {
    for key in found {
        bytes.get_mut(key).unwrap_or_default().fill(b'*');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::list;

    fn hidden(key: &str, text: &'static str) -> Bytes {
        Mask::new(Some(&Secret::new(key))).hide(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn a_key_is_hidden_wherever_and_however_it_stands() {
        assert_eq!(
            hidden("sk-abc", "sk-abc,sk-abcd sk-ab"),
            "******,******d sk-ab"
        );
        assert_eq!(
            hidden(r#"a"b\c/d"#, r#"{"k":"a\"b\\c/d"}"#),
            r#"{"k":"*********"}"#
        );
        assert_eq!(
            hidden(r#"a"b\c/d"#, r#"{"k":"a\"b\\c\/d"}"#),
            r#"{"k":"**********"}"#
        );
        assert_eq!(hidden("EMPTY", "EMPTY"), "EMPTY", "no secret");
        assert_eq!(Mask::new(None).hide(Bytes::from_static(b"x")), "x");
        assert!(!format!("{:?}", Mask::new(Some(&Secret::new("sk-abc")))).contains("abc"));
    }

    #[test]
    fn fields_too() {
        let shown = |key| list(&[("x-echo", key), ("x-echo", "other")]);
        let mut fields = shown(r#"Bearer sk-a"b, sk-a\"b"#);
        Mask::new(Some(&Secret::new("sk-a\"b"))).hide_in(&mut fields);
        assert_eq!(fields, shown("Bearer ******, *******"));
    }
}
