//! JSON values that grow.
//!
//! Keys and values are kept as the JSON text that came. Strings that come in fragments are joined between their quotes, so that every
//! escape stays as it was.

use super::AssembleError;
use super::form::{Absent, Shape};
use crate::json::{Cursor, Fault, Kind};
use crate::text::whole;
use std::collections::BTreeMap;

/// Members of one object that are told apart. No answer has more; a server that sends ever new ones is stopped.
const MEMBERS_MAX: usize = 512;
/// Objects in objects that are joined member by member. What is deeper is replaced as a whole.
const LEVELS: usize = 8;
/// What a value costs beside its text.
const NODE_BYTES: usize = 64;

/// What is left of the bytes that may be gathered.
#[derive(Debug)]
pub(super) struct Room {
    left: usize,
    limit: usize,
}

impl Room {
    pub(super) const fn new(limit: usize) -> Self {
        Self { left: limit, limit }
    }

    pub(super) fn take(&mut self, bytes: usize) -> Result<(), AssembleError> {
        let left = self.left.checked_sub(bytes);
        self.left = left.ok_or(AssembleError::TooLarge { limit: self.limit })?;
        Ok(())
    }

    pub(super) const fn taken(&self) -> usize {
        self.limit.saturating_sub(self.left)
    }

    fn give(&mut self, bytes: usize) {
        self.left = self.left.saturating_add(bytes);
    }
}

/// How members of an object that comes again go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Join {
    /// The later value stands.
    Replace,
    /// Lists grow and objects are joined; strings and numbers are replaced.
    Lists,
    /// Strings are fragments, too.
    Fragments,
}

/// How an object is joined, and how deep in its answer it stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Level {
    join: Join,
    depth: usize,
}

impl Join {
    /// From here down.
    pub(super) const fn down(self) -> Level {
        Level {
            join: self,
            depth: 0,
        }
    }

    /// This object's own members only: objects and lists in it are values.
    pub(super) const fn flat(self) -> Level {
        Level {
            join: self,
            depth: LEVELS,
        }
    }
}

impl Level {
    const fn inner(self) -> Self {
        Self {
            join: self.join,
            depth: self.depth + 1,
        }
    }

    fn opens(self) -> bool {
        self.join != Join::Replace && self.depth < LEVELS
    }
}

/// Strings of a delta that are said once and not in fragments. Some servers say them again in each chunk.
const SAID_ONCE: [&[u8]; 8] = [
    b"role", b"id", b"type", b"index", b"object", b"status", b"format", b"call_id",
];

#[derive(Debug, Clone)]
pub(super) enum Node {
    /// JSON text.
    Raw(Vec<u8>),
    /// What stands between the quotes of a string that grows.
    Text(Vec<u8>),
    List(List),
    Map(Map),
    /// JSON text that has its shape already.
    Done(Vec<u8>),
}

/// A list that grows at its end, or by the `index` of its elements.
#[derive(Debug, Clone, Default)]
pub(super) struct List {
    indexed: BTreeMap<u64, Map>,
    /// Elements' JSON text with commas between them.
    joined: Vec<u8>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Map {
    members: Vec<(Vec<u8>, Node)>,
}

impl Map {
    pub(super) fn get(&self, key: &[u8]) -> Option<&Node> {
        self.members
            .iter()
            .find_map(|(name, node)| (name == key).then_some(node))
    }

    /// The member's place, with what `absent` makes there if it is new.
    fn place(
        &mut self,
        key: &[u8],
        room: &mut Room,
        absent: impl FnOnce() -> Node,
    ) -> Result<&mut Node, AssembleError> {
        let at = self.members.iter().position(|(name, _)| name == key);
        let at = match at {
            Some(at) => at,
            None if self.members.len() >= MEMBERS_MAX => {
                return Err(AssembleError::Malformed("an object with too many members"));
            }
            None => {
                room.take(key.len() + NODE_BYTES)?;
                self.members.push((key.to_vec(), absent()));
                self.members.len() - 1
            }
        };
        self.members
            .get_mut(at)
            .map(|(_, node)| node)
            .ok_or(AssembleError::Malformed("a member that is not there"))
    }

    /// Puts this JSON text there, whatever was there.
    pub(super) fn set(
        &mut self,
        key: &[u8],
        raw: &[u8],
        room: &mut Room,
    ) -> Result<(), AssembleError> {
        let place = self.place(key, room, || Node::Raw(Vec::new()))?;
        if matches!(place, Node::Raw(same) if same == raw) {
            return Ok(());
        }
        room.give(place.len());
        room.take(raw.len())?;
        *place = Node::Raw(raw.to_vec());
        Ok(())
    }

    pub(super) fn put(
        &mut self,
        key: &[u8],
        node: Node,
        room: &mut Room,
    ) -> Result<(), AssembleError> {
        *self.place(key, room, || Node::Raw(Vec::new()))? = node;
        Ok(())
    }

