//! OpenAI's responses: the last event has the whole answer in it.

use super::AssembleError;
use super::form::Form;
use super::tree::{Node, Room};
use crate::json::Cursor;

#[derive(Debug, Default)]
pub(super) struct Responses {
    response: Option<Vec<u8>>,
}

impl Responses {
    /// The event that ends the stream: completed, incomplete, failed or cancelled.
    pub(super) fn ended(&mut self, data: &[u8], room: &mut Room) -> Result<(), AssembleError> {
        Cursor::new(data).object(|c, key| {
            let raw = c.value()?;
            if key == b"response" {
                room.take(raw.len())?;
                self.response = Some(raw.to_vec());
            }
            Ok(())
        })
    }

    pub(super) fn is_finished(&self) -> bool {
        self.response.is_some()
    }

    pub(super) fn write(self, form: Form) -> Result<Vec<u8>, AssembleError> {
        let response = self.response.ok_or(AssembleError::Truncated)?;
        let mut out = Vec::with_capacity(response.len());
        Node::opened(&response)?.write(form.response(), &mut out)?;
        Ok(out)
    }
}
