//! One connection: requests one after the other, each with a watch on the peer.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until};

use super::answer::{Answer, Finish};
use super::gone::{Gone, fill};
use super::pen::Pen;
use super::request::{BodyRead, NoRequest, read_body, read_head, watch, watch_unread};
use super::{Shared, control};
use crate::answer::Ask;
use crate::clock::now_ns;
use crate::http1::{BodyDecoder, Head};
use crate::script::{Accept, Expect, Next, OnClose, Read, Script};
use crate::truth::{CallTruth, Counted, Ended, PeerEnd};

/// Counts a connection for as long as it is open.
struct Open {
    shared: Arc<Shared>,
    number: u64,
    accepted_ns: u64,
    closed: AtomicBool,
}

impl Open {
    /// The connection is closed though its work may run on.
    fn closed(&self) {
        if !self.closed.swap(true, Ordering::Relaxed) {
            self.shared.ledger.connection_closed();
        }
    }
}

impl Open {
    /// Closes the connection as a server does that has stopped, and hides the
    /// call for as long as the guard is kept.
    fn hide(&self, stream: &TcpStream) -> Counted<'_> {
        // Fails on a socket that was reset; then it is closed already.
        let _ = SockRef::from(stream).shutdown(Shutdown::Both);
        self.closed();
        self.shared.ledger.hides()
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.closed();
    }
}

/// Counts a call for as long as it is worked on.
struct Running<'a> {
    shared: &'a Shared,
    id: u64,
    ended: Ended,
    gone: &'a Gone,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.shared
            .ledger
            .call_ended(self.id, self.ended, self.gone.get());
    }
}

pub(super) async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    let open = Open {
        number: shared.ledger.connection_opened(),
        accepted_ns: now_ns(),
        closed: AtomicBool::new(false),
        shared,
    };
    // Both only sharpen timing; a socket that refuses them is closed anyway.
    let _ = stream.set_nodelay(true);
    let script = open.shared.script();
    if let Some(bytes) = script.send_buffer {
        let _ = SockRef::from(&stream).set_send_buffer_size(bytes);
    }
    match script.accept {
        Accept::Serve => {}
        Accept::Close | Accept::Refuse => return,
        Accept::Rst => return reset(&stream),
        Accept::Hang => {
            let mut buf = Vec::new();
            while fill(&stream, &mut buf).await.is_ok() {
                buf.clear();
            }
            return;
        }
    }
    let mut connection = Connection {
        stream,
        open,
        buf: Vec::new(),
        nth: 0,
    };
    let mut cut = connection.open.shared.cut.subscribe();
    let how = tokio::select! {
        () = async { while connection.one().await {} } => return,
        how = async { cut.changed().await.map(|()| *cut.borrow()) } => how,
    };
    if how.is_ok_and(|how| how == PeerEnd::Rst) {
        reset(&connection.stream);
    }
}

