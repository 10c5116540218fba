//! Model lists.

use crate::json::{Cursor, Fault};
use crate::text::{decode, quote};
use bytes::Bytes;
use serde_json::value::RawValue;
use std::fmt;
use std::ops::Range;

/// More models than this are not taken from one upstream.
const ENTRY_LIMIT: usize = 10_000;

/// One model as an upstream (or the gateway) describes it.
#[derive(Debug, Clone)]
pub struct ModelEntry {
    /// The name to ask for.
    pub id: String,
    /// The whole JSON object, as it came.
    pub raw: Box<RawValue>,
}

/// A model list that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelsError {
    what: &'static str,
    offset: usize,
}

impl fmt::Display for ModelsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the model list {} (byte {})", self.what, self.offset)
    }
}

impl std::error::Error for ModelsError {}

impl From<Fault> for ModelsError {
    fn from(fault: Fault) -> Self {
        Self {
            what: fault.what,
            offset: fault.at,
        }
    }
}

/// Reads `{"data":[…]}` of any dialect, or a bare list. Entries without an `id` are left out.
///
/// # Errors
/// If it is not JSON, or not of that shape.
pub fn parse_models(body: &[u8]) -> Result<Vec<ModelEntry>, ModelsError> {
    let mut entries = Vec::new();
    let mut listed = false;
    let mut c = Cursor::new(body);
    if c.peek() == Some(b'[') {
        listed = true;
        list(&mut c, &mut entries)?;
    } else {
        c.object(|c, key| {
            if key == b"data" && c.peek() == Some(b'[') {
                listed = true;
                return list(c, &mut entries);
            }
            c.skip()
        })?;
    }
    c.end()?;
    if !listed {
        return Err(ModelsError {
            what: "has no `data` list",
            offset: 0,
        });
    }
    Ok(entries)
}

fn list(c: &mut Cursor<'_>, entries: &mut Vec<ModelEntry>) -> Result<(), Fault> {
    c.array(|c| {
        let text = c.value()?;
        if entries.len() < ENTRY_LIMIT {
            entries.extend(std::str::from_utf8(text).ok().and_then(ModelEntry::read));
        }
        Ok(())
    })
}

/// Where the first `id` of an object stands, and what kind of object it calls itself.
fn id_of(text: &str) -> Option<(Range<usize>, String, Option<String>)> {
    let mut id = None;
    let mut kind = None;
    let mut c = Cursor::new(text.as_bytes());
    c.object(|c, key| {
        match key {
            b"id" if c.peek() == Some(b'"') => {
                let start = c.pos();
                let raw = c.string()?;
                id = Some((start..c.pos(), decode(raw)));
            }
            b"type" => kind = c.string_or_skip()?.map(decode),
            _ => c.skip()?,
        }
        Ok::<(), Fault>(())
    })
    .ok()?;
    id.map(|(span, id)| (span, id, kind))
}

impl ModelEntry {
    fn read(text: &str) -> Option<Self> {
        let (_, id, _) = id_of(text)?;
        Some(Self {
            id,
            raw: RawValue::from_string(text.to_owned()).ok()?,
        })
    }

    /// An entry for a name that no upstream describes.
    #[must_use]
    pub fn named(id: &str, owned_by: &str) -> Self {
        let text = format!(
            r#"{{"id":{},"object":"model","created":0,"owned_by":{}}}"#,
            quote(id),
            quote(owned_by)
        );
        Self {
            id: id.to_owned(),
            raw: RawValue::from_string(text).unwrap_or_default(),
        }
    }

    /// The same description under another name.
    #[must_use]
    pub fn renamed(&self, id: &str) -> Self {
        let text = self.raw.get();
        let renamed = id_of(text).and_then(|(span, ..)| {
            let text = format!(
                "{}{}{}",
                text.get(..span.start)?,
                quote(id),
                text.get(span.end..)?
            );
            RawValue::from_string(text).ok()
        });
        Self {
            id: id.to_owned(),
            raw: renamed.unwrap_or_else(|| Self::named(id, "").raw),
        }
    }

    /// In Anthropic's shape; one that has it already is kept.
    fn anthropic(&self) -> String {
        if id_of(self.raw.get()).is_some_and(|(_, _, kind)| kind.as_deref() == Some("model")) {
            return self.raw.get().to_owned();
        }
        let id = quote(&self.id);
        format!(
            r#"{{"type":"model","id":{id},"display_name":{id},"created_at":"1970-01-01T00:00:00Z"}}"#
        )
    }
}

/// One model, in OpenAI's shape.
#[must_use]
pub fn model_body(entry: &ModelEntry) -> Bytes {
    Bytes::copy_from_slice(entry.raw.get().as_bytes())
}

/// One model, in Anthropic's shape.
#[must_use]
pub fn anthropic_model_body(entry: &ModelEntry) -> Bytes {
    Bytes::from(entry.anthropic())
}

/// The list in OpenAI's shape.
pub fn models_body<'a>(entries: impl Iterator<Item = &'a ModelEntry>) -> Bytes {
    let rows: Vec<&str> = entries.map(|entry| entry.raw.get()).collect();
    Bytes::from(format!(
        r#"{{"object":"list","data":[{}]}}"#,
        rows.join(",")
    ))
}

/// The list in Anthropic's shape, as one complete page.
pub fn anthropic_models_body<'a>(entries: impl Iterator<Item = &'a ModelEntry>) -> Bytes {
    let entries: Vec<&ModelEntry> = entries.collect();
    let id = |entry: Option<&&ModelEntry>| {
        entry.map_or_else(|| "null".to_owned(), |entry| quote(&entry.id))
    };
    let (first, last) = (id(entries.first()), id(entries.last()));
    let rows: Vec<String> = entries.iter().map(|entry| entry.anthropic()).collect();
    Bytes::from(format!(
        r#"{{"data":[{}],"has_more":false,"first_id":{first},"last_id":{last}}}"#,
        rows.join(",")
    ))
}
