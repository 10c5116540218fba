//! Endpoint → connection → request → response head. One exchange, or a reason why there is none.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Uri};
use tokio::time::Instant;

use super::attendance::Attendance;
use super::deadline::{Patience, Tier};
use super::outcome::{ConnectFailure, Phase, Rejection};
use super::retry::{self, Failure, Next};
use super::settle::Record;
use super::upload::Upload;
use super::{Prepared, Toward, Worker};
use crate::fields::UpstreamHead;
use crate::telemetry::metrics::UpstreamReason;
use crate::upstream::endpoint::InFlight;
use crate::upstream::exchange::{Http2, RequestBody, Stream, UpstreamBody};
use crate::upstream::http1::{Http1, SentHead};
use crate::upstream::pool::Checkout;
use crate::upstream::socket::UpstreamIo;
use crate::upstream::upload::{Progress, UploadError};
use crate::upstream::{EndpointState, Upstream, connect, pick};

/// A request under way, answered as far as its head.
#[derive(Debug)]
pub struct Exchange {
    pub head: Box<UpstreamHead>,
    pub body: UpstreamBody,
    pub in_flight: InFlight,
    /// How long the connection may be kept for another call.
    pub keep_idle: Duration,
}

/// Tries until an answer begins or trying again would not be safe.
///
/// # Errors
///
/// Why no answer began. [`Rejection::Broken`] says that the request may have run all the same.
pub async fn until_head(
    Toward { worker, upstream }: Toward<'_>,
    patience: &Patience<'_>,
    prepared: &mut Prepared<'_>,
    attendance: &mut Attendance,
    record: &mut Record,
) -> Result<Exchange, Rejection> {
    let mut tried: Vec<Arc<EndpointState>> = Vec::new();
    let mut fresh = None;
    loop {
        let endpoint = match fresh.take() {
            Some(endpoint) => endpoint,
            None => pick::pick(&upstream.endpoints, &tried, || fastrand::usize(..))
                .ok_or(Rejection::Connect(ConnectFailure::Unreachable))?,
        };
        let in_flight = endpoint.enter();
        let only_fresh = tried.last().is_some_and(|last| Arc::ptr_eq(last, endpoint));
        let mut trial = Trial {
            worker,
            upstream,
            patience,
            attendance,
            endpoint,
        };
        let failed = match trial.run(prepared, only_fresh, record).await? {
            Ok(begun) => return Ok(under_way(upstream, begun, in_flight)),
            Err(failed) => failed,
        };
        tried.push(Arc::clone(endpoint));
        let others = upstream
            .endpoints
            .iter()
            .any(|e| !tried.iter().any(|t| Arc::ptr_eq(t, e)));
        let repeatable = matches!(prepared.upload, Upload::Whole { .. });
        let next = retry::next(failed.failure, others, repeatable);
        if next == Next::GiveUp {
            return Err(failed.rejection);
        }
        let reason = UpstreamReason {
            upstream: Arc::clone(&upstream.name),
            reason: failed.rejection.reason(),
        };
        upstream.metrics.retries.get_or_create(&reason).inc();
        fresh = (next == Next::Fresh).then_some(endpoint);
    }
}

/// An answer that has begun.
type Begun = (Box<UpstreamHead>, UpstreamBody);

fn under_way(upstream: &Upstream, (head, body): Begun, in_flight: InFlight) -> Exchange {
    let idle = upstream.settings.pool.idle;
    // The server says when it will hang up; half a second before that the connection is no longer used.
    let told = head
        .told
        .keep_alive
        .map(|s| Duration::from_secs(s).saturating_sub(Duration::from_millis(500)));
    Exchange {
        keep_idle: told.map_or(idle, |told| told.min(idle)),
        head,
        body,
        in_flight,
    }
}

/// A try that failed without an answer.
struct Failed {
    failure: Failure,
    rejection: Rejection,
}

impl Failed {
    fn not_connected(rejection: Rejection) -> Self {
        Self {
            failure: Failure::NotConnected,
            rejection,
        }
    }
}

struct Trial<'a> {
    worker: &'a Arc<Worker>,
    upstream: &'a Arc<Upstream>,
    patience: &'a Patience<'a>,
    attendance: &'a mut Attendance,
    endpoint: &'a Arc<EndpointState>,
}

