//! OpenAI responses.

use super::{Tail, Talk, push};

fn item(talk: &Talk<'_>, status: &str, content: &str) -> String {
    format!(
        "{{\"id\":\"msg_{:016x}\",\"content\":[{content}],\"role\":\"assistant\",\"status\":\"{status}\",\"type\":\"message\"}}",
        talk.id
    )
}

fn part(text: &str) -> String {
    format!("{{\"annotations\":[],\"text\":\"{text}\",\"type\":\"output_text\",\"logprobs\":null}}")
}

fn object(talk: &Talk<'_>, status: &str, output: &str, usage: &str) -> String {
    let incomplete = if status == "incomplete" {
        "{\"reason\":\"max_output_tokens\"}"
    } else {
        "null"
    };
    format!(
        "{{\"id\":\"resp_{:016x}\",\"created_at\":{},\"error\":null,\"incomplete_details\":{incomplete},\"instructions\":null,\"metadata\":{{}},\"model\":{},\"object\":\"response\",\"output\":[{output}],\"parallel_tool_calls\":true,\"temperature\":1.0,\"tool_choice\":\"auto\",\"tools\":[],\"top_p\":1.0,\"background\":false,\"status\":\"{status}\",\"usage\":{usage}}}",
        talk.id, talk.created, talk.model
    )
}

fn usage(talk: &Talk<'_>, output: u64) -> String {
    if !talk.shows_usage() {
        return "null".to_owned();
    }
    let input = talk.script.prompt_tokens;
    format!(
        "{{\"input_tokens\":{input},\"input_tokens_details\":{{\"cached_tokens\":0}},\"output_tokens\":{output},\"output_tokens_details\":{{\"reasoning_tokens\":0}},\"total_tokens\":{}}}",
        input + output
    )
}

fn event(name: &str, fields: &str, sequence: u64) -> Vec<u8> {
    format!(
        "event: {name}\ndata: {{{fields},\"sequence_number\":{sequence},\"type\":\"{name}\"}}\n\n"
    )
    .into_bytes()
}

pub(super) fn prelude(talk: &Talk<'_>) -> Vec<Vec<u8>> {
    let response = format!("\"response\":{}", object(talk, "in_progress", "", "null"));
    vec![
        event("response.created", &response, 0),
        event("response.in_progress", &response, 1),
        event(
            "response.output_item.added",
            &format!(
                "\"item\":{},\"output_index\":0",
                item(talk, "in_progress", "")
            ),
            2,
        ),
        event(
            "response.content_part.added",
            &format!(
                "\"content_index\":0,\"item_id\":\"msg_{:016x}\",\"output_index\":0,\"part\":{}",
                talk.id,
                part("")
            ),
            3,
        ),
    ]
}

pub(super) fn step(talk: &Talk<'_>, n: u64, tail: Tail, out: &mut Vec<u8>) {
    out.extend_from_slice(
        b"event: response.output_text.delta\ndata: {\"content_index\":0,\"delta\":\"",
    );
    talk.push_text(n, out);
    push(
        out,
        format_args!(
            "\",\"item_id\":\"msg_{:016x}\",\"logprobs\":[],\"output_index\":0,\"sequence_number\":{},\"type\":\"response.output_text.delta\"",
            talk.id,
            n + 4
        ),
    );
    tail.push_stamp(out);
    out.extend_from_slice(b"}\n\n");
}

fn final_status(talk: &Talk<'_>) -> &'static str {
    if talk.limited {
        "incomplete"
    } else {
        "completed"
    }
}

pub(super) fn postlude(talk: &Talk<'_>, steps: u64) -> Vec<Vec<u8>> {
    let text = talk.text(0, steps);
    let done = part(&text);
    let at = format!(
        "\"content_index\":0,\"item_id\":\"msg_{:016x}\",\"output_index\":0",
        talk.id
    );
    let item = item(talk, "completed", &done);
    let mut events = vec![
        event(
            "response.output_text.done",
            &format!("{at},\"logprobs\":[],\"text\":\"{text}\""),
            steps + 4,
        ),
        event(
            "response.content_part.done",
            &format!("{at},\"part\":{done}"),
            steps + 5,
        ),
        event(
            "response.output_item.done",
            &format!("\"item\":{item},\"output_index\":0"),
            steps + 6,
        ),
    ];
    if talk.script.done {
        let status = final_status(talk);
        events.push(event(
            if status == "incomplete" {
                "response.incomplete"
            } else {
                "response.completed"
            },
            &format!(
                "\"response\":{}",
                object(talk, status, &item, &usage(talk, steps))
            ),
            steps + 7,
        ));
    }
    events
}

pub(super) fn whole(talk: &Talk<'_>) -> Vec<u8> {
    let text = talk.text(0, talk.steps());
    let item = item(talk, "completed", &part(&text));
    object(talk, final_status(talk), &item, &usage(talk, talk.steps())).into_bytes()
}
