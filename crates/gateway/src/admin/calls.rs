//! The calls in flight, to look at and to end.
//!
//! The port has no keys, so a page in somebody's browser must not be able to use it: whoever asks has to name the port by address or as
//! localhost (a name that was rebound to it is neither), an ending needs a header that no form can send, and no page's origin is served.

use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderName, HeaderValue, ORIGIN};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};

use super::{seconds, text};
use crate::call::Id;
use crate::call::entry::{Row, WorkState};
use crate::call::stop::By;
use crate::call::table::Table;

/// Must come with what changes something.
pub const X_TIDEGATE_ADMIN: HeaderName = HeaderName::from_static("x-tidegate-admin");

const CALLS: &str = "/admin/calls";
const UPSTREAMS: &str = "/admin/upstreams";

/// `None`: the path is another's.
///
/// `names`: the upstreams that there are; `upstreams`: how they stand.
pub fn answer<B>(
    request: &Request<B>,
    table: &Table,
    names: impl FnOnce() -> Vec<Arc<str>>,
    upstreams: impl FnOnce() -> Value,
) -> Option<Response<Full<Bytes>>> {
    let path = request.uri().path();
    let meant = meant(path)?;
    if let Err(why) = check(request.headers(), request.method()) {
        return Some(text(StatusCode::FORBIDDEN, why));
    }
    Some(match (request.method(), meant) {
        (&Method::GET | &Method::HEAD, Meant::All) => {
            let all = json!({"upstreams": upstreams(), "calls": rows(&table.list())});
            json_of(StatusCode::OK, &all)
        }
        (&Method::GET | &Method::HEAD, Meant::Upstreams) => {
            json_of(StatusCode::OK, &json!({"upstreams": upstreams()}))
        }
        (&Method::DELETE, Meant::One(id)) => {
            let ended = table.stop(By::Operator, |entry| entry.id.text() == id);
            told(ended, "no call with this id is in flight\n")
        }
        (&Method::DELETE, Meant::Of(upstream)) => {
            let ended = table.stop(By::Operator, |entry| entry.is_at(upstream));
            if ended > 0 {
                return Some(told(ended, ""));
            }
            let names = names();
            if names.iter().any(|name| **name == *upstream) {
                return Some(told(0, "no call of this upstream is in flight\n"));
            }
            let why = format!(
                "there is no upstream {upstream}; there are: {}\n",
                names.join(", ")
            );
            text(StatusCode::NOT_FOUND, why)
        }
        _ => text(
            StatusCode::METHOD_NOT_ALLOWED,
            "GET /admin/calls, GET /admin/upstreams, DELETE /admin/calls/{id}, DELETE /admin/upstreams/{name}/calls\n",
        ),
    })
}

enum Meant<'a> {
    All,
    Upstreams,
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
    let rest = path.strip_prefix(UPSTREAMS)?;
    if rest.is_empty() {
        return Some(Meant::Upstreams);
    }
    let name = rest.strip_prefix('/')?.strip_suffix("/calls")?;
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
    rows.iter()
        .map(|row| {
            json!({
                "id": row.id.text(),
                "own_id": row.own_id.as_deref(),
                "key": row.key,
                "route": row.route,
                "model": row.model.as_deref(),
                "upstream": row.upstream.as_deref(),
                "endpoint": row.endpoint.as_deref(),
                "phase": row.phase,
                "state": row.state.name(),
                "on_abandon": row.contract,
                "waiting": row.left.is_none() && row.state == WorkState::Attended,
                "age_seconds": seconds(row.age),
                "left_seconds": row.left.map(seconds),
                "attachable": row.attachable,
                "attached_to": row.attached_to.as_ref().map(Id::text),
                "tokens": row.tokens,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    fn asked(method: &str, path: &str, headers: &[(&str, &str)]) -> Option<StatusCode> {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let table = Table::new(1);
        answer(&request.body(()).unwrap(), &table, Vec::new, || json!([]))
            .map(|response| response.status())
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
            ("GET", "/admin/upstreams", vec![here], 200),
            ("GET", "/admin/upstreams", vec![], 403),
            (
                "GET",
                "/admin/upstreams",
                vec![here, ("origin", "null")],
                403,
            ),
            ("DELETE", "/admin/upstreams", vec![here, admin], 405),
            ("POST", one, vec![here, admin], 405),
            ("DELETE", all, vec![here, admin], 405),
        ] {
            let seen = asked(method, path, &headers).map(|status| status.as_u16());
            assert_eq!(seen, Some(status), "{method} {path} {headers:?}");
        }
        assert_eq!(asked("GET", "/metrics", &[here]), None);
    }

    /// A name with a slip in it does not look like one at which nothing runs.
    #[tokio::test]
    async fn a_name_that_no_upstream_has_is_told_apart_from_one_that_is_idle() {
        let names = || vec!["a".into(), "b".into()];
        for (name, said) in [
            ("a", "no call of this upstream is in flight\n"),
            ("zzz", "there is no upstream zzz; there are: a, b\n"),
        ] {
            let request = Request::builder()
                .method("DELETE")
                .uri(format!("/admin/upstreams/{name}/calls"))
                .header("host", "127.0.0.1:9090")
                .header("x-tidegate-admin", "1");
            let table = Table::new(1);
            let answer = answer(&request.body(()).unwrap(), &table, names, || json!([])).unwrap();
            assert_eq!(answer.status(), StatusCode::NOT_FOUND);
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(body, said);
        }
    }
}
