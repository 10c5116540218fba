//! Reads TOML text and checks it against the shape of the file.
//!
//! What is wrong is reported and left out, so that the rest can still be read and checked: a person sees every mistake in one run.
//! The result is a JSON value that the types of [`super::file`] accept.

use std::collections::BTreeSet;
use std::ops::Range;

use serde_json::{Map, Value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::findings::Findings;
use super::mistake::Origin;
use super::near;
use super::schema::{Choice, Field, Shape};
use super::sources::{Env, Expanded, Unexpanded, expand};
use super::units::{Size, Time, TimeOrOff, Wrong, shown};

/// A configuration file longer than this is a mistake.
pub(super) const FILE_BYTES_MAX: usize = 4 << 20;

/// What stands in a text, as far as it is right.
pub(super) struct Tree {
    pub(super) values: Map<String, Value>,
    /// Variables that the text names.
    pub(super) used: BTreeSet<String>,
    /// The text is TOML at all.
    pub(super) readable: bool,
}

/// One reading of one text.
struct Reader<'a> {
    text: &'a str,
    root: &'a Shape,
    env: &'a Env,
    /// Byte offsets at which lines begin.
    lines: Vec<usize>,
    findings: &'a mut Findings,
    /// Variables that the text names.
    used: BTreeSet<String>,
}

