//! The fields of a request as they go upstream.

use http::header::HeaderMap;

use super::list::FieldLine;
use super::{CREDENTIALS, Field, Fields, HOP_BY_HOP, PRIVATE_REQUEST, Set, words};

/// The client's fields, as they came, and a rule which of them cross; then our own. They are not copied: they are written from here.
#[derive(Debug)]
pub struct Sent {
    fields: Fields,
    /// So many of them are the client's.
    client: usize,
    withheld: Set,
    /// The client's `Connection` names more than what is the connection's own.
    names: bool,
}

impl Sent {
    /// `credentials`: the client's cross. `key`: goes in their place.
    pub fn new(client: Fields, credentials: bool, key: Option<(Field, &str)>) -> Self {
        let mut withheld = HOP_BY_HOP.and(PRIVATE_REQUEST);
        if !credentials {
            withheld = withheld.and(CREDENTIALS);
        }
        let is_other = |word| Field::of(word).is_none_or(|field| !HOP_BY_HOP.has(field));
        let mut values = client.get_all(Field::Connection);
        let names = values.any(|value| words(value).any(is_other));
        drop(values);
        let (client, mut fields) = (client.count(), client);
        if let Some((field, key)) = key {
            fields.append(field, key);
        }
        // A compressed stream could not be read or added to.
        fields.append(Field::AcceptEncoding, "identity");
        Self {
            fields,
            client,
            withheld,
            names,
        }
    }

    /// Each of them, in order. `Host` and what frames the body are not among them.
    pub fn lines(&self) -> impl Iterator<Item = FieldLine<'_>> {
        let crosses = |&(n, line): &(usize, FieldLine<'_>)| n >= self.client || self.crosses(line);
        let lines = self.fields.lines().enumerate();
        lines.filter(crosses).map(|(_, line)| line)
    }

    fn crosses(&self, line: FieldLine<'_>) -> bool {
        let withheld = line.field.is_some_and(|field| self.withheld.has(field));
        let named = self.names && self.is_named(line);
        !withheld && !named
    }

    /// The client's `Connection` names it.
    fn is_named(&self, line: FieldLine<'_>) -> bool {
        let mut named = self.fields.get_all(Field::Connection).flat_map(words);
        named.any(|word| line.is_named(word))
    }

    /// A copy, for HTTP/2.
    pub fn to_map(&self) -> HeaderMap {
        self.lines().filter_map(|line| line.in_map()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::list;

    fn sent(client: &[(&str, &str)], credentials: bool, key: Option<(Field, &str)>) -> String {
        let sent = Sent::new(list(client), credentials, key);
        let lines: Vec<u8> = sent
            .lines()
            .flat_map(|line| line.written.to_vec())
            .collect();
        let map = sent.to_map();
        assert_eq!(map.len(), sent.lines().count());
        for line in sent.lines() {
            let name = str::from_utf8(line.name).unwrap();
            let secret = ["authorization", "x-api-key", "api-key"].contains(&name);
            for value in map.get_all(name) {
                assert_eq!(value.is_sensitive(), secret, "{name}");
            }
        }
        String::from_utf8(lines).unwrap()
    }

    const OURS: &str = "\r\naccept-encoding: identity";

    #[test]
    fn fields_named_by_connection_do_not_cross() {
        let client = [
            ("x-secret-hop", "1"),
            ("Connection", "close, X-Secret-Hop"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("X-Kept", "1"),
            ("x-other-hop", "1"),
            ("connection", "x-other-hop,accept, content-encoding"),
            ("content-encoding", "gzip"),
            ("accept", "a"),
        ];
        let expected = format!("\r\nx-kept: 1\r\ncontent-encoding: gzip{OURS}");
        assert_eq!(sent(&client, true, None), expected);
    }

    #[test]
    fn what_is_about_the_client_stays_here_and_the_rest_keeps_its_order() {
        let client = [
            ("host", "gateway"),
            ("x-b", "1"),
            ("content-length", "2"),
            ("accept-encoding", "gzip"),
            ("cookie", "c"),
            ("x-forwarded-for", "10.0.0.1"),
            ("x-tidegate-call", "mine"),
            ("x-a", "2"),
            ("x-b", "3"),
        ];
        let expected = format!("\r\nx-b: 1\r\nx-a: 2\r\nx-b: 3{OURS}");
        assert_eq!(sent(&client, true, None), expected);
    }

    #[test]
    fn credentials_cross_only_where_we_have_none() {
        let client = [
            ("authorization", "Bearer c"),
            ("x-api-key", "c"),
            ("api-key", "c"),
        ];
        let passed = "\r\nauthorization: Bearer c\r\nx-api-key: c\r\napi-key: c";
        assert_eq!(sent(&client, true, None), format!("{passed}{OURS}"));
        assert_eq!(sent(&client, false, None), OURS);
        let key = Some((Field::XApiKey, "ours"));
        let replaced = format!("\r\nx-api-key: ours{OURS}");
        assert_eq!(sent(&client, false, key), replaced);
    }
}
