//! What is wrong with a configuration, where, and what to do.
//!
//! All mistakes are collected and shown at once. No text here carries a secret: values that may hold one are never quoted.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

/// A path is shown up to this length.
const PATH_CHARS_MAX: usize = 120;

/// Where a setting comes from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The whole configuration, or a flag that is missing.
    Whole,
    Flag(String),
    Env(String),
    File {
        file: PathBuf,
        line: usize,
        column: usize,
    },
    /// A file that cannot be read at all.
    WholeFile(PathBuf),
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mistake {
    pub place: Origin,
    /// `upstreams[1].timeouts.connect`; empty where no setting is meant.
    pub path: String,
    pub what: String,
    /// What to do about it.
    pub help: String,
}

/// Every mistake of one configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mistakes {
    /// In the order of the file. Never empty when returned as an error.
    pub all: Vec<Mistake>,
    /// Files whose change may mend it.
    pub watch: Vec<PathBuf>,
}

/// Something that works and is probably not meant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Warning(pub Mistake);

// === impl Origin ===

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("configuration"),
            Self::Flag(flag) => f.write_str(flag),
            Self::Env(name) => f.write_str(name),
            Self::File { file, line, column } => write!(f, "{}:{line}:{column}", file.display()),
            Self::WholeFile(file) => write!(f, "{}", file.display()),
        }
    }
}

// === impl Mistake ===

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.place)?;
        let in_file = matches!(self.place, Origin::File { .. });
        if in_file && !self.path.is_empty() {
            match self.path.char_indices().nth(PATH_CHARS_MAX) {
                Some((end, _)) => write!(f, "{}...: ", &self.path[..end])?,
                None => write!(f, "{}: ", self.path)?,
            }
        }
        f.write_str(&self.what)?;
        if !self.help.is_empty() {
            write!(f, "\n    {}", self.help)?;
        }
        Ok(())
    }
}

// === impl Mistakes ===

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for mistake in &self.all {
            writeln!(f, "{mistake}")?;
        }
        match self.all.len() {
            1 => f.write_str("1 mistake in the configuration"),
            n => write!(f, "{n} mistakes in the configuration"),
        }
    }
}

impl Error for Mistakes {}

// === impl Warning ===

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "warning: {}", self.0)
    }
}
