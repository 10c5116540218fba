//! The operator's port: health, readiness, metrics, and the calls in flight. Reads snapshots; a lock that calls take is held for no longer
//! than it takes to copy pointers.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::task::TaskTracker;

use crate::call::Generation;
use crate::call::table::Table;
use crate::signal::Signal;
use crate::telemetry::metrics::Metrics;
use crate::upstream::connect::TcpOptions;

pub mod calls;
mod upstreams;

/// Scrapers and probes; more at once is a mistake or an attack, which must not take the descriptors of calls.
const CONNECTIONS_MAX: usize = 16;
const HEAD_TIME: Duration = Duration::from_secs(10);

const INDEX: &str = "tidegate admin\n\n/healthz  the process answers\n/readyz   it takes new calls; /readyz?upstreams  and a model server can be connected to\n/metrics  Prometheus\n/admin/upstreams  slots, queues and endpoints\n/admin/calls  the same, and the calls in flight; DELETE /admin/calls/{id} ends one\n";

/// What the admin port shows.
#[derive(Clone, Debug)]
pub struct View {
    pub metrics: Arc<Metrics>,
    /// Raised when the gateway takes no more calls.
    pub unready: Signal,
    pub table: Table,
    pub running: watch::Receiver<Arc<Generation>>,
    /// A reader that takes nothing, or has vanished, is cut by them: its place is one of few.
    pub tcp: TcpOptions,
}

/// Serves until `stop` is raised.
pub async fn serve(listener: TcpListener, view: View, stop: Signal) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let tasks = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stop.raised() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((tcp, _)) = accepted else {
            // Out of descriptors: look again shortly, without spinning.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            continue;
        };
        if view.tcp.apply(&tcp).is_err() {
            continue; // it is gone already
        }
        let view = view.clone();
        tasks.spawn(async move {
            let service = service_fn(move |request| {
                let view = view.clone();
                async move { Ok::<_, std::convert::Infallible>(answer(&request, &view).await) }
            });
            let conn = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIME)
                .serve_connection(TokioIo::new(tcp), service);
            // A probe that hangs up is no event.
            let _ = conn.await;
            drop(place);
        });
    }
}

async fn answer(request: &Request<Incoming>, view: &View) -> Response<Full<Bytes>> {
    let upstreams = || upstreams::rows(&view.running.borrow());
    if let Some(response) =
        calls::answer(request, &view.table, || view.metrics.upstreams(), upstreams)
    {
        return response;
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return text(StatusCode::METHOD_NOT_ALLOWED, "this port is only read\n");
    }
    match request.uri().path() {
        "/healthz" | "/livez" => text(StatusCode::OK, "ok\n"),
        "/readyz" if view.unready.is_raised() => {
            text(StatusCode::SERVICE_UNAVAILABLE, "draining\n")
        }
        "/readyz" if request.uri().query() == Some("upstreams") => {
            let generation = Arc::clone(&view.running.borrow());
            match upstreams::reach(generation, view.tcp).await {
                Ok(()) => text(StatusCode::OK, "ready\n"),
                Err(why) => text(
                    StatusCode::SERVICE_UNAVAILABLE,
                    format!("no model server can be connected to\n{why}"),
                ),
            }
        }
        "/readyz" => text(StatusCode::OK, "ready\n"),
        "/metrics" => {
            let mut response = text(StatusCode::OK, view.metrics.encode());
            let kind = HeaderValue::from_static(
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
            );
            response.headers_mut().insert(CONTENT_TYPE, kind);
            response
        }
        "/" => text(StatusCode::OK, INDEX),
        _ => text(StatusCode::NOT_FOUND, INDEX),
    }
}

/// To the millisecond.
fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e3).round() / 1e3
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}
