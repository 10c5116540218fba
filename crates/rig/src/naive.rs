//! A proxy with the faults this project is about, so that the judge can be
//! seen to fail something: a detached task reads the upstream on whoever
//! waits, each request makes a connection, the slot is freed at the head, and
//! no timer watches a stall.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::task::AbortHandle;

use crate::http1::{BodyDecoder, Head};

/// The faulty proxy. Dropping it ends the listener; its detached tasks run on.
#[derive(Debug)]
pub struct NaiveProxy {
    addr: SocketAddr,
    task: AbortHandle,
}

impl NaiveProxy {
    /// Listens on `listen` and forwards to `upstream`.
    pub async fn start(listen: SocketAddr, upstream: SocketAddr, slots: usize) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let addr = listener.local_addr()?;
        let slots = Arc::new(Semaphore::new(slots));
        let serve = async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(one(client, upstream, slots.clone()));
            }
        };
        let task = tokio::spawn(serve).abort_handle();
        Ok(Self { addr, task })
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for NaiveProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The unbounded queue between the task that reads and the one that writes.
#[derive(Debug, Default)]
struct Queue {
    parts: Mutex<VecDeque<Option<Vec<u8>>>>,
    more: Notify,
}

impl Queue {
    fn push(&self, part: Option<Vec<u8>>) {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.push_back(part);
        drop(parts);
        self.more.notify_one();
    }

    async fn pop(&self) -> Option<Vec<u8>> {
        loop {
            let part = self
                .parts
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop_front();
            match part {
                Some(part) => return part,
                None => self.more.notified().await,
            }
        }
    }
}

/// Errors end the connection without a word, as such proxies do.
async fn one(mut client: TcpStream, upstream: SocketAddr, slots: Arc<Semaphore>) -> io::Result<()> {
    client.set_nodelay(true)?;
    let Some(request) = request(&mut client).await? else {
        return Ok(());
    };
    let slot = slots.acquire().await.map_err(io::Error::other)?;
    let mut server = TcpStream::connect(upstream).await?;
    server.set_nodelay(true)?;
    server.write_all(&request).await?;
    let mut head = vec![0; 16 * 1024];
    let n = server.read(&mut head).await?;
    drop(slot);
    head.truncate(n);
    let queue = Arc::new(Queue::default());
    queue.push(Some(head));
    tokio::spawn(pump(server, queue.clone()));
    while let Some(part) = queue.pop().await {
        client.write_all(&part).await?;
    }
    Ok(())
}

/// Reads the upstream to its end, whether or not anybody still listens.
async fn pump(mut server: TcpStream, queue: Arc<Queue>) {
    let mut part = vec![0; 16 * 1024];
    while let Ok(n) = server.read(&mut part).await
        && n > 0
    {
        queue.push(Some(part[..n].to_vec()));
    }
    queue.push(None);
}

/// Reads a request and makes it one that closes the connection.
async fn request(client: &mut TcpStream) -> io::Result<Option<Vec<u8>>> {
    let mut buf = Vec::new();
    let (head, used) = loop {
        if let Some(found) = Head::parse(&buf) {
            break found;
        }
        if client.read_buf(&mut buf).await? == 0 {
            return Ok(None);
        }
    };
    let mut decoder = BodyDecoder::new(head.request_framing().ok_or(io::ErrorKind::InvalidData)?);
    let mut rest = buf.split_off(used);
    let mut body = Vec::new();
    loop {
        let used = decoder
            .decode(&rest, &mut body)
            .map_err(|_| io::ErrorKind::InvalidData)?;
        rest.drain(..used);
        if decoder.done() {
            break;
        }
        if client.read_buf(&mut rest).await? == 0 {
            return Ok(None);
        }
    }
    let mut out = format!("{}\r\n", head.line);
    let hop = ["connection", "content-length", "transfer-encoding"];
    for (name, value) in &head.headers {
        if !hop.contains(&name.to_ascii_lowercase().as_str()) {
            out.push_str(&format!("{name}: {value}\r\n"));
        }
    }
    out.push_str(&format!(
        "connection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    ));
    let mut out = out.into_bytes();
    out.extend_from_slice(&body);
    Ok(Some(out))
}
