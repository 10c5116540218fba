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
        Err(Fault {
            at: DEPTH_LIMIT,
            what: TOO_DEEP
        })
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
            assert_eq!(plain_run(&text), len, "{stop} at {len}");
        }
        let clean: Vec<u8> = (0..len)
            .map(|i| [0x7f, 0x80, 0xff, 0x20, b'!', b'#', b'[', b']'][i % 8])
            .collect();
        assert_eq!(plain_run(&clean), len);
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

proptest::proptest! {
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
