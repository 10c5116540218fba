//! A plain reader of event streams, as the standard describes it.

/// One event that a standard reader would dispatch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// `event:`, empty if absent.
    pub name: String,
    /// `data:` lines, joined by line feeds.
    pub data: String,
    /// `id:`, if present.
    pub id: Option<String>,
}

impl Event {
    /// Parses one block at the start of `bytes`; none if it is not whole yet.
    /// A whole block without data (comments only) is no event.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<(Option<Self>, usize)> {
        let mut event = Self::default();
        let mut data = false;
        let mut at = 0;
        loop {
            let (line, used) = line(&bytes[at..])?;
            at += used;
            if line.is_empty() {
                return Some((data.then_some(event), at));
            }
            let text = String::from_utf8_lossy(line);
            let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
            let (field, value) = text.split_once(':').unwrap_or((text, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "data" => {
                    if data {
                        event.data.push('\n');
                    }
                    data = true;
                    event.data.push_str(value);
                }
                "event" => value.clone_into(&mut event.name),
                "id" => event.id = Some(value.to_owned()),
                _ => {}
            }
        }
    }

    /// Parses all whole blocks.
    #[must_use]
    pub fn all(bytes: &[u8]) -> Vec<Self> {
        let mut events = Vec::new();
        let mut at = 0;
        while let Some((event, used)) = Self::parse(&bytes[at..]) {
            events.extend(event);
            at += used;
        }
        events
    }

    /// The data as JSON.
    #[must_use]
    pub fn json(&self) -> Option<serde_json::Value> {
        serde_json::from_str(&self.data).ok()
    }
}

/// The line at the start and its length with its end. A `\r` at the very end
/// of what is there counts as a line end: a `\n` that follows later is then an
/// empty line of its own, which only a byte-exact test would mind.
fn line(bytes: &[u8]) -> Option<(&[u8], usize)> {
    let end = memchr::memchr2(b'\n', b'\r', bytes)?;
    let crlf = bytes[end] == b'\r' && bytes.get(end + 1) == Some(&b'\n');
    Some((&bytes[..end], end + if crlf { 2 } else { 1 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_events_come_out_of_each_line_end() {
        let lf = ": hi\n\nevent: a\ndata: x: y\ndata:z\n\ndata: 1\n\n";
        for end in ["\n", "\r\n", "\r"] {
            let events = Event::all(lf.replace('\n', end).as_bytes());
            assert_eq!(events.len(), 2, "{end:?}");
            assert_eq!(events[0].name, "a");
            assert_eq!(events[0].data, "x: y\nz");
            assert_eq!(events[1].data, "1");
        }
    }

    #[test]
    fn an_open_block_is_no_event() {
        assert_eq!(Event::parse(b"data: x\n"), None);
    }
}
