//! What may stand in the file, read from the JSON schema of `File`.
//!
//! One source for four readers: the check of a file (`tree`), flags and environment, `tidegate schema`, and
//! `docs/config.md`. The doc comments and defaults come from the types.

use std::sync::LazyLock;

use serde_json::Value;

use super::file::File;
use super::units::{Size, Time};

/// The form of one value.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    Table(Vec<Field>),
    List(Box<Self>),
    /// Free names (model aliases) → values of one shape.
    Map(Box<Self>),
    Text,
    Secret,
    Time {
        off: bool,
        min: Time,
        max: Time,
    },
    Size {
        min: Size,
        max: Size,
    },
    Count {
        min: i64,
        max: i64,
    },
    Flag,
    Choice(Vec<Choice>),
}

/// One named value of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    pub name: String,
    pub doc: String,
    /// `Null`: depends on other settings, or there is none.
    pub default: Value,
    pub shape: Shape,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    pub name: String,
    pub doc: String,
}

/// The JSON schema of the file, for editors and `tidegate schema`.
pub fn json() -> Value {
    schemars::schema_for!(File).to_value()
}

impl Shape {
    /// The whole file. It never changes, and reading the schema costs more than reading a file.
    pub fn of_file() -> &'static Self {
        static FILE: LazyLock<Shape> = LazyLock::new(|| {
            let schema = json();
            shape(&schema, &schema)
        });
        &FILE
    }

    pub fn fields(&self) -> &[Field] {
        match self {
            Self::Table(fields) => fields,
            Self::List(of) => of.fields(),
            _ => &[],
        }
    }

    pub fn field(&self, name: &str) -> Option<&Field> {
        self.fields().iter().find(|field| field.name == name)
    }

    /// The shape at a path like `server.listen` or `upstreams[0].slots`.
    pub fn at(&self, path: &str) -> Option<&Self> {
        path.split('.').try_fold(self, |shape, step| {
            let name = step.split('[').next().unwrap_or(step);
            shape.field(name).map(|field| &field.shape)
        })
    }

    /// What a person calls it.
    pub fn noun(&self) -> String {
        match self {
            Self::Table(_) | Self::Map(_) => "a table".into(),
            Self::List(of) if matches!(**of, Self::Table(_)) => "a list of tables".into(),
            Self::List(_) => "a list in brackets, [\"...\"]".into(),
            Self::Text | Self::Secret => "text in quotes".into(),
            Self::Time { off: false, .. } => "a duration in quotes, \"30s\"".into(),
            Self::Time { off: true, .. } => "a duration in quotes, \"30s\", or \"off\"".into(),
            Self::Size { .. } => "a size in quotes, \"64KiB\"".into(),
            Self::Count { .. } => "a whole number without quotes".into(),
            Self::Flag => "true or false, without quotes".into(),
            Self::Choice(choices) => {
                let names: Vec<_> = choices.iter().map(|c| format!("\"{}\"", c.name)).collect();
                format!("one of {}", names.join(", "))
            }
        }
    }
}

fn shape(schema: &Value, root: &Value) -> Shape {
    let schema = resolve(schema, root);
    let text = |name: &str| schema.get(name).and_then(Value::as_str);
    match text("x-kind") {
        Some("secret") => return Shape::Secret,
        Some("size") => {
            let bound = |name, or| {
                text(name).map_or(or, |t| Size::parse(t).expect("bounds in file.rs are sizes"))
            };
            return Shape::Size {
                min: bound("x-min", Size::kib(1)),
                max: bound("x-max", Size::mib(64)),
            };
        }
        Some(kind) => {
            let bound = |name, or| {
                text(name).map_or(or, |t| Time::parse(t).expect("bounds in file.rs are times"))
            };
            let day = Time::secs(86_400);
            return Shape::Time {
                off: kind == "time-or-off",
                min: bound("x-min", Time::millis(1)),
                max: bound("x-max", day),
            };
        }
        None => {}
    }
    if let Some(choices) = choices(schema) {
        return Shape::Choice(choices);
    }
    match type_name(schema) {
        Some("object") => match (schema.get("properties"), schema.get("additionalProperties")) {
            (Some(Value::Object(properties)), _) => Shape::Table(
                properties
                    .iter()
                    .map(|(name, of)| field(name, of, root))
                    .collect(),
            ),
            (_, Some(of)) => Shape::Map(Box::new(shape(of, root))),
            _ => Shape::Map(Box::new(Shape::Text)),
        },
        Some("array") => Shape::List(Box::new(shape(
            schema.get("items").unwrap_or(&Value::Null),
            root,
        ))),
        Some("integer") => {
            let bound = |name, or| {
                schema
                    .get(name)
                    .and_then(Value::as_f64)
                    .map_or(or, |n| n as i64)
            };
            Shape::Count {
                min: bound("minimum", 0),
                max: bound("maximum", i64::from(u32::MAX)),
            }
        }
        Some("boolean") => Shape::Flag,
        _ => Shape::Text,
    }
}

