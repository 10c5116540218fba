//! `docs/config.md` and the example file say what the code does.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::de::{MapAccess, SeqAccess, Visitor};

use super::schema::{Field, Shape};
use super::*;
use crate::config::near;

/// Paths of all settings without numbers: `upstreams.timeouts.idle`.
pub(super) fn every_setting() -> Vec<String> {
    fn walk(shape: &Shape, path: &str, into: &mut Vec<String>) {
        for field in shape.fields() {
            let path = if path.is_empty() {
                field.name.clone()
            } else {
                format!("{path}.{}", field.name)
            };
            if field.shape.fields().is_empty() {
                into.push(path);
            } else {
                walk(&field.shape, &path, into);
            }
        }
    }
    let mut settings = Vec::new();
    walk(Shape::of_file(), "", &mut settings);
    settings
}

/// A file with one setting and what it needs beside it.
pub(super) fn one_setting(path: &str, value: &str) -> String {
    let (section, name) = path.rsplit_once('.').unwrap_or(("", path));
    let upstream = "[[upstreams]]\nurl = \"http://a\"\n";
    match section {
        "" => format!("{name} = {value}\n{upstream}"),
        "upstreams" if name == "url" || name == "endpoints" => {
            format!("[[upstreams]]\n{name} = {value}\n")
        }
        "upstreams" => format!("{upstream}{name} = {value}\n"),
        "keys" if name == "name" => format!("[[keys]]\n{name} = {value}\nkey = \"k\"\n{upstream}"),
        "keys" => format!("[[keys]]\nname = \"n\"\n{name} = {value}\n{upstream}"),
        "upstreams.abandon" if name == "confirm_within" => {
            format!("{upstream}abandon.confirm = \"llama-slots\"\nabandon.{name} = {value}\n")
        }
        // The bounds are those of a contract that has them.
        "upstreams.abandon" => {
            format!("{upstream}on_abandon = \"drain\"\nabandon.{name} = {value}\n")
        }
        "upstreams.attach" if name == "bytes" => {
            format!("{upstream}attach.grace = \"9s\"\nattach.{name} = {value}\n")
        }
        section if section.starts_with("upstreams.") => {
            format!("{upstream}[{section}]\n{name} = {value}\n")
        }
        section => format!("[{section}]\n{name} = {value}\n{upstream}"),
    }
}

/// A value that the setting accepts.
fn sample(path: &str, field: &Field) -> String {
    match path {
        "default_upstream" => "\"default\"".into(),
        "server.tls.cert_file"
        | "server.tls.key_file"
        | "keys.key_file"
        | "upstreams.api_key_file"
        | "upstreams.tls.ca_file" => {
            format!(
                "{:?}",
                Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")
            )
        }
        "keys.sha256" => format!("\"{}\"", "ab".repeat(32)),
        "upstreams.url" => "\"http://a\"".into(),
        "prices" => "{ a = \"1/2\" }".into(),
        "upstreams.endpoints" => "[\"http://a\", \"http://b\"]".into(),
        "cors.origins" => "[\"https://a\"]".into(),
        _ if !field.default.is_null() => match &field.shape {
            Shape::Map(_) => "{ a = \"b\" }".into(),
            Shape::List(_) => "[\"a\"]".into(),
            _ => field.default.to_string(),
        },
        _ => match &field.shape {
            Shape::Count { min, .. } => min.max(&2).to_string(),
            Shape::Flag => "true".into(),
            Shape::Time { max, .. } => format!("\"{max}\""),
            Shape::Size { max, .. } => format!("\"{max}\""),
            Shape::Choice(choices) => format!("\"{}\"", choices[0].name),
            _ => "\"a\"".into(),
        },
    }
}

fn field_at(root: &Shape, path: &str) -> Field {
    let (section, name) = path.rsplit_once('.').unwrap_or(("", path));
    let table = if section.is_empty() {
        Some(root)
    } else {
        root.at(section)
    };
    table
        .and_then(|table| table.field(name))
        .cloned()
        .unwrap_or_else(|| panic!("{path}"))
}

#[test]
fn every_setting_can_be_written() {
    let root = Shape::of_file();
    for path in every_setting() {
        let text = one_setting(&path, &sample(&path, &field_at(root, &path)));
        if let Err(mistakes) = parse(&text, &Env::default()) {
            // Files of keys hold one key, and TLS needs both files: the setting itself must be known.
            let said = mistakes.to_string();
            let file = path.ends_with("_file");
            assert!(
                file && !said.contains("no such setting") && !said.contains(" not text"),
                "{text}\n{said}"
            );
        }
    }
}

// === the page ===

/// Names in the order of the types, which the schema has lost.
struct Names(Vec<(String, Self)>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self(Vec::new()))
    }
}

impl<'de> Visitor<'de> for Names {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some(entry) = map.next_entry()? {
            self.0.push(entry);
        }
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self, A::Error> {
        Ok(list.next_element()?.unwrap_or(self))
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }
}

/// The shape of the file with the fields in the order of the types.
fn in_order() -> Shape {
    fn sort(shape: &mut Shape, names: &Names) {
        match shape {
            Shape::List(of) => sort(of, names),
            Shape::Table(fields) => {
                let place = |name: &str| names.0.iter().position(|(other, _)| other == name);
                fields.sort_by_key(|field| place(&field.name));
                for field in fields {
                    let at = place(&field.name)
                        .unwrap_or_else(|| panic!("{} is not in the types", field.name));
                    sort(&mut field.shape, &names.0[at].1);
                }
            }
            _ => {}
        }
    }
    let mut file = file::File {
        keys: vec![file::Key::default()],
        upstreams: vec![file::Upstream::default()],
        ..Default::default()
    };
    file.server.tls = Some(file::ServerTls::default());
    let text = serde_json::to_string(&file).unwrap();
    let mut shape = Shape::of_file().clone();
    sort(&mut shape, &serde_json::from_str(&text).unwrap());
    shape
}

