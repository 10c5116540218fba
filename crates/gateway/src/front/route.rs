//! Method and path → route. Pure; the table of everything the data port serves.

use http::uri::PathAndQuery;
use http::{Method, Uri};
use tidegate_wire::Dialect;

use super::is_read;
use crate::call::{ModelIn, Rejection, RouteFacts};

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// To an upstream.
    Call(RouteFacts),
    /// The list of models, merged over the upstreams.
    Models,
    /// One of them, by the name that clients use.
    Model(String),
    /// The end of a call by its id.
    Cancel,
}

/// A route found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    pub route: Route,
    /// Safe to append to an upstream's base path.
    pub path_and_query: PathAndQuery,
}

/// A request that has no route. The dialect is that of the path's family, for the error's shape.
#[derive(Debug)]
pub struct Misrouted {
    pub rejection: Rejection,
    pub dialect: Dialect,
}

/// One known path.
#[derive(Debug)]
pub struct Known {
    pub path: &'static str,
    pub facts: RouteFacts,
}

const fn call(path: &'static str, name: &'static str, dialect: Dialect, can_stream: bool) -> Known {
    Known {
        path,
        facts: RouteFacts {
            name,
            dialect,
            model: ModelIn::Body,
            can_stream,
        },
    }
}

/// The paths whose bodies are looked into. Everything else under `/v1/` passes with the same guarantees.
pub const KNOWN: [Known; 6] = [
    call("/v1/chat/completions", "chat", Dialect::OpenAi, true),
    call("/v1/completions", "completions", Dialect::OpenAi, true),
    call("/v1/embeddings", "embeddings", Dialect::OpenAi, false),
    call("/v1/responses", "responses", Dialect::Responses, true),
    call("/v1/messages", "messages", Dialect::Anthropic, true),
    call(
        "/v1/messages/count_tokens",
        "count_tokens",
        Dialect::Anthropic,
        false,
    ),
];

const fn pass(dialect: Dialect) -> RouteFacts {
    RouteFacts {
        name: "pass",
        dialect,
        model: ModelIn::BodyIfJson,
        can_stream: false,
    }
}

impl Destination {
    fn new(route: Route, uri: &Uri) -> Self {
        Self {
            route,
            path_and_query: uri
                .path_and_query()
                .cloned()
                .unwrap_or_else(|| PathAndQuery::from_static("/")),
        }
    }
}

impl Destination {
    /// It goes to an upstream with a slot.
    pub fn is_a_call(&self) -> bool {
        matches!(self.route, Route::Call(_))
    }

    pub fn dialect(&self) -> Dialect {
        match &self.route {
            Route::Call(facts) => facts.dialect,
            Route::Models | Route::Model(_) | Route::Cancel => Dialect::OpenAi,
        }
    }
}

/// # Errors
///
/// No such path, not with this method, or a path that must not go near an upstream.
pub fn find(method: &Method, uri: &Uri) -> Result<Destination, Misrouted> {
    let path = uri.path();
    let dialect = family(path);
    let misrouted = |rejection| Err(Misrouted { rejection, dialect });
    if is_read(method)
        && let Some(name) = path.strip_prefix("/v1/models/")
    {
        // The name goes nowhere as a path, so it may hold what a path must not.
        return match decoded(name).filter(|name| !name.is_empty()) {
            Some(name) => Ok(Destination::new(Route::Model(name), uri)),
            None => misrouted(Rejection::BadPath("it is no name of a model")),
        };
    }
    if let Some(known) = KNOWN.iter().find(|known| known.path == path) {
        let posts = method == Method::POST;
        // `GET /v1/chat/completions` lists stored completions; the same holds for responses.
        let reads = is_read(method) && matches!(known.facts.name, "chat" | "responses");
        return match (posts, reads) {
            (true, _) => Ok(Destination::new(Route::Call(known.facts), uri)),
            (false, true) => Ok(Destination::new(Route::Call(pass(dialect)), uri)),
            _ => misrouted(Rejection::MethodNotAllowed {
                allow: "POST, OPTIONS",
            }),
        };
    }
    if let Err(why) = check(path) {
        return misrouted(Rejection::BadPath(why));
    }
    if KNOWN
        .iter()
        .any(|known| path.trim_end_matches('/') == known.path)
    {
        return misrouted(Rejection::NotFound);
    }
    if path == "/v1/models" {
        return if is_read(method) {
            Ok(Destination::new(Route::Models, uri))
        } else {
            misrouted(Rejection::MethodNotAllowed {
                allow: "GET, HEAD, OPTIONS",
            })
        };
    }
    if cancelled_call(path).is_some() {
        return if method == Method::POST {
            Ok(Destination::new(Route::Cancel, uri))
        } else {
            misrouted(Rejection::MethodNotAllowed {
                allow: "POST, OPTIONS",
            })
        };
    }
    if let Some(asked) = doubled(path) {
        return Err(Misrouted {
            rejection: Rejection::DoubledPath,
            dialect: family(asked),
        });
    }
    if path.starts_with("/v1/") && method != Method::CONNECT && method != Method::TRACE {
        return Ok(Destination::new(Route::Call(pass(dialect)), uri));
    }
    misrouted(Rejection::NotFound)
}