/// A value before its shape is checked.
#[derive(Clone, Copy)]
pub(super) enum Raw<'a> {
    /// `typed`: written in the file. Otherwise from a flag or a variable: may stand for a number, and is not quoted in messages.
    Text {
        text: &'a str,
        typed: bool,
    },
    Number(&'a str),
    Bool(bool),
    Other(&'static str),
}

/// Reads `text` and reports what is wrong with it.
pub(super) fn read(text: &str, root: &Shape, env: &Env, findings: &mut Findings) -> Tree {
    let lines = std::iter::once(0)
        .chain(text.match_indices('\n').map(|(at, _)| at + 1))
        .collect();
    let mut reader = Reader {
        text,
        root,
        env,
        lines,
        findings,
        used: BTreeSet::new(),
    };
    let (tree, errors) = DeTable::parse_recoverable(text);
    let mut readable = true;
    let mut last_line = 0;
    let yaml = !errors.is_empty() && is_yaml(text);
    for error in errors {
        let place = reader.place(error.span().unwrap_or(0..0));
        // One slip makes several errors in a row.
        if let Origin::File { line, .. } = place {
            if line == last_line {
                continue;
            }
            last_line = line;
        }
        let duplicate = error.message().contains("duplicate key");
        readable &= duplicate;
        let (what, help) = match duplicate {
            true => (
                "this name stands here for the second time".to_owned(),
                "keep one of them",
            ),
            false => (format!("not valid TOML: {}", one_line(error.message())), ""),
        };
        let help = if yaml { YAML } else { help };
        reader.findings.wrong_at(place, "", what, help);
        if yaml {
            break; // All of it is wrong, and for one reason.
        }
    }
    // After a real syntax error the tree is a guess, and complaints about a guess mislead.
    let values = if readable {
        reader.table("", tree.get_ref(), root.fields())
    } else {
        Map::new()
    };
    Tree {
        values,
        used: reader.used,
        readable,
    }
}

const YAML: &str = "this looks like YAML, and the configuration is TOML: name = \"value\", [section]; deploy/tidegate.example.toml shows every setting";

/// The first line that says something is `name:`, `name: value` or `- value`.
fn is_yaml(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    let is_name = |name: &str| !name.contains(['=', '"', '[', ' ']);
    first.is_some_and(|line| {
        line == "---"
            || line.starts_with("- ")
            || line.strip_suffix(':').is_some_and(is_name)
            || line.split_once(": ").is_some_and(|(name, _)| is_name(name))
    })
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

// === impl Reader ===

impl Reader<'_> {
    fn table(&mut self, path: &str, table: &DeTable<'_>, fields: &[Field]) -> Map<String, Value> {
        let mut values = Map::new();
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            let child = join(path, name);
            match fields.iter().find(|field| field.name == name) {
                Some(field) => {
                    if let Some(value) = self.value(&child, value, &field.shape) {
                        values.insert(name.to_owned(), value);
                    }
                }
                None => {
                    if self.findings.is_full() {
                        break;
                    }
                    let help = near::advice(self.root, &near::section(path), fields, name);
                    // What was meant is not also missing.
                    if let Some(meant) = near::meant(fields, name) {
                        self.findings.broken.insert(join(path, meant));
                    }
                    let place = self.place(key.span());
                    self.findings
                        .wrong_at(place, &child, "no such setting", help);
                }
            }
        }
        values
    }

    fn value(&mut self, path: &str, value: &Spanned<DeValue<'_>>, shape: &Shape) -> Option<Value> {
        let place = self.place(value.span());
        self.findings.places.insert(path.to_owned(), place);
        match (shape, value.get_ref()) {
            (Shape::Table(fields), DeValue::Table(table)) => {
                Some(Value::Object(self.table(path, table, fields)))
            }
            (Shape::Map(of), DeValue::Table(table)) => {
                let entries = table.iter().filter_map(|(key, value)| {
                    let name = key.get_ref().as_ref();
                    self.value(&join(path, name), value, of)
                        .map(|value| (name.to_owned(), value))
                });
                Some(Value::Object(entries.collect()))
            }
            (Shape::List(of), DeValue::Array(items)) => self.list(path, items.iter(), of),
            (shape, value) => self.scalar(path, value, shape),
        }
    }

    /// A list of tables keeps its numbering: a broken element becomes an empty table. A list of texts is all or nothing.
    fn list<'b, 'i: 'b>(
        &mut self,
        path: &str,
        items: impl Iterator<Item = &'b Spanned<DeValue<'i>>>,
        of: &Shape,
    ) -> Option<Value> {
        let mut values = Vec::new();
        let mut whole = true;
        for (index, item) in items.enumerate() {
            let value = self.value(&format!("{path}[{index}]"), item, of);
            whole &= value.is_some() || matches!(of, Shape::Table(_));
            values.push(value.unwrap_or_else(|| Value::Object(Map::new())));
        }
        if !whole {
            self.findings.broken.insert(path.to_owned());
        }
        whole.then_some(Value::Array(values))
    }

    fn scalar(&mut self, path: &str, value: &DeValue<'_>, shape: &Shape) -> Option<Value> {
        let result = match value {
            DeValue::String(text) => match self.expand(path, text) {
                Ok(Expanded { text, variables }) => scalar(
                    shape,
                    Raw::Text {
                        text: &text,
                        typed: variables.is_empty(),
                    },
                ),
                Err(wrong) => Err(wrong),
            },
            DeValue::Integer(number) => scalar(shape, Raw::Number(&number.to_string())),
            DeValue::Float(number) => scalar(shape, Raw::Number(number.as_str())),
            DeValue::Boolean(yes) => scalar(shape, Raw::Bool(*yes)),
            DeValue::Datetime(_) => scalar(shape, Raw::Other("a date")),
            DeValue::Array(_) => scalar(shape, Raw::Other("a list")),
            DeValue::Table(_) => scalar(shape, Raw::Other("a table")),
        };
        match result {
            Ok(value) => Some(value),
            Err(wrong) => {
                let help = section_help(path, shape, value).unwrap_or(wrong.help);
                self.findings.wrong(path, wrong.what, help);
                self.findings.broken.insert(path.to_owned());
                None
            }
        }
    }

    fn expand(&mut self, path: &str, text: &str) -> Result<Expanded, Wrong> {
        match expand(text, self.env) {
            Ok(done) => {
                if !done.variables.is_empty() {
                    self.findings.filled_in.insert(path.to_owned());
                }
                self.used.extend(done.variables.iter().cloned());
                Ok(done)
            }
            Err(Unexpanded::Unset(names)) => {
                let first = names.first().cloned().unwrap_or_default();
                let (noun, are) = if names.len() == 1 { ("variable", "is") } else { ("variables", "are") };
                self.used.extend(names.iter().cloned());
                Err(Wrong {
                    what: format!("the environment {noun} {} {are} not set", names.join(", ")),
                    help: match path.ends_with("key") {
                        true => "set it where the gateway is started, or name a file with the key (api_key_file, key_file)".into(),
                        false => format!("set it, or write ${{{first}:-a default}}"),
                    },
                })
            }
            Err(Unexpanded::Malformed) => Err(Wrong {
                what: "`${` without a name and `}`".into(),
                help: "write ${NAME} or ${NAME:-default} for a variable, $${ for the characters themselves".into(),
            }),
        }
    }

    fn place(&self, span: Range<usize>) -> Origin {
        let line = self
            .lines
            .partition_point(|start| *start <= span.start)
            .max(1);
        let start = self.lines[line - 1];
        // Characters, or bytes where a line is so long that counting them for every value costs too much.
        let column = match self.text.get(start..span.start) {
            Some(before) if before.len() < 4096 => before.chars().count() + 1,
            _ => span.start - start + 1,
        };
        Origin::File {
            file: self.findings.file.clone().unwrap_or_default(),
            line,
            column,
        }
    }
}

/// `[upstreams]` for `[[upstreams]]` and the other way round.
fn section_help(path: &str, shape: &Shape, value: &DeValue<'_>) -> Option<String> {
    let section = near::section(path);
    match (shape, value) {
        (Shape::List(of), DeValue::Table(_)) if matches!(**of, Shape::Table(_)) => {
            Some(format!("write [[{section}]], with two brackets"))
        }
        (Shape::Table(_), DeValue::Array(_)) => {
            Some(format!("write [{section}], with one bracket"))
        }
        _ => None,
    }
}

