//! A page of a model server about itself: asked for beside the calls, without a slot, on a connection that calls may use too.

use std::fmt;
use std::io;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Request, StatusCode, Uri};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::connect::{self, TcpOptions};
use super::exchange::{Failure, Http2, RequestBody, Stream, UpstreamBody};
use super::http1::{Http1, SentHead};
use super::pool::{Checkout, Pool};
use super::{EndpointState, Upstream};
use crate::fields::{Sent, UpstreamHead};

/// Longest page that is read. vLLM's metrics are some hundred KiB.
const PAGE_BYTES: usize = 4 * 1024 * 1024;

/// Why there is no page.
#[derive(Debug)]
pub enum PageError {
    /// All connections to the endpoint are in use by calls, which go first.
    NoConnection,
    Connect(io::Error),
    Broken(Failure),
    Status(StatusCode),
    TooLong,
}

impl PageError {
    /// For metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::NoConnection => "no_connection",
            Self::Connect(_) => "connect",
            Self::Broken(_) => "broken",
            Self::Status(_) => "status",
            Self::TooLong => "too_long",
        }
    }
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoConnection => f.write_str("all connections are in use (pool.connections_max)"),
            Self::Connect(error) => write!(f, "cannot connect: {error}"),
            Self::Broken(error) => error.fmt(f),
            Self::Status(status) => write!(f, "it is answered {status}"),
            Self::TooLong => write!(f, "it is longer than {} MiB", PAGE_BYTES >> 20),
        }
    }
}

impl std::error::Error for PageError {}

/// How a connection is had.
#[derive(Clone, Debug)]
pub struct Way {
    pub pool: Arc<Pool>,
    pub tcp: TcpOptions,
    pub buffer_bytes: usize,
    /// Drivers of HTTP/2 connections.
    pub drivers: TaskTracker,
}

/// The page at `path`, below the endpoint's base path. The caller bounds the time.
///
/// # Errors
///
/// There is none, or it is not read.
///
/// # Cancel safety
///
/// Dropping the future closes the connection (HTTP/2: its stream).
pub async fn fetch(
    upstream: &Upstream,
    endpoint: &Arc<EndpointState>,
    way: &Way,
    fields: &Sent,
    path: &str,
) -> Result<Bytes, PageError> {
    let target = format!("{}{path}", endpoint.address.base_path);
    let mut fresh = false;
    let (head, mut body) = loop {
        let pooled = (!fresh)
            .then(|| way.pool.checkout(endpoint, Instant::now()))
            .flatten();
        let reused = pooled.is_some();
        let conn = match pooled {
            Some(conn) => conn,
            None => open(upstream, endpoint, way).await?,
        };
        match exchange(conn, endpoint, fields, &target).await {
            Ok(begun) => break begun,
            // The server had closed it; asking twice does no harm.
            Err(_) if reused => fresh = true,
            Err(error) => return Err(PageError::Broken(error)),
        }
    };
    if !head.status.is_success() {
        return Err(PageError::Status(head.status));
    }
    let mut page = BytesMut::new();
    while let Some(data) = body.data().await {
        let data = data.map_err(PageError::Broken)?;
        if page.len() + data.len() > PAGE_BYTES {
            return Err(PageError::TooLong);
        }
        page.extend_from_slice(&data);
    }
    if let Some(conn) = body.into_idle() {
        way.pool
            .put(conn, Instant::now(), upstream.settings.pool.idle);
    }
    Ok(page.freeze())
}

async fn open(
    upstream: &Upstream,
    endpoint: &Arc<EndpointState>,
    way: &Way,
) -> Result<Checkout, PageError> {
    let permits = Arc::clone(&endpoint.connections);
    let permit = permits
        .try_acquire_owned()
        .map_err(|_| PageError::NoConnection)?;
    let tcp = connect::tcp(endpoint, way.tcp)
        .await
        .map_err(PageError::Connect)?;
    let (io, http2) = connect::tls(upstream, endpoint, tcp, permit)
        .await
        .map_err(PageError::Connect)?;
    if !http2 {
        let conn = Http1::new(io, Arc::clone(endpoint), way.buffer_bytes);
        return Ok(Checkout::Http1(Box::new(conn)));
    }
    let drivers = way.drivers.clone();
    let conn = Http2::new(io, way.buffer_bytes, move |driver| {
        drivers.spawn(driver);
    });
    let conn = conn.await.map_err(PageError::Connect)?;
    let idle = upstream.settings.pool.idle;
    Ok(Checkout::Http2(way.pool.share(endpoint, conn, idle)))
}

async fn exchange(
    conn: Checkout,
    endpoint: &EndpointState,
    fields: &Sent,
    target: &str,
) -> Result<(Box<UpstreamHead>, UpstreamBody), Failure> {
    match conn {
        Checkout::Http1(mut conn) => {
            let head = SentHead {
                method: &Method::GET,
                target,
                host: &endpoint.authority,
                fields,
                body: &[],
            };
            let sent = conn.send(head, RequestBody::Whole(None)).await;
            let head = sent.map_err(|failed| failed.error)?;
            Ok((head, UpstreamBody::Http1(conn)))
        }
        Checkout::Http2(mut place) => {
            let mut request = Request::new(RequestBody::Whole(None));
            *request.headers_mut() = fields.to_map();
            *request.version_mut() = http::Version::HTTP_2;
            *request.uri_mut() =
                uri(endpoint, target).ok_or(Failure::Malformed("no valid address"))?;
            let sent = place.conn.send(request).await;
            let (parts, body) = sent.map_err(|failed| failed.error)?.into_parts();
            let body = UpstreamBody::Http2(Box::new(Stream { body, place }));
            Ok((Box::new(UpstreamHead::of(&parts)), body))
        }
    }
}

fn uri(endpoint: &EndpointState, target: &str) -> Option<Uri> {
    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(if endpoint.address.tls {
        Scheme::HTTPS
    } else {
        Scheme::HTTP
    });
    parts.authority = Authority::try_from(&*endpoint.authority).ok();
    parts.path_and_query = PathAndQuery::try_from(target).ok();
    Uri::from_parts(parts).ok()
}
