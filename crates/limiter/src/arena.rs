//! A slab of calls and the lists that run through it: O(1) insertion and removal, no tombstones.
//!
//! A vacant cell at the end is given back at once, and the storage follows the number of calls
//! down, so calls that have left hold no memory.

/// No cell.
const NIL: u32 = u32::MAX;

/// Below this many cells the storage is not shrunk.
const KEEP: usize = 64;

/// How many lists a call can be on at once.
const LISTS: usize = 2;

/// Names one call for as long as it lives. A key of a call that is gone finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    index: u32,
    id: u64,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    prev: u32,
    next: u32,
}

#[derive(Debug)]
enum Cell<T> {
    Full {
        id: u64,
        links: [Link; LISTS],
        value: T,
    },
    Free(Link),
}

#[derive(Debug)]
pub(crate) struct Arena<T> {
    cells: Vec<Cell<T>>,
    free: u32,
    len: usize,
    next_id: u64,
}

/// A list through the arena on link set `L`. Each call is on at most one list per link set.
#[derive(Debug)]
pub(crate) struct List<const L: usize> {
    head: u32,
    tail: u32,
    len: usize,
}

// === impl Key ===

impl Key {
    pub(crate) const fn id(self) -> u64 {
        self.id
    }
}

// === impl Link ===

impl Link {
    const NONE: Self = Self {
        prev: NIL,
        next: NIL,
    };
}

// === impl Arena ===

impl<T> Arena<T> {
    #[cfg(test)]
    pub(crate) const CELL_BYTES: usize = size_of::<Cell<T>>();

    pub(crate) const fn new() -> Self {
        Self {
            cells: Vec::new(),
            free: NIL,
            len: 0,
            next_id: 1,
        }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn insert(&mut self, value: T) -> Key {
        let id = self.next_id;
        self.next_id += 1;
        self.len += 1;
        let cell = Cell::Full {
            id,
            links: [Link::NONE; LISTS],
            value,
        };
        let index = self.free;
        if index == NIL {
            let index = u32::try_from(self.cells.len()).expect("limits keep the arena below 2^26");
            self.cells.push(cell);
            return Key { index, id };
        }
        self.unlink_free(index);
        self.cells[index as usize] = cell;
        Key { index, id }
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        match self.cells.get(key.index as usize) {
            Some(Cell::Full { id, value, .. }) if *id == key.id => Some(value),
            _ => None,
        }
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        match self.cells.get_mut(key.index as usize) {
            Some(Cell::Full { id, value, .. }) if *id == key.id => Some(value),
            _ => None,
        }
    }

    /// Takes a call out. It must be on no list.
    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        self.get(key)?;
        let vacant = Cell::Free(Link {
            prev: NIL,
            next: self.free,
        });
        let old = std::mem::replace(&mut self.cells[key.index as usize], vacant);
        if let Some(Cell::Free(link)) = self.cells.get_mut(self.free as usize) {
            link.prev = key.index;
        }
        self.free = key.index;
        self.len -= 1;
        self.give_back();
        match old {
            Cell::Full { value, .. } => Some(value),
            Cell::Free(_) => None,
        }
    }

    /// Drops vacant cells at the end, and storage that is mostly empty.
    fn give_back(&mut self) {
        while let Some(Cell::Free(_)) = self.cells.last() {
            let last = self.cells.len() - 1;
            self.unlink_free(u32::try_from(last).expect("an index that was given out"));
            self.cells.pop();
        }
        if self.cells.capacity() > KEEP && self.cells.len() < self.cells.capacity() / 4 {
            self.cells.shrink_to((self.cells.len() * 2).max(KEEP));
        }
    }

    fn unlink_free(&mut self, index: u32) {
        let Cell::Free(Link { prev, next }) = self.cells[index as usize] else {
            return;
        };
        if let Some(Cell::Free(link)) = self.cells.get_mut(prev as usize) {
            link.next = next;
        } else {
            self.free = next;
        }
        if let Some(Cell::Free(link)) = self.cells.get_mut(next as usize) {
            link.prev = prev;
        }
    }

    fn links(&mut self, index: u32) -> Option<&mut [Link; LISTS]> {
        match self.cells.get_mut(index as usize) {
            Some(Cell::Full { links, .. }) => Some(links),
            _ => None,
        }
    }

