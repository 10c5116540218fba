//! The operator's key for an upstream, kept from clients: servers quote in their errors what they were sent.

use std::fmt;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use memchr::memmem::Finder;

use crate::config::Secret;

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
        let mut hidden: Option<BytesMut> = None;
        for form in &self.0 {
            let length = form.needle().len();
            for at in form.find_iter(&bytes) {
                let copy = hidden.get_or_insert_with(|| BytesMut::from(&*bytes));
                if let Some(found) = copy.get_mut(at..at + length) {
                    found.fill(b'*');
                }
            }
        }
        hidden.map_or(bytes, BytesMut::freeze)
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
    pub fn hide_in(&self, headers: &mut HeaderMap) {
        if self.0.is_empty() {
            return;
        }
        for value in headers.values_mut() {
            let shows = |form: &Finder<'_>| form.find(value.as_bytes()).is_some();
            if self.0.iter().any(shows) {
                let hidden = self.hide(Bytes::copy_from_slice(value.as_bytes()));
                *value = HeaderValue::from_maybe_shared(hidden)
                    .unwrap_or_else(|_| HeaderValue::from_static("***"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut headers = HeaderMap::new();
        headers.insert("x-echo", "Bearer sk-abc".parse().unwrap());
        headers.append("x-echo", "other".parse().unwrap());
        Mask::new(Some(&Secret::new("sk-abc"))).hide_in(&mut headers);
        let values: Vec<_> = headers.get_all("x-echo").iter().collect();
        assert_eq!(values, ["Bearer ******", "other"]);
    }
}
