//! The fields of a head, in their order.

use std::fmt;

use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::{CONTENT, CREDENTIALS, Field, Set};

/// Fields as they are written: each a line of one text, its name in lower case. Which of the known ones are among them is noted: what is not
/// there is not looked for.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Fields {
    /// A line is `\r\nname: value`.
    text: Vec<u8>,
    places: Vec<LinePlace>,
    seen: Set,
    repeated: Set,
}

/// One of them.
#[derive(Clone, Copy)]
pub struct FieldLine<'a> {
    pub field: Option<Field>,
    pub name: &'a [u8],
    pub value: &'a [u8],
    /// As it is written.
    pub written: &'a [u8],
}

impl fmt::Debug for FieldLine<'_> {
    /// Without the value, which may be a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(self.name))
    }
}

/// Where a line stands in the text.
#[derive(Clone, Copy, PartialEq, Eq)]
struct LinePlace {
    field: Option<Field>,
    start: u32,
    /// Of its value.
    value: u32,
    end: u32,
}

/// Fields that we add to most heads.
const OURS: usize = 3;
/// What a line takes, as a guess.
const BYTES: usize = 40;
const LINE_END: &[u8] = b"\r\n";
const COLON: &[u8] = b": ";

impl Fields {
    /// For so many fields, whose lines are about so long together, and some of ours.
    pub fn with_capacity(fields: usize, bytes: usize) -> Self {
        Self {
            text: Vec::with_capacity(bytes + OURS * BYTES),
            places: Vec::with_capacity(fields + OURS),
            ..Self::default()
        }
    }

    /// Adds a field whose name and value a parser has let through. `field`: which one it is.
    pub fn read(&mut self, field: Option<Field>, name: &[u8], value: &[u8]) {
        debug_assert!(
            !name
                .iter()
                .chain(value)
                .any(|byte| b"\r\n\0".contains(byte))
        );
        let start = self.text.len();
        self.text.extend_from_slice(LINE_END);
        if let Some(field) = field {
            if self.seen.has(field) {
                self.repeated.insert(field);
            }
            self.seen.insert(field);
            self.text.extend_from_slice(field.name().as_bytes());
        } else {
            self.text.extend(name.iter().map(u8::to_ascii_lowercase));
        }
        self.text.extend_from_slice(COLON);
        let from = self.text.len();
        self.text.extend_from_slice(value);
        self.places.push(LinePlace {
            field,
            start: start as u32,
            value: from as u32,
            end: self.text.len() as u32,
        });
    }

    /// Adds a field of ours. What cannot stand on one line is left out: what comes behind a line end would be another field.
    pub fn append(&mut self, field: Field, value: impl AsRef<[u8]>) {
        let value = value.as_ref();
        // All are looked at, several at once, whatever the first is.
        let sound = |ok, &b: &u8| ok & (((b >= b' ') & (b != 0x7f)) | (b == b'\t'));
        if value.iter().fold(true, sound) {
            self.read(Some(field), b"", value);
        }
    }

    /// Adds it in place of all that have its name.
    pub fn insert(&mut self, field: Field, value: impl AsRef<[u8]>) {
        self.remove(field);
        self.append(field, value);
    }

    pub fn remove(&mut self, field: Field) {
        if self.has(field) {
            self.retain(|line| line.field != Some(field));
        }
    }

    pub(super) fn retain(&mut self, kept: impl Fn(&FieldLine<'_>) -> bool) {
        let all = std::mem::take(self);
        for line in all.lines().filter(kept) {
            self.read(line.field, line.name, line.value);
        }
    }

    pub(super) fn count(&self) -> usize {
        self.places.len()
    }

    pub fn has(&self, field: Field) -> bool {
        self.seen.has(field)
    }

    /// It comes more than once.
    pub fn repeats(&self, field: Field) -> bool {
        self.repeated.has(field)
    }

    /// The value of the first of that name.
    pub fn get(&self, field: Field) -> Option<&[u8]> {
        self.get_all(field).next()
    }

    pub fn get_all(&self, field: Field) -> impl Iterator<Item = &[u8]> {
        let places = self.has(field).then_some(&self.places);
        let places = places.into_iter().flatten();
        places
            .filter(move |place| place.field == Some(field))
            .map(|place| self.part(place.value, place.end))
    }

    /// All of them, in order.
    pub fn lines(&self) -> impl Iterator<Item = FieldLine<'_>> {
        let (before, between) = (LINE_END.len() as u32, COLON.len() as u32);
        self.places.iter().map(move |place| FieldLine {
            field: place.field,
            name: self.part(place.start + before, place.value - between),
            value: self.part(place.value, place.end),
            written: self.part(place.start, place.end),
        })
    }