fn field(name: &str, schema: &Value, root: &Value) -> Field {
    let target = resolve(schema, root);
    let doc = schema
        .get("description")
        .or_else(|| target.get("description"));
    Field {
        name: name.to_owned(),
        doc: doc.and_then(Value::as_str).unwrap_or_default().to_owned(),
        default: schema.get("default").cloned().unwrap_or_default(),
        shape: shape(schema, root),
    }
}

/// Follows `$ref` and takes the other half of "this or null". Bounds stand beside the value, so nothing is lost.
fn resolve<'a>(mut schema: &'a Value, root: &'a Value) -> &'a Value {
    loop {
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            schema = root
                .pointer(reference.trim_start_matches('#'))
                .unwrap_or(&Value::Null);
        } else if let Some(Value::Array(options)) = schema.get("anyOf") {
            let is_null =
                |option: &&Value| option.get("type").and_then(Value::as_str) == Some("null");
            schema = options
                .iter()
                .find(|option| !is_null(option))
                .unwrap_or(&Value::Null);
        } else {
            return schema;
        }
    }
}

fn type_name(schema: &Value) -> Option<&str> {
    match schema.get("type")? {
        Value::Array(names) => names
            .iter()
            .filter_map(Value::as_str)
            .find(|name| *name != "null"),
        name => name.as_str(),
    }
}

/// An enum: a plain list of names, or names with a text each, or a mix.
fn choices(schema: &Value) -> Option<Vec<Choice>> {
    let named = |name: &Value, doc: Option<&Value>| {
        let doc = doc.and_then(Value::as_str).unwrap_or_default().to_owned();
        name.as_str().map(|name| Choice {
            name: name.to_owned(),
            doc,
        })
    };
    if let Some(Value::Array(names)) = schema.get("enum") {
        return Some(names.iter().filter_map(|name| named(name, None)).collect());
    }
    let Some(Value::Array(options)) = schema.get("oneOf") else {
        return None;
    };
    let mut all = Vec::new();
    for option in options {
        if let Some(name) = option.get("const") {
            all.extend(named(name, option.get("description")));
        } else if let Some(Value::Array(names)) = option.get("enum") {
            all.extend(names.iter().filter_map(|name| named(name, None)));
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shapes_are_those_of_the_file() {
        let file = Shape::of_file();
        let names: Vec<_> = file.fields().iter().map(|f| f.name.as_str()).collect();
        for name in [
            "server",
            "admin",
            "limits",
            "timeouts",
            "cors",
            "log",
            "keys",
            "upstreams",
            "default_upstream",
        ] {
            assert!(names.contains(&name), "{name} of {names:?}");
        }
        assert_eq!(
            file.at("upstreams[0].slots"),
            Some(&Shape::Count {
                min: 1,
                max: 1_000_000
            })
        );
        assert_eq!(
            file.at("upstreams.queue"),
            Some(&Shape::Count {
                min: 0,
                max: 1_000_000
            })
        );
        assert_eq!(
            file.at("server.workers"),
            Some(&Shape::Count { min: 1, max: 1024 })
        );
        assert_eq!(file.at("keys.key"), Some(&Shape::Secret));
        assert_eq!(file.at("upstreams.api_key"), Some(&Shape::Secret));
        assert!(matches!(file.at("upstreams.aliases"), Some(Shape::Map(_))));
        assert!(matches!(
            file.at("upstreams.timeouts.total"),
            Some(Shape::Time { off: true, .. })
        ));
        assert!(matches!(
            file.at("upstreams.timeouts.idle"),
            Some(Shape::Time { off: false, .. })
        ));
        assert!(
            matches!(file.at("limits.request_body"), Some(Shape::Size { max: Size(m), .. }) if *m == 4 << 30)
        );
        let kinds = file
            .at("upstreams.kind")
            .map(Shape::noun)
            .unwrap_or_default();
        assert_eq!(
            kinds,
            r#"one of "vllm", "sglang", "llama.cpp", "ollama", "tgi", "openai", "azure", "anthropic", "openrouter", "deepseek", "bedrock", "gemini", "groq", "mistral", "other""#
        );
    }

    #[test]
    fn every_setting_has_a_text() {
        fn walk(shape: &Shape, path: &str) {
            for field in shape.fields() {
                assert!(!field.doc.is_empty(), "{path}.{} has no text", field.name);
                walk(&field.shape, &format!("{path}.{}", field.name));
            }
        }
        walk(Shape::of_file(), "");
    }
}
