//! The judge's command line.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    tidegate_rig::cli::main()
}
