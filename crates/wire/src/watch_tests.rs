use super::*;

fn watch(text: &[u8], size: usize) -> Watch {
    let mut watch = Watch::new(true);
    for chunk in text.chunks(size) {
        watch.feed(chunk);
    }
    watch
}

#[test]
fn finds_the_outer_values_at_any_cut() {
    let text = "\u{feff}event: response.completed\r\ndata: {\"response\":{\"output\":[{\"usage\":{\"input_tokens\":1},\
        \"text\":\"\\\"usage\\\":{\\\\\"}],\"error\":null,\"usage\" : {\"input_tokens\":17,\"output_tokens\":5},\"user\":{\"usage\":3}},\r\n\
        data: \"sequence_number\":9,\"delta\":1,\"type\":\"response.completed\"}\r\n\r\n";
    for size in 1..=text.len() {
        let watch = watch(text.as_bytes(), size);
        let seen = watch.seen();
        assert_eq!(watch.name(), b"response.completed");
        assert_eq!(seen.kind, Some(&b"response.completed"[..]));
        let usage = seen
            .inner_usage
            .and_then(|raw| raw.normal(crate::Dialect::Responses))
            .unwrap();
        assert_eq!((usage.input, usage.output), (Some(17), Some(5)));
        assert!(
            seen.usage.is_none()
                && seen.error.is_none()
                && seen.inner_error.is_none()
                && seen.delta
        );
    }
}

#[test]
fn text_and_foreign_objects_are_not_taken_for_the_real_thing() {
    let text = r#"data: {"response":{"text":"a\"}},\"usage\":{\"input_tokens\":7}","usage":{"input_tokens":1}},
data: "metadata":{"usage":{"input_tokens":99},"error":"x"},"list":[{"usage":{"input_tokens":98}}]}"#;
    for size in [1, 3, text.len()] {
        let watch = watch(text.as_bytes(), size);
        let seen = watch.seen();
        let usage = seen
            .inner_usage
            .and_then(|raw| raw.normal(crate::Dialect::Responses));
        assert_eq!(usage.unwrap().input, Some(1));
        assert!(seen.usage.is_none() && seen.error.is_none() && seen.inner_error.is_none());
    }
}

#[test]
fn what_it_keeps_is_bounded() {
    let text = format!(
        "data: {{\"error\":{{\"message\":\"{}\"}},\"{}\":1}}\n\n",
        "x".repeat(100_000),
        "k".repeat(100_000)
    );
    let watch = watch(text.as_bytes(), 1000);
    assert_eq!(watch.json.error.bytes.len(), VALUE_LIMIT);
    assert!(watch.json.key.len() <= WORD_LIMIT);
    assert_eq!(watch.seen().error.unwrap().message.len(), 1024);
}

#[test]
fn broken_text_does_no_harm() {
    for text in [
        "data: }}}}]]]]:::,,,\"usage\":{",
        "data: [[[\"a\":{\"usage\":1",
        "data: {\"usage\"",
        "data",
        "event: ",
        "data: {\"usage\":\"\\",
    ] {
        let watch = watch(text.as_bytes(), 1);
        assert!(watch.seen().usage.is_none());
    }
}
