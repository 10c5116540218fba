//! Anthropic's messages: a message, its content blocks, and what is told at the end.

use super::AssembleError;
use super::form::{Form, Shape};
use super::tree::{Join, Map, Node, Room, compact};
use crate::json::{Cursor, Kind};
use crate::text::whole;
use std::collections::BTreeMap;

/// What a block costs beside its text.
const BLOCK_BYTES: usize = 128;

#[derive(Debug, Default)]
pub(super) struct Messages {
    message: Option<Map>,
    blocks: BTreeMap<u64, BlockParts>,
    usage: Map,
    stopped: bool,
}

#[derive(Debug, Default)]
struct BlockParts {
    fields: Map,
    /// The fragments of `input`, decoded: they are JSON text in a string.
    input: Vec<u8>,
}

#[derive(Debug, Default)]
struct Event<'a> {
    kind: &'a [u8],
    index: u64,
    message: Option<&'a [u8]>,
    block: Option<&'a [u8]>,
    delta: Option<&'a [u8]>,
    usage: Option<&'a [u8]>,
    /// What else a `message_delta` says of the message.
    rest: Vec<(&'a [u8], &'a [u8])>,
}

impl<'a> Event<'a> {
    fn read(data: &'a [u8]) -> Result<Self, AssembleError> {
        let mut event = Self::default();
        Cursor::new(data).object(|c, key| {
            match key {
                b"type" => event.kind = c.string_or_skip()?.unwrap_or_default(),
                b"index" => event.index = whole(c.value()?).unwrap_or_default(),
                b"message" => event.message = Some(c.value()?),
                b"content_block" => event.block = Some(c.value()?),
                b"delta" => event.delta = Some(c.value()?),
                b"usage" => event.usage = Some(c.value()?),
                _ => event.rest.push((key, c.value()?)),
            }
            Ok::<(), AssembleError>(())
        })?;
        Ok(event)
    }
}

impl Messages {
    pub(super) fn event(&mut self, data: &[u8], room: &mut Room) -> Result<(), AssembleError> {
        let event = Event::read(data)?;
        match event.kind {
            b"message_start" => self.start(event.message.unwrap_or(b"{}"), room),
            b"content_block_start" => {
                room.take(BLOCK_BYTES)?;
                let block = self.blocks.entry(event.index).or_default();
                let raw = event.block.unwrap_or(b"{}");
                block
                    .fields
                    .join(&mut Cursor::new(raw), Join::Fragments.flat(), room)
            }
            b"content_block_delta" => {
                let block = self.blocks.get_mut(&event.index);
                let block = block.ok_or(AssembleError::Malformed("a delta without its block"))?;
                block.delta(event.delta.unwrap_or(b"{}"), room)
            }
            b"message_delta" => self.delta(&event, room),
            _ => Ok(()),
        }
    }

    fn start(&mut self, raw: &[u8], room: &mut Room) -> Result<(), AssembleError> {
        let message = self.message.get_or_insert_default();
        Cursor::new(raw).object(|c, key| match key {
            b"usage" if c.kind()? == Kind::Object => {
                message.set(key, b"{}", room)?;
                self.usage.join(c, Join::Replace.flat(), room)
            }
            _ => message.set(key, c.value()?, room),
        })
    }

    /// What is known of the message at its end. Usage is cumulative: a later number takes an earlier one's place.
    fn delta(&mut self, event: &Event<'_>, room: &mut Room) -> Result<(), AssembleError> {
        let message = self.message.get_or_insert_default();
        Cursor::new(event.delta.unwrap_or(b"{}")).object(|c, key| {
            let raw = c.value()?;
            self.stopped |= key == b"stop_reason" && raw != b"null";
            message.update(key, raw, room)
        })?;
        for (key, raw) in &event.rest {
            message.update(key, raw, room)?;
        }
        if let Some(usage) = event.usage.filter(|usage| usage.starts_with(b"{")) {
            message.update(b"usage", b"{}", room)?;
            self.usage
                .join(&mut Cursor::new(usage), Join::Replace.flat(), room)?;
        }
        Ok(())
    }

    pub(super) fn is_finished(&self) -> bool {
        self.stopped
    }

    pub(super) fn write(self, form: Form) -> Result<Vec<u8>, AssembleError> {
        let mut message = self.message.ok_or(AssembleError::Truncated)?;
        let mut content = b"[".to_vec();
        for (position, block) in self.blocks.into_values().enumerate() {
            if position > 0 {
                content.push(b',');
            }
            block.write(&mut content)?;
        }
        content.push(b']');
        let mut room = Room::new(usize::MAX);
        message.put(b"content", Node::Done(content), &mut room)?;
        if message.get(b"usage").is_some() {
            message.put(b"usage", Node::Map(self.usage), &mut room)?;
        }
        let mut out = Vec::new();
        message.write(form.message(), &mut out)?;
        Ok(out)
    }
}

impl BlockParts {
    fn delta(&mut self, raw: &[u8], room: &mut Room) -> Result<(), AssembleError> {
        Cursor::new(raw).object(|c, key| match key {
            b"type" => Ok(c.skip()?),
            b"partial_json" => {
                let text = c.string_or_skip()?.unwrap_or_default();
                room.take(text.len())?;
                let text = crate::text::decode(text);
                self.input.extend_from_slice(text.as_bytes());
                Ok(())
            }
            b"citation" => {
                let list = [b"[", c.value()?, b"]"].concat();
                self.fields.extend(
                    b"citations",
                    &mut Cursor::new(&list),
                    Join::Lists.flat(),
                    room,
                )
            }
            _ => self.fields.member(key, c, Join::Fragments.flat(), room),
        })
    }

    fn write(mut self, out: &mut Vec<u8>) -> Result<(), AssembleError> {
        let is_object = Cursor::new(&self.input).check().is_ok()
            && self.input.trim_ascii_start().starts_with(b"{");
        if is_object {
            let mut room = Room::new(usize::MAX);
            self.fields
                .set(b"input", &compact(&self.input), &mut room)?;
        }
        self.fields.write(&Shape::ANY, out)
    }
}
