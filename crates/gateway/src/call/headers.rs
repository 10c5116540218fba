//! The request's fields as they go upstream.

use crate::config::{AuthStyle, Config, Upstream};
use crate::fields::{Field, Fields, Sent};

/// What crosses of the client's fields, and our own.
///
/// Credentials: if the gateway holds the upstream's key, or has client keys of its own, the client's never cross. Otherwise the gateway
/// has no part in them and they pass.
pub fn to_upstream(client: Fields, config: &Config, upstream: &Upstream) -> Sent {
    // A key that cannot be a field's value is refused when the configuration is read.
    let Some(key) = upstream.api_key.as_ref().map(|key| key.expose()) else {
        return Sent::new(client, config.keys.is_empty(), None);
    };
    match upstream.auth {
        AuthStyle::Bearer => {
            let bearer = format!("Bearer {key}");
            Sent::new(client, false, Some((Field::Authorization, &bearer)))
        }
        AuthStyle::XApiKey => Sent::new(client, false, Some((Field::XApiKey, key))),
    }
}
