//! Heads and framing without a socket: any cut of the bytes gives the same answer, and what is ambiguous is refused.

use bytes::BytesMut;
use proptest::prelude::*;

use super::decode::{Decoded, Decoder};
use super::head;
use crate::upstream::exchange::Failure;

fn decoder(head: &str, to_head_request: bool) -> Result<(Decoder, bool), Failure> {
    let mut bytes = BytesMut::from(head);
    let head = head::parse(&mut bytes)?.expect("a whole head");
    assert!(bytes.is_empty());
    let keeps = head::keeps(&head);
    Ok((Decoder::new(&head, to_head_request)?, keeps))
}

fn chunked() -> Decoder {
    decoder(
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        false,
    )
    .unwrap()
    .0
}

/// Feeds `pieces` one after the other; the body, whether it ended, and what was left over.
fn feed<'a>(
    mut decoder: Decoder,
    pieces: impl Iterator<Item = &'a [u8]>,
) -> Result<(Vec<u8>, bool, Vec<u8>), Failure> {
    let mut unread = BytesMut::new();
    let mut body = Vec::new();
    for piece in pieces {
        unread.extend_from_slice(piece);
        while let Decoded::Data(bytes) = decoder.decode(&mut unread)? {
            body.extend_from_slice(&bytes);
        }
    }
    Ok((body, decoder.is_done(), unread.to_vec()))
}

#[test]
fn a_head_is_read_when_it_is_whole_and_takes_nothing_behind_it() {
    let text = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: a\r\nx: b\r\n\r\n";
    for cut in 0..text.len() {
        let mut bytes = BytesMut::from(&text[..cut]);
        assert!(head::parse(&mut bytes).unwrap().is_none(), "{cut}");
        assert_eq!(bytes.len(), cut);
    }
    let mut bytes = BytesMut::from(format!("{text}ok").as_str());
    let head = head::parse(&mut bytes).unwrap().unwrap();
    assert_eq!(&bytes[..], b"ok");
    assert_eq!(
        head.fields.lines().filter(|line| line.name == b"x").count(),
        2
    );
}

#[test]
fn framing_follows_the_head() {
    for (fields, expected) in [
        ("content-length: 5\r\n", Decoder::Length(5)),
        (
            "content-length: 5\r\nContent-Length: 5\r\n",
            Decoder::Length(5),
        ),
        ("content-length: 0\r\n", Decoder::Done),
        ("", Decoder::Connection),
        ("transfer-encoding: Chunked\r\n", chunked()),
    ] {
        let head = format!("HTTP/1.1 200 OK\r\n{fields}\r\n");
        assert_eq!(decoder(&head, false).unwrap().0, expected, "{fields}");
        assert_eq!(
            decoder(&head, true).unwrap().0,
            Decoder::Done,
            "HEAD {fields}"
        );
    }
    for status in ["204 No Content", "304 Not Modified"] {
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: 5\r\n\r\n");
        assert_eq!(decoder(&head, false).unwrap().0, Decoder::Done, "{status}");
    }
}

#[test]
fn ambiguous_framing_is_refused() {
    for fields in [
        "content-length: 5\r\ncontent-length: 6\r\n",
        "content-length: 5, 5\r\n",
        "content-length: +5\r\n",
        "content-length: -1\r\n",
        "content-length: 5x\r\n",
        "content-length:\r\n",
        "content-length: 99999999999999999999999\r\n",
        "transfer-encoding: gzip, chunked\r\n",
        "transfer-encoding: xchunked\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: identity\r\n",
        "bad name: x\r\n",
        " folded: x\r\n",
    ] {
        let head = format!("HTTP/1.1 200 OK\r\n{fields}\r\n");
        assert!(decoder(&head, false).is_err(), "{fields:?}");
    }
    let old = "HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    assert!(decoder(old, false).is_err());
    for text in [
        "HTTP/2.0 200 OK\r\n\r\n",
        "ICY 200 OK\r\n\r\n",
        "\0\0\0\0",
        "HTTP/1.1 2000 OK\r\n\r\n",
    ] {
        assert!(head::parse(&mut BytesMut::from(text)).is_err(), "{text:?}");
    }
}

#[test]
fn the_server_says_whether_the_connection_stays() {
    for (head, keeps) in [
        ("HTTP/1.1 204 x\r\n\r\n", true),
        ("HTTP/1.1 204 x\r\nconnection: close\r\n\r\n", false),
        ("HTTP/1.1 204 x\r\nconnection: x, CLOSE\r\n\r\n", false),
        ("HTTP/1.0 204 x\r\n\r\n", false),
        ("HTTP/1.0 204 x\r\nconnection: Keep-Alive\r\n\r\n", true),
    ] {
        assert_eq!(decoder(head, false).unwrap().1, keeps, "{head:?}");
    }
}

#[test]
fn bytes_behind_a_length_are_not_part_of_the_body() {
    let (body, done, left) =
        feed(Decoder::Length(2), [&b"okHTTP/1.1 200 OK"[..]].into_iter()).unwrap();
    assert_eq!(
        (&body[..], done, &left[..]),
        (&b"ok"[..], true, &b"HTTP/1.1 200 OK"[..])
    );
}

#[test]
fn chunks_extensions_and_trailers_come_off() {
    let text = b"5;a=b\r\nhello\r\n0A\r\n, 01234567\r\n0\r\nx: y\r\nz: w\r\n\r\nnext";
    let (body, done, left) = feed(chunked(), [&text[..]].into_iter()).unwrap();
    assert_eq!(
        (&body[..], done, &left[..]),
        (&b"hello, 01234567"[..], true, &b"next"[..])
    );
}

#[test]
fn broken_chunks_are_refused() {
    for text in [
        "x\r\n",
        "-1\r\n",
        "0x5\r\nhello",
        "5 hello",
        "FFFFFFFFFFFFFFFFF\r\n",
        "5\r\nhello!\r\n",
        "5\r\nhello\n0\r\n",
        "5\nhello\r\n",
    ] {
        assert!(
            feed(chunked(), [text.as_bytes()].into_iter()).is_err(),
            "{text:?}"
        );
    }
    let endless = format!("5;{}", "x".repeat(40_000));
    assert!(feed(chunked(), [endless.as_bytes()].into_iter()).is_err());
    let trailers = format!("0\r\nx: {}", "y".repeat(40_000));
    assert!(feed(chunked(), [trailers.as_bytes()].into_iter()).is_err());
}

proptest! {
    #[test]
    fn any_cut_gives_the_same_body(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..8), cut in 1usize..9) {
        let mut text = Vec::new();
        for chunk in &chunks {
            text.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
            text.extend_from_slice(chunk);
            text.extend_from_slice(b"\r\n");
        }
        text.extend_from_slice(b"0\r\n\r\nrest");
        let (body, done, left) = feed(chunked(), text.chunks(cut)).unwrap();
        prop_assert_eq!(body, chunks.concat());
        prop_assert!(done);
        prop_assert_eq!(left, b"rest");
    }

    #[test]
    fn no_bytes_panic(head in prop::collection::vec(any::<u8>(), 0..200), body in prop::collection::vec(any::<u8>(), 0..200), cut in 1usize..20) {
        let _ = head::parse(&mut BytesMut::from(&head[..]));
        let _ = feed(chunked(), body.chunks(cut));
        let _ = feed(Decoder::Length(100), body.chunks(cut));
        let _ = feed(Decoder::Connection, body.chunks(cut));
    }
}
