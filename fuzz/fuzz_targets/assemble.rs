#![no_main]

#[path = "../../crates/wire/tests/common/checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::assemble(data));