    fn part(&self, from: u32, to: u32) -> &[u8] {
        let part = self.text.get(from as usize..to as usize);
        part.unwrap_or_default()
    }

    /// Writes them, but for some.
    pub fn write(&self, left_out: Set, mut out: impl FnMut(&[u8])) {
        if self.seen.meets(left_out) {
            let stays = |line: &FieldLine<'_>| !line.field.is_some_and(|field| left_out.has(field));
            self.lines()
                .filter(stays)
                .for_each(|line| out(line.written));
        } else {
            out(&self.text);
        }
    }

    /// Changes values; their lengths stay.
    pub fn values_mut(&mut self, mut change: impl FnMut(&mut [u8])) {
        for place in &self.places {
            let value = self.text.get_mut(place.value as usize..place.end as usize);
            value.into_iter().for_each(&mut change);
        }
    }

    /// As HTTP/2 takes them.
    pub fn to_map(&self) -> HeaderMap {
        self.lines().filter_map(|line| line.in_map()).collect()
    }
}

impl FieldLine<'_> {
    /// Whether it is meant by a word of a `Connection` field.
    pub(super) fn is_named(&self, word: &[u8]) -> bool {
        let is_content = self.field.is_some_and(|field| CONTENT.has(field));
        !is_content && word.eq_ignore_ascii_case(self.name)
    }

    /// `None`: its name is longer than the library has them.
    pub(super) fn in_map(&self) -> Option<(HeaderName, HeaderValue)> {
        let name = HeaderName::from_bytes(self.name).ok()?;
        let mut value = HeaderValue::from_bytes(self.value).ok()?;
        value.set_sensitive(self.field.is_some_and(|field| CREDENTIALS.has(field)));
        Some((name, value))
    }
}

impl From<&HeaderMap> for Fields {
    fn from(map: &HeaderMap) -> Self {
        let mut fields = Self::with_capacity(map.len(), BYTES * map.len());
        for (name, value) in map {
            let name = name.as_str().as_bytes();
            fields.read(Field::of(name), name, value.as_bytes());
        }
        fields
    }
}

