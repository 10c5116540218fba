use super::*;

fn ends(text: &[u8]) -> Vec<usize> {
    let mut b = Boundaries::new();
    let (mut at, mut found) = (0, Vec::new());
    while let Some(len) = text
        .get(at..)
        .filter(|t| !t.is_empty())
        .and_then(|t| b.next(t))
    {
        at += len;
        found.push(at);
    }
    found
}

#[test]
fn all_three_line_ends_and_their_mixes_end_an_event() {
    assert_eq!(ends(b"a\n\nb\n\n"), [3, 6]);
    assert_eq!(ends(b"a\r\n\r\nb\r\n\r\n"), [5, 10]);
    assert_eq!(ends(b"a\r\rb\r\r"), [3, 6]);
    assert_eq!(ends(b"a\n\r\nb"), [4]);
    assert_eq!(ends(b"a\r\n\nb"), [4]);
    assert_eq!(ends(b"a\r\n\rb"), [4]);
    assert_eq!(ends(b"a\n\rb\r\n\n"), [3, 7]);
    assert_eq!(ends(b"a\r\nb\r\n"), Vec::<usize>::new());
}

#[test]
fn unicode_line_separators_are_no_line_ends() {
    assert_eq!(
        ends("a\u{2028}\u{2028}b\u{85}\u{85}\x0b\x0b\x0c\x0c".as_bytes()),
        Vec::<usize>::new()
    );
}

#[test]
fn a_cr_at_the_end_of_a_chunk_ends_the_event_and_its_lf_starts_none() {
    let mut b = Boundaries::new();
    assert_eq!(b.next(b"a\r\n\r"), Some(4));
    assert!(b.expects_lf());
    assert!(b.take_lf(b"\nb"));
    assert_eq!(b.next(b"b\n\n"), Some(3));
    let mut b = Boundaries::new();
    assert_eq!(b.next(b"a\r"), None);
    assert_eq!(b.next(b"\n"), None);
    assert_eq!(b.next(b"\r\n"), Some(2));
}

#[test]
fn fields_split_at_the_first_colon_and_lose_one_space() {
    let read = |text: &'static [u8]| {
        let block = Block::read(text, false, false);
        (block.name, block.data.map(Cow::into_owned))
    };
    assert_eq!(read(b"data: a: b\n\n"), (&b""[..], Some(b"a: b".to_vec())));
    assert_eq!(read(b"data:a\n\n").1, Some(b"a".to_vec()));
    assert_eq!(read(b"data:  a\n\n").1, Some(b" a".to_vec()));
    assert_eq!(read(b"data\n\n").1, Some(Vec::new()));
    assert_eq!(
        read(b"data: a\r\ndata: b\rdata: c\n\n").1,
        Some(b"a\nb\nc".to_vec())
    );
    assert_eq!(
        read(b"event: x\nevent: y\ndata: 1\n\n"),
        (&b"y"[..], Some(b"1".to_vec()))
    );
    assert_eq!(
        read(b": c\nid: 7\nretry: 1\ndatax: 1\n data: 1\n\n").1,
        None
    );
    assert_eq!(read(b"\ndata: 1").1, Some(b"1".to_vec()));
    assert_eq!(
        Block::read(b"\xEF\xBB\xBFdata: 1\n\n", true, false)
            .data
            .as_deref(),
        Some(&b"1"[..])
    );
    assert_eq!(
        Block::read(b"\xEF\xBB\xBFdata: 1\n\n", false, false).data,
        None
    );
}

#[test]
fn an_event_of_a_single_line_is_known_as_one_however_it_is_cut() {
    for (text, single) in [
        ("data: a\n\n", true),
        ("data: a\r\n\r\n", true),
        ("data: a\r\r", true),
        (": c\n\r\n", true),
        ("\n", false),
        ("event: a\ndata: b\n\n", false),
        ("event: a\r\ndata: b\r\n\r\n", false),
        ("data: a\ndata: b\ndata: c\n\n", false),
    ] {
        for cut in 0..text.len() {
            let (start, end) = text.as_bytes().split_at(cut);
            let mut b = Boundaries::new();
            assert!(b.next(b"a\nb\n\n").is_some() && !b.one_line());
            assert!(b.next(start).is_some() | b.next(end).is_some());
            assert_eq!(b.one_line(), single, "{text:?} cut at {cut}");
        }
    }
}

#[test]
fn a_single_line_is_read_like_any_other() {
    for line in [
        "data: a",
        "data:a",
        "data",
        "data: ",
        "event: x",
        "datum: 1",
        ": c",
        "\u{feff}data: a",
    ] {
        for end in ["\n\n", "\r\n\r\n", "\r\r", "\n\r", ""] {
            let text = format!("{line}{end}");
            for first in [false, true] {
                let read = |one_line| {
                    let block = Block::read(text.as_bytes(), first, one_line);
                    (block.name, block.data)
                };
                assert_eq!(read(true), read(false), "{text:?}");
            }
        }
    }
}
