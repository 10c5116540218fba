//! What the events of a stream have in common: nearly each is the one before it with another text in it, and perhaps another number.

use crate::json;
use std::ops::Range;

/// An event longer than this is no token's, and is not kept. Less than the largest [`Value::start`].
const KEPT_MAX: usize = 1024;
/// So many values of an event may be other ones in the next.
const VALUES_MAX: usize = 8;

/// Values of an event that say no more than that they are there.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Values {
    list: [Value; VALUES_MAX],
    len: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct Value {
    start: u16,
    end: u16,
    means: Means,
    /// Was another one in an event before.
    varies: bool,
}

/// What is to be known of a value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Means {
    /// It is a string, and not an empty one.
    Text,
    /// The `sequence_number`.
    Sequence,
    #[default]
    Nothing,
}

impl Values {
    /// In the order in which they stand. Those that are too many are as the rest of the event.
    #[inline]
    pub(crate) fn note(&mut self, start: usize, end: usize, means: Means) {
        if let (Some(place), Ok(end)) = (self.list.get_mut(self.len), u16::try_from(end)) {
            (place.start, place.end, place.means) =
                (u16::try_from(start).unwrap_or(end), end, means);
            self.len += 1;
        }
    }

    /// The same in a text that begins so much earlier. A place that is beyond all numbers stays so, and its event is too long to be kept.
    pub(crate) fn moved(mut self, by: usize) -> Self {
        let by = u16::try_from(by).unwrap_or(u16::MAX);
        for value in &mut self.list {
            value.start = value.start.saturating_add(by);
            value.end = value.end.saturating_add(by);
        }
        self
    }

    fn iter(&self) -> impl Iterator<Item = &Value> {
        self.list.iter().take(self.len)
    }
}

/// An event that says nothing else than that there is another text.
#[derive(Debug, Default)]
pub(crate) struct Pattern {
    /// Empty: there is none.
    event: Vec<u8>,
    values: Values,
}

/// An event that is as the one that was kept.
#[derive(Debug, Default)]
pub(crate) struct Alike {
    pub(crate) len: usize,
    pub(crate) sequence: Option<u64>,
}

impl Pattern {
    /// The event that starts here, if it is the one that was kept but for values that may be other ones: then it is whole, and says the same.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<Alike> {
        if self.event.is_empty() {
            return None;
        }
        let mut alike = Alike::default();
        let mut from = 0;
        for value in self.values.iter().filter(|value| value.varies) {
            let before = self.event.get(from..value.start.into())?;
            if !bytes.get(alike.len..)?.starts_with(before) {
                return None;
            }
            value.step_over(bytes, before.len(), &mut alike)?;
            from = value.end.into();
        }
        let behind = self.event.get(from..)?;
        let ends = bytes.get(alike.len..)?.starts_with(behind);
        alike.len += behind.len();
        ends.then_some(alike)
    }

    /// Keeps this whole event and its values, of which one is its text.
    pub(crate) fn keep(&mut self, event: &[u8], mut values: Values) {
        let alike = values.len == self.values.len;
        for (value, old) in values.list.iter_mut().zip(&self.values.list) {
            let other = || event.get(value.place()) != self.event.get(old.place());
            value.varies = value.means == Means::Text || (alike && (old.varies || other()));
        }
        self.values = values;
        self.event.clear();
        // Behind a CR at its end the event might go on by an LF.
        if event.len() <= KEPT_MAX && event.ends_with(b"\n") {
            self.event.reserve_exact(event.len());
            self.event.extend_from_slice(event);
        }
    }
}

impl Value {
    fn place(&self) -> Range<usize> {
        self.start.into()..self.end.into()
    }

    /// What is no string and no plain number is to be read with care, and so is a text without anything in it.
    #[inline]
    fn step_over(&self, bytes: &[u8], by: usize, alike: &mut Alike) -> Option<()> {
        let start = alike.len + by;
        let string = bytes.get(start) == Some(&b'"');
        alike.len = match self.means {
            Means::Text | Means::Nothing if string => json::string_end(bytes, start + 1).ok()?,
            Means::Text => return None,
            Means::Sequence | Means::Nothing => {
                let (number, end) = json::plain_number(bytes, start)?;
                if self.means == Means::Sequence {
                    alike.sequence = Some(number);
                }
                end
            }
        };
        (self.means != Means::Text || alike.len > start + 2).then_some(())
    }
}
