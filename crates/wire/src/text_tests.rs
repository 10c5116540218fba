use super::*;

#[test]
fn quoting_leaves_no_line_end_of_any_kind() {
    let quoted = quote("a\r\n\u{85}\u{2028}\u{2029}\"\\\0ü");
    assert!(
        quoted
            .chars()
            .all(|c| !c.is_control() && !matches!(c, '\u{2028}' | '\u{2029}'))
    );
    assert_eq!(
        serde_json::from_str::<String>(&quoted).unwrap(),
        "a\r\n\u{85}\u{2028}\u{2029}\"\\\0ü"
    );
}

#[test]
fn keys_are_read_with_escapes_considered() {
    assert_eq!(*key(b"model"), *b"model");
    assert_eq!(*key(br"mod\u0065l"), *b"model");
    assert_ne!(*key(br"mod\u0066l"), *b"model");
    assert_ne!(*key(br"mod\ud800l"), *b"model");
}

#[test]
fn clipping_keeps_characters_whole() {
    assert_eq!(clip("aüb", 2), "a");
    assert_eq!(clip("aüb", 3), "aü");
    assert_eq!(clip("ab", 9), "ab");
}