impl Trial<'_> {
    /// The outer error ends the call; the inner one only this try.
    async fn run(
        &mut self,
        prepared: &mut Prepared<'_>,
        only_fresh: bool,
        record: &mut Record,
    ) -> Result<Result<Begun, Failed>, Rejection> {
        record.attempt(self.endpoint);
        let now = Instant::now();
        let pooled = if only_fresh {
            None
        } else {
            self.worker.pool.checkout(self.endpoint, now)
        };
        let conn = match pooled {
            Some(conn) => {
                record.phase_from(Phase::WaitingHead, now);
                conn
            }
            // Boxed: rare, and a large part of the call's future otherwise.
            None => match Box::pin(self.open(record)).await? {
                Ok(conn) => {
                    record.phase(Phase::WaitingHead);
                    conn
                }
                Err(failed) => return Ok(Err(failed)),
            },
        };
        let sending = match &prepared.upload {
            Upload::Streamed { body, .. } => Some(body.sent().clone()),
            Upload::Whole { .. } | Upload::Gone => None,
        };
        let target = self.target(prepared.path_and_query)?;
        record.sent();
        self.exchange(conn, prepared, target, sending.as_ref())
            .await
    }

    async fn exchange(
        &mut self,
        conn: Checkout,
        prepared: &mut Prepared<'_>,
        target: Cow<'_, PathAndQuery>,
        sending: Option<&Progress>,
    ) -> Result<Result<Begun, Failed>, Rejection> {
        let (sent, reused) = match conn {
            Checkout::Http1(mut conn) => {
                let body = prepared.upload.body_apart();
                let head = SentHead {
                    method: prepared.method,
                    target: target.as_str(),
                    host: &self.endpoint.authority,
                    fields: &prepared.fields,
                    body: prepared.upload.small(),
                };
                let sent = self.head(sending, pin!(conn.send(head, body))).await?;
                let reused = conn.reused;
                (sent.map(|head| (head, UpstreamBody::Http1(conn))), reused)
            }
            Checkout::Http2(mut place) => {
                let request = self.http2_request(prepared, target.into_owned())?;
                let sent = self.head(sending, pin!(place.conn.send(request))).await;
                // A slow server or a dead connection: nobody can tell. Later calls are not put to the same test.
                if matches!(sent, Err(Rejection::Timeout(_))) {
                    place.retire();
                }
                let sent = sent?;
                let reused = place.reused;
                if sent.as_ref().is_err_and(|failed| failed.unsent) {
                    place.retire();
                }
                let begun = sent.map(|response| {
                    let (parts, body) = response.into_parts();
                    let body = UpstreamBody::Http2(Box::new(Stream { body, place }));
                    (Box::new(UpstreamHead::of(&parts)), body)
                });
                (begun, reused)
            }
        };
        Ok(sent.map_err(|failed| {
            tracing::debug!(error = %failed.error, endpoint = %self.endpoint.authority, reused, unsent = failed.unsent, "no answer");
            let failure = Failure::Broke { reused, unsent: failed.unsent };
            let rejection = match failed.error.upload() {
                Some(UploadError::Broken) => Rejection::Gone,
                Some(UploadError::Slow) => Rejection::Timeout(Tier::RequestBody),
                None => Rejection::Broken,
            };
            Failed { failure, rejection }
        }))
    }

    /// The endpoint's base path and what the client asked for.
    fn target<'a>(&self, asked: &'a PathAndQuery) -> Result<Cow<'a, PathAndQuery>, Rejection> {
        let base = &self.endpoint.address.base_path;
        if base.is_empty() {
            return Ok(Cow::Borrowed(asked));
        }
        PathAndQuery::try_from(format!("{base}{asked}"))
            .map(Cow::Owned)
            .map_err(|_| Rejection::BadPath("it is not a valid request target"))
    }

    /// Waits for the head. What is sent while it comes from the client can take its time: the limit begins anew with each part of it, and
    /// for good with the last. A client that stops has a limit of its own.
    async fn head<T>(
        &mut self,
        sending: Option<&Progress>,
        mut send: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, Rejection> {
        let limit = self.upstream.settings.timeouts.response_head;
        let mut left = limit;
        loop {
            let step = self
                .attendance
                .within(self.patience, Tier::ResponseHead, left, send.as_mut())
                .await;
            let Some(sending) = sending else {
                return step;
            };
            let stalled = sending.stalled();
            match step {
                Err(Rejection::Timeout(Tier::ResponseHead)) if stalled < limit => {
                    left = limit - stalled;
                }
                done => return done,
            }
        }
    }

    fn http2_request(
        &self,
        prepared: &mut Prepared<'_>,
        target: PathAndQuery,
    ) -> Result<Request<RequestBody>, Rejection> {
        let mut request = Request::new(prepared.upload.body());
        *request.method_mut() = prepared.method.clone();
        *request.headers_mut() = prepared.fields.to_map();
        *request.version_mut() = http::Version::HTTP_2;
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(if self.endpoint.address.tls {
            Scheme::HTTPS
        } else {
            Scheme::HTTP
        });
        let authority = Authority::try_from(&*self.endpoint.authority);
        parts.authority = Some(authority.map_err(|_| Rejection::Internal)?);
        parts.path_and_query = Some(target);
        *request.uri_mut() = Uri::from_parts(parts).map_err(|_| Rejection::Internal)?;
        Ok(request)
    }

    /// Opens a connection for this call: permit, TCP, TLS, each under its own tier.
    async fn open(&self, record: &mut Record) -> Result<Result<Checkout, Failed>, Rejection> {
        let timeouts = &self.upstream.settings.timeouts;
        record.phase(Phase::Pool);
        let permit = self
            .patience
            .within(
                Tier::Pool,
                timeouts.pool,
                self.worker.pool.permit(self.endpoint),
            )
            .await?;
        let Some(permit) = permit else {
            return Err(Rejection::Internal);
        };
        record.phase(Phase::Connecting);
        let tcp = self
            .patience
            .within(
                Tier::Connect,
                timeouts.connect,
                connect::tcp(self.endpoint, self.worker.tcp),
            )
            .await;
        let tcp = match self.connected(tcp, connect_failure)? {
            Ok(tcp) => tcp,
            Err(failed) => return Ok(Err(failed)),
        };
        let tls = self
            .patience
            .within(
                Tier::Tls,
                timeouts.tls,
                connect::tls(self.upstream, self.endpoint, tcp, permit),
            )
            .await;
        let (io, http2) = match self.connected(tls, |_| ConnectFailure::Tls)? {
            Ok(done) => done,
            Err(failed) => return Ok(Err(failed)),
        };
        if http2 {
            return self.shake(io).await;
        }
        self.opened();
        let buffer = self.worker.stream_buffer_bytes;
        let conn = Http1::new(io, Arc::clone(self.endpoint), buffer);
        Ok(Ok(Checkout::Http1(Box::new(conn))))
    }

    /// The handshake of HTTP/2, under the limit of the one before it.
    async fn shake(&self, io: UpstreamIo) -> Result<Result<Checkout, Failed>, Rejection> {
        let drivers = self.worker.drivers.clone();
        let shake = Http2::new(io, self.worker.stream_buffer_bytes, move |driver| {
            drivers.spawn(driver);
        });
        let limit = self.upstream.settings.timeouts.tls;
        let shake = self.patience.within(Tier::Tls, limit, shake).await;
        let conn = match self.connected(shake, |_| ConnectFailure::Unreachable)? {
            Ok(conn) => conn,
            Err(failed) => return Ok(Err(failed)),
        };
        self.opened();
        let place = self
            .worker
            .pool
            .share(self.endpoint, conn, self.upstream.settings.pool.idle);
        Ok(Ok(Checkout::Http2(place)))
    }

    /// Sorts a connecting step's result: done, this endpoint failed (it is left out for a while), or the call is over.
    fn connected<T>(
        &self,
        step: Result<io::Result<T>, Rejection>,
        failure: impl FnOnce(&io::Error) -> ConnectFailure,
    ) -> Result<Result<T, Failed>, Rejection> {
        let rejection = match step {
            Ok(Ok(done)) => return Ok(Ok(done)),
            Ok(Err(error)) => {
                let failure = failure(&error);
                tracing::debug!(%error, upstream = %self.upstream.name, endpoint = %self.endpoint.authority, "cannot connect");
                self.failed(Rejection::Connect(failure), &error)
            }
            Err(timeout @ Rejection::Timeout(Tier::Connect | Tier::Tls)) => {
                let took_too_long = timeout.reason();
                self.failed(
                    timeout,
                    &format_args!("no answer within the `{took_too_long}` timeout"),
                )
            }
            Err(over) => return Err(over),
        };
        let reason = UpstreamReason {
            upstream: Arc::clone(&self.upstream.name),
            reason: rejection.reason(),
        };
        self.upstream
            .metrics
            .upstream_connect_errors
            .get_or_create(&reason)
            .inc();
        Ok(Err(Failed::not_connected(rejection)))
    }

    /// Leaves the endpoint out for a while, unless it has no part in the failure. The log tells of changes, not of each call.
    fn failed(&self, rejection: Rejection, why: &dyn fmt::Display) -> Rejection {
        let (upstream, endpoint) = (&self.upstream.name, &self.endpoint.authority);
        if let Rejection::Connect(ConnectFailure::OutOfSockets) = rejection {
            if self.endpoint.shortage_is_news() {
                tracing::warn!(error = %why, %upstream, %endpoint, "no socket left to connect with; raise the descriptor limit (LimitNOFILE, ulimit -n) or net.ipv4.ip_local_port_range, or lower pool.connections_max");
            }
        } else if self.endpoint.eject(
            self.upstream.settings.pool.eject,
            rejection.reason(),
            why.to_string(),
        ) {
            tracing::warn!(error = %why, %upstream, %endpoint, "cannot connect; the endpoint is left out for a while");
        }
        rejection
    }

    /// A connection was opened.
    fn opened(&self) {
        if self.endpoint.restore() {
            tracing::info!(upstream = %self.upstream.name, endpoint = %self.endpoint.authority, "the endpoint is back");
        }
    }
}

fn connect_failure(error: &io::Error) -> ConnectFailure {
    if connect::is_out_of_sockets(error) {
        return ConnectFailure::OutOfSockets;
    }
    match error.kind() {
        io::ErrorKind::ConnectionRefused => ConnectFailure::Refused,
        io::ErrorKind::NotFound => ConnectFailure::Lookup,
        _ => ConnectFailure::Unreachable,
    }
}
