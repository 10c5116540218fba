//! What asks a running gateway, from the command line.

use crate::binary::run;

/// One environment for the whole container: who asks is told where to ask by what tells the gateway where to listen.
#[test]
fn the_variable_of_the_admin_port_is_obeyed_by_those_that_ask_it() {
    for asks in [&["health"][..], &["calls"], &["kill", "req_1"]] {
        let flag = [asks, &["--admin", "127.0.0.1:2"]].concat();
        for (asks, told, expected) in [
            (asks, "127.0.0.1:1", "127.0.0.1:1"),
            (&flag, "127.0.0.1:1", "127.0.0.1:2"),
            (asks, "off", "the admin port is off"),
        ] {
            let (code, _, said) = run(asks, &[("TIDEGATE_ADMIN", told)]);
            assert!(code == 1 && said.contains(expected), "{asks:?}: {said}");
        }
    }
}