/// A name with its `%2F` and the like made plain; `None`: it is no text without control characters.
fn decoded(name: &str) -> Option<String> {
    let mut parts = name.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let code = part
            .get(..2)
            .filter(|c| c.bytes().all(|b| b.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(code, 16).ok()?);
        bytes.extend_from_slice(part.get(2..)?.as_bytes());
    }
    let name = String::from_utf8(bytes).ok()?;
    (!name.chars().any(char::is_control)).then_some(name)
}

/// The id in `/v1/calls/{id}/cancel`.
pub fn cancelled_call(path: &str) -> Option<&str> {
    let id = path.strip_prefix("/v1/calls/")?.strip_suffix("/cancel")?;
    (!id.contains('/')).then_some(id)
}

/// The path that was meant, where the client's base URL holds a part of it already: `/v1/v1/...`, or a route behind a route.
fn doubled(path: &str) -> Option<&str> {
    let route = |rest: &str| {
        KNOWN
            .iter()
            .any(|known| known.path.strip_prefix("/v1") == Some(rest))
    };
    let again = |known: &&Known| path.strip_prefix(known.path).is_some_and(route);
    let inner = path
        .strip_prefix("/v1")
        .filter(|inner| inner.starts_with("/v1/"));
    inner.or_else(|| KNOWN.iter().find(again).map(|known| known.path))
}

fn family(path: &str) -> Dialect {
    let under = |prefix: &str| {
        path.strip_prefix(prefix)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    if under("/v1/messages") || under("/v1/complete") {
        Dialect::Anthropic
    } else if under("/v1/responses") {
        Dialect::Responses
    } else {
        Dialect::OpenAi
    }
}

/// A path that means the same to every server on the way.
fn check(path: &str) -> Result<(), &'static str> {
    if !path.starts_with('/') {
        return Err("it must begin with a slash");
    }
    if path.contains("//") || path.contains('\\') {
        return Err("it must not hold an empty segment or a backslash");
    }
    let lower = path.to_ascii_lowercase();
    if ["%2f", "%5c", "%00", "%0a", "%0d"]
        .iter()
        .any(|hidden| lower.contains(hidden))
    {
        return Err("it must not hold an encoded slash, backslash or control character");
    }
    if path.contains(';') {
        return Err("it must not hold path parameters");
    }
    if encodes_needlessly(path) {
        return Err("it must not encode letters, digits, `-`, `.`, `_` or `~`");
    }
    let dots = lower.replace("%2e", ".");
    if dots
        .split('/')
        .any(|segment| segment == "." || segment == "..")
    {
        return Err("it must not hold dot segments");
    }
    Ok(())
}

