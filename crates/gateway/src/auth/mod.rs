//! Client keys → who is calling. Keys are kept as SHA-256 and compared in constant time; nothing here can show one.

use sha2::{Digest, Sha256};
use std::sync::Arc;
use subtle::ConstantTimeEq;

use crate::config::ClientKey;
use crate::fields::{Field, Fields};

/// The caller, by the name of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    name: Arc<str>,
    flow: u64,
}

impl Default for Principal {
    fn default() -> Self {
        Self::new("anonymous")
    }
}

impl Principal {
    /// A caller that was not let in.
    pub fn nobody() -> Self {
        Self::new("none")
    }

    fn new(name: &str) -> Self {
        // Any number that is the same for the same name, in every generation of the configuration.
        let flow = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self {
            name: name.into(),
            flow,
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Stands for it where calls of several keys wait for the same slots.
    pub fn flow(&self) -> u64 {
        self.flow
    }
}

/// Why a request was not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    Missing,
    Unknown,
}

/// The client keys of one generation. Empty: everybody is `anonymous`.
#[derive(Debug)]
pub struct Keys {
    keys: Vec<(Principal, [u8; 32])>,
    anonymous: Principal,
}

impl Keys {
    pub fn new(keys: &[ClientKey]) -> Self {
        let keys = keys
            .iter()
            .map(|k| (Principal::new(&k.name), k.sha256))
            .collect();
        Self {
            keys,
            anonymous: Principal::default(),
        }
    }

    pub fn is_open(&self) -> bool {
        self.keys.is_empty()
    }

    /// Reads `Authorization: Bearer` and `x-api-key`, whatever the dialect: SDKs of both kinds send either.
    pub fn authenticate(&self, fields: &Fields) -> Result<Principal, Denied> {
        if self.is_open() {
            return Ok(self.anonymous.clone());
        }
        let bearer = fields.get(Field::Authorization).and_then(strip_bearer);
        let api_key = fields.get(Field::XApiKey);
        let given = [bearer, api_key].map(|key| key.filter(|key| !key.is_empty()));
        if given.iter().flatten().next().is_none() {
            return Err(Denied::Missing);
        }
        given
            .into_iter()
            .flatten()
            .find_map(|key| self.find(key))
            .ok_or(Denied::Unknown)
    }

    /// Compares with every key, so that the time tells nothing about which one nearly matched.
    fn find(&self, key: &[u8]) -> Option<Principal> {
        let hash: [u8; 32] = Sha256::digest(key).into();
        let mut found = None;
        for (principal, known) in &self.keys {
            if bool::from(known.ct_eq(&hash)) {
                found = Some(principal.clone());
            }
        }
        found
    }
}

fn strip_bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys::new(&[
            ClientKey {
                name: "a".into(),
                sha256: Sha256::digest(b"key-a").into(),
            },
            ClientKey {
                name: "b".into(),
                sha256: Sha256::digest(b"key-b").into(),
            },
        ])
    }

    fn with(fields: &[(&str, &str)]) -> Fields {
        crate::fields::list(fields)
    }

    #[test]
    fn both_headers_name_the_principal() {
        for (name, value, who) in [
            ("authorization", "Bearer key-a", "a"),
            ("authorization", "bearer key-b", "b"),
            ("x-api-key", "key-b", "b"),
        ] {
            assert_eq!(
                keys().authenticate(&with(&[(name, value)])).unwrap().name(),
                who
            );
        }
    }

    #[test]
    fn missing_and_unknown_are_told_apart() {
        assert_eq!(
            keys().authenticate(&Fields::default()),
            Err(Denied::Missing)
        );
        for (name, value) in [
            ("authorization", "Bearer nope"),
            ("x-api-key", ""),
            ("authorization", "Basic key-a"),
            ("authorization", "Bearer"),
        ] {
            let denied = keys().authenticate(&with(&[(name, value)])).unwrap_err();
            let expected = if ["Basic key-a", "Bearer", ""].contains(&value) {
                Denied::Missing
            } else {
                Denied::Unknown
            };
            assert_eq!(denied, expected, "{name}: {value}");
        }
    }

    #[test]
    fn a_good_key_beside_a_bad_one_counts() {
        let both = [
            ("authorization", "Bearer sdk-default"),
            ("x-api-key", "key-a"),
        ];
        assert_eq!(keys().authenticate(&with(&both)).unwrap().name(), "a");
    }

    #[test]
    fn without_keys_everybody_is_anonymous() {
        assert_eq!(
            Keys::new(&[])
                .authenticate(&Fields::default())
                .unwrap()
                .name(),
            "anonymous"
        );
    }

    #[test]
    fn debug_shows_no_key() {
        assert!(!format!("{:?}", keys()).contains("key-a"));
    }
}