    fn key_at(&self, index: u32) -> Option<Key> {
        match self.cells.get(index as usize) {
            Some(Cell::Full { id, .. }) => Some(Key { index, id: *id }),
            _ => None,
        }
    }

    fn next_on(&self, list: usize, index: u32) -> u32 {
        match self.cells.get(index as usize) {
            Some(Cell::Full { links, .. }) => links[list].next,
            _ => NIL,
        }
    }

    #[cfg(test)]
    pub(crate) fn cells_held(&self) -> usize {
        self.cells.capacity()
    }
}

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Self::new()
    }
}

// === impl List ===

impl<const L: usize> List<L> {
    pub(crate) const fn new() -> Self {
        Self {
            head: NIL,
            tail: NIL,
            len: 0,
        }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn front<T>(&self, arena: &Arena<T>) -> Option<Key> {
        arena.key_at(self.head)
    }

    pub(crate) fn back<T>(&self, arena: &Arena<T>) -> Option<Key> {
        arena.key_at(self.tail)
    }

    pub(crate) fn push_back<T>(&mut self, arena: &mut Arena<T>, key: Key) {
        let tail = self.tail;
        if let Some(links) = arena.links(key.index) {
            links[L] = Link {
                prev: tail,
                next: NIL,
            };
        }
        match arena.links(tail) {
            Some(links) => links[L].next = key.index,
            None => self.head = key.index,
        }
        self.tail = key.index;
        self.len += 1;
    }

    /// Takes a call off the list. It must be on it.
    pub(crate) fn unlink<T>(&mut self, arena: &mut Arena<T>, key: Key) {
        let Some(links) = arena.links(key.index) else {
            return;
        };
        let Link { prev, next } = std::mem::replace(&mut links[L], Link::NONE);
        match arena.links(prev) {
            Some(links) => links[L].next = next,
            None => self.head = next,
        }
        match arena.links(next) {
            Some(links) => links[L].prev = prev,
            None => self.tail = prev,
        }
        self.len -= 1;
    }

    pub(crate) fn keys<'a, T>(&'a self, arena: &'a Arena<T>) -> impl Iterator<Item = Key> + 'a {
        let mut index = self.head;
        std::iter::from_fn(move || {
            let key = arena.key_at(index)?;
            index = arena.next_on(L, index);
            Some(key)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(list: &List<0>, arena: &Arena<u32>) -> Vec<u32> {
        list.keys(arena)
            .filter_map(|key| arena.get(key).copied())
            .collect()
    }

    #[test]
    fn a_list_keeps_its_order_when_the_middle_leaves() {
        let (mut arena, mut list) = (Arena::new(), List::<0>::new());
        let keys: Vec<Key> = (0..4).map(|value| arena.insert(value)).collect();
        for key in &keys {
            list.push_back(&mut arena, *key);
        }
        list.unlink(&mut arena, keys[1]);
        arena.remove(keys[1]);
        assert_eq!(values(&list, &arena), [0, 2, 3]);
        list.unlink(&mut arena, keys[0]);
        list.unlink(&mut arena, keys[3]);
        assert_eq!(values(&list, &arena), [2]);
        assert_eq!(list.len(), 1);
    }

    #[test]
    fn a_key_of_a_call_that_is_gone_finds_nothing() {
        let mut arena = Arena::new();
        let first = arena.insert(1);
        assert_eq!(arena.remove(first), Some(1));
        let second = arena.insert(2);
        assert_eq!(arena.get(first), None);
        assert_eq!(arena.remove(first), None);
        assert_eq!(arena.get(second), Some(&2));
    }

    #[test]
    fn storage_follows_the_number_of_calls_down() {
        let mut arena = Arena::new();
        let stays = arena.insert(0);
        let keys: Vec<Key> = (0..100_000).map(|value| arena.insert(value)).collect();
        for key in keys.iter().step_by(2).chain(keys.iter().skip(1).step_by(2)) {
            arena.remove(*key);
        }
        assert_eq!(arena.get(stays), Some(&0));
        assert!(arena.cells_held() <= KEEP, "{}", arena.cells_held());
    }
}
