use super::*;

fn valid(text: &[u8]) -> bool {
    let mut c = Cursor::new(text);
    c.skip().and_then(|()| c.end()).is_ok()
}

#[test]
fn takes_what_json_is() {
    for text in [
        "{}",
        "[]",
        "null",
        "true",
        "false",
        "0",
        "-0",
        "-1.5e+10",
        "1E5",
        r#""""#,
        r#""\u2028\"\\\/""#,
        "{\"a\":[1,{\"b\":[]}],\"c\":{}}",
        " \t\r\n[ 1 , 2 ] ",
        "\"\u{2028}\u{85}\"",
    ] {
        assert!(valid(text.as_bytes()), "{text}");
    }
}

#[test]
fn refuses_what_json_is_not() {
    for text in [
        "",
        "{",
        "}",
        "[1,]",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{a:1}",
        "01",
        "1.",
        ".5",
        "+1",
        "1e",
        "-",
        "nul",
        "tru",
        "\"",
        "\"\\x\"",
        "\"\\u12g4\"",
        "\"\\u12",
        "\"a\nb\"",
        "[1 2]",
        "{\"a\":1 \"b\":2}",
        "[}",
        "{]",
        "1 2",
        "[1}",
        "NaN",
        "'a'",
    ] {
        assert!(!valid(text.as_bytes()), "{text}");
    }
}

#[test]
fn nesting_has_a_bound_and_no_recursion() {
    let nest = |n: usize| [vec![b'['; n], vec![b']'; n]].concat();
    assert!(valid(&nest(300)));
    assert!(valid(&nest(DEPTH_LIMIT)));
    assert!(!valid(&nest(DEPTH_LIMIT + 1)));
    let mut c = Cursor::new(&[b'['; 100_000]);
    assert_eq!(
        c.skip(),
        Err(Box::new(Flaw {
            at: DEPTH_LIMIT,
            what: TOO_DEEP
        }))
    );
    let objects = "{\"a\":".repeat(300) + "1" + &"}".repeat(300);
    assert!(valid(objects.as_bytes()));
}

#[test]
fn the_string_scan_finds_every_stop_at_every_place() {
    for len in 0..40 {
        for stop in [b'"', b'\\', 0u8, 0x1f] {
            let mut text = vec![b'x'; len];
            text.push(stop);
            text.extend_from_slice(b"\xFF\x80 tail\"");
            assert_eq!(eight::plain_run(&text), len, "{stop} at {len}");
            if let Some(start) = text.first_chunk() {
                assert_eq!(
                    eight::short_plain_run(start),
                    len.min(16),
                    "{stop} at {len}"
                );
            }
        }
        let clean: Vec<u8> = (0..len)
            .map(|i| [0x7f, 0x80, 0xff, 0x20, b'!', b'#', b'[', b']'][i % 8])
            .collect();
        assert_eq!(eight::plain_run(&clean), len);
    }
}

#[test]
fn truth_is_as_in_scripts() {
    let truthy = |text: &str| Cursor::new(text.as_bytes()).truthy().unwrap();
    for text in [
        r#""x""#,
        "[0]",
        r#"{"a":null}"#,
        "1",
        "0.5",
        "true",
        "-2",
        "[ [] ]",
    ] {
        assert!(truthy(text), "{text}");
    }
    for text in [
        r#""""#, "[]", "{}", "[ ]", "{ }", "0", "0.0", "false", "null",
    ] {
        assert!(!truthy(text), "{text}");
    }
}

#[test]
fn whole_numbers_only() {
    let number = |text: &str| {
        let mut c = Cursor::new(text.as_bytes());
        (c.whole_number().unwrap(), c.odd)
    };
    assert_eq!(number("12"), (Some(12), false));
    assert_eq!(number("12.0"), (Some(12), false));
    assert_eq!(number("1e3"), (Some(1000), false));
    assert_eq!(number("null"), (None, false));
    for odd in ["-1", "1.5", "1e999", "\"12\"", "true", "{}"] {
        assert_eq!(number(odd), (None, true), "{odd}");
    }
}

/// Walks a text as readers do: through `object` and `array`, value by value.
fn walk(c: &mut Cursor<'_>) -> Result<(), Fault> {
    match c.kind()? {
        Kind::Object => c.object(|c, _| walk(c)),
        Kind::Array => c.array(walk),
        Kind::String => c.string().map(|_| ()),
        Kind::Number => c.whole_number().map(|_| ()),
        Kind::Bool | Kind::Null => c.truthy().map(|_| ()),
    }
}