/// Makes the close that follows a reset.
fn reset(stream: &TcpStream) {
    // Fails only on a socket that is reset already.
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

struct Connection {
    stream: TcpStream,
    open: Open,
    buf: Vec<u8>,
    nth: u32,
}

impl Connection {
    /// Serves one request; whether another may follow.
    async fn one(&mut self) -> bool {
        let head = match self.next_head().await {
            Ok(head) => head,
            Err(NoRequest::Gone(_)) => return false,
            Err(NoRequest::Bad) => return self.unreadable().await,
        };
        if control::is_for(&self.open.shared, &head) {
            return self.control(&head).await;
        }
        self.call(head).await
    }

    async fn next_head(&mut self) -> Result<Head, NoRequest> {
        let script = self.open.shared.script();
        let after = |ms: Option<u64>| async move {
            match ms {
                Some(ms) => sleep(Duration::from_millis(ms)).await,
                None => std::future::pending().await,
            }
        };
        let idle = self.nth > 0 && self.buf.is_empty();
        tokio::select! {
            head = read_head(&self.stream, &mut self.buf) => head,
            () = after(script.idle_close_ms), if idle => Err(NoRequest::Gone(PeerEnd::Fin)),
            () = after(script.idle_408_ms), if idle => {
                let _ = self.stream.try_write(
                    b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
                );
                Err(NoRequest::Gone(PeerEnd::Fin))
            }
        }
    }

    async fn unreadable(&mut self) -> bool {
        let call = CallTruth {
            accepted_ns: self.open.accepted_ns,
            connection: self.open.number,
            head_ns: now_ns(),
            ..CallTruth::default()
        };
        let id = self.open.shared.ledger.call_begun(call);
        self.open
            .shared
            .ledger
            .call_ended(id, Ended::BadRequest, None);
        let _ = self.stream.try_write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        );
        false
    }

    async fn control(&mut self, head: &Head) -> bool {
        let Some(framed) = head.request_framing() else {
            return false;
        };
        let mut body = BodyRead::new();
        let mut decoder = BodyDecoder::new(framed);
        let read = read_body(&self.stream, &mut self.buf, &mut decoder, &mut body);
        if read.await.is_err() {
            return false;
        }
        let answer = control::answer(&self.open.shared, head, &body.bytes);
        let mut rest = answer.as_slice();
        while !rest.is_empty() {
            if self.stream.writable().await.is_err() {
                return false;
            }
            match self.stream.try_write(rest) {
                Ok(n) => rest = &rest[n..],
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return false,
            }
        }
        true
    }

    async fn call(&mut self, head: Head) -> bool {
        self.nth += 1;
        let shared = self.open.shared.clone();
        let early = head_script(&shared, &head);
        let (method, path) = match head.words() {
            Some((m, p, _)) => (m.to_owned(), p.to_owned()),
            None => (head.line.clone(), String::new()),
        };
        let framed = head.request_framing();
        let head_facts = HeadFacts::of(&head, &method);
        let id = shared.ledger.call_begun(CallTruth {
            accepted_ns: self.open.accepted_ns,
            connection: self.open.number,
            nth_on_connection: self.nth,
            head_ns: now_ns(),
            method,
            path: path.clone(),
            headers: head.headers,
            ..CallTruth::default()
        });
        let gone = Gone::default();
        let mut running = Running {
            shared: &shared,
            id,
            ended: Ended::BadRequest,
            gone: &gone,
        };
        let (Ok(early), Some(framed)) = (early, framed) else {
            return false;
        };
        // What a connection cut from outside ends with.
        running.ended = Ended::Script;
        let mut body = BodyRead::new();
        let mut decoder = BodyDecoder::new(framed);
        if !expected(&self.stream, &head_facts, early.expect) {
            return false;
        }
        if early.read == Read::All {
            let read = read_body(&self.stream, &mut self.buf, &mut decoder, &mut body);
            if let Err(why) = read.await {
                note_body(&shared, id, body, false);
                running.ended = Ended::BadRequest;
                if let NoRequest::Gone(how) = why {
                    gone.set(how);
                    running.ended = gone_as(how);
                    shared.ledger.peer_gone(id, how);
                }
                return false;
            }
        }
        let mut ask = Ask::read(&path, &body.bytes);
        head_facts.give(&mut ask);
        note_body(&shared, id, body, early.read == Read::All);
        let work = Work {
            open: &self.open,
            shared: &shared,
            id,
            ask: &ask,
            early,
            read_on: decoder,
        };
        let finish = work.run(&self.stream, &mut self.buf, &mut running).await;
        drop(running);
        self.finish(finish, head_facts.close).await
    }

    /// Does what the answer ended with; whether another request may follow.
    async fn finish(&mut self, finish: Finish, asked_close: bool) -> bool {
        match finish {
            Finish::Reset => {
                reset(&self.stream);
                false
            }
            Finish::Close => {
                self.close().await;
                false
            }
            Finish::Keep(_) if asked_close => {
                self.close().await;
                false
            }
            Finish::Keep(Next::Serve) => true,
            Finish::Keep(next) => {
                let came = !self.buf.is_empty() || self.stream.readable().await.is_ok();
                if came && next == Next::Rst {
                    reset(&self.stream);
                } else if came && fill(&self.stream, &mut self.buf).await.is_ok() {
                    self.close().await;
                }
                false
            }
        }
    }

    /// Half-closes and reads on for a moment, so that unread bytes do not turn
    /// the close into a reset that destroys the answer.
    async fn close(&mut self) {
        use tokio::io::AsyncWriteExt as _;
        if self.stream.shutdown().await.is_err() {
            return;
        }
        let drain = async {
            loop {
                self.buf.clear();
                if fill(&self.stream, &mut self.buf).await.is_err() {
                    return;
                }
            }
        };
        // A peer that keeps its half open is not waited for longer.
        let _ = tokio::time::timeout(Duration::from_secs(1), drain).await;
    }
}