/// `%63` for `c`: some servers decode it, so that the path would mean one thing here and another there (RFC 3986 §2.3).
fn encodes_needlessly(path: &str) -> bool {
    path.split('%').skip(1).any(|rest| {
        let code = rest
            .get(..2)
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        code.is_none_or(|c| c.is_ascii_alphanumeric() || b"-._~".contains(&c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(method: &str, uri: &str) -> Result<Destination, Misrouted> {
        find(&method.parse().unwrap(), &uri.parse().unwrap())
    }

    #[test]
    fn known_paths_take_post_and_keep_their_query() {
        for known in &KNOWN {
            let place = found("POST", &format!("{}?a=b", known.path)).unwrap();
            assert_eq!(place.route, Route::Call(known.facts));
            assert_eq!(place.path_and_query.query(), Some("a=b"));
            assert!(matches!(
                found("DELETE", known.path).unwrap_err().rejection,
                Rejection::MethodNotAllowed { .. }
            ));
        }
    }

    #[test]
    fn the_host_of_an_absolute_target_is_ignored() {
        assert_eq!(
            found("POST", "http://evil/v1/chat/completions")
                .unwrap()
                .path_and_query,
            "/v1/chat/completions"
        );
    }

    #[test]
    fn other_paths_under_v1_pass_and_the_rest_is_unknown() {
        for (path, dialect) in [
            ("/v1/audio/speech", Dialect::OpenAi),
            ("/v1/responses/resp_1/cancel", Dialect::Responses),
            ("/v1/messages/batches", Dialect::Anthropic),
        ] {
            assert_eq!(found("POST", path).unwrap().dialect(), dialect, "{path}");
        }
        for path in [
            "/",
            "/v1",
            "/chat/completions",
            "/metrics",
            "/healthz",
            "/v2/x",
        ] {
            assert!(
                matches!(
                    found("GET", path).unwrap_err().rejection,
                    Rejection::NotFound
                ),
                "{path}"
            );
        }
    }

    #[test]
    fn a_base_url_that_is_too_long_is_told_in_the_shape_of_what_was_meant() {
        for (path, dialect) in [
            ("/v1/v1/messages", Dialect::Anthropic),
            ("/v1/v1/chat/completions", Dialect::OpenAi),
            ("/v1/v1/responses/resp_1", Dialect::Responses),
            ("/v1/v1/models", Dialect::OpenAi),
            ("/v1/chat/completions/chat/completions", Dialect::OpenAi),
            ("/v1/messages/messages", Dialect::Anthropic),
            ("/v1/responses/chat/completions", Dialect::Responses),
        ] {
            for method in ["GET", "POST"] {
                let refused = found(method, path).unwrap_err();
                assert!(
                    matches!(refused.rejection, Rejection::DoubledPath),
                    "{path}"
                );
                assert_eq!(refused.dialect, dialect, "{path}");
            }
        }
        for path in [
            "/v1/v1x",
            "/v1/responses/resp_1",
            "/v1/chat/completions/chat",
        ] {
            assert!(found("GET", path).is_ok(), "{path}");
        }
    }

    #[test]
    fn a_model_is_asked_for_by_any_name_it_may_have() {
        for (path, name) in [
            ("/v1/models/tiny", "tiny"),
            ("/v1/models/org/tiny", "org/tiny"),
            ("/v1/models/org%2Ftiny%3Aq4", "org/tiny:q4"),
            ("/v1/models/a%20b", "a b"),
            ("/v1/models/..", ".."),
        ] {
            let route = found("GET", path).unwrap().route;
            assert_eq!(route, Route::Model(name.into()), "{path}");
        }
        for path in [
            "/v1/models/",
            "/v1/models/%00",
            "/v1/models/%2",
            "/v1/models/%+1",
            "/v1/models/%ff",
        ] {
            let refused = found("GET", path).unwrap_err().rejection;
            assert!(matches!(refused, Rejection::BadPath(_)), "{path}");
        }
        let deleted = found("DELETE", "/v1/models/tiny").unwrap().route;
        assert!(matches!(deleted, Route::Call(_)), "that one is passed on");
    }

    #[test]
    fn paths_that_servers_read_differently_are_refused() {
        for path in [
            "/v1/../admin",
            "/v1/%2e%2e/admin",
            "/v1/.%2E/x",
            "//evil/v1/x",
            "/v1//x",
            "/v1/a%2fb",
            "/v1/a%5Cb",
            "/v1/%00",
            "/v1/./x",
            "/v1/%63hat/completions",
            "/v1/x%zz",
            "/v1/chat/completions;x",
        ] {
            assert!(
                matches!(
                    found("POST", path).unwrap_err().rejection,
                    Rejection::BadPath(_)
                ),
                "{path}"
            );
        }
    }
}
