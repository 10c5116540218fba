//! The header fields that the gateway acts on: their names, which of them cross, and what is noted of a request's and an answer's in one
//! pass over each.

mod answer;
mod list;
mod sent;

pub use answer::{Coding, ContentKind, Length, Reading, Told, UpstreamHead};
pub use list::{FieldLine, Fields};
pub use sent::Sent;

macro_rules! known {
    ($($field:ident = $name:literal,)+) => {
        /// A field that the gateway acts on, in either direction.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Field {
            $($field),+
        }

        #[expect(non_upper_case_globals, reason = "named like the variants")]
        mod length {
            $(pub(super) const $field: usize = $name.len();)+
        }

        impl Field {
            /// The field of this name, in whatever case. `None`: one that the gateway has no part in.
            #[inline]
            pub fn of(name: &[u8]) -> Option<Self> {
                let mut short = Short::default();
                short.get_mut(..name.len())?.copy_from_slice(name);
                short.make_ascii_lowercase();
                // By the length first: that leaves a few to compare with.
                match name.len() {
                    $(length::$field if short == const { short_of($name) } => Some(Self::$field),)+
                    _ => None,
                }
            }

            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$field => $name,)+
                }
            }
        }

        #[cfg(test)]
        const ALL: &[(Field, &str)] = &[$((Field::$field, $name)),+];
    };
}

known! {
    Accept = "accept",
    AcceptEncoding = "accept-encoding",
    Allow = "allow",
    AllowCredentials = "access-control-allow-credentials",
    AllowHeaders = "access-control-allow-headers",
    AllowMethods = "access-control-allow-methods",
    AllowOrigin = "access-control-allow-origin",
    AltSvc = "alt-svc",
    AnthropicBeta = "anthropic-beta",
    AnthropicVersion = "anthropic-version",
    ApiKey = "api-key",
    AskedHeaders = "access-control-request-headers",
    AskedMethod = "access-control-request-method",
    Authorization = "authorization",
    CacheControl = "cache-control",
    Close = "close",
    Connection = "connection",
    ContentEncoding = "content-encoding",
    ContentLength = "content-length",
    ContentType = "content-type",
    Cookie = "cookie",
    Date = "date",
    Expect = "expect",
    ExposeHeaders = "access-control-expose-headers",
    Forwarded = "forwarded",
    Host = "host",
    Http2Settings = "http2-settings",
    IdempotencyKey = "idempotency-key",
    KeepAlive = "keep-alive",
    Location = "location",
    MaxAge = "access-control-max-age",
    OpenaiBeta = "openai-beta",
    OpenaiOrganization = "openai-organization",
    OpenaiProject = "openai-project",
    Origin = "origin",
    ProxyAuthenticate = "proxy-authenticate",
    ProxyAuthorization = "proxy-authorization",
    ProxyConnection = "proxy-connection",
    Referer = "referer",
    RequestId = "request-id",
    RetryAfter = "retry-after",
    RetryCount = "x-stainless-retry-count",
    SetCookie = "set-cookie",
    Te = "te",
    Trailer = "trailer",
    TransferEncoding = "transfer-encoding",
    Upgrade = "upgrade",
    Vary = "vary",
    XAccelBuffering = "x-accel-buffering",
    XApiKey = "x-api-key",
    XForwardedFor = "x-forwarded-for",
    XForwardedHost = "x-forwarded-host",
    XForwardedProto = "x-forwarded-proto",
    XRealIp = "x-real-ip",
    XRequestId = "x-request-id",
    XShouldRetry = "x-should-retry",
    XTidegateAttached = "x-tidegate-attached",
    XTidegateAttempts = "x-tidegate-attempts",
    XTidegateCall = "x-tidegate-call",
    XTidegateId = "x-tidegate-id",
    XTidegateResume = "x-tidegate-resume",
    XTidegateStarted = "x-tidegate-started",
}

/// Some of the known fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Set(u64);