fn gone_as(how: PeerEnd) -> Ended {
    match how {
        PeerEnd::Fin => Ended::PeerFin,
        PeerEnd::Rst => Ended::PeerRst,
    }
}

/// The script as far as the head decides it.
fn head_script(shared: &Shared, head: &Head) -> Result<Arc<Script>, String> {
    let default = shared.script();
    match head.get("x-rig") {
        Some(text) if !default.ignore_requests => shared.scripted(text),
        _ => Ok(default),
    }
}

fn note_body(shared: &Shared, id: u64, body: BodyRead, whole: bool) {
    shared.ledger.note(id, |call| {
        call.body_len = body.len;
        call.body_hash = body.hash.finish();
        call.body_ns = whole.then(now_ns);
    });
    shared.ledger.body(id, body.kept());
}

/// What the answer needs of the head.
struct HeadFacts {
    close: bool,
    expects: bool,
    gzip: bool,
    head_request: bool,
    test_id: Option<String>,
}

impl HeadFacts {
    fn of(head: &Head, method: &str) -> Self {
        let old = head.line.ends_with("HTTP/1.0") && !head.has("connection", "keep-alive");
        Self {
            close: old || head.has("connection", "close"),
            expects: head.has("expect", "100-continue"),
            gzip: head
                .get("accept-encoding")
                .is_some_and(|v| v.contains("gzip")),
            head_request: method == "HEAD",
            test_id: head.get("x-test-id").map(ToOwned::to_owned),
        }
    }

    fn give(&self, ask: &mut Ask) {
        ask.accepts_gzip = self.gzip;
        ask.head_request = self.head_request;
        ask.close = self.close;
        if self.test_id.is_some() {
            ask.test_id.clone_from(&self.test_id);
        }
    }
}

/// Treats `Expect`; whether the request goes on.
fn expected(stream: &TcpStream, facts: &HeadFacts, expect: Expect) -> bool {
    if !facts.expects {
        return true;
    }
    // A fresh send buffer takes these few bytes.
    match expect {
        Expect::Ignore => true,
        Expect::Continue => stream.try_write(b"HTTP/1.1 100 Continue\r\n\r\n").is_ok(),
        Expect::Refuse => {
            let _ = stream.try_write(
                b"HTTP/1.1 417 Expectation Failed\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            );
            false
        }
    }
}

/// One call's work, with the watch on its peer.
struct Work<'a> {
    open: &'a Open,
    shared: &'a Shared,
    id: u64,
    ask: &'a Ask,
    early: Arc<Script>,
    read_on: BodyDecoder,
}

