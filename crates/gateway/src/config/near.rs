//! The nearest valid name for a wrong one.

use super::schema::{Field, Shape};

/// Words that people add to a setting's name and that we leave out, since the value carries its unit.
const NOISE: [&str; 9] = [
    "timeout", "timeouts", "ms", "secs", "seconds", "bytes", "size", "limit", "s",
];

/// A name longer than this resembles nothing, and comparing costs its square.
const NAME_BYTES_MAX: usize = 64;

/// The most similar of `names`, if it is similar at all.
pub(super) fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > NAME_BYTES_MAX {
        return None;
    }
    let score = |other: &str| {
        let edits = strsim::damerau_levenshtein(name, other);
        let longest = name.chars().count().max(other.chars().count());
        // A third of the letters may differ.
        (edits * 3 <= longest).then_some(edits)
    };
    names
        .filter_map(|other| score(other).map(|edits| (edits, other)))
        .min()
        .map(|(_, other)| other)
}

/// The setting of this table that a wrong name probably stands for.
pub(super) fn meant<'a>(fields: &'a [Field], name: &str) -> Option<&'a str> {
    let own = words(name);
    let mut here = fields.iter().map(|field| field.name.as_str());
    here.clone()
        .find(|other| words(other) == own)
        .or_else(|| nearest(name, &mut here))
}

/// What to do about the name `name` that the table `section` does not have.
pub(super) fn advice(root: &Shape, section: &str, fields: &[Field], name: &str) -> String {
    let here = || fields.iter().map(|field| field.name.as_str());
    let own = words(name);
    if let Some(same) = here().find(|other| words(other) == own) {
        return format!("the name is `{same}`");
    }
    let mut elsewhere = Vec::new();
    sections(root, "", &mut elsewhere);
    for exact in [true, false] {
        let matches = |other: &str| {
            if exact {
                other == name
            } else {
                words(other) == own
            }
        };
        let found: Vec<_> = elsewhere
            .iter()
            .filter(|(at, other)| at != section && matches(other))
            .collect();
        if let Some((_, other)) = found.first() {
            let at: Vec<_> = found
                .iter()
                .filter(|(_, o)| o == other)
                .map(|(at, _)| title(at))
                .collect();
            return format!("`{other}` belongs to {}", at.join(" or "));
        }
    }
    if let Some(near) = nearest(name, here()) {
        return format!("did you mean `{near}`?");
    }
    let near = nearest(name, elsewhere.iter().map(|(_, other)| other.as_str()));
    if let Some((at, other)) = elsewhere
        .iter()
        .find(|(_, other)| Some(other.as_str()) == near)
    {
        return format!("did you mean `{other}` in {}?", title(at));
    }
    let names: Vec<_> = here().collect();
    format!("valid here: {}", names.join(", "))
}

/// `[server]`, `[[upstreams]]`, `[upstreams.timeouts]`, as it is written in the file.
pub(super) fn title(section: &str) -> String {
    match section {
        "" => "the top of the file, before the first [section]".to_owned(),
        "keys" | "upstreams" => format!("[[{section}]]"),
        _ => format!("[{section}]"),
    }
}

/// The path of a table without the numbers: `upstreams[1].pool` → `upstreams.pool`.
pub(super) fn section(path: &str) -> String {
    let mut inside = false;
    let keep = |c: &char| {
        inside = (inside || *c == '[') && *c != ']';
        !inside && *c != ']'
    };
    path.chars().filter(keep).collect()
}

fn words(name: &str) -> Vec<String> {
    let lower = name.to_ascii_lowercase();
    let mut words: Vec<_> = lower.split(['_', '-', ' ']).map(str::to_owned).collect();
    if words.iter().any(|word| !NOISE.contains(&word.as_str())) {
        words.retain(|word| !NOISE.contains(&word.as_str()));
    }
    words.sort();
    words
}

fn sections(shape: &Shape, path: &str, into: &mut Vec<(String, String)>) {
    for field in shape.fields() {
        into.push((path.to_owned(), field.name.clone()));
        let below = if path.is_empty() {
            field.name.clone()
        } else {
            format!("{path}.{}", field.name)
        };
        sections(&field.shape, &below, into);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_the_right_setting() {
        let root = Shape::of_file();
        let table = [
            ("server", "lisen", "did you mean `listen`?"),
            ("server", "max_connections", "the name is `connections_max`"),
            ("server", "keep-alive", "the name is `keep_alive`"),
            ("server", "slots", "`slots` belongs to [[upstreams]]"),
            ("", "listen", "`listen` belongs to [admin] or [server]"),
            (
                "upstreams",
                "connect",
                "`connect` belongs to [timeouts] or [upstreams.timeouts]",
            ),
            (
                "upstreams",
                "connect_timeout",
                "`connect` belongs to [timeouts] or [upstreams.timeouts]",
            ),
            (
                "upstreams.timeouts",
                "request_head",
                "`request_head` belongs to [limits] or [timeouts]",
            ),
            ("limits", "request_body_bytes", "the name is `request_body`"),
            (
                "server",
                "default_upstream",
                "`default_upstream` belongs to the top of the file, before the first [section]",
            ),
            ("", "upstream", "did you mean `upstreams`?"),
            ("cors", "zzz", "valid here: origins"),
        ];
        for (section, name, expected) in table {
            let fields = if section.is_empty() {
                root.fields()
            } else {
                root.at(section).map(Shape::fields).unwrap_or_default()
            };
            assert_eq!(
                advice(root, section, fields, name),
                expected,
                "[{section}] {name}"
            );
        }
        assert_eq!(super::section("upstreams[12].pool"), "upstreams.pool");
    }
}