/// Why and where a text is refused, the same whether it is looked into or skipped.
fn refusal(text: &str) -> Option<(usize, &'static str)> {
    let skipped = Cursor::new(text.as_bytes()).check();
    let mut c = Cursor::new(text.as_bytes());
    let walked = walk(&mut c).and_then(|()| c.end());
    assert_eq!(walked, skipped, "{text}");
    skipped.err().map(|flaw| (flaw.at, flaw.what))
}

#[test]
fn a_flaw_has_its_place_and_its_words_near_the_end_of_the_text_and_far_from_it() {
    for (text, at, what) in [
        (r#"{"a" 1"#, 5, "needs `:` after a key"),
        (r#"{ a:1"#, 2, "needs a key in double quotes"),
        (r#"{"a":1, }"#, 8, "needs a key in double quotes"),
        (r#"{"a":1 "b""#, 7, behind(true)),
        (r#"{"a":1]"#, 6, behind(true)),
        ("[1 2", 3, behind(false)),
        ("[1}", 2, behind(false)),
        ("[1,]", 3, NO_VALUE),
        ("[ ,", 2, NO_VALUE),
        ("[nulL", 1, "has a word that is not true, false or null"),
        ("[-x", 2, "has a number that JSON does not allow"),
        ("[1.e", 3, "has a number that JSON does not allow"),
        ("[1e+", 4, "has a number that JSON does not allow"),
        ("[01", 2, behind(false)),
        (r#"["a\q"#, 3, "has an escape JSON does not know"),
        (
            r#"["abcdefghijklmnopqrs\u12x4"#,
            21,
            "has a `\\u` escape without four hex digits",
        ),
        (
            "{\"a\nb\":1",
            3,
            "has a raw control character in a string; escape it",
        ),
    ] {
        assert_eq!(refusal(text), Some((at, what)), "{text}");
        let longer = format!("{text} ,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,");
        assert_eq!(refusal(&longer), Some((at, what)), "{longer}");
        let inner = format!("[{{\"key\":{text}");
        assert_eq!(refusal(&inner), Some((at + 8, what)), "{inner}");
    }
    for (text, at, what) in [
        ("[", 1, NO_TEXT),
        ("[1", 2, behind(false)),
        (r#"{"a"#, 3, "ends inside a string"),
        (r#"{"a":"#, 5, NO_TEXT),
        (r#"{"a":{}"#, 7, behind(true)),
        (r#"{"a":1}}"#, 7, "has more text after its end"),
    ] {
        assert_eq!(refusal(text), Some((at, what)), "{text}");
    }
}

#[test]
fn keys_of_all_lengths_are_found_with_and_without_white_space() {
    for len in 0..40 {
        let key = "k".repeat(len);
        for (before, behind) in [("", ""), (" ", ""), ("", "\n"), ("\t \r", "  ")] {
            for tail in ["1}", "\"long enough that a window of it fits\"}"] {
                let text = format!("{{{before}\"{key}\"{behind}:{tail}");
                let mut found = None;
                let mut c = Cursor::new(text.as_bytes());
                c.object(|c, key| {
                    found = Some(key.to_vec());
                    assert_eq!(c.pos(), text.len() - tail.len());
                    c.skip()
                })
                .unwrap();
                assert_eq!(found.as_deref(), Some(key.as_bytes()), "{text}");
            }
        }
    }
}

#[test]
fn depth_counts_what_is_looked_into_and_what_is_skipped() {
    let looked_into = 40;
    for over in [0, 1] {
        let skipped = DEPTH_LIMIT - looked_into + over;
        let text = "[".repeat(looked_into) + &"{\"a\":".repeat(skipped);
        let mut c = Cursor::new(text.as_bytes());
        fn enter(c: &mut Cursor<'_>, levels: usize) -> Result<(), Fault> {
            if levels == 0 {
                return c.skip();
            }
            c.array(|c| enter(c, levels - 1))
        }
        let flaw = enter(&mut c, looked_into).unwrap_err();
        let what = if over == 1 { TOO_DEEP } else { NO_TEXT };
        let at = looked_into + 5 * (DEPTH_LIMIT - looked_into);
        assert_eq!((flaw.at, flaw.what), (at, what));
    }
}

#[test]
fn the_kinds_of_brackets_are_kept_through_all_levels() {
    for depth in [1, 63, 64, 65, 128, 700] {
        let kinds: Vec<bool> = (0..depth).map(|i| i * i % 3 == 0).collect();
        let open: String = kinds
            .iter()
            .map(|object| if *object { "{\"k\":" } else { "[" })
            .collect();
        let close: String = kinds
            .iter()
            .rev()
            .map(|object| if *object { '}' } else { ']' })
            .collect();
        assert_eq!(refusal(&format!("{open}0{close}")), None, "{depth}");
        for wrong in 0..depth {
            let mut close = close.clone().into_bytes();
            close[wrong] ^= b'}' ^ b']';
            let text = format!("{open}0{}", String::from_utf8(close).unwrap());
            let at = open.len() + 1 + wrong;
            assert_eq!(refusal(&text).unwrap().0, at, "{depth} {wrong}");
        }
    }
}

#[test]
fn large_numbers_are_whole_up_to_where_they_are_exact() {
    let number = |text: &str| {
        let mut c = Cursor::new(text.as_bytes());
        let number = c.whole_number().unwrap();
        assert_eq!(c.pos(), text.len());
        number
    };
    assert_eq!(number("0"), Some(0));
    assert_eq!(
        number("9999999999999999999"),
        Some(9_999_999_999_999_999_999)
    );
    assert_eq!(number("18446744073709551615"), Some(u64::MAX));
    assert_eq!(number("18446744073709551616"), None);
    assert_eq!(number("100000000000000000000000000000000000000000"), None);
    for refused in ["00", "01", "007"] {
        let mut c = Cursor::new(refused.as_bytes());
        let read = c.whole_number();
        assert!(read.is_err() || c.end().is_err(), "{refused}");
    }
}

/// JSON text of some depth, with strings and keys of all lengths, escapes and white space.
fn json() -> impl proptest::strategy::Strategy<Value = String> {
    use proptest::collection::vec;
    use proptest::prelude::{Just, Strategy, prop_oneof};
    let word = || {
        prop_oneof![
            "[a-z_]{0,24}",
            "[ -!#-\\[\\]-~é\u{2028}]{0,40}",
            r#"([a-z]{0,20}(\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}))+[a-z]{0,9}"#,
        ]
        .prop_map(|text| format!("\"{text}\""))
    };
    let scalar = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        Just("false".to_owned()),
        "-?(0|[1-9][0-9]{0,22})(\\.[0-9]{1,9})?([eE][+-]?[0-9]{1,3})?",
        word(),
    ];
    let white = || "[ \t\r\n]{0,2}";
    scalar.prop_recursive(5, 60, 6, move |inner| {
        let element = (white(), inner.clone(), white()).prop_map(|(a, v, b)| a + &v + &b);
        let member = (white(), word(), white(), element.clone())
            .prop_map(|(a, key, b, v)| format!("{a}{key}{b}:{v}"));
        prop_oneof![
            (vec(element, 0..6), white())
                .prop_map(|(all, empty)| format!("[{empty}{}]", all.join(","))),
            (vec(member, 0..6), white())
                .prop_map(|(all, empty)| format!("{{{empty}{}}}", all.join(","))),
        ]
    })
}

/// The text with one byte changed, left out or put in. It stays UTF-8: a change in a longer character changes all of it.
fn spoilt(text: &str, at: usize, byte: u8, how: u8) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    let at = at % (chars.len() + 1);
    match how % 3 {
        0 => chars.insert(at, char::from(byte)),
        _ if at == chars.len() => {}
        1 => chars[at] = char::from(byte),
        _ => {
            chars.remove(at);
        }
    }
    chars.into_iter().collect()
}

fn accepted_by_serde(text: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

proptest::proptest! {
    #[test]
    fn accepts_and_refuses_what_serde_json_does(text in json(), at: usize, byte in proptest::sample::select(b"\"\\{}[]:,0e.-nt \n\x01\x7f".to_vec()), how: u8) {
        proptest::prop_assert!(accepted_by_serde(&text) && refusal(&text).is_none(), "{}", text);
        let text = spoilt(&text, at, byte, how);
        proptest::prop_assert_eq!(refusal(&text).is_none(), accepted_by_serde(&text), "{}", text);
    }

    #[test]
    fn agrees_with_serde_json_on_validity(text in "[\\[\\]{}\",:0-9a\\\\u.eE+ \\-ntrfls]{0,24}") {
        let theirs = serde_json::from_str::<serde_json::Value>(&text);
        let ours = valid(text.as_bytes());
        // Their value also refuses numbers out of range and lone surrogates.
        let excused = theirs.as_ref().is_err_and(|e| {
            let e = e.to_string();
            e.contains("out of range") || e.contains("surrogate") || e.contains("hex escape") || e.contains("unicode")
        });
        proptest::prop_assert!(excused || ours == theirs.is_ok(), "{} {:?}", text, theirs);
    }
}
