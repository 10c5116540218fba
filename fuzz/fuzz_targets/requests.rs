#![no_main]
//! Any bytes as requests of HTTP/1, one behind the other: heads are read or refused, bodies come off; and however the bytes are cut, these
//! are the same requests.

use bytes::BytesMut;
use tidegate::serve::http1::head;
use tidegate::upstream::http1::{Decoded, Decoder};

const HEAD_MAX: usize = 4096;

/// Each request: its first line and fields, its body, and whether that is whole.
type Requests = Vec<(String, Vec<u8>, bool)>;

/// Reads `data` in pieces of `at_once` bytes.
fn read(data: &[u8], at_once: usize) -> Requests {
    let mut pieces = data.chunks(at_once);
    let (mut unread, mut looked) = (BytesMut::new(), 0);
    let mut requests = Requests::new();
    let mut more = |unread: &mut BytesMut| pieces.next().map(|piece| unread.extend_from_slice(piece)).is_some();
    loop {
        let head = match head::parse(&mut unread, &mut looked, HEAD_MAX) {
            Ok(Some(head)) => head,
            Ok(None) if more(&mut unread) => continue,
            Ok(None) | Err(_) => return requests,
        };
        let mut decoder = Decoder::of_request(head.length);
        let mut body = Vec::new();
        let whole = loop {
            match decoder.decode(&mut unread) {
                Ok(Decoded::Data(bytes)) => body.extend_from_slice(&bytes),
                Ok(Decoded::End) => break true,
                Ok(Decoded::More) if more(&mut unread) => {}
                Ok(Decoded::More) | Err(_) => break false,
            }
        };
        let fields: Vec<_> = head.fields.lines().collect();
        let first = (head.method, head.target, head.version);
        requests.push((format!("{first:?} {fields:?} {}", head.keeps), body, whole));
        if !whole {
            return requests;
        }
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // What is longer than a limit is refused earlier or later, as it comes.
    if data.len() <= HEAD_MAX {
        let whole = read(data, HEAD_MAX);
        for at_once in [1, 7] {
            assert_eq!(read(data, at_once), whole);
        }
    }
});
