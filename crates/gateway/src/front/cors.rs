//! Browsers: preflights, allowed origins, and what is refused before it can do harm.

use std::net::IpAddr;

use bytes::Bytes;
use http::uri::Authority;
use http::{Method, StatusCode, Uri};

use crate::call::answer::{Answer, AnswerHead};
use crate::call::{Generation, Rejection};
use crate::config::Cors;
use crate::fields::{Field, Fields};

const EXPOSED: &str = "x-request-id, request-id, x-tidegate-id, x-tidegate-attached, x-tidegate-attempts, retry-after, retry-after-ms, x-should-retry";

fn allowed<'a>(origin: &'a [u8], cors: &Cors) -> Option<&'a [u8]> {
    let any = cors.origins.iter().any(|o| o == "*");
    if any {
        return Some(b"*");
    }
    let listed = cors.origins.iter().any(|o| o.as_bytes() == origin);
    listed.then_some(origin)
}

/// The answer to a preflight, without authentication and without an upstream. Plain OPTIONS gets the same.
pub fn preflight(method: &Method, asked: &Fields, cors: &Cors) -> Option<Answer> {
    if method != Method::OPTIONS {
        return None;
    }
    let mut fields = Fields::default();
    if asked
        .get(Field::Origin)
        .and_then(|origin| allowed(origin, cors))
        .is_some()
        && asked.has(Field::AskedMethod)
    {
        let methods = "GET, HEAD, POST, DELETE, OPTIONS";
        fields.append(Field::AllowMethods, methods);
        if let Some(wanted) = asked.get(Field::AskedHeaders) {
            fields.append(Field::AllowHeaders, wanted);
        }
        fields.append(Field::MaxAge, "7200");
    }
    let status = StatusCode::NO_CONTENT;
    Some(Answer::whole(AnswerHead { status, fields }, Bytes::new()))
}

/// Puts the same fields on every answer, errors too: without them a browser shows a network error instead of the status.
pub fn allow(origin: Option<&[u8]>, cors: &Cors, fields: &mut Fields) {
    if cors.origins.is_empty() {
        return;
    }
    fields.append(Field::Vary, "origin");
    if let Some(allowed) = origin.and_then(|origin| allowed(origin, cors)) {
        fields.insert(Field::AllowOrigin, allowed);
        fields.insert(Field::ExposeHeaders, EXPOSED);
    }
}

/// Without client keys any page that a browser on this machine shows could spend the model's time: a cross-origin POST needs no preflight to
/// be sent, only to be read. So a foreign origin that is not allowed is refused before anything runs.
pub fn refuse_foreign(uri: &Uri, asked: &Fields, generation: &Generation) -> Result<(), Rejection> {
    let Some(origin) = asked.get(Field::Origin) else {
        return Ok(());
    };
    if !generation.keys.is_open()
        || allowed(origin, &generation.config.cors).is_some()
        || (generation.config.server.allow_unauthenticated && is_own(uri, asked, origin))
    {
        return Ok(());
    }
    Err(Rejection::OriginNotAllowed)
}

/// Without client keys only this machine is let in, and that a page can borrow: its host name is made to point to 127.0.0.1 (DNS rebinding),
/// and what the browser then sends is of its own origin. The name that it asks for gives it away. Whoever said that nobody needs a key is
/// taken at his word; there the names under which the gateway is reached are not known.
pub fn refuse_unknown_host(
    uri: &Uri,
    asked: &Fields,
    generation: &Generation,
) -> Result<(), Rejection> {
    let config = &generation.config;
    if !generation.keys.is_open() || config.server.allow_unauthenticated {
        return Ok(());
    }
    let known = |host: &str| is_known(host, &config.cors);
    let host = asked.get(Field::Host);
    let host = host.is_none_or(|host| str::from_utf8(host).is_ok_and(known));
    let authority = uri.authority().map(Authority::as_str);
    if host && authority.is_none_or(known) && !asked.repeats(Field::Host) {
        return Ok(());
    }
    Err(Rejection::HostNotAllowed)
}

fn is_known(asked: &str, cors: &Cors) -> bool {
    if is_plainly_here(asked) {
        return true;
    }
    let Ok(asked) = asked.parse::<Authority>() else {
        return false;
    };
    let host = asked.host().to_ascii_lowercase();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return ip.to_canonical().is_loopback() || is_listed(&host, cors);
    }
    let name = host.strip_suffix('.').unwrap_or(&host);
    name == "localhost" || name.ends_with(".localhost") || is_listed(name, cors)
}

/// What nearly everybody asks for, seen without taking the name apart.
fn is_plainly_here(asked: &str) -> bool {
    let (host, port) = asked.split_once(':').unwrap_or((asked, "0"));
    matches!(host, "127.0.0.1" | "localhost") && port.parse::<u16>().is_ok()
}

/// The host of an allowed origin; where all may come, there is nobody to keep out.
fn is_listed(host: &str, cors: &Cors) -> bool {
    cors.origins.iter().any(|origin| {
        let authority = origin.split_once("://").map(|(_, rest)| rest.parse());
        let listed = |authority: Authority| authority.host().eq_ignore_ascii_case(host);
        origin == "*" || authority.and_then(Result::ok).is_some_and(listed)
    })
}

/// A page from this very host: there is one only behind a proxy that serves it, as the gateway has none.
fn is_own(uri: &Uri, asked: &Fields, origin: &[u8]) -> bool {
    let host = asked.get(Field::Host);
    let host = host.or_else(|| uri.authority().map(|a| a.as_str().as_bytes()));
    let origin_host = origin
        .strip_prefix(b"https://")
        .or_else(|| origin.strip_prefix(b"http://"));
    host.is_some() && origin_host == host
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine_are_known_and_no_others() {
        let cors = Cors {
            origins: vec!["https://app.example".into(), "http://10.0.0.7:3000".into()],
        };
        for host in [
            "localhost",
            "LocalHost:8080",
            "a.localhost:1",
            "localhost.",
            "127.0.0.1",
            "127.8.9.1:8080",
            "[::1]:8080",
            "[::ffff:127.0.0.1]",
            "app.example",
            "APP.example:8080",
            "10.0.0.7",
        ] {
            assert!(is_known(host, &cors), "{host}");
        }
        for host in [
            "",
            "x",
            "evil.example",
            "localhost.evil.example",
            "evillocalhost",
            "127.0.0.1.evil.example",
            "0.0.0.0",
            "10.0.0.8",
            "[::2]",
            "evil.example:80@localhost x",
        ] {
            assert!(!is_known(host, &cors), "{host}");
        }
        let any = Cors {
            origins: vec!["*".into()],
        };
        assert!(is_known("evil.example", &any));
    }
}