    /// As [`set`](Self::set), but null takes nothing away.
    pub(super) fn update(
        &mut self,
        key: &[u8],
        raw: &[u8],
        room: &mut Room,
    ) -> Result<(), AssembleError> {
        if raw == b"null" && self.get(key).is_some() {
            return Ok(());
        }
        self.set(key, raw, room)
    }

    /// A fragment of a string, raw.
    pub(super) fn append(
        &mut self,
        key: &[u8],
        fragment: &[u8],
        room: &mut Room,
    ) -> Result<(), AssembleError> {
        let place = self.place(key, room, || Node::Text(Vec::new()))?;
        room.take(fragment.len())?;
        match place {
            Node::Text(text) => text.extend_from_slice(fragment),
            Node::Raw(raw) if raw == b"null" => *place = Node::Text(fragment.to_vec()),
            _ => return Err(AssembleError::Malformed("a field that changes its type")),
        }
        Ok(())
    }

    /// Elements of a list, which the cursor stands before.
    pub(super) fn extend(
        &mut self,
        key: &[u8],
        c: &mut Cursor<'_>,
        level: Level,
        room: &mut Room,
    ) -> Result<(), AssembleError> {
        let place = self.place(key, room, || Node::List(List::default()))?;
        if let Node::Raw(raw) = place {
            *place = Node::List(List::of(raw)?);
        }
        let Node::List(list) = place else {
            return Err(AssembleError::Malformed("a field that changes its type"));
        };
        c.array(|c| list.element(c, level, room))
    }

    /// Joins the object that the cursor stands before into this one.
    pub(super) fn join(
        &mut self,
        c: &mut Cursor<'_>,
        level: Level,
        room: &mut Room,
    ) -> Result<(), AssembleError> {
        c.object(|c, key| self.member(key, c, level, room))
    }

    /// Joins one member's value, which the cursor stands before.
    pub(super) fn member(
        &mut self,
        key: &[u8],
        c: &mut Cursor<'_>,
        level: Level,
        room: &mut Room,
    ) -> Result<(), AssembleError> {
        match c.kind()? {
            Kind::String if level.join == Join::Fragments && !SAID_ONCE.contains(&key) => {
                let fragment = c.string()?;
                let again = key == b"name"
                    && matches!(self.get(key), Some(Node::Text(name)) if name == fragment);
                if again {
                    return Ok(());
                }
                self.append(key, fragment, room)
            }
            Kind::String if level.join == Join::Fragments => {
                let raw = c.value()?;
                // Said again, and empty: what was said before stands.
                if raw == b"\"\"" && self.get(key).is_some() {
                    return Ok(());
                }
                self.set(key, raw, room)
            }
            Kind::Object if level.opens() => {
                let place = self.place(key, room, || Node::Map(Self::default()))?;
                if !matches!(place, Node::Map(_)) {
                    *place = Node::Map(Self::default());
                }
                let Node::Map(map) = place else { return Ok(()) };
                map.join(c, level.inner(), room)
            }
            Kind::Array if level.opens() => self.extend(key, c, level.inner(), room),
            _ => self.update(key, c.value()?, room),
        }
    }
}

impl List {
    /// From a list's JSON text, or from null.
    fn of(raw: &[u8]) -> Result<Self, AssembleError> {
        let mut list = Self::default();
        if raw != b"null" {
            Cursor::new(raw).array(|c| {
                list.push(c.value()?);
                Ok::<(), Fault>(())
            })?;
        }
        Ok(list)
    }

    fn element(
        &mut self,
        c: &mut Cursor<'_>,
        level: Level,
        room: &mut Room,
    ) -> Result<(), AssembleError> {
        let raw = c.value()?;
        let index = match level.join {
            Join::Fragments if raw.starts_with(b"{") => index_of(raw)?,
            _ => None,
        };
        let Some(index) = index else {
            room.take(raw.len() + 1)?;
            self.push(raw);
            return Ok(());
        };
        if !self.indexed.contains_key(&index) {
            room.take(NODE_BYTES)?;
        }
        let map = self.indexed.entry(index).or_default();
        map.join(&mut Cursor::new(raw), level, room)
    }

    fn push(&mut self, raw: &[u8]) {
        if !self.joined.is_empty() {
            self.joined.push(b',');
        }
        self.joined.extend_from_slice(raw);
    }
}

/// The element's `index`, if it is a whole number.
fn index_of(raw: &[u8]) -> Result<Option<u64>, Fault> {
    let mut index = None;
    Cursor::new(raw).object(|c, key| {
        if key == b"index" && c.kind()? == Kind::Number {
            index = whole(c.value()?);
            return Ok(());
        }
        c.skip()
    })?;
    Ok(index)
}

// --- writing -----------------------------------------------------------------------------------------------------

impl Node {
    /// Bytes of text in it, as they were counted when they came.
    fn len(&self) -> usize {
        match self {
            Self::Raw(text) | Self::Text(text) | Self::Done(text) => text.len(),
            Self::List(list) => list.joined.len(),
            Self::Map(_) => 0,
        }
    }

