//! The `tidegate` binary: arguments, commands, exit code.

#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;

use tidegate::cli::{self, Command, Exit, Output};
use tidegate::config::Sources;

fn main() -> ExitCode {
    let output = match cli::parse(std::env::args_os(), Sources::of_process()) {
        Err(error) => Output::from(error),
        Ok(Command::Check(sources)) => cli::check(&sources),
        Ok(Command::Schema) => cli::schema(),
        Ok(Command::HashKey(args)) => cli::hash_key(&args, io::stdin()),
        Ok(Command::Serve(_) | Command::Demo(_) | Command::FakeUpstream(_)) => {
            let stderr = "not wired yet\n".to_owned();
            Output {
                stdout: String::new(),
                stderr,
                exit: Exit::Failed,
            }
        }
    };
    // A closed pipe is the reader's choice.
    let _ = io::stderr().write_all(output.stderr.as_bytes());
    let _ = io::stdout().write_all(output.stdout.as_bytes());
    output.exit.into()
}
