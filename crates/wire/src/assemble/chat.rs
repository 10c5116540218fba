//! OpenAI chat and legacy completions: chunks with choices.

use super::AssembleError;
use super::form::{Form, Shape};
use super::tree::{Join, Map, Node, Room};
use crate::json::{Cursor, Fault, Kind};
use crate::text::whole;
use std::collections::BTreeMap;

/// What a choice costs beside its text.
const CHOICE_BYTES: usize = 128;

#[derive(Debug, Default)]
pub(super) struct Chat {
    top: Map,
    choices: BTreeMap<u64, Choice>,
    /// The choice that usage was last given for, where each has its own.
    counted: Option<u64>,
    /// The choice that the last chunk was about.
    last: u64,
}

#[derive(Debug, Default)]
struct Choice {
    fields: Map,
    /// `delta`, joined. `None`: a legacy completion.
    message: Option<Map>,
    finished: bool,
}

impl Chat {
    pub(super) fn chunk(
        &mut self,
        data: &[u8],
        form: Form,
        room: &mut Room,
    ) -> Result<(), AssembleError> {
        let mut counts: Vec<(&[u8], &[u8])> = Vec::new();
        Cursor::new(data).object(|c, key| match key {
            b"choices" => {
                if c.kind()? != Kind::Array {
                    return Ok(c.skip()?);
                }
                self.top.update(key, b"[]", room)?;
                c.array(|c| self.choice(c.value()?, room))
            }
            b"object" => {
                let raw = c.value()?;
                let whole = raw.strip_suffix(b".chunk\"");
                let whole = whole.map(|start| [start, b"\""].concat());
                self.top.set(key, whole.as_deref().unwrap_or(raw), room)
            }
            b"usage" | b"timings" => {
                counts.push((key, c.value()?));
                Ok(())
            }
            _ => self.top.update(key, c.value()?, room),
        })?;
        for (key, value) in counts {
            self.count(key, value, form, room)?;
        }
        Ok(())
    }

    fn choice(&mut self, raw: &[u8], room: &mut Room) -> Result<(), AssembleError> {
        let index = index_of(raw)?;
        self.last = index;
        if !self.choices.contains_key(&index) {
            room.take(CHOICE_BYTES)?;
        }
        let choice = self.choices.entry(index).or_default();
        Cursor::new(raw).object(|c, key| match key {
            b"delta" => {
                let message = choice.message.get_or_insert_default();
                if c.kind()? != Kind::Object {
                    return Ok(c.skip()?);
                }
                message.join(c, Join::Fragments.down(), room)
            }
            b"text" => choice.fields.member(key, c, Join::Fragments.down(), room),
            b"finish_reason" => {
                let raw = c.value()?;
                choice.finished |= raw != b"null";
                choice.fields.update(key, raw, room)
            }
            _ => choice.fields.member(key, c, Join::Lists.down(), room),
        })
    }

    /// Usage and timings: the last ones stand, or those of the first choice.
    fn count(
        &mut self,
        key: &[u8],
        value: &[u8],
        form: Form,
        room: &mut Room,
    ) -> Result<(), AssembleError> {
        if form.counts_first_choice() && value != b"null" {
            if self.counted.is_some_and(|counted| counted < self.last) {
                return Ok(());
            }
            self.counted = Some(self.last);
        }
        self.top.update(key, value, room)
    }

    pub(super) fn is_finished(&self) -> bool {
        !self.choices.is_empty() && self.choices.values().all(|choice| choice.finished)
    }

    pub(super) fn write(self, form: Form) -> Result<Vec<u8>, AssembleError> {
        if self.choices.is_empty() {
            return Err(AssembleError::Truncated);
        }
        let completion = self.choices.values().all(|choice| choice.message.is_none());
        let shape = if completion {
            form.completion()
        } else {
            form.chat()
        };
        let inside = shape
            .members
            .iter()
            .find(|member| member.name == "choices")
            .map_or(&Shape::ANY, |member| member.inside);
        let mut choices = b"[".to_vec();
        let mut room = Room::new(usize::MAX);
        for (position, choice) in self.choices.into_values().enumerate() {
            let mut fields = choice.fields;
            if let Some(message) = choice.message {
                fields.put(b"message", Node::Map(message), &mut room)?;
            }
            if position > 0 {
                choices.push(b',');
            }
            fields.write(inside, &mut choices)?;
        }
        choices.push(b']');
        let mut top = self.top;
        top.put(b"choices", Node::Done(choices), &mut room)?;
        let mut out = Vec::new();
        top.write(shape, &mut out)?;
        Ok(out)
    }
}

/// The choice's `index`; without one it is the first.
fn index_of(raw: &[u8]) -> Result<u64, Fault> {
    let mut index = 0;
    Cursor::new(raw).object(|c, key| {
        if key == b"index" && c.kind()? == Kind::Number {
            index = whole(c.value()?).unwrap_or(0);
            return Ok(());
        }
        c.skip()
    })?;
    Ok(index)
}