    fn is_null(&self) -> bool {
        matches!(self, Self::Raw(raw) if raw == b"null")
    }

    /// An object's JSON text, one level of it opened. Other values stay text.
    pub(super) fn opened(raw: &[u8]) -> Result<Self, Fault> {
        let mut c = Cursor::new(raw);
        if c.kind()? != Kind::Object {
            return Ok(Self::Raw(raw.to_vec()));
        }
        let mut map = Map::default();
        c.object(|c, key| {
            map.members
                .push((key.to_vec(), Self::Raw(c.value()?.to_vec())));
            Ok::<(), Fault>(())
        })?;
        Ok(Self::Map(map))
    }

    pub(super) fn write(&self, shape: &Shape, out: &mut Vec<u8>) -> Result<(), AssembleError> {
        match self {
            Self::Done(raw) => out.extend_from_slice(raw),
            Self::Raw(raw) if shape.members.is_empty() => out.extend_from_slice(raw),
            Self::Raw(raw) => match raw.first() {
                Some(b'{') => match Self::opened(raw)? {
                    Self::Map(map) => map.write(shape, out)?,
                    _ => out.extend_from_slice(raw),
                },
                Some(b'[') => elements(raw, shape, out)?,
                _ => out.extend_from_slice(raw),
            },
            Self::Text(text) => {
                out.push(b'"');
                out.extend_from_slice(text);
                out.push(b'"');
            }
            Self::List(list) => list.write(shape, out)?,
            Self::Map(map) => map.write(shape, out)?,
        }
        Ok(())
    }
}

/// A list's JSON text with its objects in `shape`.
fn elements(raw: &[u8], shape: &Shape, out: &mut Vec<u8>) -> Result<(), AssembleError> {
    out.push(b'[');
    let mut first = true;
    Cursor::new(raw).array(|c| {
        if !std::mem::take(&mut first) {
            out.push(b',');
        }
        match Node::opened(c.value()?)? {
            Node::Map(map) => map.write(shape, out),
            other => other.write(&Shape::ANY, out),
        }
    })?;
    out.push(b']');
    Ok(())
}

impl List {
    fn write(&self, shape: &Shape, out: &mut Vec<u8>) -> Result<(), AssembleError> {
        out.push(b'[');
        let mut first = true;
        for map in self.indexed.values() {
            if !std::mem::take(&mut first) {
                out.push(b',');
            }
            map.write(shape, out)?;
        }
        if !self.joined.is_empty() {
            if !first {
                out.push(b',');
            }
            out.extend_from_slice(&self.joined);
        }
        out.push(b']');
        Ok(())
    }
}

impl Map {
    /// The members that `shape` names, in its order, then the others in the order they came.
    pub(super) fn write(&self, shape: &Shape, out: &mut Vec<u8>) -> Result<(), AssembleError> {
        let shape = match shape.only_with {
            Some(key) if self.get(key.as_bytes()).is_none() => &Shape::ANY,
            _ => shape,
        };
        let mut first = true;
        let mut key = |name: &[u8], out: &mut Vec<u8>| {
            out.extend_from_slice(if std::mem::take(&mut first) {
                b"{\""
            } else {
                b",\""
            });
            out.extend_from_slice(name);
            out.extend_from_slice(b"\":");
        };
        for member in shape.members {
            let name = member.name.as_bytes();
            let found = self.get(name);
            let null = found.is_none_or(Node::is_null);
            match (found, member.absent) {
                (_, Absent::Dropped) => {}
                (_, Absent::NullDropped) if null => {}
                (_, Absent::Is(value)) if null => {
                    key(name, out);
                    out.extend_from_slice(value.as_bytes());
                }
                (None, Absent::As(other)) => {
                    if let Some(node) = self.get(other.as_bytes()) {
                        key(name, out);
                        node.write(&Shape::ANY, out)?;
                    }
                }
                (Some(node), _) => {
                    key(name, out);
                    node.write(member.inside, out)?;
                }
                (None, _) => {}
            }
        }
        for (name, node) in &self.members {
            if !shape.members.iter().any(|m| m.name.as_bytes() == name) {
                key(name, out);
                node.write(&Shape::ANY, out)?;
            }
        }
        out.extend_from_slice(if first { b"{}" } else { b"}" });
        Ok(())
    }
}

/// JSON text without the white space between its tokens, as servers write it that read it first.
pub(super) fn compact(raw: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(raw.len());
    let (mut inside, mut escaped) = (false, false);
    for &byte in raw {
        if inside {
            (inside, escaped) = (escaped || byte != b'"', !escaped && byte == b'\\');
        } else if byte.is_ascii_whitespace() {
            continue;
        } else {
            inside = byte == b'"';
        }
        out.push(byte);
    }
    out
}