impl Work<'_> {
    async fn run(self, stream: &TcpStream, buf: &mut Vec<u8>, running: &mut Running<'_>) -> Finish {
        let (shared, id, read) = (self.shared, self.id, self.early.read);
        let script = match self.script() {
            Ok(script) => script,
            Err(why) => Arc::new(refusal(why)),
        };
        let gone = running.gone;
        let pen = Pen::new(stream, gone, shared, &script, id);
        let mut answer = Answer::new(pen, self.ask);
        let on_close = answer.on_close();
        let mut read_on = self.read_on;
        let begun = Instant::now();
        let outcome = {
            let work = answer.run();
            let watched = async {
                let seen = |how| shared.ledger.peer_gone(id, how);
                match read {
                    Read::Head => {
                        watch_unread(stream, gone, seen).await;
                        return;
                    }
                    Read::HeadThenBody => {
                        finish_body(shared, id, stream, buf, &mut read_on).await;
                    }
                    Read::All => {}
                }
                watch(stream, buf, gone, seen).await;
            };
            tokio::select! {
                biased;
                () = watched => None,
                () = must_stop(gone, on_close, begun, || self.open.hide(stream)) => None,
                outcome = work => Some(outcome),
            }
        };
        let (terminal, stopped) = (answer.terminal, answer.stopped);
        match (outcome, gone.get()) {
            (Some((ended, finish)), None) => {
                running.ended = ended;
                if read == Read::All || read_on.done() {
                    finish
                } else if finish == Finish::Reset {
                    Finish::Reset
                } else {
                    Finish::Close
                }
            }
            (Some(_), Some(how)) if stopped => {
                running.ended = gone_as(how);
                Finish::Close
            }
            (Some((ended, _)), Some(_)) if ended == Ended::Script || terminal => {
                running.ended = ended;
                Finish::Close
            }
            (Some(_), Some(_)) => {
                running.ended = Ended::RanOn;
                Finish::Close
            }
            (None, how) => {
                running.ended = how.map_or(Ended::Script, gone_as);
                Finish::Close
            }
        }
    }

    fn script(&self) -> Result<Arc<Script>, String> {
        let mut script = self.early.clone();
        if let Some(text) = &self.ask.rig
            && !script.ignore_requests
        {
            script = self.shared.scripted(text)?;
        }
        let test_id = self.ask.test_id.as_ref().or(script.id.as_ref());
        let attempt = test_id.map_or(1, |test_id| {
            let attempt = self.shared.ledger.attempt(test_id);
            self.shared.ledger.note(self.id, |call| {
                call.test_id = Some(test_id.clone());
                call.attempt = attempt;
            });
            attempt
        });
        if script.attempts.is_empty() && script.per_upstream.is_empty() {
            return Ok(script);
        }
        let name = self.shared.script().name.clone();
        (*script)
            .clone()
            .resolved(attempt, name.as_deref())
            .map(Arc::new)
            .map_err(|e| format!("rig: {e}"))
    }
}

fn refusal(why: String) -> Script {
    Script {
        status: 400,
        message: why,
        ..Script::default()
    }
}

async fn finish_body(
    shared: &Shared,
    id: u64,
    stream: &TcpStream,
    buf: &mut Vec<u8>,
    decoder: &mut BodyDecoder,
) {
    let mut body = BodyRead::new();
    let whole = read_body(stream, buf, decoder, &mut body).await.is_ok();
    note_body(shared, id, body, whole);
}

/// Returns when work has to stop because the peer has left. `hide` makes it
/// look as if it had stopped, as long as what it returns is kept.
async fn must_stop<T>(gone: &Gone, on_close: OnClose, begun: Instant, hide: impl FnOnce() -> T) {
    let at = gone.wait().await;
    let _hidden = (on_close == OnClose::Bills).then(hide);
    match on_close {
        OnClose::Stop => {}
        OnClose::LateMs(ms) => sleep_until(at + Duration::from_millis(ms)).await,
        OnClose::PollMs(ms) => {
            let period = Duration::from_millis(ms.max(1));
            let mut next = begun;
            while next < at {
                next += period;
            }
            sleep_until(next).await;
        }
        // Counted where tokens are made.
        OnClose::AfterTokens(_) | OnClose::Step | OnClose::Never | OnClose::Bills => {
            std::future::pending().await
        }
    }
}