/// Values are not shown: keys are among them.
impl fmt::Debug for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self
            .lines()
            .map(|line| String::from_utf8_lossy(line.name).into_owned());
        f.debug_list().entries(names).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::list;

    fn written(fields: &Fields, left_out: &[Field]) -> String {
        let mut text = Vec::new();
        fields.write(Set::of(left_out), |lines| text.extend_from_slice(lines));
        String::from_utf8(text).unwrap()
    }

    const CAME: &[(&str, &str)] = &[
        ("Host", "a"),
        ("X-Unknown", "u: v"),
        ("content-length", "12"),
        ("host", ""),
    ];

    #[test]
    fn what_is_there_is_found_and_what_repeats_is_known() {
        let fields = list(CAME);
        assert!(fields.has(Field::Host) && fields.repeats(Field::Host));
        assert!(fields.has(Field::ContentLength) && !fields.repeats(Field::ContentLength));
        assert!(!fields.has(Field::Origin) && !fields.repeats(Field::Origin));
        assert_eq!(fields.get(Field::Host).unwrap(), b"a");
        assert_eq!(fields.get(Field::Origin), None);
        let hosts: Vec<_> = fields.get_all(Field::Host).collect();
        assert_eq!(hosts, [&b"a"[..], b""]);
        assert_eq!(fields.get_all(Field::Origin).count(), 0);
        let names: Vec<_> = fields.lines().map(|line| line.name).collect();
        let expected = ["host", "x-unknown", "content-length", "host"];
        assert_eq!(names, expected.map(str::as_bytes));
    }

    #[test]
    fn they_are_written_in_order_but_for_those_left_out() {
        let fields = list(CAME);
        let all = "\r\nhost: a\r\nx-unknown: u: v\r\ncontent-length: 12\r\nhost: ";
        assert_eq!(written(&fields, &[]), all);
        assert_eq!(written(&fields, &[Field::Origin]), all);
        let some = "\r\nx-unknown: u: v\r\ncontent-length: 12";
        assert_eq!(written(&fields, &[Field::Origin, Field::Host]), some);
        assert_eq!(written(&Fields::default(), &[Field::Host]), "");
    }

    #[test]
    fn what_takes_the_place_of_others_is_alone() {
        let mut fields = list(CAME);
        fields.insert(Field::Host, "b");
        fields.append(Field::Vary, "x");
        assert!(!fields.repeats(Field::Host) && fields.has(Field::ContentLength));
        let text = "\r\nx-unknown: u: v\r\ncontent-length: 12\r\nhost: b\r\nvary: x";
        assert_eq!(written(&fields, &[]), text);
        fields.remove(Field::Host);
        fields.remove(Field::Host);
        assert!(!fields.has(Field::Host) && fields.get(Field::Host).is_none());
        fields.retain(|line| line.name != b"x-unknown");
        assert_eq!(written(&fields, &[]), "\r\ncontent-length: 12\r\nvary: x");
        fields.values_mut(|value| value.fill(b'*'));
        assert_eq!(written(&fields, &[]), "\r\ncontent-length: **\r\nvary: *");
    }

    /// Of each byte, wherever it stands: what the parser takes for a part of a name or of a value, and what we write ourselves, is one for the
    /// library too.
    #[test]
    fn names_and_values_are_what_the_library_says_that_they_are() {
        for byte in 0..=u8::MAX {
            // The parser looks at several bytes at once, where there are so many.
            for at in [1, 7, 15, 20, 31, 40, 62] {
                names_and_values_with(byte, at);
            }
        }
    }

    fn names_and_values_with(byte: u8, at: usize) {
        let mut middle = [b'a'; 64];
        middle[at] = byte;
        let name = [&middle[..], b": 1\r\n\r\n"].concat();
        let value = [b"vary: ", &middle[..], b"\r\n\r\n"].concat();
        let [name, value] = [name, value].map(|text| {
            let mut space = [httparse::EMPTY_HEADER; 2];
            let parsed = httparse::parse_headers(&text, &mut space).ok()?;
            let field = parsed.is_complete().then_some(space[0])?;
            let mut fields = Fields::default();
            let name = field.name.as_bytes();
            fields.read(Field::of(name), name, field.value);
            assert_eq!(fields.to_map().len(), 1, "{text:?}");
            Some((name.to_vec(), field.value.to_vec()))
        });
        let is_name = HeaderName::from_bytes(&middle).is_ok();
        let is_value = HeaderValue::from_bytes(&middle).is_ok();
        // A colon ends a name, a line end a value: they are parts of neither.
        assert_eq!(
            name.is_some_and(|(name, _)| name == middle),
            is_name,
            "{byte} at {at}"
        );
        assert_eq!(
            value.is_some_and(|(_, v)| v == middle),
            is_value,
            "{byte} at {at}"
        );
        let mut ours = Fields::default();
        ours.append(Field::Vary, middle);
        let written = is_value.then_some(&middle[..]);
        assert_eq!(ours.get(Field::Vary), written, "{byte} at {at}");
    }

    /// What is shown for the sake of a test or an error has no key and no prompt in it.
    #[test]
    fn a_line_is_shown_without_its_value() {
        let fields = list(&[("authorization", "Bearer sk-secret")]);
        for line in fields.lines() {
            assert_eq!(format!("{line:?}"), "authorization");
        }
        assert!(!format!("{fields:?}").contains("secret"));
    }

    #[test]
    fn a_map_has_the_same_fields_and_is_told_which_are_secret() {
        let mut fields = list(CAME);
        let map = fields.to_map();
        assert_eq!(map.len(), 4);
        assert!(map.get_all("host").iter().eq(["a", ""]));
        assert_eq!(map["x-unknown"], "u: v");
        // The library puts those of one name together.
        let back: Vec<_> = [("host", "a"), ("host", "")].into();
        let rest = [("x-unknown", "u: v"), ("content-length", "12")];
        assert_eq!(Fields::from(&map), list(&[back, rest.into()].concat()));
        fields.append(Field::Authorization, "Bearer secret");
        assert!(fields.to_map()["authorization"].is_sensitive());
        assert!(!map["host"].is_sensitive());
        let shown = format!("{fields:?}");
        assert!(shown.contains("authorization") && !shown.contains("secret"));
    }
}
