//! Simulated storage of prefixes, such as a disk.

use chairlift_core::{BlockHash, BlockHasher, CacheScope, SeqId, Time, Token};
use std::collections::{BTreeMap, HashSet};

/// Storage that has each block of a prompt once a request has begun to compute it, and reads one prefix after another.
pub(crate) struct Storage {
    read_ns_per_block: u32,
    block_size: usize,
    stored: HashSet<BlockHash>,
    /// The reads by the time at which they end: requests, and the leading blocks that are then in the cache.
    reads: BTreeMap<(Time, u64), (SeqId, usize)>,
    /// When the last read ends.
    free_at: Time,
    begun: u64,
}

impl Storage {
    /// Empty storage. None if a machine has none.
    pub(crate) fn new(read_ns_per_block: u32, block_size: u32) -> Option<Self> {
        let block_size = block_size as usize;
        let empty = Self { read_ns_per_block, block_size, stored: HashSet::new(), reads: BTreeMap::new(), free_at: 0, begun: 0 };
        (read_ns_per_block > 0).then_some(empty)
    }

    /// Begins to read the blocks of a prompt after the first `cached` ones. Returns false if there are none.
    pub(crate) fn begin(&mut self, id: SeqId, prompt: &[Token], cached: usize, now: Time) -> bool {
        let names = BlockHasher::new(0).names(&CacheScope::default(), prompt, self.block_size);
        let known = names.iter().take_while(|name| self.stored.contains(name)).count();
        self.stored.extend(&names[known..]);
        if known <= cached {
            return false;
        }
        let takes = (known - cached) as Time * Time::from(self.read_ns_per_block) / 1000;
        self.free_at = self.free_at.max(now) + takes;
        self.begun += 1;
        self.reads.insert((self.free_at, self.begun), (id, known));
        true
    }

    /// When the next read ends.
    pub(crate) fn next_end(&self) -> Option<Time> {
        self.reads.first_key_value().map(|(&(end, _), _)| end)
    }

    /// A request whose read has ended, and the number of its leading tokens that are then in the cache.
    pub(crate) fn take_ended(&mut self, now: Time) -> Option<(SeqId, usize)> {
        self.next_end().filter(|&end| end <= now)?;
        self.reads.pop_first().map(|(_, (id, blocks))| (id, blocks * self.block_size))
    }
}
