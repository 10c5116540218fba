//! The calls in flight, for whoever lists them or ends them from outside.
//!
//! One shard a worker, so that its lock is uncontended: a call takes it once when it begins and once when nothing of it is left, its
//! slot included. What changes in between is in the call's own [`Entry`].

use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::Instant;

use super::entry::{Entry, Row};
use super::stop::By;
use crate::upstream::EndpointState;

/// All calls in flight. Clones share it.
#[derive(Clone, Debug)]
pub struct Table {
    shards: Arc<[Mutex<Shard>]>,
}

/// Entries by place; free places are used again.
#[derive(Debug, Default)]
struct Shard {
    entries: Vec<Option<Arc<Entry>>>,
    free: Vec<usize>,
}

/// The place of a call in the table; given back when it is dropped.
#[derive(Debug)]
pub struct Listed {
    entry: Arc<Entry>,
    shard: usize,
    place: usize,
}

// === impl Table ===

impl Table {
    pub fn new(workers: usize) -> Self {
        Self {
            shards: (0..workers.max(1)).map(|_| Mutex::default()).collect(),
        }
    }

    /// Lists a call that began on this worker. The table is that of its books.
    pub fn begin(worker: u32, entry: Arc<Entry>) -> Listed {
        let table = &entry.books.table;
        let shard = worker as usize % table.shards.len();
        let place = table.shard(shard).add(Arc::clone(&entry));
        Listed {
            entry,
            shard,
            place,
        }
    }

    fn shard(&self, index: usize) -> std::sync::MutexGuard<'_, Shard> {
        // No code of others runs under this lock, so a poisoned one holds sound data.
        self.shards[index]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Every call in flight, the oldest first.
    pub fn list(&self) -> Vec<Row> {
        let mut rows: Vec<_> = self.all().iter().map(|entry| entry.row()).collect();
        rows.sort_by(|a, b| b.age.cmp(&a.age).then_with(|| a.id.cmp(&b.id)));
        rows
    }

    fn all(&self) -> Vec<Arc<Entry>> {
        let shards = 0..self.shards.len();
        shards
            .flat_map(|index| {
                let shard = self.shard(index);
                let here: Vec<_> = shard.entries.iter().flatten().cloned().collect();
                here
            })
            .collect()
    }

    /// Calls that the server at this endpoint certainly worked on at any time from `since` until now: their tokens came before, all that came
    /// is read, and their end is not among it. A slow reader's call is none: its end may lie unread in the socket.
    pub fn steady(&self, endpoint: &Arc<EndpointState>, since: Instant) -> usize {
        let all = self.all();
        let steady = all.iter().filter(|entry| entry.is_steady(endpoint, since));
        steady.count()
    }

    /// Ends the calls that `which` says; how many those were.
    pub fn stop(&self, by: By, which: impl Fn(&Entry) -> bool) -> usize {
        let all = self.all();
        let meant: Vec<_> = all.iter().filter(|entry| which(entry)).collect();
        // All of them before the first wakes: what its end sets free must not start another one of them.
        meant.iter().for_each(|entry| entry.mark_end(by));
        meant.iter().for_each(|entry| entry.wake());
        meant.len()
    }
}

// === impl Shard ===

impl Shard {
    fn add(&mut self, entry: Arc<Entry>) -> usize {
        match self.free.pop() {
            Some(place) => {
                self.entries[place] = Some(entry);
                place
            }
            None => {
                self.entries.push(Some(entry));
                self.entries.len() - 1
            }
        }
    }
}

// === impl Listed ===

impl Listed {
    pub fn entry(&self) -> &Arc<Entry> {
        &self.entry
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut shard = self.entry.books.table.shard(self.shard);
        let entry = shard.entries[self.place].take();
        shard.free.push(self.place);
        drop(shard);
        drop(entry);
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tidegate_wire::Dialect;

    use super::*;
    use crate::auth::{Keys, Principal};
    use crate::call::settle::Books;
    use crate::call::{Asker, Generation, Id, ModelIn, RouteFacts};
    use crate::config::{Config, Endpoint};
    use crate::telemetry::access_log::AccessLog;
    use crate::telemetry::metrics::Metrics;
    use crate::upstream::registry::Registry;

    fn begin(table: &Table) -> Listed {
        let asker = Asker {
            id: Id::new(),
            own_id: None,
            principal: Principal::default(),
        };
        let route = RouteFacts {
            name: "chat",
            dialect: Dialect::OpenAi,
            model: ModelIn::Body,
            can_stream: true,
        };
        let metrics = Arc::new(Metrics::new());
        let config = Config::one_upstream(Endpoint::from(SocketAddr::from(([127, 0, 0, 1], 1))));
        let registry = Registry::new(Arc::clone(&metrics));
        let generation = Generation {
            number: 1,
            routes: registry.build(&config).unwrap(),
            keys: Keys::new(&config.keys),
            config,
        };
        let books = Books::new(&metrics, AccessLog::off(), table.clone());
        let entry = Entry::new(asker, route, &Arc::new(generation), &Arc::new(books));
        Table::begin(0, Arc::new(entry))
    }

    #[tokio::test]
    async fn a_call_is_listed_until_nothing_is_left_of_it() {
        let table = Table::new(2);
        let one = begin(&table);
        let two = begin(&table);
        assert_eq!(table.list().len(), 2);
        drop(one);
        let three = begin(&table);
        let ids: Vec<_> = table.list().iter().map(|row| row.id).collect();
        assert_eq!(ids, [two.entry().id, three.entry().id]);
        drop((two, three));
        assert!(table.list().is_empty());
        assert_eq!(table.shard(0).entries.len(), 2, "places are used again");
    }

    #[tokio::test]
    async fn a_stop_wakes_whoever_has_the_call_and_the_operator_has_the_last_word() {
        let table = Table::new(1);
        let listed = begin(&table);
        let (entry, id) = (Arc::clone(listed.entry()), listed.entry().id);
        let waits = tokio::task::spawn(async move { entry.stop().await });
        tokio::task::yield_now().await;
        assert_eq!(table.stop(By::Client, |entry| entry.id == Id::new()), 0);
        assert_eq!(table.stop(By::Client, |entry| entry.id == id), 1);
        assert_eq!(waits.await.unwrap(), By::Client);
        table.stop(By::Operator, |_| true);
        table.stop(By::Client, |_| true);
        assert_eq!(listed.entry().stopped(), Some(By::Operator));
    }
}
