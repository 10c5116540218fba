//! One address of an upstream, read from a URL.

use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::str::FromStr;

use super::Endpoint;
use super::units::Wrong;

const EXAMPLE: &str = "write it like \"http://127.0.0.1:8000\" or \"https://api.openai.com\"";

// === impl Endpoint ===

impl Endpoint {
    /// Reads `http://host[:port][/prefix]`. Never quotes the text: a URL may carry a password.
    pub fn parse(text: &str) -> Result<Self, Wrong> {
        if text.is_empty() {
            return wrong("is empty", EXAMPLE);
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return wrong("has no http:// or https:// in front", EXAMPLE);
        };
        let tls = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return wrong("is neither http:// nor https://", EXAMPLE),
        };
        if rest.contains(['?', '#']) {
            return wrong(
                "has a query or fragment",
                "leave out what begins with ? or #",
            );
        }
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        if authority.contains('@') {
            return wrong(
                "has a user name or password in it",
                "give the key as api_key = \"${NAME}\" or api_key_file",
            );
        }
        let (host, port) = host_and_port(authority)?;
        let port = match port {
            None if tls => 443,
            None => 80,
            Some(port) => match port.parse::<u16>() {
                Ok(port) if port != 0 && port.to_string().len() <= 5 => port,
                _ => return wrong("has a port that is not a number from 1 to 65535", EXAMPLE),
            },
        };
        Ok(Self {
            tls,
            host,
            port,
            base_path: base_path(path)?,
        })
    }
}

impl FromStr for Endpoint {
    type Err = Wrong;

    fn from_str(text: &str) -> Result<Self, Wrong> {
        Self::parse(text)
    }
}

/// Plain HTTP on this address.
impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        Self {
            tls: false,
            host: address.ip().to_string(),
            port: address.port(),
            base_path: String::new(),
        }
    }
}

/// The URL, always with its port.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        let Self {
            host,
            port,
            base_path,
            ..
        } = self;
        if host.contains(':') {
            write!(f, "{scheme}://[{host}]:{port}{base_path}")
        } else {
            write!(f, "{scheme}://{host}:{port}{base_path}")
        }
    }
}

fn host_and_port(authority: &str) -> Result<(String, Option<&str>), Wrong> {
    if let Some(inside) = authority.strip_prefix('[') {
        let Some((host, rest)) = inside.split_once(']') else {
            return wrong(
                "has a [ without ]",
                "write an IPv6 address like \"http://[::1]:8000\"",
            );
        };
        let Ok(ip) = host.parse::<Ipv6Addr>() else {
            return wrong(
                "has something in [ ] that is not an IPv6 address",
                "write it like \"http://[::1]:8000\"",
            );
        };
        return match rest.strip_prefix(':') {
            Some(port) => Ok((ip.to_string(), Some(port))),
            None if rest.is_empty() => Ok((ip.to_string(), None)),
            None => wrong(
                "has something after the ]",
                "write an IPv6 address like \"http://[::1]:8000\"",
            ),
        };
    }
    let (host, port) = authority
        .split_once(':')
        .map_or((authority, None), |(host, port)| (host, Some(port)));
    if port.is_some_and(|port| port.contains(':')) {
        return wrong(
            "has an IPv6 address without brackets",
            "write it like \"http://[::1]:8000\"",
        );
    }
    if host.is_empty() {
        return wrong("has no host", EXAMPLE);
    }
    if !host.is_ascii() {
        return wrong(
            "has a host name that is not ASCII",
            "write the name in its xn-- form",
        );
    }
    let valid = host.len() <= 253
        && host
            .trim_end_matches('.')
            .split('.')
            .all(|label| !label.is_empty() && label.len() <= 63)
        && host
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_'));
    if valid {
        Ok((host.to_ascii_lowercase(), port))
    } else {
        wrong("has a host name that cannot be one", EXAMPLE)
    }
}

fn base_path(path: &str) -> Result<String, Wrong> {
    let path = path.trim_end_matches('/');
    let path = path
        .strip_suffix("/v1")
        .unwrap_or(path)
        .trim_end_matches('/');
    if path.contains("/v1/") || path.ends_with("/chat/completions") {
        return wrong(
            "is the address of a route, not of a server",
            "leave out the path from /v1 on",
        );
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || "/-._~%!$&'()*+,;=:@".contains(c);
    if !path.chars().all(allowed)
        || path.split('/').any(|step| step == "." || step == "..")
        || path.contains("//")
    {
        return wrong(
            "has a path that cannot stand before /v1",
            "write a plain prefix such as /openai, or none",
        );
    }
    Ok(path.to_owned())
}

fn wrong<T>(what: &str, help: &str) -> Result<T, Wrong> {
    Err(Wrong {
        what: what.to_owned(),
        help: help.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read() {
        let table = [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
            ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
            ("HTTPS://API.OpenAI.com/v1", "https://api.openai.com:443"),
            ("http://vllm", "http://vllm:80"),
            ("http://[::1]:8000/v1", "http://[::1]:8000"),
            ("http://[2001:db8::1]", "http://[2001:db8::1]:80"),
            (
                "https://gateway.example/openai/v1",
                "https://gateway.example:443/openai",
            ),
            (
                "https://gateway.example/a/b/",
                "https://gateway.example:443/a/b",
            ),
            (
                "http://gpu_1.svc.cluster.local.:80",
                "http://gpu_1.svc.cluster.local.:80",
            ),
        ];
        for (text, expected) in table {
            assert_eq!(
                Endpoint::parse(text).unwrap().to_string(),
                expected,
                "{text}"
            );
        }
        assert_eq!(Endpoint::parse("http://[::1]:8000").unwrap().host, "::1");
    }

    #[test]
    fn what_is_no_server_is_refused() {
        let table = [
            ("", "is empty"),
            ("127.0.0.1:8000", "has no http://"),
            ("ftp://host", "neither http"),
            ("http://", "has no host"),
            ("http://:80", "has no host"),
            ("http://user:pw@host", "user name or password"),
            ("http://host?key=1", "query"),
            ("http://host#x", "fragment"),
            ("http://host:0", "port"),
            ("http://host:70000", "port"),
            ("http://host:", "port"),
            ("http://host:x", "port"),
            ("http://::1:8000", "without brackets"),
            ("http://[::1", "without ]"),
            ("http://[zz]", "not an IPv6"),
            ("http://[::1]x", "after the ]"),
            ("http://ho st", "host name"),
            ("http://bücher.example", "not ASCII"),
            ("http://host..x", "host name"),
            ("http://host/v1/chat/completions", "address of a route"),
            ("http://host/a/../b", "path"),
            ("http://host/a b", "path"),
        ];
        for (text, what) in table {
            let wrong = Endpoint::parse(text).unwrap_err();
            assert!(wrong.what.contains(what), "{text}: {wrong:?}");
            assert!(
                !wrong.help.is_empty() && !wrong.what.contains("pw"),
                "{text}: {wrong:?}"
            );
        }
    }
}
