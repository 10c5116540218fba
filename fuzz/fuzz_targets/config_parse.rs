#![no_main]
//! Any text as a configuration: it is refused with at least one mistake, or accepted; what is accepted can be printed, and without
//! secrets the printed settings say the same.

use tidegate::config::{Env, effective, parse};

libfuzzer_sys::fuzz_target!(|text: &str| {
    let env: Env = [("NAME", "value"), ("TIME", "30s")].into_iter().collect();
    match parse(text, &env) {
        Err(mistakes) => assert!(!mistakes.all.is_empty() && !mistakes.to_string().is_empty()),
        Ok(loaded) => {
            let printed = effective::toml(&loaded);
            let config = &loaded.config;
            if config.keys.is_empty() && config.upstreams.iter().all(|upstream| upstream.api_key.is_none()) {
                let again = parse(&printed, &Env::default()).unwrap_or_else(|mistakes| panic!("{mistakes}\n{printed}"));
                assert_eq!(again.config, *config);
            }
        }
    }
});
