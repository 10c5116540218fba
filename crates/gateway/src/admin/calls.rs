//! The calls in flight, to look at and to end.
//!
//! The port has no keys, so a page in somebody's browser must not be able to use it: whoever asks has to name the port by address or as
//! localhost (a name that was rebound to it is neither), an ending needs a header that no form can send, and no page's origin is served.

use std::net::IpAddr;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderName, HeaderValue, ORIGIN};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};

use super::text;
use crate::call::table::{By, Row, State, Table};

/// Must come with what changes something.
pub const X_TIDEGATE_ADMIN: HeaderName = HeaderName::from_static("x-tidegate-admin");

const CALLS: &str = "/admin/calls";
const UPSTREAMS: &str = "/admin/upstreams/";

/// `None`: the path is another's.
pub fn answer<B>(request: &Request<B>, table: &Table) -> Option<Response<Full<Bytes>>> {
    let path = request.uri().path();
    let meant = meant(path)?;
    if let Err(why) = check(request.headers(), request.method()) {
        return Some(text(StatusCode::FORBIDDEN, why));
    }
    Some(match (request.method(), meant) {
        (&Method::GET | &Method::HEAD, Meant::All) => json_of(StatusCode::OK, &rows(&table.list())),
        (&Method::DELETE, Meant::One(id)) => {
            let ended = table.stop(By::Operator, |entry| *entry.id == *id);
            told(ended, "no call with this id is in flight\n")
        }
        (&Method::DELETE, Meant::Of(upstream)) => {
            let ended = table.stop(By::Operator, |entry| entry.is_at(upstream));
            told(ended, "no call of this upstream is in flight\n")
        }
        _ => text(
            StatusCode::METHOD_NOT_ALLOWED,
            "GET /admin/calls, DELETE /admin/calls/{id}, DELETE /admin/upstreams/{name}/calls\n",
        ),
    })
}

enum Meant<'a> {
    All,
    One(&'a str),
    Of(&'a str),
}

fn meant(path: &str) -> Option<Meant<'_>> {
    if path == CALLS {
        return Some(Meant::All);
    }
    if let Some(id) = path.strip_prefix(CALLS).and_then(|p| p.strip_prefix('/')) {
        return Some(Meant::One(id));
    }
    let name = path.strip_prefix(UPSTREAMS)?.strip_suffix("/calls")?;
    Some(Meant::Of(name))
}

/// Keeps pages in browsers out.
fn check(headers: &HeaderMap, method: &Method) -> Result<(), &'static str> {
    if headers.contains_key(ORIGIN) {
        return Err("pages in browsers are not served here\n");
    }
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    if !host.is_some_and(is_address) {
        return Err("name this port by its address or as localhost\n");
    }
    if method == Method::DELETE && !headers.contains_key(X_TIDEGATE_ADMIN) {
        return Err("to end a call send the header `x-tidegate-admin: 1`\n");
    }
    Ok(())
}

/// An IP address or localhost, with or without a port.
fn is_address(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

fn told(ended: usize, none: &'static str) -> Response<Full<Bytes>> {
    if ended == 0 {
        return text(StatusCode::NOT_FOUND, none);
    }
    json_of(StatusCode::OK, &json!({"ended": ended}))
}

fn json_of(status: StatusCode, value: &Value) -> Response<Full<Bytes>> {
    let mut response = text(status, format!("{value}\n"));
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

fn rows(rows: &[Row]) -> Value {
    let seconds = |time: std::time::Duration| (time.as_secs_f64() * 1e3).round() / 1e3;
    let calls: Vec<_> = rows
        .iter()
        .map(|row| {
            json!({
                "id": &*row.id,
                "own_id": row.own_id.as_deref(),
                "key": row.key,
                "route": row.route,
                "model": row.facts.model.as_deref(),
                "upstream": row.facts.upstream.as_deref(),
                "endpoint": row.facts.endpoint.as_deref(),
                "phase": row.phase,
                "state": row.state.name(),
                "on_abandon": row.facts.contract,
                "waiting": row.left.is_none() && row.state == State::Attended,
                "age_seconds": seconds(row.age),
                "left_seconds": row.left.map(seconds),
                "attachable": row.attachable,
                "attached_to": row.facts.attached_to.as_deref(),
                "tokens": row.tokens,
            })
        })
        .collect();
    json!({ "calls": calls })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(method: &str, path: &str, headers: &[(&str, &str)]) -> Option<StatusCode> {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let table = Table::new(1);
        answer(&request.body(()).unwrap(), &table).map(|response| response.status())
    }

    #[test]
    fn pages_in_browsers_are_kept_out() {
        let here = ("host", "127.0.0.1:9090");
        let admin = ("x-tidegate-admin", "1");
        let all = "/admin/calls";
        let one = "/admin/calls/req_1";
        for (method, path, headers, status) in [
            ("GET", all, vec![here], 200),
            ("GET", all, vec![("host", "localhost:9090")], 200),
            ("GET", all, vec![("host", "[::1]:9090")], 200),
            ("GET", all, vec![("host", "rebound.example:9090")], 403),
            ("GET", all, vec![("host", "127.0.0.1.example")], 403),
            ("GET", all, vec![], 403),
            ("GET", all, vec![here, ("origin", "https://a")], 403),
            ("DELETE", one, vec![here], 403),
            ("DELETE", one, vec![here, admin, ("origin", "null")], 403),
            ("DELETE", one, vec![here, admin], 404),
            ("DELETE", "/admin/upstreams/a/calls", vec![here, admin], 404),
            ("POST", one, vec![here, admin], 405),
            ("DELETE", all, vec![here, admin], 405),
        ] {
            let seen = asked(method, path, &headers).map(|status| status.as_u16());
            assert_eq!(seen, Some(status), "{method} {path} {headers:?}");
        }
        assert_eq!(asked("GET", "/metrics", &[here]), None);
    }
}