fn page() -> String {
    let mut page = include_str!("config.head.md").to_owned();
    let root = in_order();
    let plain: Vec<_> = root
        .fields()
        .iter()
        .filter(|field| field.shape.fields().is_empty())
        .cloned()
        .collect();
    page += "\n### Top of the file\n\nBefore the first `[section]`.\n";
    page += &table(&plain);
    for field in root.fields() {
        section(&mut page, &field.name, &field.doc, &field.shape);
    }
    page
}

fn section(page: &mut String, path: &str, doc: &str, shape: &Shape) {
    let (leaves, tables): (Vec<_>, Vec<_>) = shape
        .fields()
        .iter()
        .cloned()
        .partition(|field| field.shape.fields().is_empty());
    if leaves.is_empty() {
        return;
    }
    *page += &format!("\n### `{}`\n\n{}\n", near::title(path), paragraph(doc));
    *page += &table(&leaves);
    for field in tables {
        section(
            page,
            &format!("{path}.{}", field.name),
            &field.doc,
            &field.shape,
        );
    }
}

fn table(fields: &[Field]) -> String {
    let mut text = "\n| Setting | Value | Default | Meaning |\n|---|---|---|---|\n".to_owned();
    for field in fields {
        let default = match &field.default {
            serde_json::Value::Null => String::new(),
            value => format!("`{value}`"),
        };
        text += &format!(
            "| `{}` | {} | {default} | {} |\n",
            field.name,
            value(&field.shape),
            meaning(field)
        );
    }
    text
}

fn value(shape: &Shape) -> String {
    match shape {
        Shape::Time { off, min, max } => format!(
            "time, {min} to {max}{}",
            if *off { ", or `\"off\"`" } else { "" }
        ),
        Shape::Size { min, max } => format!("size, {min} to {max}"),
        Shape::Count { min, max } => format!("number, {min} to {max}"),
        Shape::Flag => "`true` or `false`".into(),
        Shape::Choice(choices) => choices
            .iter()
            .map(|choice| format!("`\"{}\"`", choice.name))
            .collect::<Vec<_>>()
            .join(", "),
        Shape::List(_) => "list of texts".into(),
        Shape::Map(_) => "table of texts".into(),
        Shape::Secret => "text, secret".into(),
        Shape::Text | Shape::Table(_) => "text".into(),
    }
}

fn meaning(field: &Field) -> String {
    let mut text = paragraph(&field.doc);
    if let Shape::Choice(choices) = &field.shape {
        for choice in choices.iter().filter(|choice| !choice.doc.is_empty()) {
            text += &format!(" `\"{}\"`: {}", choice.name, paragraph(&choice.doc));
        }
    }
    text.replace('|', "\\|")
}

fn paragraph(doc: &str) -> String {
    doc.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Fails when the generated `file` differs; writes it when `UPDATE_DOCS` is set.
pub(crate) fn up_to_date(file: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(file);
    if fs::read_to_string(&path).is_ok_and(|old| old == text) {
        return;
    }
    assert!(
        std::env::var_os("UPDATE_DOCS").is_some(),
        "{file} is stale: run UPDATE_DOCS=1 cargo test -p tidegate"
    );
    fs::write(&path, text).unwrap();
}

#[test]
fn the_page_is_up_to_date() {
    up_to_date("docs/config.md", &page());
}

#[test]
fn every_example_on_the_page_loads() {
    let page = page();
    let blocks: Vec<_> = page
        .split("```toml\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
    assert!(blocks.len() >= 2);
    for block in blocks {
        loaded_with(
            block,
            &[
                ("OPENAI_API_KEY", "sk-1"),
                ("ANTHROPIC_API_KEY", "sk-2"),
                ("CI_KEY", "k"),
            ],
        );
    }
}

// === the example file ===

fn example() -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/tidegate.example.toml");
    fs::read_to_string(file).unwrap()
}

#[test]
fn the_example_loads_as_it_is_and_with_everything_switched_on() {
    let env = [("OPENAI_API_KEY", "sk-1"), ("CI_KEY", "k")];
    let as_is = loaded_with(&example(), &[]);
    let warned: Vec<_> = as_is.warnings.iter().map(ToString::to_string).collect();
    assert!(
        matches!(&warned[..], [kind] if kind.contains("upstreams[0].kind: the kind is not given")),
        "{warned:?}"
    );
    let on: String = example()
        .lines()
        .map(|line| format!("{}\n", uncommented(line)))
        .collect();
    loaded_with(&on, &env);
    let unknown: Vec<_> = every_setting()
        .into_iter()
        .filter(|path| {
            let name = path.rsplit('.').next().unwrap_or(path);
            let (value, section) = (format!("{name} ="), format!("[{path}]"));
            !on.lines()
                .any(|line| line.trim_start_matches("# ").starts_with(&value) || line == section)
        })
        .collect();
    assert!(unknown.is_empty(), "the example does not show {unknown:?}");
}

/// `#name = value` is a setting that is switched off, `# text` is text.
fn uncommented(line: &str) -> &str {
    line.strip_prefix('#')
        .filter(|rest| !rest.starts_with(' ') && !rest.is_empty())
        .unwrap_or(line)
}
