//! Memory that one connection needs for a moment, and the next one after it: a thread's own, so that it is in the processor's cache.
//!
//! Of some hundred streams each has something to read and to write every few milliseconds. Memory of their own would have left the cache
//! by then, and a fetched line costs as much as some hundred instructions (measured: decision 0014). What a connection cannot be rid of
//! within one poll stays with it, and the thread allocates anew.

use std::cell::Cell;

use bytes::BytesMut;

/// What is lent has room for so much at first.
const ROOM: usize = 2 * 1024;
/// What has more room is not kept for the next one: of a read, as a slow reader's answer may hold what was read; of a write, as the
/// thread keeps it for ever.
const READ_MAX: usize = 2 * ROOM;
const WRITE_MAX: usize = 64 * 1024;

thread_local! {
    static READ: Cell<Option<BytesMut>> = const { Cell::new(None) };
    static WRITE: Cell<Option<Vec<u8>>> = const { Cell::new(None) };
}

/// Empty memory to read into, with room for 2 to 4 KiB.
pub fn to_read() -> BytesMut {
    let kept = READ.try_with(Cell::take).ok().flatten();
    kept.unwrap_or_else(|| BytesMut::with_capacity(ROOM))
}

/// Nothing that was read is in it any more. It is kept unless somebody still has a slice of it.
pub fn was_read(mut empty: BytesMut) {
    empty.clear();
    if empty.try_reclaim(ROOM) && empty.capacity() <= READ_MAX {
        // A thread that ends keeps nothing.
        let _ = READ.try_with(|kept| kept.set(Some(empty)));
    }
}

/// Empty memory to write from.
pub fn to_write() -> Vec<u8> {
    let kept = WRITE.try_with(Cell::take).ok().flatten();
    kept.unwrap_or_else(|| Vec::with_capacity(ROOM))
}

/// All that was in it is written.
pub fn was_written(mut done: Vec<u8>) {
    done.clear();
    if done.capacity() <= WRITE_MAX {
        let _ = WRITE.try_with(|kept| kept.set(Some(done)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_one_has_the_memory_of_the_one_before() {
        let mut read = to_read();
        read.extend_from_slice(b"abc");
        let at = read.as_ptr();
        let _ = read.split_to(3);
        was_read(read);
        let next = to_read();
        assert!(next.is_empty() && next.capacity() >= ROOM);
        assert_eq!(next.as_ptr(), at);
        let mut write = to_write();
        write.extend_from_slice(b"abc");
        let at = write.as_ptr();
        was_written(write);
        let next = to_write();
        assert!(next.is_empty() && next.as_ptr() == at);
    }

    /// Else the next one would write over what somebody still reads.
    #[test]
    fn memory_that_somebody_has_a_slice_of_is_not_lent_again() {
        let mut read = to_read();
        read.extend_from_slice(b"abc");
        let slice = read.split().freeze();
        was_read(read);
        let mut next = to_read();
        next.extend_from_slice(b"xyz");
        assert_eq!(&slice[..], b"abc");
        assert!(next.capacity() >= ROOM);
    }

    #[test]
    fn the_memory_of_a_long_answer_is_given_back() {
        was_written(Vec::with_capacity(WRITE_MAX + 1));
        assert!(to_write().capacity() <= WRITE_MAX);
        was_read(BytesMut::with_capacity(READ_MAX + 1));
        assert!(to_read().capacity() <= READ_MAX);
    }
}
