//! Anthropic messages.

use super::{Tail, Talk, push};

fn block_start(index: u64, block: &str, out: &mut Vec<u8>) {
    push(
        out,
        format_args!(
            "event: content_block_start\ndata: {{\"type\":\"content_block_start\",\"index\":{index},\"content_block\":{block}}}\n\n"
        ),
    );
}

fn block_stop(index: u64, out: &mut Vec<u8>) {
    push(
        out,
        format_args!(
            "event: content_block_stop\ndata: {{\"type\":\"content_block_stop\",\"index\":{index}}}\n\n"
        ),
    );
}

pub(super) fn prelude(talk: &Talk<'_>) -> Vec<Vec<u8>> {
    let mut start = Vec::with_capacity(320);
    push(
        &mut start,
        format_args!(
            "event: message_start\ndata: {{\"type\":\"message_start\",\"message\":{{\"id\":\"msg_{:016x}\",\"type\":\"message\",\"role\":\"assistant\",\"content\":[],\"model\":{},\"stop_reason\":null,\"stop_sequence\":null",
            talk.id, talk.model
        ),
    );
    if talk.shows_usage() {
        push(
            &mut start,
            format_args!(
                ",\"usage\":{{\"input_tokens\":{},\"output_tokens\":1}}",
                talk.script.prompt_tokens
            ),
        );
    }
    start.extend_from_slice(b"}}\n\n");
    vec![
        start,
        b"event: ping\ndata: {\"type\":\"ping\"}\n\n".to_vec(),
    ]
}

/// Index of the block step `n` belongs to, and its place within the block.
fn block_of(talk: &Talk<'_>, n: u64) -> (u64, u64) {
    let reasoning = talk.script.reasoning_tokens;
    let before = u64::from(reasoning > 0);
    if n < reasoning {
        (0, n)
    } else if n < talk.first_text() {
        (before + (n - reasoning) / 3, (n - reasoning) % 3)
    } else {
        (
            before + u64::from(talk.script.tool_calls),
            n - talk.first_text(),
        )
    }
}

pub(super) fn step(talk: &Talk<'_>, n: u64, tail: Tail, out: &mut Vec<u8>) {
    let (block, nth) = block_of(talk, n);
    let reasoning = n < talk.script.reasoning_tokens;
    let tool = !reasoning && n < talk.first_text();
    if nth == 0 {
        if block > 0 {
            block_stop(block - 1, out);
        }
        let kind = if reasoning {
            "{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}".to_owned()
        } else if tool {
            format!(
                "{{\"type\":\"tool_use\",\"id\":\"toolu_{:012x}{block}\",\"name\":\"get_weather\",\"input\":{{}}}}",
                talk.id >> 16
            )
        } else {
            "{\"type\":\"text\",\"text\":\"\"}".to_owned()
        };
        block_start(block, &kind, out);
    }
    push(
        out,
        format_args!(
            "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"index\":{block},\"delta\":"
        ),
    );
    if reasoning {
        out.extend_from_slice(b"{\"type\":\"thinking_delta\",\"thinking\":\"");
        talk.push_text(n, out);
    } else if tool {
        out.extend_from_slice(b"{\"type\":\"input_json_delta\",\"partial_json\":\"");
        out.extend_from_slice(match nth {
            0 => b"".as_slice(),
            1 => br#"{\"city\": "#.as_slice(),
            _ => br#"\"Paris\"}"#.as_slice(),
        });
    } else {
        out.extend_from_slice(b"{\"type\":\"text_delta\",\"text\":\"");
        talk.push_text(n, out);
    }
    out.extend_from_slice(b"\"}");
    tail.push_stamp(out);
    out.extend_from_slice(b"}\n\n");
}

pub(super) fn postlude(talk: &Talk<'_>, steps: u64) -> Vec<Vec<u8>> {
    let mut events = Vec::with_capacity(3);
    if steps > 0 {
        let mut out = Vec::new();
        block_stop(block_of(talk, steps - 1).0, &mut out);
        events.push(out);
    }
    let mut out = Vec::with_capacity(192);
    push(
        &mut out,
        format_args!(
            "event: message_delta\ndata: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":{},\"stop_sequence\":null}}",
            super::quoted(&talk.finish("tool_use", "max_tokens", "end_turn"))
        ),
    );
    let (input, output) = (talk.script.prompt_tokens, steps);
    if talk.shows_usage() {
        push(
            &mut out,
            format_args!(",\"usage\":{{\"input_tokens\":{input},\"output_tokens\":{output}}}"),
        );
    }
    out.extend_from_slice(b"}\n\n");
    events.push(out);
    if talk.script.done {
        events.push(b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n".to_vec());
    }
    events
}

pub(super) fn whole(talk: &Talk<'_>) -> Vec<u8> {
    let mut blocks: Vec<String> = (0..talk.script.tool_calls)
        .map(|i| {
            format!(
                "{{\"type\":\"tool_use\",\"id\":\"toolu_{:012x}{i}\",\"name\":\"get_weather\",\"input\":{{\"city\":\"Paris\"}}}}",
                talk.id >> 16
            )
        })
        .collect();
    if talk.tokens > 0 {
        blocks.push(format!(
            "{{\"type\":\"text\",\"text\":\"{}\"}}",
            talk.text(talk.first_text(), talk.steps())
        ));
    }
    format!(
        "{{\"id\":\"msg_{:016x}\",\"type\":\"message\",\"role\":\"assistant\",\"content\":[{}],\"model\":{},\"stop_reason\":{},\"stop_sequence\":null,\"usage\":{{\"input_tokens\":{},\"output_tokens\":{}}}}}",
        talk.id,
        blocks.join(","),
        talk.model,
        super::quoted(&talk.finish("tool_use", "max_tokens", "end_turn")),
        talk.script.prompt_tokens,
        talk.steps()
    )
    .into_bytes()
}
