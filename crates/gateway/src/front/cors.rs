//! Browsers: preflights, allowed origins, and what is refused before it can do harm.

use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HOST, HeaderMap, HeaderValue, ORIGIN, VARY,
};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;

use crate::call::body::OutBody;
use crate::call::{Generation, Rejection};
use crate::config::Cors;

const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id, request-id, x-tidegate-id, retry-after, retry-after-ms, x-should-retry",
);

fn allowed(origin: &HeaderValue, cors: &Cors) -> Option<HeaderValue> {
    let any = cors.origins.iter().any(|o| o == "*");
    if any {
        return Some(HeaderValue::from_static("*"));
    }
    cors.origins
        .iter()
        .any(|o| o.as_bytes() == origin.as_bytes())
        .then(|| origin.clone())
}

/// The answer to a preflight, without authentication and without an upstream. Plain OPTIONS gets the same.
pub fn preflight(request: &Request<Incoming>, cors: &Cors) -> Option<Response<OutBody>> {
    if request.method() != Method::OPTIONS {
        return None;
    }
    let mut response = Response::new(OutBody::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let asked = request.headers();
    if asked
        .get(ORIGIN)
        .and_then(|origin| allowed(origin, cors))
        .is_some()
        && asked.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
    {
        let fields = response.headers_mut();
        fields.insert(
            ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("GET, HEAD, POST, DELETE, OPTIONS"),
        );
        if let Some(wanted) = asked.get(ACCESS_CONTROL_REQUEST_HEADERS) {
            fields.insert(ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
        }
        fields.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("7200"));
    }
    Some(response)
}

/// Puts the same fields on every answer, errors too: without them a browser shows a network error instead of the status.
pub fn allow(origin: Option<&HeaderValue>, cors: &Cors, headers: &mut HeaderMap) {
    if cors.origins.is_empty() {
        return;
    }
    headers.append(VARY, HeaderValue::from_static("origin"));
    if let Some(allowed) = origin.and_then(|origin| allowed(origin, cors)) {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
}

/// Without client keys any page that a browser on this machine shows could spend the model's time: a cross-origin POST needs no preflight to
/// be sent, only to be read. So a foreign origin that is not allowed is refused before anything runs.
pub fn refuse_foreign(
    request: &Request<Incoming>,
    generation: &Generation,
) -> Result<(), Rejection> {
    let Some(origin) = request.headers().get(ORIGIN) else {
        return Ok(());
    };
    if !generation.keys.is_open()
        || allowed(origin, &generation.config.cors).is_some()
        || is_own(request, origin)
    {
        return Ok(());
    }
    Err(Rejection::OriginNotAllowed)
}

/// A page from this very host.
fn is_own(request: &Request<Incoming>, origin: &HeaderValue) -> bool {
    let host = request
        .headers()
        .get(HOST)
        .map(|h| h.as_bytes())
        .or_else(|| request.uri().authority().map(|a| a.as_str().as_bytes()));
    let origin = origin.as_bytes();
    let origin_host = origin
        .strip_prefix(b"https://")
        .or_else(|| origin.strip_prefix(b"http://"));
    host.is_some() && origin_host == host
}