/// Checks one value that is neither table nor list.
pub(super) fn scalar(shape: &Shape, raw: Raw<'_>) -> Result<Value, Wrong> {
    let number = |text: &str| text.parse::<i64>().ok();
    match (shape, raw) {
        (Shape::Text | Shape::Secret, Raw::Text { text, .. }) => Ok(Value::from(text)),
        (Shape::Time { off, min, max }, Raw::Text { text, typed }) => {
            let time = if *off {
                TimeOrOff::parse(text)
            } else {
                Time::parse(text).map(TimeOrOff::On)
            };
            match time.map_err(|wrong| discreet(wrong, typed))? {
                TimeOrOff::On(time) if time < *min => Err(too_small(time, min, *off)),
                TimeOrOff::On(time) if time > *max => Err(too_large(time, max)),
                time => Ok(Value::from(time.to_string())),
            }
        }
        (Shape::Size { min, max }, Raw::Text { text, typed }) => {
            match Size::parse(text).map_err(|wrong| discreet(wrong, typed))? {
                size if size < *min => Err(too_small(size, min, false)),
                size if size > *max => Err(too_large(size, max)),
                size => Ok(Value::from(size.to_string())),
            }
        }
        // The text of the number tells what the unit may be.
        (Shape::Time { .. }, Raw::Number(text)) => Err(Time::parse(text)
            .err()
            .unwrap_or_else(|| mismatch(shape, "a number"))),
        (Shape::Size { .. }, Raw::Number(text)) => Err(Size::parse(text)
            .err()
            .unwrap_or_else(|| mismatch(shape, "a number"))),
        (Shape::Count { min, max }, Raw::Number(text) | Raw::Text { text, typed: false }) => {
            match number(text) {
                Some(n) if n < *min => Err(too_small(n, min, false)),
                Some(n) if n > *max => Err(too_large(n, max)),
                Some(n) => Ok(Value::from(n)),
                None => Err(Wrong {
                    what: "is not a whole number, or too large".into(),
                    help: format!("write a number from {min} to {max}"),
                }),
            }
        }
        (Shape::Count { .. }, Raw::Text { text, .. }) if number(text).is_some() => Err(Wrong {
            help: format!("write {text} without quotes"),
            ..mismatch(shape, "text")
        }),
        (Shape::Flag, Raw::Bool(yes)) => Ok(Value::from(yes)),
        (
            Shape::Flag,
            Raw::Text {
                text: text @ ("true" | "false"),
                typed: false,
            },
        ) => Ok(Value::from(text == "true")),
        (Shape::Choice(choices), Raw::Text { text, typed }) => choice(shape, choices, text, typed),
        (_, Raw::Text { .. }) => Err(mismatch(shape, "text")),
        (_, Raw::Number(_)) => Err(mismatch(shape, "a number")),
        (_, Raw::Bool(_)) => Err(mismatch(shape, "true or false")),
        (_, Raw::Other(noun)) => Err(mismatch(shape, noun)),
    }
}

fn choice(shape: &Shape, choices: &[Choice], text: &str, typed: bool) -> Result<Value, Wrong> {
    let names = || choices.iter().map(|choice| choice.name.as_str());
    if names().any(|name| name == text) {
        return Ok(Value::from(text));
    }
    let near = near::nearest(&text.to_ascii_lowercase().replace('_', "-"), names());
    let what = if typed {
        shown(text)
    } else {
        "the value".into()
    };
    let help = near.map_or(String::new(), |near| format!("did you mean \"{near}\"?"));
    Err(Wrong {
        what: format!("{what} is not {}", shape.noun()),
        help,
    })
}

/// The same complaint without the value, which came from the environment and may be a secret.
fn discreet(wrong: Wrong, typed: bool) -> Wrong {
    let quote = wrong.what.rfind('"');
    match quote {
        Some(end) if !typed => Wrong {
            what: format!("the value{}", &wrong.what[end + 1..]),
            help: wrong.help,
        },
        _ => wrong,
    }
}

fn mismatch(shape: &Shape, got: &str) -> Wrong {
    Wrong {
        what: format!("is {got}, not {}", shape.noun()),
        help: format!("write {}", shape.noun()),
    }
}

fn too_small(value: impl std::fmt::Display, min: impl std::fmt::Display, off: bool) -> Wrong {
    let off = if off { ", or \"off\"" } else { "" };
    Wrong {
        what: format!("{value} is too small"),
        help: format!("the least is {min}{off}"),
    }
}

fn too_large(value: impl std::fmt::Display, max: impl std::fmt::Display) -> Wrong {
    Wrong {
        what: format!("{value} is too large"),
        help: format!("the most is {max}"),
    }
}

/// `upstreams[0].aliases."gpt-4.1"`: names that are not bare are quoted.
pub(super) fn join(path: &str, name: &str) -> String {
    let bare = !name.is_empty()
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    let name = if bare {
        name.to_owned()
    } else {
        format!("{name:?}")
    };
    if path.is_empty() {
        name
    } else {
        format!("{path}.{name}")
    }
}
