//! A client of either version of HTTP that makes one call and leaves it.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::{RecvStream, SendStream};
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;

use crate::RawClient;

/// How a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Closes its connection.
    Fin,
    /// Resets its connection.
    Rst,
    /// Says that it will send no more, and reads on.
    HalfClose,
    /// Resets its HTTP/2 stream; the connection stays.
    Stream,
    /// Closes its HTTP/2 connection.
    Fin2,
    /// Resets its HTTP/2 connection.
    Rst2,
}

impl Way {
    /// Those of HTTP/1.1.
    pub const ONE: [Self; 3] = [Self::Fin, Self::Rst, Self::HalfClose];
    /// Those of HTTP/2.
    pub const TWO: [Self; 3] = [Self::Stream, Self::Fin2, Self::Rst2];

    pub(super) fn http2(self) -> bool {
        matches!(self, Self::Stream | Self::Fin2 | Self::Rst2)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Fin => "FIN",
            Self::Rst => "RST",
            Self::HalfClose => "half-close",
            Self::Stream => "HTTP/2 stream reset",
            Self::Fin2 => "HTTP/2 FIN",
            Self::Rst2 => "HTTP/2 RST",
        }
    }
}

/// A client with a call under way.
pub(super) struct Leaver {
    way: Way,
    link: Link,
}

enum Link {
    One(RawClient),
    Two(Box<Two>),
}

/// An HTTP/2 connection with one stream.
struct Two {
    socket: std::net::TcpStream,
    driver: AbortHandle,
    sending: SendStream<Bytes>,
    response: Option<ResponseFuture>,
    body: Option<RecvStream>,
}

/// What is left of a client that must stay until its call is over.
pub(super) struct Rest {
    _link: Option<Link>,
}

impl Drop for Two {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

const LIMIT: Duration = Duration::from_secs(10);

async fn within<T>(wait: impl Future<Output = T>) -> io::Result<T> {
    let result = tokio::time::timeout(LIMIT, wait).await;
    result.map_err(|_| io::ErrorKind::TimedOut.into())
}

impl Two {
    async fn post(target: SocketAddr, path: &str, body: &str) -> io::Result<Self> {
        let tcp = within(TcpStream::connect(target)).await??;
        tcp.set_nodelay(true)?;
        let socket = tcp.into_std()?;
        let tcp = TcpStream::from_std(socket.try_clone()?)?;
        let (send, connection) = within(h2::client::handshake(tcp))
            .await?
            .map_err(io::Error::other)?;
        let driver = tokio::spawn(async move {
            // How it ends is seen on its stream.
            let _ = connection.await;
        })
        .abort_handle();
        let mut send = within(send.ready()).await?.map_err(io::Error::other)?;
        let request = http::Request::post(format!("http://localhost{path}"))
            .header("content-type", "application/json")
            .body(())
            .map_err(io::Error::other)?;
        let (response, mut sending) = send
            .send_request(request, false)
            .map_err(io::Error::other)?;
        sending
            .send_data(Bytes::copy_from_slice(body.as_bytes()), true)
            .map_err(io::Error::other)?;
        Ok(Self {
            socket,
            driver,
            sending,
            response: Some(response),
            body: None,
        })
    }

    async fn begun(&mut self) -> io::Result<()> {
        let response = self.response.take().ok_or(io::ErrorKind::InvalidInput)?;
        let mut body = within(response)
            .await?
            .map_err(io::Error::other)?
            .into_body();
        let data = within(body.data()).await?;
        data.ok_or(io::ErrorKind::UnexpectedEof)?
            .map_err(io::Error::other)?;
        self.body = Some(body);
        Ok(())
    }
}

impl Leaver {
    /// Connects and sends the request.
    pub(super) async fn post(
        way: Way,
        target: SocketAddr,
        path: &str,
        body: &str,
    ) -> io::Result<Self> {
        let link = if way.http2() {
            Link::Two(Box::new(Two::post(target, path, body).await?))
        } else {
            let mut client = RawClient::connect(target).await?;
            client.post(path, body).await?;
            Link::One(client)
        };
        Ok(Self { way, link })
    }

    /// Waits until the answer has begun.
    pub(super) async fn begun(&mut self) -> io::Result<()> {
        match &mut self.link {
            Link::One(client) => {
                client.final_head().await?;
                client.body_bytes(1).await?;
                Ok(())
            }
            Link::Two(two) => two.begun().await,
        }
    }

    /// Leaves, by one system call or, of a stream, by what the connection's
    /// task sends next.
    pub(super) fn leave(self) -> io::Result<Rest> {
        let rest = match (self.link, self.way) {
            (Link::One(client), Way::Rst) => {
                client.leave_rst()?;
                None
            }
            (Link::One(client), Way::HalfClose) => {
                client.shut_write()?;
                Some(Link::One(client))
            }
            (Link::One(client), _) => {
                client.leave_fin();
                None
            }
            (Link::Two(mut two), Way::Stream) => {
                two.sending.send_reset(h2::Reason::CANCEL);
                Some(Link::Two(two))
            }
            (Link::Two(two), Way::Rst2) => {
                // The connection's task holds the socket until it has ended.
                SockRef::from(&two.socket).set_linger(Some(Duration::ZERO))?;
                drop(two);
                None
            }
            (Link::Two(two), _) => {
                two.socket.shutdown(Shutdown::Both)?;
                Some(Link::Two(two))
            }
        };
        Ok(Rest { _link: rest })
    }
}
