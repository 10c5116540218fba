//! A client's HTTP/1 connection: one request after the other, each answered before the next is looked at (RFC 9112).
//!
//! Everything happens in one poll on the connection's task, in this order: read a head, ask the front for the answer, pass the body of the
//! request to the call as the call asks for it, write the answer as it comes. Meanwhile the socket is read on, within a bound, so that a client
//! that leaves is noticed in whatever phase its call is. Heads and chunk sizes are parsed by `httparse`; why not hyper's server:
//! `docs/decisions/0018`.
//!
//! Whoever drops the connection drops the answer with it: before its head that is a [`Handover`], afterwards the answer's body.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::{Method, Version};
use http_body::Body as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::guard::Drainable;
use super::malformed;
use super::socket::{DownstreamIo, EndWatch};
use crate::call::answer::Answer;
use crate::call::body::OutBody;
use crate::call::downstream::{Answers, Downstream, Request};
use crate::call::handover::Handover;
use crate::config::HalfClose;
use crate::upstream::arriving::{Arriving, Cut, Feed, pipe};
use crate::upstream::http1::{Decoded, Decoder};

mod encode;
pub mod head;

#[cfg(test)]
mod oracle_tests;
#[cfg(test)]
mod tests;

pub(super) use encode::now;
use encode::{AnswerTo, Framing, OutgoingAnswer};
pub(super) use head::Bad;
use head::RequestHead;

/// One read. What is read is copied to where it is kept, so that a connection at rest holds no more than [`KEPT`].
const READ: usize = 8 * 1024;
/// What is kept of the memory between requests.
const KEPT: usize = 1024;
/// Bytes that are held for later while a request is being answered. Whoever sends more behind a whole request is cut off: no client of models
/// does.
const AHEAD_BYTES: usize = 64 * 1024;
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// What holds for all connections of a listener.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub(super) head_bytes: usize,
    /// What a FIN means.
    pub(super) half_close: HalfClose,
}

/// A connection, at rest or with the one request that is being answered.
// In this order: see `call::relay::Relay`.
#[repr(C)]
pub(super) struct Connection<F> {
    /// Above `state`, and so dropped before it: how the socket is closed hangs on whether an answer is still under way.
    io: DownstreamIo,
    state: ConnectionState,
    out: OutgoingAnswer,
    /// Read and not yet understood.
    unread: BytesMut,
    /// What is still to come of the request's body.
    upload: Option<Box<Upload>>,
    /// Nothing more will come.
    fin: bool,
    /// Whether another request can follow it.
    keeps: bool,
    draining: bool,
    /// The request that is answered now, or was last.
    asked: AnswerTo,
    /// How much of what is unread was looked at for a head.
    looked: usize,
    /// Watches for the end while the bound holds us back from reading on to it, or nothing is left to read that would tell of it.
    end: Option<EndWatch>,
    rules: Rules,
    downstream: Arc<Downstream>,
    front: F,
}

enum ConnectionState {
    /// A head is awaited.
    Rest,
    Answering(Handover<Answer>),
    Sending(Framing, OutBody),
    /// The answer is complete and is being written.
    Sent,
    /// The last word is being written.
    Closing,
}

/// A body that comes after its head.
#[derive(Debug)]
struct Upload {
    decoder: Decoder,
    feed: Feed,
    /// The client waits for a word, and has not sent anything.
    expects: bool,
}

/// What was done for a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Uploaded {
    /// The call has something new.
    More,
    /// The call waits for what the client sends.
    Waiting,
    /// Nothing is asked for.
    Nothing,
}

impl<F> fmt::Debug for Connection<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("peer", &self.downstream.peer)
            .field("unread", &self.unread.len())
            .field("upload", &self.upload)
            .finish_non_exhaustive()
    }
}

impl<F: Answers> Connection<F> {
    pub(super) fn new(
        io: DownstreamIo,
        downstream: Arc<Downstream>,
        front: F,
        rules: Rules,
    ) -> Self {
        Self {
            io,
            downstream,
            front,
            rules,
            unread: BytesMut::new(),
            looked: 0,
            fin: false,
            end: None,
            asked: AnswerTo::new(&Method::GET, Version::HTTP_11),
            keeps: true,
            upload: None,
            state: ConnectionState::Rest,
            out: OutgoingAnswer::default(),
            draining: false,
        }
    }

