//! What events look like on the wire: line ends, spaces, comments.

use crate::script::{LineEnd, Script};

/// An event in the scripted clothes: line ends, spaces, comments.
pub(super) fn dress(script: &Script, event: &[u8], nth: u64, last: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(event.len() + 32);
    if nth == 0 && script.bom {
        out.extend_from_slice(b"\xef\xbb\xbf");
    }
    if let Some(comment) = &script.comment {
        out.extend_from_slice(comment.as_bytes());
    }
    let keep = event.len() - if last { 2 } else { 0 };
    let mut body = event[..keep].to_vec();
    if last {
        body.resize(keep + usize::from(script.final_newlines.min(2)), b'\n');
    }
    let end: &[u8] = match (script.line_end, nth % 3) {
        (LineEnd::Lf, _) | (LineEnd::Mixed, 0) => b"\n",
        (LineEnd::Crlf, _) | (LineEnd::Mixed, 1) => b"\r\n",
        (LineEnd::Cr, _) | (LineEnd::Mixed, _) => b"\r",
    };
    for line in body.split_inclusive(|b| *b == b'\n') {
        let (text, ended) = match line.strip_suffix(b"\n") {
            Some(text) => (text, true),
            None => (line, false),
        };
        match text.iter().position(|b| *b == b':') {
            Some(colon) if script.no_space && text.get(colon + 1) == Some(&b' ') => {
                out.extend_from_slice(&text[..=colon]);
                out.extend_from_slice(&text[colon + 2..]);
            }
            _ => out.extend_from_slice(text),
        }
        if ended {
            out.extend_from_slice(end);
        }
    }
    out
}

/// Whether events go out as they were made.
pub(super) fn plain(s: &Script) -> bool {
    s.line_end == LineEnd::Lf
        && s.final_newlines == 2
        && !s.no_space
        && !s.bom
        && s.comment.is_none()
}
