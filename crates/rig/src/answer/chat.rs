//! OpenAI chat and (legacy) completions.

use super::{Dialect, Tail, Talk, push};
use crate::script::Usage;

const TOOL_ARGUMENTS: [&str; 2] = [r#"{\"city\": "#, r#"\"Paris\"}"#];

fn open(talk: &Talk<'_>, out: &mut Vec<u8>) {
    let (prefix, object) = match talk.dialect {
        Dialect::Completion => ("cmpl", "text_completion"),
        _ => ("chatcmpl", "chat.completion.chunk"),
    };
    push(
        out,
        format_args!(
            "data: {{\"id\":\"{prefix}-{:016x}\",\"object\":\"{object}\",\"created\":{},\"model\":{},\"choices\":[",
            talk.id, talk.created, talk.model
        ),
    );
}

/// Appends `,"usage":{…}` for so many tokens.
fn usage(talk: &Talk<'_>, completion: u64, out: &mut Vec<u8>) {
    let prompt = talk.script.prompt_tokens;
    push(
        out,
        format_args!(
            ",\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{},\"completion_tokens\":{completion}}}",
            prompt + completion
        ),
    );
}

fn continuous(talk: &Talk<'_>, completion: u64, out: &mut Vec<u8>) {
    if talk.usage == Usage::Continuous {
        usage(talk, completion, out);
    }
}

pub(super) fn prelude(talk: &Talk<'_>) -> Vec<Vec<u8>> {
    if !talk.script.role_chunk {
        return Vec::new();
    }
    let mut out = Vec::with_capacity(288);
    open(talk, &mut out);
    out.extend_from_slice(
        b"{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]",
    );
    continuous(talk, 0, &mut out);
    out.extend_from_slice(b",\"prompt_token_ids\":null,\"prompt_text\":null}\n\n");
    vec![out]
}

fn close(talk: &Talk<'_>, n: u64, tail: Tail, out: &mut Vec<u8>) {
    if tail.last {
        let reason = super::quoted(&talk.finish("tool_calls", "length", "stop"));
        push(
            out,
            format_args!(",\"finish_reason\":{reason},\"stop_reason\":null,\"token_ids\":null}}]"),
        );
    } else {
        out.extend_from_slice(b",\"finish_reason\":null,\"token_ids\":null}]");
    }
    continuous(talk, n + 1, out);
    tail.push_stamp(out);
    out.extend_from_slice(b"}\n\n");
}

pub(super) fn step(talk: &Talk<'_>, n: u64, tail: Tail, out: &mut Vec<u8>) {
    open(talk, out);
    out.extend_from_slice(b"{\"index\":0,\"delta\":{");
    let reasoning = talk.script.reasoning_tokens;
    if n < reasoning {
        out.extend_from_slice(b"\"reasoning\":\"");
        talk.push_text(n, out);
        out.extend_from_slice(b"\"}");
    } else if n < talk.first_text() {
        let (call, part) = ((n - reasoning) / 3, (n - reasoning) % 3);
        push(out, format_args!("\"tool_calls\":[{{\"index\":{call},"));
        match part {
            0 => push(
                out,
                format_args!(
                    "\"id\":\"call_{:012x}{call}\",\"type\":\"function\",\"function\":{{\"name\":\"get_weather\",\"arguments\":\"\"}}}}]}}",
                    talk.id >> 16
                ),
            ),
            p => push(
                out,
                format_args!(
                    "\"function\":{{\"arguments\":\"{}\"}}}}]}}",
                    TOOL_ARGUMENTS[p as usize - 1]
                ),
            ),
        }
    } else {
        out.extend_from_slice(b"\"content\":\"");
        talk.push_text(n, out);
        out.extend_from_slice(b"\"}");
    }
    out.extend_from_slice(b",\"logprobs\":null");
    close(talk, n, tail, out);
}

pub(super) fn completion_step(talk: &Talk<'_>, n: u64, tail: Tail, out: &mut Vec<u8>) {
    open(talk, out);
    out.extend_from_slice(b"{\"index\":0,\"text\":\"");
    talk.push_text(n, out);
    out.extend_from_slice(b"\",\"logprobs\":null");
    close(talk, n, tail, out);
}

pub(super) fn postlude(talk: &Talk<'_>, steps: u64) -> Vec<Vec<u8>> {
    let mut events = Vec::with_capacity(3);
    if steps == 0 {
        let mut out = Vec::new();
        open(talk, &mut out);
        out.extend_from_slice(match talk.dialect {
            Dialect::Completion => b"{\"index\":0,\"text\":\"\",\"logprobs\":null".as_slice(),
            _ => b"{\"index\":0,\"delta\":{},\"logprobs\":null".as_slice(),
        });
        let tail = Tail {
            last: true,
            stamp: None,
        };
        close(talk, 0, tail, &mut out);
        events.push(out);
    }
    if talk.shows_usage() {
        let mut out = Vec::with_capacity(256);
        open(talk, &mut out);
        out.push(b']');
        usage(talk, steps, &mut out);
        out.extend_from_slice(b",\"system_fingerprint\":\"rig\"}\n\n");
        events.push(out);
    }
    if talk.script.done {
        events.push(b"data: [DONE]\n\n".to_vec());
    }
    events
}

/// `tool_calls` of a message in one piece, as a JSON array.
fn tool_calls(talk: &Talk<'_>) -> String {
    let calls: Vec<String> = (0..talk.script.tool_calls)
        .map(|i| {
            format!(
                "{{\"id\":\"call_{:012x}{i}\",\"type\":\"function\",\"function\":{{\"name\":\"get_weather\",\"arguments\":\"{}{}\"}}}}",
                talk.id >> 16,
                TOOL_ARGUMENTS[0],
                TOOL_ARGUMENTS[1]
            )
        })
        .collect();
    format!("[{}]", calls.join(","))
}

pub(super) fn whole(talk: &Talk<'_>) -> Vec<u8> {
    let text = talk.text(talk.first_text(), talk.steps());
    let reason = super::quoted(&talk.finish("tool_calls", "length", "stop"));
    let mut out = Vec::with_capacity(512 + text.len());
    let (id, created, model) = (talk.id, talk.created, &talk.model);
    if talk.dialect == Dialect::Completion {
        push(
            &mut out,
            format_args!(
                "{{\"id\":\"cmpl-{id:016x}\",\"object\":\"text_completion\",\"created\":{created},\"model\":{model},\"choices\":[{{\"index\":0,\"text\":\"{text}\",\"logprobs\":null,\"finish_reason\":{reason},\"stop_reason\":null}}]"
            ),
        );
    } else {
        let tools = if talk.script.tool_calls > 0 {
            format!(",\"tool_calls\":{}", tool_calls(talk))
        } else {
            String::new()
        };
        push(
            &mut out,
            format_args!(
                "{{\"id\":\"chatcmpl-{id:016x}\",\"object\":\"chat.completion\",\"created\":{created},\"model\":{model},\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"{text}\",\"refusal\":null{tools}}},\"logprobs\":null,\"finish_reason\":{reason},\"stop_reason\":null}}]"
            ),
        );
    }
    if talk.shows_usage() {
        usage(talk, talk.steps(), &mut out);
    }
    out.push(b'}');
    out
}