    /// Looks for the next request.
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            match head::parse(&mut self.unread, &mut self.looked, self.rules.head_bytes) {
                Ok(Some(head)) => {
                    self.begin(head);
                    return Poll::Ready(Ok(()));
                }
                Ok(None) => {}
                Err(bad) => {
                    encode::now(|date| self.out.bytes(malformed::answer(bad, date).as_bytes()));
                    self.state = ConnectionState::Closing;
                    return Poll::Ready(Ok(()));
                }
            }
            let idle = self.unread.is_empty();
            if self.fin || (idle && self.draining) {
                self.state = ConnectionState::Closing;
                return Poll::Ready(Ok(()));
            }
            self.fin = ready!(self.poll_read(cx))? == 0;
        }
    }

    fn begin(&mut self, head: RequestHead) {
        self.asked = AnswerTo::new(&head.method, head.version);
        self.keeps = head.keeps;
        if self.asked.version == Version::HTTP_10 {
            self.downstream.ends_by_close();
        }
        let mut decoder = Decoder::of_request(head.length);
        let body = match whole(&mut decoder, &mut self.unread) {
            Some(bytes) => Arriving::Whole(bytes),
            None => {
                let (feed, pipe) = pipe(head.length);
                self.upload = Some(Box::new(Upload {
                    decoder,
                    feed,
                    expects: head.expects && self.unread.is_empty(),
                }));
                Arriving::Piped(pipe)
            }
        };
        self.give_back();
        let request = Request {
            method: head.method,
            target: head.target,
            version: head.version,
            fields: head.fields,
            body,
        };
        let answer = self.front.answer(request, self.downstream.enter(None));
        self.state = ConnectionState::Answering(answer);
    }

    /// Memory for what was read, where there is nothing in it.
    fn give_back(&mut self) {
        if self.unread.is_empty() && self.unread.capacity() > KEPT {
            self.unread = BytesMut::new();
        }
    }

    fn poll_answering(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let ConnectionState::Answering(answer) = &mut self.state else {
                return Poll::Ready(Ok(()));
            };
            if let Poll::Ready(answer) = Pin::new(answer).poll(cx) {
                self.answer(answer);
                return Poll::Ready(Ok(()));
            }
            match self.upload(cx)? {
                Uploaded::More => {}
                Uploaded::Waiting => return Poll::Pending,
                Uploaded::Nothing => {
                    self.read_ahead(cx)?;
                    return Poll::Pending;
                }
            }
        }
    }

    fn answer(&mut self, Answer { head, body }: Answer) {
        // Its answer is the word that the client waits for. Another in the midst of it would be read as a part of it.
        if let Some(upload) = &mut self.upload {
            upload.expects = false;
        }
        let given_up = self.upload.as_ref().is_some_and(|u| u.feed.is_given_up());
        let framed = body.size_hint().exact();
        let framing = self.asked.framing(head.status, framed);
        self.keeps &= !self.draining
            && framing != Framing::Close
            && !encode::says_close(&head)
            && (!given_up || self.skip_upload());
        let of = (self.asked, framed, self.keeps);
        self.out.head(&head, framing, of);
        self.state = match framing {
            Framing::None => ConnectionState::Sent,
            _ => ConnectionState::Sending(framing, body),
        };
    }

    fn poll_sending(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if self.out.is_full() && self.poll_out(cx)?.is_pending() {
                // A client may read nothing of its answer before it has sent all.
                while self.upload(cx)? == Uploaded::More {}
                break;
            }
            let ConnectionState::Sending(framing, body) = &mut self.state else {
                return Poll::Ready(Ok(()));
            };
            match Pin::new(&mut *body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    let Ok(data) = frame.into_data() else {
                        continue;
                    };
                    self.out.data(framing, data)?;
                    if !body.is_end_stream() {
                        continue;
                    }
                }
                Poll::Ready(Some(Err(broken))) => {
                    return Poll::Ready(Err(io::Error::other(broken)));
                }
                Poll::Ready(None) => {}
                Poll::Pending if self.upload(cx)? == Uploaded::More => continue,
                Poll::Pending => {
                    let _ = self.poll_out(cx)?;
                    break;
                }
            }
            let ConnectionState::Sending(framing, _) = self.state else {
                return Poll::Ready(Ok(()));
            };
            self.out.end(framing)?;
            self.state = ConnectionState::Sent;
            return Poll::Ready(Ok(()));
        }
        self.read_ahead(cx)?;
        Poll::Pending
    }

    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.poll_out(cx)?.is_pending() {
            while self.upload(cx)? == Uploaded::More {}
            return Poll::Pending;
        }
        self.end = None;
        let whole = self.upload.is_none() || self.skip_upload();
        self.upload = None;
        if self.keeps && whole && !self.draining {
            self.state = ConnectionState::Rest;
            self.give_back();
            if !self.unread.is_empty() {
                self.io.state().has_read();
            }
        } else {
            self.state = ConnectionState::Closing;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_closing(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_out(cx))?;
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    /// Writes all that is to be written.
    fn poll_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.out.poll_write(&mut self.io, cx))?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    /// Gives the call the next piece of the request's body, if it asks for one and one is here.
    fn upload(&mut self, cx: &mut Context<'_>) -> io::Result<Uploaded> {
        let Some(upload) = &mut self.upload else {
            return Ok(Uploaded::Nothing);
        };
        if !upload.feed.poll_asked(cx) {
            return Ok(Uploaded::Nothing);
        }
        if std::mem::take(&mut upload.expects) {
            self.out.bytes(CONTINUE);
        }
        if !self.out.is_empty() {
            let _ = self.out.poll_write(&mut self.io, cx)?;
        }
        loop {
            let Some(upload) = &mut self.upload else {
                return Ok(Uploaded::More);
            };
            let end = match upload.decoder.decode(&mut self.unread) {
                Ok(Decoded::Data(bytes)) => {
                    upload.feed.give(bytes);
                    if !upload.decoder.is_done() {
                        return Ok(Uploaded::More);
                    }
                    Some(Ok(()))
                }
                Ok(Decoded::End) => Some(Ok(())),
                Ok(Decoded::More) => None,
                Err(_) => Some(Err(Cut::Broken)),
            };
            if let Some(end) = end {
                self.uploaded(end);
            } else if self.fin {
                self.uploaded(Err(Cut::Broken));
            } else {
                match self.poll_read(cx)? {
                    Poll::Ready(0) => self.finished()?,
                    Poll::Ready(_) => {}
                    Poll::Pending => return Ok(Uploaded::Waiting),
                }
            }
        }
    }

    fn uploaded(&mut self, how: Result<(), Cut>) {
        self.keeps &= how.is_ok();
        if let Some(upload) = self.upload.take() {
            upload.feed.end(how);
        }
    }

    /// Steps over what is here of a body that nobody wants. False: not all of it is here, so what follows is no request.
    fn skip_upload(&mut self) -> bool {
        let Some(upload) = &mut self.upload else {
            return true;
        };
        while let Ok(Decoded::Data(_)) = upload.decoder.decode(&mut self.unread) {}
        upload.decoder.is_done()
    }

    /// Reads on while a request is being answered: a client that leaves is to be noticed.
    fn read_ahead(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while !self.fin && self.unread.len() < AHEAD_BYTES {
            match self.poll_read(cx)? {
                Poll::Ready(0) => self.finished()?,
                Poll::Ready(_) => {}
                Poll::Pending => return Ok(()),
            }
        }
        let fin_means = self.rules.half_close;
        // Behind a whole request that is no upload but a flood: to see the FIN behind it, all of it would have to be kept.
        if self.upload.is_none() && fin_means == HalfClose::Gone {
            self.io.state().set_flooded();
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let end = match &mut self.end {
            Some(end) => end,
            none => none.insert(self.io.watch_end(fin_means)?),
        };
        if end.poll_came(cx).is_ready() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    /// The client has sent its FIN: it has left, or only has nothing more to say.
    fn finished(&mut self) -> io::Result<()> {
        self.fin = true;
        match self.rules.half_close {
            HalfClose::Gone => Err(io::ErrorKind::ConnectionAborted.into()),
            HalfClose::Serve => Ok(()),
        }
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut space = [const { MaybeUninit::uninit() }; READ];
        let mut read = ReadBuf::uninit(&mut space);
        ready!(Pin::new(&mut self.io).poll_read(cx, &mut read))?;
        let read = read.filled();
        self.unread.extend_from_slice(read);
        Poll::Ready(Ok(read.len()))
    }
}

/// The body, if all of it came with its head.
fn whole(decoder: &mut Decoder, unread: &mut BytesMut) -> Option<Option<Bytes>> {
    match decoder {
        Decoder::Done => Some(None),
        Decoder::Length(length) if *length <= unread.len() as u64 => match decoder.decode(unread) {
            Ok(Decoded::Data(bytes)) => Some(Some(bytes)),
            _ => None,
        },
        _ => None,
    }
}

impl<F: Answers> Future for Connection<F> {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            ready!(match this.state {
                ConnectionState::Rest => this.poll_rest(cx),
                ConnectionState::Answering(_) => this.poll_answering(cx),
                ConnectionState::Sending(..) => this.poll_sending(cx),
                ConnectionState::Sent => this.poll_sent(cx),
                ConnectionState::Closing => return this.poll_closing(cx),
            })?;
        }
    }
}

impl<F: Answers> Drainable for Connection<F> {
    type Error = io::Error;

    fn begin_drain(mut self: Pin<&mut Self>) {
        self.draining = true;
    }
}
