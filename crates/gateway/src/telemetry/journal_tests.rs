use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;

use super::*;

/// A file of its own for one test.
fn path(test: &str) -> PathBuf {
    let folder =
        std::env::temp_dir().join(format!("tidegate-journal-{test}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder.join("calls")
}

fn noted(id: &str) -> Noted {
    Noted {
        began: 1_700_000_000_000_000,
        sent: true,
        id: id.into(),
        principal: "ci".into(),
        model: "tiny".into(),
        upstream: "gpu".into(),
        endpoint: "10.0.0.1:8000".into(),
    }
}

fn open(path: &Path) -> (Journal, FoundAtStart) {
    Journal::open(path, Counter::default()).unwrap()
}

#[test]
fn what_was_in_flight_is_found_and_what_had_ended_is_not() {
    let path = path("found");
    let (journal, found) = open(&path);
    assert!(found.lost.is_empty() && found.set_aside.is_none());
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let first = journal.begin(&noted("a")).unwrap();
    let second = journal.begin(&noted("b")).unwrap();
    drop(first);
    let third = journal.begin(&noted("c")).unwrap();
    assert_eq!(third.slot, 0, "places are used again");
    let more = Noted {
        model: "other".into(),
        ..noted("c")
    };
    assert!(third.note(&more));
    // Killed: nothing is dropped, the file stays as it is; the lock goes with the process.
    let killed = std::fs::read(&path).unwrap();
    let copy = path.with_extension("copy");
    std::fs::write(&copy, &killed).unwrap();
    let (again, found) = open(&copy);
    let calls: Vec<_> = found.lost.iter().map(|(noted, _)| noted.clone()).collect();
    assert_eq!((calls, found.damaged), (vec![more, noted("b")], 0));
    let new = again.begin(&noted("d")).unwrap();
    assert_eq!(
        new.slot, 2,
        "their places are theirs until their lines are written"
    );
    drop((found, new));
    again.finish();
    assert_eq!(std::fs::metadata(&copy).unwrap().len(), SLOT as u64);
    drop(again);
    assert!(open(&copy).1.lost.is_empty());
    journal.finish();
    let len = std::fs::metadata(&path).unwrap().len();
    assert_eq!(len, 3 * SLOT as u64, "two are still in flight");
    drop((second, third));
}

#[test]
fn one_process_has_it_at_a_time() {
    let path = path("lock");
    let held = open(&path);
    let refused = Journal::open(&path, Counter::default()).unwrap_err();
    assert!(
        refused.to_string().contains("in use by another process"),
        "{refused}"
    );
    drop(held);
    open(&path);
}

#[test]
fn what_is_no_journal_is_set_aside_whole() {
    for (name, bytes) in [
        ("text", b"my diary".to_vec()),
        ("long", vec![b'x'; 4096]),
        ("cut", MAGIC[..10].to_vec()),
    ] {
        let path = path(name);
        std::fs::write(&path, &bytes).unwrap();
        let (journal, found) = open(&path);
        let aside = found.set_aside.expect("set aside");
        assert_eq!(std::fs::read(aside).unwrap(), bytes, "{name}");
        assert!(journal.begin(&noted("a")).is_some());
    }
    let huge = path("huge");
    File::create(&huge).unwrap().set_len(BYTES_MAX + 1).unwrap();
    assert!(open(&huge).1.set_aside.is_some());
}

#[test]
fn what_cannot_be_a_file_is_an_error() {
    let folder = path("folder");
    std::fs::create_dir(&folder).unwrap();
    let link = folder.with_extension("link");
    std::os::unix::fs::symlink("/nowhere", &link).unwrap();
    for (path, why) in [
        (folder.clone(), "Is a directory"),
        (folder.join("no/such/calls"), "No such file"),
        (link, "it is a symbolic link"),
    ] {
        let error = Journal::open(&path, Counter::default()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("log.journal is a file"), "{error}");
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn the_file_has_an_end_and_says_so() {
    let missed = Counter::default();
    let (journal, _) = Journal::open(&path("end"), missed.clone()).unwrap();
    journal.0.free().next = SLOTS_MAX - 1;
    let last = journal.begin(&noted("a"));
    assert!(last.is_some() && journal.begin(&noted("b")).is_none());
    assert_eq!(missed.get(), 1);
    assert!(journal.0.file.metadata().unwrap().len() <= BYTES_MAX);
    drop(last);
    assert!(journal.begin(&noted("c")).is_some());
}

proptest! {
    #[test]
    fn a_record_is_read_as_it_was_written(
        id in ".{0,80}", principal in ".{0,80}", model in ".{0,140}", upstream in ".{0,80}", endpoint in ".{0,80}",
        began: u64, sent: bool,
    ) {
        let noted = Noted { began, sent, id, principal, model, upstream, endpoint };
        let Slot::Call(read) = decode(&encode(&noted)) else { panic!("a call") };
        prop_assert_eq!((read.began, read.sent), (began, sent));
        for (read, wrote, most) in [
            (&read.id, &noted.id, 64), (&read.principal, &noted.principal, 96), (&read.model, &noted.model, 128),
            (&read.upstream, &noted.upstream, 64), (&read.endpoint, &noted.endpoint, 96),
        ] {
            prop_assert!(wrote.starts_with(read.as_str()) && (read == wrote || read.len() + 4 > most));
        }
    }

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..1600), ours: bool) {
        let mut bytes = bytes;
        if ours && bytes.len() >= MAGIC.len() {
            bytes[..MAGIC.len()].copy_from_slice(MAGIC);
        }
        let _ = records(&bytes);
    }

    #[test]
    fn a_changed_byte_is_noticed(at in 0usize..SLOT, change in 1u8..) {
        let whole = encode(&noted("a"));
        let mut record = whole;
        record[at] ^= change;
        let padding = (1..SUM.start).contains(&at);
        match decode(&record) {
            Slot::Call(read) => prop_assert!(padding && read == noted("a")),
            Slot::Empty => prop_assert_eq!(record[0], 0),
            Slot::Damaged => prop_assert!(!padding),
        }
    }
}
