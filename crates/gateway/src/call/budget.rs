//! Bytes in memory that are bounded in all, whoever they are for.

use bytes::Bytes;
use prometheus_client::metrics::gauge::Gauge;

/// What is in use of one bound: that of all request bodies, or of all answers in one piece. What is shown is what counts.
#[derive(Clone, Debug)]
pub struct Budget {
    used: Gauge,
}

impl Budget {
    pub fn new(used: Gauge) -> Self {
        Self { used }
    }

    /// Of nothing yet.
    pub fn lease(&self) -> Lease<'_> {
        Lease {
            budget: self,
            bytes: 0,
        }
    }

    fn give_back(&self, bytes: usize) {
        if bytes > 0 {
            self.used.dec_by(bytes as i64);
        }
    }

    /// Nothing more should be begun: the last sixteenth is for what has begun.
    pub fn is_full(&self, max: usize) -> bool {
        in_bytes(self.used.get()) >= max - max / 16
    }
}

/// A part of the budget, given back when dropped.
#[derive(Debug)]
pub struct Lease<'a> {
    budget: &'a Budget,
    bytes: usize,
}

impl Lease<'_> {
    /// So many more. False if there is no room for them; they are counted all the same, until the lease is dropped.
    #[must_use]
    pub fn grow(&mut self, bytes: usize, max: usize) -> bool {
        let before = self.budget.used.inc_by(bytes as i64);
        self.bytes += bytes;
        in_bytes(before).saturating_add(bytes) <= max
    }

    /// So many in all. False as with [`grow`](Self::grow); fewer than before always fit.
    #[must_use]
    pub fn set(&mut self, bytes: usize, max: usize) -> bool {
        if let Some(more) = bytes.checked_sub(self.bytes) {
            return more == 0 || self.grow(more, max);
        }
        self.budget.give_back(self.bytes - bytes);
        self.bytes = bytes;
        true
    }

    /// Goes with `body` wherever that is handed on to, until the last piece of it is let go.
    pub fn around(mut self, body: Bytes) -> Bytes {
        Bytes::from_owner(Leased {
            body,
            budget: self.budget.clone(),
            bytes: std::mem::take(&mut self.bytes),
        })
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

struct Leased {
    body: Bytes,
    budget: Budget,
    bytes: usize,
}

impl Drop for Leased {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

impl AsRef<[u8]> for Leased {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

fn in_bytes(used: i64) -> usize {
    usize::try_from(used).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_counted_until_the_last_piece_of_its_body_is_gone() {
        let used = Gauge::default();
        let budget = Budget::new(used.clone());
        let mut lease = budget.lease();
        assert!(lease.set(93, 100) && !budget.is_full(100));
        assert!(lease.set(94, 100) && budget.is_full(100));
        assert!(lease.set(100, 100));
        let mut other = budget.lease();
        assert!(!other.grow(1, 100));
        drop(other);
        assert!(lease.set(10, 100) && used.get() == 10);

        let mut body = lease.around(Bytes::from_static(b"0123456789"));
        let piece = body.split_to(4);
        assert_eq!((&*piece, &*body), (&b"0123"[..], &b"456789"[..]));
        drop(body);
        assert_eq!(used.get(), 10, "a piece keeps all of it in memory");
        drop(piece);
        assert_eq!(used.get(), 0);
    }
}
