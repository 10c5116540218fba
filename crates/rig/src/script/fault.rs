//! The faults of model servers, by name.

use clap::ValueEnum;

use super::{
    Accept, Compress, End, Expect, Framing, Interim, LineEnd, Next, Piece, Read, Script, Segment,
    Stall, StallAt,
};
use crate::script::Body;

/// One fault. Where it needs a place in the stream, that is an event's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fault {
    /// Connections are refused
    Refuse,
    /// Connections are accepted, and never read
    Hang,
    /// Connections are reset at once
    ResetConnection,
    /// No answer ever comes
    Silent,
    /// Silence after the n-th event, the connection open
    Stall,
    /// Silence in the middle of the n-th event
    StallMidEvent,
    /// All events, but never the end of the body
    NoEnd,
    /// Reset before the head
    ResetHead,
    /// Reset after the n-th event
    Reset,
    /// Closed (FIN) before the head
    CutHead,
    /// Closed (FIN) after the n-th event, without the end of the body
    Cut,
    /// Closed in the middle of the n-th event
    CutMidEvent,
    /// A proper end of the body after the n-th event, without the last events
    NoDone,
    /// The declared length is longer than the body
    LongLength,
    /// A declared length and chunks at once
    TwoLengths,
    /// A chunk size that is no number, after the n-th event
    BadChunk,
    /// Bytes after the end that look like another answer
    Surplus,
    /// The answer comes before the request's body was read
    Early,
    /// `100 Continue` never comes
    NoContinue,
    /// `Expect` is answered with 417
    RefuseContinue,
    /// 100, 102 and 103 come unasked before the answer
    Interim,
    /// Each byte by itself, in text of many bytes a letter
    SplitUtf8,
    /// Lines end with CR LF
    Crlf,
    /// Lines end with CR
    Cr,
    /// Lines end one way or another, a byte order mark first, no space after the colon
    OddLines,
    /// The last event has no blank line
    NoBlankLine,
    /// One `data:` line without end
    EndlessLine,
    /// Events without end
    Endless,
    /// Compressed though nobody asked
    Gzip,
    /// 503 without Retry-After
    Overload,
    /// 429 with Retry-After: 1
    OverloadRetryAfter,
    /// 500 in the dialect's shape
    Error,
    /// 502 with a proxy's HTML page
    Html,
    /// An error event after the n-th event
    ErrorEvent,
    /// A JSON answer, status 200, where a stream was asked for
    NotAStream,
    /// The kept connection is closed when the next request comes
    CloseNext,
    /// The kept connection is reset when the next request comes
    ResetNext,
}

impl Fault {
    /// Puts the fault into a script; `at` is the event it happens at.
    pub fn into_script(self, script: &mut Script, at: u64) {
        let end = |script: &mut Script, end: End| {
            script.end = end;
            script.end_at = Some(at);
        };
        match self {
            Self::Refuse => script.accept = Accept::Refuse,
            Self::Hang => script.accept = Accept::Hang,
            Self::ResetConnection => script.accept = Accept::Rst,
            Self::Silent => script.stall = stall(StallAt::Head),
            Self::Stall => script.stall = stall(StallAt::Event(at)),
            Self::StallMidEvent => script.stall = stall(StallAt::MidEvent(at)),
            Self::NoEnd => script.end = End::Hang,
            Self::ResetHead => nothing(script, End::Rst),
            Self::CutHead => nothing(script, End::Fin),
            Self::Reset => end(script, End::Rst),
            Self::Cut => end(script, End::Fin),
            Self::CutMidEvent => {
                end(script, End::Fin);
                script.end_mid_event = true;
            }
            Self::BadChunk => end(script, End::BadChunk),
            Self::NoDone => end(script, End::Clean),
            Self::LongLength => {
                script.framing = Framing::Length;
                script.end = End::ShortLength;
            }
            Self::TwoLengths => script.framing = Framing::Both,
            Self::Surplus => script.end = End::Extra,
            Self::Endless => {
                script.end = End::Never;
                script.pace_ms = script.pace_ms.max(1.0);
            }
            Self::ErrorEvent => script.error_at = Some(at),
            Self::CloseNext => script.next = Next::Close,
            Self::ResetNext => script.next = Next::Rst,
            _ => self.into_words(script),
        }
    }

    /// The faults of what is said, not of where it ends.
    fn into_words(self, script: &mut Script) {
        let status = |script: &mut Script, status: u16| script.status = status;
        match self {
            Self::Early => script.read = Read::Head,
            Self::NoContinue => script.expect = Expect::Ignore,
            Self::RefuseContinue => script.expect = Expect::Refuse,
            Self::Interim => {
                let one = |status| Interim {
                    status,
                    headers: Vec::new(),
                    pause_ms: 0,
                };
                script.interim = vec![one(100), one(102), one(103)];
            }
            Self::SplitUtf8 => {
                script.segment = Segment::Byte;
                script.token_text = Some(" \u{e9}\u{4e16}\u{1f680}\u{2028}".to_owned());
            }
            Self::Crlf => script.line_end = LineEnd::Crlf,
            Self::Cr => script.line_end = LineEnd::Cr,
            Self::OddLines => {
                script.line_end = LineEnd::Mixed;
                script.bom = true;
                script.no_space = true;
            }
            Self::NoBlankLine => script.final_newlines = 1,
            Self::EndlessLine => {
                script.body = Body::EndlessLine;
                script.pace_ms = script.pace_ms.max(1.0);
            }
            Self::Gzip => script.compress = Compress::Gzip,
            Self::Overload => status(script, 503),
            Self::OverloadRetryAfter => {
                status(script, 429);
                script.retry_after = Some("1".to_owned());
            }
            Self::Error => status(script, 500),
            Self::Html => {
                status(script, 502);
                script.body = Body::Html;
            }
            Self::NotAStream => script.body = Body::Chat,
            _ => {}
        }
    }
}

fn stall(at: StallAt) -> Option<Stall> {
    Some(Stall { at, ms: None })
}

/// Ends before the head, when the prompt's tokens were worked on.
fn nothing(script: &mut Script, end: End) {
    script.body = Body::Wire(vec![Piece::default()]);
    script.end = end;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_changes_the_script() {
        for fault in Fault::value_variants() {
            let mut script = Script::default();
            fault.into_script(&mut script, 3);
            assert_ne!(script, Script::default(), "{fault:?}");
            assert_eq!(script.changed(serde_json::Map::new()).ok(), Some(script));
        }
    }
}
