//! Answers that are longer or shorter than they say, and words that nobody asked for: none of it becomes the next answer.

use std::net::SocketAddr;

use bytes::Bytes;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

use super::caller::Caller;
use super::stage::{Http, Stage, forms, on_both, over, routes};
use crate::support::{LOCALHOST, gateway_at, slots, whole};

/// After an answer with something behind it, the next call has its own, whoever asks for it and where.
#[tokio::test]
async fn c85_surplus_bytes_never_become_the_next_answer() {
    let extra =
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n{\"x\":1}";
    let long = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n{{\"y\":2}}{extra}"
    );
    let scripts = [
        json!({"end": "extra", "framing": "length"}),
        json!({"end": "extra", "framing": "chunked"}),
        json!({"body": {"wire": [{"text": long}]}, "end": "hang"}),
        json!({"idle_408_ms": 1}),
        json!({"interim": [{"status": 102}, {"status": 103}]}),
        json!({"end": "short_length"}),
    ];
    on_both(
        Http::One,
        |c| c.server.workers = slots(1),
        async |stage: &Stage| {
            for path in routes() {
                for script in &scripts {
                    let short = script["end"] == "short_length";
                    let (head, rest) = stage
                        .post(path, &whole(script.clone()))
                        .await
                        .answer()
                        .await;
                    let well = head.status == 200 && rest.whole;
                    assert_eq!(well, !short, "{stage}, {path}, {script}");
                    let mut next = stage.post(path, &whole(json!({"tokens": 2}))).await;
                    next.accepted().await;
                    let rest = next.rest().await;
                    assert!(rest.whole && rest.json().is_object(), "{stage}, {path}");
                    let text = rest.text();
                    let own = !text.contains("\"x\":1") && !text.contains("\"y\":2");
                    assert!(own, "{stage}, {path}, {script}: {text}");
                }
            }
            assert_eq!(stage.gate.metric("retries_total", &[]), 0.0, "{stage}");
        },
    )
    .await;
}

#[tokio::test]
async fn c85_an_answer_framed_in_two_ways_is_refused() {
    on_both(
        Http::One,
        |_| {},
        async |stage: &Stage| {
            for form in forms() {
                let both = form.ask(json!({"framing": "both"}));
                let (head, _) = stage.post(form.path, &both).await.answer().await;
                assert_eq!(head.status, 502, "{stage}, {form:?}");
            }
            stage.gate.settled_with(&stage.up, 0).await;
        },
    )
    .await;
}

/// Every second answer says seven bytes, and has so many.
async fn lies(socket: TcpStream, sends: usize) -> Result<(), h2::Error> {
    let mut connection = h2::server::handshake(socket).await?;
    let mut honest = true;
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        honest = !honest;
        let sends = if honest { 7 } else { sends };
        tokio::spawn(async move {
            let mut body = request.into_body();
            while let Some(Ok(_)) = body.data().await {}
            let head = http::Response::builder()
                .header("content-type", "application/json")
                .header("content-length", "7")
                .body(())
                .expect("a head");
            let mut sending = respond.send_response(head, false)?;
            let text = format!("{:<sends$}", "{\"z\":3}");
            sending.send_data(Bytes::from(text).slice(..sends), true)
        });
    }
    Ok(())
}

/// An HTTP/2 server of this kind.
async fn liar(sends: usize) -> (SocketAddr, AbortHandle) {
    let listener = TcpListener::bind(LOCALHOST).await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    let task = tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        while let Ok((socket, _)) = listener.accept().await {
            connections.spawn(lies(socket, sends));
        }
    });
    (addr, task.abort_handle())
}

/// The same from an HTTP/2 server: what does not fit its length is broken, and the next call on the connection is not touched.
#[tokio::test]
async fn c85_an_http2_answer_that_does_not_fit_its_length_is_broken() {
    for sends in [200, 3] {
        for down in [Http::One, Http::Two] {
            let (addr, task) = liar(sends).await;
            let gate = gateway_at(addr, |c| {
                over(c, Http::Two);
                c.server.workers = slots(1);
            });
            for path in routes() {
                for lies in [true, false] {
                    let mut caller = Caller::connect(down, gate.addr()).await;
                    caller.post(path, &whole(json!({}))).await;
                    let (head, rest) = caller.answer().await;
                    let well = head.status == 200 && rest.whole;
                    let text = rest.text();
                    assert_eq!(well, !lies, "{down:?}, {path}, {sends}: {head:?} {text}");
                    assert!(lies || text == "{\"z\":3}", "{down:?}, {path}: {text}");
                }
            }
            task.abort();
        }
    }
}
