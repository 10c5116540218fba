//! No input makes the reader panic, and what it accepts it can print and read again.

use proptest::prelude::*;

use super::*;

const PIECES: [&str; 34] = [
    "[server]\n",
    "[[upstreams]]\n",
    "[upstreams]\n",
    "[upstreams.timeouts]\n",
    "[[keys]]\n",
    "[limits]\n",
    "[log]\n",
    "[",
    "]",
    "=",
    ".",
    "\"",
    "'",
    "\n",
    "#",
    "listen = ",
    "url = ",
    "\"http://a\"",
    "\"http://[::1]:8/v1\"",
    "name = ",
    "\"a\"",
    "slots = ",
    "idle = ",
    "\"30s\"",
    "30",
    "-1",
    "{",
    "}",
    ",",
    "models = [\"a*\"]\n",
    "\"${X:-y}\"",
    "\"${",
    "é",
    "sha256 = ",
];

fn check(text: &str) {
    match parse(text, &Env::default()) {
        Ok(loaded) => {
            let again = parse(&effective::toml(&loaded), &Env::default());
            if loaded.config.keys.is_empty()
                && loaded
                    .config
                    .upstreams
                    .iter()
                    .all(|upstream| upstream.api_key.is_none())
            {
                assert_eq!(again.unwrap().config, loaded.config);
            }
        }
        Err(mistakes) => {
            assert!(!mistakes.all.is_empty());
            assert!(!mistakes.to_string().is_empty());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_text(text in any::<String>()) {
        check(&text);
    }

    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        check(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn pieces_of_files(pieces in proptest::collection::vec(proptest::sample::select(&PIECES[..]), 0..40)) {
        check(&pieces.concat());
    }

    /// A value of any kind at any setting.
    #[test]
    fn any_value_anywhere(at in any::<proptest::sample::Index>(), value in "[-0-9a-zA-Z\"'{}\\[\\],.:/*$ é]{0,24}") {
        let settings = docs::every_setting();
        check(&docs::one_setting(at.get(settings.as_slice()).as_str(), &value));
        check(&docs::one_setting(at.get(settings.as_slice()).as_str(), &format!("{value:?}")));
    }
}
