//! Which header fields cross, in which direction.

use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, FORWARDED, HOST,
    HeaderMap, HeaderName, HeaderValue, LOCATION, ORIGIN, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION,
    REFERER, SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};

use crate::config::{AuthStyle, Config, Upstream};

/// Fields that belong to one connection (RFC 9110 §7.6.1), besides those that `Connection` names.
static HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Request fields that are never forwarded: they are about the client and the gateway, not about the model server.
static PRIVATE_REQUEST: [HeaderName; 15] = [
    HOST,
    CONTENT_LENGTH,
    EXPECT,
    COOKIE,
    ACCEPT_ENCODING,
    ORIGIN,
    REFERER,
    FORWARDED,
    HeaderName::from_static("x-forwarded-for"),
    HeaderName::from_static("x-forwarded-host"),
    HeaderName::from_static("x-forwarded-proto"),
    HeaderName::from_static("x-real-ip"),
    HeaderName::from_static("x-tidegate-call"),
    super::attach::RESUME,
    HeaderName::from_static("http2-settings"),
];

/// Answer fields that are never forwarded: cookies and places of an inner host mean nothing to the client, CORS is the gateway's own.
static PRIVATE_ANSWER: [HeaderName; 9] = [
    SET_COOKIE,
    LOCATION,
    http::header::ALT_SVC,
    http::header::ACCESS_CONTROL_ALLOW_ORIGIN,
    http::header::ACCESS_CONTROL_ALLOW_METHODS,
    http::header::ACCESS_CONTROL_ALLOW_HEADERS,
    http::header::ACCESS_CONTROL_ALLOW_CREDENTIALS,
    http::header::ACCESS_CONTROL_EXPOSE_HEADERS,
    http::header::ACCESS_CONTROL_MAX_AGE,
];

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Where clients put keys: OpenAI's and Anthropic's field, and Azure's.
static CREDENTIALS: [HeaderName; 3] =
    [AUTHORIZATION, X_API_KEY, HeaderName::from_static("api-key")];

/// The fields that cross: neither hop-by-hop, nor named by `Connection`, nor `private`. One pass, since most fields do cross.
fn crossing(headers: &HeaderMap, private: impl Fn(&HeaderName) -> bool) -> HeaderMap {
    let mut kept = HeaderMap::with_capacity(headers.len() + 4);
    for (name, value) in headers {
        if !HOP_BY_HOP.contains(name) && !private(name) {
            kept.append(name.clone(), value.clone());
        }
    }
    if headers.contains_key(CONNECTION) {
        for name in named_by_connection(headers) {
            kept.remove(name);
        }
    }
    kept
}

fn named_by_connection(headers: &HeaderMap) -> impl Iterator<Item = HeaderName> + '_ {
    headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|b| *b == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
}

/// The request's fields as they go upstream.
///
/// Credentials: if the gateway holds the upstream's key, or has client keys of its own, the client's never cross. Otherwise the gateway
/// has no part in them and they pass. The upstream is asked for `identity`: a compressed stream could not be read or added to.
pub fn to_upstream(headers: &HeaderMap, config: &Config, upstream: &Upstream) -> HeaderMap {
    let ours = upstream.api_key.is_some() || !config.keys.is_empty();
    let mut sent = crossing(headers, |name| {
        PRIVATE_REQUEST.contains(name) || (ours && CREDENTIALS.contains(name))
    });
    if let Some(key) = &upstream.api_key {
        put_key(&mut sent, upstream.auth, key.expose());
    }
    sent.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    sent
}

fn put_key(headers: &mut HeaderMap, style: AuthStyle, key: &str) {
    let (name, value) = match style {
        AuthStyle::Bearer => (
            AUTHORIZATION,
            HeaderValue::try_from(format!("Bearer {key}")),
        ),
        AuthStyle::XApiKey => (X_API_KEY, HeaderValue::try_from(key)),
    };
    // A key that cannot be a header value is refused when the configuration is read.
    if let Ok(mut value) = value {
        value.set_sensitive(true);
        headers.insert(name, value);
    }
}

/// The answer's fields as they go downstream, without its framing.
pub fn to_downstream(headers: &HeaderMap) -> HeaderMap {
    crossing(headers, |name| {
        name == CONTENT_LENGTH || PRIVATE_ANSWER.contains(name)
    })
}

/// `Keep-Alive: timeout=N`, in seconds.
pub fn keep_alive_seconds(headers: &HeaderMap) -> Option<u64> {
    let value = headers.get("keep-alive")?.to_str().ok()?;
    value
        .split(',')
        .find_map(|part| part.trim().strip_prefix("timeout=")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(fields: &[(&str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in fields {
            map.append(
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                value.parse().unwrap(),
            );
        }
        map
    }

    #[test]
    fn fields_named_by_connection_do_not_cross_either_way() {
        let fields = map(&[
            ("connection", "close, x-secret-hop"),
            ("x-secret-hop", "1"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("x-kept", "1"),
        ]);
        for crossed in [to_downstream(&fields), crossing(&fields, |_| false)] {
            assert_eq!(crossed, map(&[("x-kept", "1")]));
        }
    }

    #[test]
    fn answers_keep_rate_limit_and_id_fields_and_lose_cookies() {
        let fields = map(&[
            ("x-ratelimit-remaining-requests", "5"),
            ("x-request-id", "r"),
            ("retry-after-ms", "300"),
            ("set-cookie", "a=b"),
            ("location", "http://inner/"),
        ]);
        let crossed = to_downstream(&fields);
        assert_eq!(
            crossed,
            map(&[
                ("x-ratelimit-remaining-requests", "5"),
                ("x-request-id", "r"),
                ("retry-after-ms", "300")
            ])
        );
    }

    #[test]
    fn keep_alive_timeout_is_read() {
        assert_eq!(
            keep_alive_seconds(&map(&[("keep-alive", "timeout=5, max=100")])),
            Some(5)
        );
        assert_eq!(keep_alive_seconds(&map(&[("keep-alive", "max=1")])), None);
    }
}
