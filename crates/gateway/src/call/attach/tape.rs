//! The bytes of an answer that are kept for whoever takes it up again. Pure.

use std::collections::VecDeque;

use bytes::Bytes;

/// Tapes grow by blocks of this size, and the bounds count blocks.
pub const BLOCK_BYTES: usize = 4096;

/// A stretch of an answer: from its first byte, unless its beginning was forgotten. Positions count from the answer's first byte.
#[derive(Debug)]
pub struct Tape {
    blocks: VecDeque<Vec<u8>>,
    /// Of the first byte that is kept; a multiple of the block size.
    start: u64,
    end: u64,
    blocks_max: usize,
}

/// Why not everything was put on a tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// The bound of this tape.
    Own,
    /// The bound of all tapes, or of its key's.
    All,
}

impl Tape {
    /// Keeps at most `bytes`, and never less than one block.
    pub fn new(bytes: usize) -> Self {
        Self {
            blocks: VecDeque::new(),
            start: 0,
            end: 0,
            blocks_max: (bytes / BLOCK_BYTES).max(1),
        }
    }

    /// Takes the beginning of `bytes`, as much as there is room for, and says how much. `grant` is asked for each block more.
    pub fn push(&mut self, bytes: &[u8], mut grant: impl FnMut() -> bool) -> (usize, Option<Full>) {
        let mut rest = bytes;
        let mut full = None;
        while !rest.is_empty() {
            let room = self
                .blocks
                .back()
                .map_or(0, |block| BLOCK_BYTES - block.len());
            if room == 0 {
                if self.blocks.len() == self.blocks_max {
                    full = Some(Full::Own);
                    break;
                }
                if !grant() {
                    full = Some(Full::All);
                    break;
                }
                self.blocks.push_back(Vec::with_capacity(BLOCK_BYTES));
                continue;
            }
            let (now, later) = rest.split_at(room.min(rest.len()));
            if let Some(block) = self.blocks.back_mut() {
                block.extend_from_slice(now);
            }
            rest = later;
        }
        let taken = bytes.len() - rest.len();
        self.end += taken as u64;
        (taken, full)
    }

    /// What is kept at `at`, at most to the end of its block. `None`: nothing is there yet, or no longer.
    pub fn read(&self, at: u64) -> Option<Bytes> {
        let from = usize::try_from(at.checked_sub(self.start)?).ok()?;
        let block = self.blocks.get(from / BLOCK_BYTES)?;
        let rest = block.get(from % BLOCK_BYTES..)?;
        (!rest.is_empty()).then(|| Bytes::copy_from_slice(rest))
    }

    /// Lets go of the blocks that lie wholly before `at`; how many.
    pub fn forget(&mut self, at: u64) -> usize {
        let mut gone = 0;
        while self.start + BLOCK_BYTES as u64 <= at && self.blocks.pop_front().is_some() {
            self.start += BLOCK_BYTES as u64;
            gone += 1;
        }
        gone
    }

    /// Lets go of everything; how many blocks that were.
    pub fn clear(&mut self) -> usize {
        let gone = self.blocks.len();
        self.blocks = VecDeque::new();
        self.start = self.end;
        gone
    }

    /// The first byte is still there.
    pub fn is_whole(&self) -> bool {
        self.start == 0
    }

    pub fn end(&self) -> u64 {
        self.end
    }

    pub fn held_bytes(&self) -> usize {
        self.blocks.len() * BLOCK_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(tape: &Tape, mut at: u64) -> Vec<u8> {
        let mut all = Vec::new();
        while let Some(bytes) = tape.read(at) {
            at += bytes.len() as u64;
            all.extend_from_slice(&bytes);
        }
        all
    }

    #[test]
    fn what_is_read_is_what_was_written_whatever_the_pieces_and_the_bound_holds() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let bound = random.usize(1..6 * BLOCK_BYTES);
            let mut tape = Tape::new(bound);
            let most = (bound / BLOCK_BYTES).max(1) * BLOCK_BYTES;
            let mut granted = random.usize(0..8);
            let (mut written, mut read) = (Vec::new(), Vec::new());
            for _ in 0..random.usize(1..200) {
                let piece: Vec<u8> = (0..random.usize(0..3000)).map(|_| random.u8(..)).collect();
                let before = tape.held_bytes();
                let mut asked = 0;
                let (taken, full) = tape.push(&piece, || {
                    let yes = granted > 0;
                    granted = granted.saturating_sub(1);
                    asked += usize::from(yes);
                    yes
                });
                written.extend_from_slice(&piece[..taken]);
                assert_eq!(full.is_some(), taken < piece.len());
                assert_eq!(tape.end(), written.len() as u64);
                assert_eq!(tape.held_bytes(), before + asked * BLOCK_BYTES);
                assert!(tape.held_bytes() <= most, "seed {seed}");
                if tape.is_whole() {
                    assert_eq!(read_all(&tape, 0), written, "seed {seed}");
                }
                if random.bool()
                    && let Some(bytes) = tape.read(read.len() as u64)
                {
                    read.extend_from_slice(&bytes);
                }
                if full == Some(Full::Own) {
                    granted += tape.forget(read.len() as u64);
                }
            }
            read.extend(read_all(&tape, read.len() as u64));
            assert_eq!(read, written, "seed {seed}");
            let held = tape.held_bytes() / BLOCK_BYTES;
            assert_eq!(tape.clear(), held);
            assert_eq!((tape.read(0), tape.held_bytes()), (None, 0));
        }
    }

    #[test]
    fn a_full_tape_says_whose_bound_it_was() {
        let mut tape = Tape::new(2 * BLOCK_BYTES);
        let much = vec![1; 3 * BLOCK_BYTES];
        assert_eq!(tape.push(&much, || false), (0, Some(Full::All)));
        assert_eq!(
            tape.push(&much, || true),
            (2 * BLOCK_BYTES, Some(Full::Own))
        );
        assert_eq!(tape.forget(BLOCK_BYTES as u64 - 1), 0);
        assert!(tape.is_whole());
        assert_eq!(tape.forget(BLOCK_BYTES as u64), 1);
        assert!(!tape.is_whole());
        assert_eq!(tape.read(0), None);
        assert_eq!(tape.read(BLOCK_BYTES as u64).unwrap().len(), BLOCK_BYTES);
    }
}
