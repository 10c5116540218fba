//! Request bodies: what is read, what is refused, what an edit leaves alone.

use bytes::Bytes;
use proptest::prelude::*;
use tidegate_wire::{Dialect, Edit, Peek, PeekError, peek, splice};

fn read(text: &str) -> Result<Peek, PeekError> {
    peek(&Bytes::copy_from_slice(text.as_bytes()), Dialect::OpenAi)
}

fn edit(text: &str, edits: &[Edit<'_>]) -> String {
    let body = Bytes::copy_from_slice(text.as_bytes());
    let peek = peek(&body, Dialect::OpenAi).expect("a body to edit");
    String::from_utf8(splice(&body, &peek, edits).to_vec()).expect("UTF-8")
}

#[test]
fn reads_the_fields_of_each_dialect() {
    let body = r#" {"model":"m","stream":true,"stream_options":{"x":1,"include_usage":true},"max_tokens":5} "#;
    let chat = read(body).unwrap();
    assert_eq!(
        (chat.model.as_deref(), chat.stream, chat.include_usage),
        (Some("m"), true, Some(true))
    );
    assert_eq!((chat.max_tokens, chat.background), (Some(5), false));
    let both = read(r#"{"max_tokens":5,"max_completion_tokens":9}"#).unwrap();
    assert_eq!(
        (both.max_tokens, both.model, both.stream),
        (Some(9), None, false)
    );
    let body = Bytes::from_static(br#"{"model":"r","background":true,"max_output_tokens":7,"stream_options":7,"max_tokens":"x"}"#);
    let responses = peek(&body, Dialect::Responses).unwrap();
    assert_eq!(
        (
            responses.background,
            responses.max_tokens,
            responses.include_usage
        ),
        (true, Some(7), None)
    );
    let body = Bytes::from_static(
        br#"{"model":"c","max_tokens":3,"stream":false,"background":"not mine"}"#,
    );
    let anthropic = peek(&body, Dialect::Anthropic).unwrap();
    assert_eq!(
        (anthropic.max_tokens, anthropic.stream, anthropic.background),
        (Some(3), false, false)
    );
    let nulls =
        read(r#"{"model":null,"stream":null,"stream_options":null,"max_tokens":null}"#).unwrap();
    assert_eq!(
        (nulls.model, nulls.stream, nulls.include_usage),
        (None, false, None)
    );
    assert_eq!(read(r#"{"max_tokens":-1}"#).unwrap().max_tokens, None);
    assert_eq!(
        read(r#"{"model":"a\"\u00fc\n"}"#).unwrap().model.as_deref(),
        Some("a\"ü\n")
    );
}

#[test]
fn only_the_top_level_counts() {
    let body = r#"{"messages":[{"model":"x","stream":true}],"tools":{"stream":"yes","model":7},"model":"m"}"#;
    let found = read(body).unwrap();
    assert_eq!((found.model.as_deref(), found.stream), (Some("m"), false));
}

#[test]
fn refuses_a_field_that_comes_twice() {
    for (body, field) in [
        (r#"{"model":"a","model":"b"}"#, "model"),
        (r#"{"model":"a","mod\u0065l":"b"}"#, "model"),
        (r#"{"stream":true,"x":1,"stream":true}"#, "stream"),
        (
            r#"{"stream_options":{},"stream_options":{}}"#,
            "stream_options",
        ),
        (
            r#"{"stream_options":{"include_usage":true,"include_usage":false}}"#,
            "stream_options.include_usage",
        ),
        (r#"{"max_tokens":1,"max_tokens":100}"#, "max_tokens"),
    ] {
        let error = read(body).unwrap_err();
        assert_eq!(error.param, Some(field));
        assert!(
            error
                .to_string()
                .starts_with(&format!("`{field}` comes twice; send it once (line 1")),
            "{error}"
        );
    }
    let body = Bytes::from_static(br#"{"background":true,"background":false}"#);
    assert_eq!(
        peek(&body, Dialect::Responses).unwrap_err().param,
        Some("background")
    );
}

#[test]
fn refuses_wrong_types() {
    for (body, says) in [
        (r#"{"model":7}"#, "`model` must be a string"),
        (r#"{"model":["m"]}"#, "`model` must be a string"),
        (
            r#"{"model":"\ud800"}"#,
            "`model` has an escape that is no character",
        ),
        (
            r#"{"stream":"true"}"#,
            "`stream` must be true or false, without quotes",
        ),
        (r#"{"stream":1}"#, "`stream` must be true or false"),
        (
            r#"{"stream_options":true}"#,
            "`stream_options` must be an object or null",
        ),
        (
            r#"{"stream_options":{"include_usage":"yes"}}"#,
            "`stream_options.include_usage` must be",
        ),
        (r#"{"max_tokens":"5"}"#, "`max_tokens` must be a number"),
    ] {
        let error = read(body).unwrap_err().to_string();
        assert!(error.starts_with(says), "{error}");
    }
}

#[test]
fn refuses_what_is_no_json_object_and_says_where() {
    for (body, says) in [
        (
            "",
            "the request body is empty; send a JSON object (line 1, column 1, byte 0)",
        ),
        (
            "  \n ",
            "the request body is empty; send a JSON object (line 2, column 2, byte 4)",
        ),
        (
            "[1]",
            "the request body is not a JSON object; send one (line 1, column 1, byte 0)",
        ),
        (
            "model=x",
            "the request body is not a JSON object; send one (line 1, column 1, byte 0)",
        ),
        (
            "{\"model\":\"tiny\", bad",
            "the request body needs a key in double quotes (line 1, column 18, byte 17)",
        ),
        (
            "{\"a\":1}\n{}",
            "the request body has more text after its end (line 2, column 1, byte 8)",
        ),
        (
            "{\n \"a\":\n  \"b",
            "the request body ends inside a string (line 3, column 5, byte 12)",
        ),
        (
            "{\"a\":NaN}",
            "the request body has something that is not a JSON value (line 1, column 6, byte 5)",
        ),
    ] {
        assert_eq!(read(body).unwrap_err().to_string(), says);
    }
    let error = peek(&Bytes::from_static(b"{\"a\":\"\xFF\"}"), Dialect::OpenAi).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the request body is not UTF-8; encode it as UTF-8 (line 1, column 7, byte 6)"
    );
}

#[test]
fn deep_nesting_is_fine_and_deeper_is_refused() {
    let nest = |n: usize| {
        format!(
            "{{\"a\":{}{},\"model\":\"m\"}}",
            "[".repeat(n),
            "]".repeat(n)
        )
    };
    assert_eq!(read(&nest(300)).unwrap().model.as_deref(), Some("m"));
    let error = read(&nest(100_000)).unwrap_err();
    assert!(
        error.what.contains("nested more than 1024 levels deep"),
        "{error}"
    );
    let objects = format!("{}1{}", "{\"model\":".repeat(100_000), "}".repeat(100_000));
    assert!(read(&objects).is_err());
}

#[test]
fn must_59_an_edit_changes_its_own_bytes_only() {
    let odd = "{ \"x\" : 1e400,\t\"model\" : \"old\" ,\r\n\"y\":[1, 2.0,\"\\u0041\"],\"x\":2, \"z\":\"é\u{2028}\" }\n";
    assert_eq!(
        edit(odd, &[Edit::Model("new")]),
        odd.replace("\"old\"", "\"new\"")
    );
    assert_eq!(
        edit(odd, &[Edit::Model("a\"b\n")]),
        odd.replace("\"old\"", "\"a\\\"b\\n\"")
    );
    assert_eq!(edit(odd, &[Edit::Model("old")]), odd);
    assert_eq!(edit(odd, &[]), odd);
}

#[test]
fn an_edit_that_changes_nothing_copies_nothing() {
    let body = Bytes::from_static(br#"{"model":"m","stream_options":{"include_usage":true}}"#);
    let peek = peek(&body, Dialect::OpenAi).unwrap();
    let out = splice(&body, &peek, &[Edit::IncludeUsage, Edit::Model("m")]);
    assert_eq!(out.as_ptr(), body.as_ptr());
}

#[test]
fn must_58_include_usage_is_added_or_completed() {
    let usage = |text| edit(text, &[Edit::IncludeUsage]);
    assert_eq!(usage("{}"), r#"{"stream_options":{"include_usage":true}}"#);
    assert_eq!(
        usage("{ \"a\":1}"),
        "{\"stream_options\":{\"include_usage\":true}, \"a\":1}"
    );
    assert_eq!(
        usage(r#"{"stream_options":null,"a":1}"#),
        r#"{"stream_options":{"include_usage":true},"a":1}"#
    );
    assert_eq!(
        usage(r#"{"stream_options":{ }}"#),
        r#"{"stream_options":{"include_usage":true }}"#
    );
    assert_eq!(
        usage(r#"{"stream_options":{"b":{}}}"#),
        r#"{"stream_options":{"include_usage":true,"b":{}}}"#
    );
    assert_eq!(
        usage(r#"{"stream_options":{"include_usage": false,"b":1}}"#),
        r#"{"stream_options":{"include_usage": true,"b":1}}"#
    );
    assert_eq!(
        usage(r#"{"stream_options":{"include_usage":null}}"#),
        r#"{"stream_options":{"include_usage":true}}"#
    );
    let body = Bytes::from_static(b"{\"model\":\"c\"}");
    for dialect in [Dialect::Anthropic, Dialect::Responses] {
        assert_eq!(
            splice(&body, &peek(&body, dialect).unwrap(), &[Edit::IncludeUsage]),
            body
        );
    }
}

#[test]
fn a_stream_is_asked_for() {
    let stream = |text| edit(text, &[Edit::Stream]);
    assert_eq!(stream(r#"{"model":"m"}"#), r#"{"stream":true,"model":"m"}"#);
    assert_eq!(stream("{ }"), r#"{"stream":true }"#);
    assert_eq!(
        stream(r#"{"stream": false, "n":1}"#),
        r#"{"stream": true, "n":1}"#
    );
    assert_eq!(stream(r#"{"stream":null}"#), r#"{"stream":true}"#);
    assert_eq!(stream(r#"{"stream":true}"#), r#"{"stream":true}"#);
    assert_eq!(
        edit(
            r#"{"model":"a","stream":false}"#,
            &[Edit::Stream, Edit::IncludeUsage, Edit::Model("b")]
        ),
        r#"{"stream_options":{"include_usage":true},"model":"b","stream":true}"#
    );
}

#[test]
fn fields_that_a_stream_cannot_honour_are_told() {
    let field = |text: &str| read(text).unwrap().one_piece;
    for (text, told) in [
        (r#"{"n":3,"logprobs":true,"tools":[],"stop":"x"}"#, None),
        (r#"{"best_of":4}"#, Some("best_of")),
        (r#"{"best_of":1,"echo":false,"audio":null}"#, None),
        (r#"{"best_of":null,"stream_options":null}"#, None),
        (r#"{"echo":true}"#, Some("echo")),
        (r#"{"prompt_logprobs":0}"#, Some("prompt_logprobs")),
        (r#"{"use_beam_search":true}"#, Some("use_beam_search")),
        (r#"{"modalities":["text"]}"#, None),
        (r#"{"modalities":["text","audio"]}"#, Some("modalities")),
        (r#"{"stream_options":{}}"#, Some("stream_options")),
        (r#"{"metadata":{"best_of":4}}"#, None),
    ] {
        assert_eq!(field(text), told, "{text}");
    }
    let claude = peek(&Bytes::from_static(br#"{"echo":true}"#), Dialect::Anthropic).unwrap();
    assert_eq!(claude.one_piece, None);
}

#[test]
fn edits_go_together_in_any_order() {
    let both = [Edit::IncludeUsage, Edit::Model("n")];
    assert_eq!(
        edit("{}", &both),
        r#"{"model":"n","stream_options":{"include_usage":true}}"#
    );
    let text = r#"{"stream_options":{"include_usage":false},"a":1,"model":"m"}"#;
    assert_eq!(
        edit(text, &both),
        r#"{"stream_options":{"include_usage":true},"a":1,"model":"n"}"#
    );
    assert_eq!(
        edit(r#"{"model":null}"#, &[Edit::Model("x"), Edit::Model("y")]),
        r#"{"model":"y"}"#
    );
}

#[test]
fn a_peek_of_another_body_does_no_harm() {
    let long = Bytes::from_static(br#"{"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa":1,"model":"m"}"#);
    let short = Bytes::from_static(b"{}");
    let foreign = peek(&long, Dialect::OpenAi).unwrap();
    assert_eq!(splice(&short, &foreign, &[Edit::Model("x")]), short);
}

fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        ".{0,8}".prop_map(serde_json::Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            proptest::collection::btree_map("[a-z]{1,3}", inner, 0..4)
                .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn must_59_splicing_is_editing_the_parsed_object(
        mut members in proptest::collection::btree_map("[a-f]{1,3}", json(), 0..5),
        model in proptest::option::of(".{0,6}"),
        options in proptest::option::of(proptest::collection::btree_map("[a-c]|include_usage", any::<bool>(), 0..4)),
        name in ".{0,6}",
        pretty in any::<bool>(),
    ) {
        members.extend(model.map(|model| ("model".to_owned(), model.into())));
        members.extend(options.map(|options| {
            let options: serde_json::Map<_, _> = options.into_iter().map(|(k, v)| (k, v.into())).collect();
            ("stream_options".to_owned(), options.into())
        }));
        let mut object: serde_json::Map<String, serde_json::Value> = members.into_iter().collect();
        let text = if pretty { serde_json::to_string_pretty(&object) } else { serde_json::to_string(&object) }.unwrap();
        let edited: serde_json::Map<_, _> =
            serde_json::from_str(&edit(&text, &[Edit::Model(&name), Edit::IncludeUsage])).unwrap();
        object.insert("model".into(), name.into());
        let options = object.entry("stream_options").or_insert_with(|| serde_json::Map::new().into());
        options["include_usage"] = true.into();
        prop_assert_eq!(edited, object);
    }

    #[test]
    fn no_body_makes_it_panic(body in proptest::collection::vec(any::<u8>(), 0..64), name in ".{0,4}") {
        let body = Bytes::from(body);
        for dialect in [Dialect::OpenAi, Dialect::Responses, Dialect::Anthropic] {
            if let Ok(found) = peek(&body, dialect) {
                let out = splice(&body, &found, &[Edit::Model(&name), Edit::IncludeUsage]);
                prop_assert_eq!(peek(&out, dialect).unwrap().model, Some(name.clone()));
            }
        }
    }
}