impl Set {
    pub const fn of(fields: &[Field]) -> Self {
        let mut bits = 0;
        let mut left = fields;
        while let [field, rest @ ..] = left {
            bits |= 1 << *field as u64;
            left = rest;
        }
        Self(bits)
    }

    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn has(self, field: Field) -> bool {
        self.0 & (1 << field as u64) != 0
    }

    fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    fn insert(&mut self, field: Field) {
        self.0 |= 1 << field as u64;
    }
}

/// Fields that belong to one connection (RFC 9110 §7.6.1), besides those that `Connection` names. `close` is a word there and never a field.
const HOP_BY_HOP: Set = Set::of(&[
    Field::Connection,
    Field::Close,
    Field::KeepAlive,
    Field::ProxyConnection,
    Field::ProxyAuthenticate,
    Field::ProxyAuthorization,
    Field::Te,
    Field::Trailer,
    Field::TransferEncoding,
    Field::Upgrade,
]);

/// Fields that cross with the body whatever `Connection` names: without them it cannot be read.
const CONTENT: Set = Set::of(&[Field::ContentType, Field::ContentEncoding]);

/// Request fields that are never forwarded: they are about the client and the gateway, not about the model server.
const PRIVATE_REQUEST: Set = Set::of(&[
    Field::Host,
    Field::ContentLength,
    Field::Expect,
    Field::Cookie,
    Field::AcceptEncoding,
    Field::Origin,
    Field::Referer,
    Field::Forwarded,
    Field::XForwardedFor,
    Field::XForwardedHost,
    Field::XForwardedProto,
    Field::XRealIp,
    Field::XTidegateCall,
    Field::XTidegateResume,
    Field::Http2Settings,
]);

/// Answer fields that are never forwarded: cookies and places of an inner host mean nothing to the client, CORS and the length are the
/// gateway's own.
const PRIVATE_ANSWER: Set = Set::of(&[
    Field::SetCookie,
    Field::Location,
    Field::AltSvc,
    Field::AllowOrigin,
    Field::AllowMethods,
    Field::AllowHeaders,
    Field::AllowCredentials,
    Field::ExposeHeaders,
    Field::MaxAge,
    Field::ContentLength,
]);

/// Where clients put keys: OpenAI's and Anthropic's field, and Azure's.
const CREDENTIALS: Set = Set::of(&[Field::Authorization, Field::XApiKey, Field::ApiKey]);

/// The name of a known field with zeros behind it: two of them are compared without a loop.
type Short = [u8; 32];

const fn short_of(name: &str) -> Short {
    let mut short = [0; 32];
    let (space, _) = short.split_at_mut(name.len());
    space.copy_from_slice(name.as_bytes());
    short
}

/// The words of a `Connection` field.
pub fn words(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|b| *b == b',').map(<[u8]>::trim_ascii)
}

#[cfg(test)]
pub(crate) fn list(fields: &[(&str, &str)]) -> Fields {
    let mut list = Fields::default();
    for (name, value) in fields {
        list.read(
            Field::of(name.as_bytes()),
            name.as_bytes(),
            value.as_bytes(),
        );
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_field_is_known_by_its_name_and_has_a_bit() {
        let mut seen = Set::default();
        for (field, name) in ALL {
            assert_eq!(Field::of(name.to_uppercase().as_bytes()), Some(*field));
            assert_eq!(field.name(), *name);
            assert!(!seen.has(*field), "{name}");
            seen.insert(*field);
            assert_eq!(Set::of(&[*field]).and(Set::default()).0.count_ones(), 1);
        }
        assert_eq!(seen.0.count_ones() as usize, ALL.len());
        for other in [
            "",
            "content-lengthy",
            "content-lengtH\0",
            "content-len",
            "c\u{212a}",
            &"x".repeat(33),
        ] {
            assert_eq!(Field::of(other.as_bytes()), None, "{other:?}");
        }
    }
}
