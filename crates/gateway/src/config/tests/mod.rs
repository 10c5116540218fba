//! What a person writes, and what they are told.

use super::*;

fn loaded(text: &str) -> Loaded {
    parse(text, &Env::default()).unwrap_or_else(|mistakes| panic!("{mistakes}"))
}

#[test]
fn the_smallest_file_is_one_upstream() {
    let loaded = loaded("[[upstreams]]\nurl = \"http://127.0.0.1:8000\"\n");
    let address: SocketAddr = "127.0.0.1:8000".parse().unwrap();
    assert_eq!(loaded.config, Config::one_upstream(address));
    assert_eq!(loaded.warnings, []);
}
