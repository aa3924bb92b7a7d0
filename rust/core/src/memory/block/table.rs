//! The blocks of one sequence.

use super::{BlockId, CacheOwner};

/// The blocks of one sequence, in order.
///
/// The type is not `Clone`, and only [`BlockPool::release`] empties a table. A block is therefore released exactly once.
#[derive(Debug, Default)]
pub struct BlockTable {
    pub(super) ids: Vec<BlockId>,
    /// The session whose request the sequence computes.
    pub(super) owner: Option<CacheOwner>,
}

impl BlockTable {
    /// The physical blocks, in logical order.
    pub fn ids(&self) -> &[BlockId] {
        &self.ids
    }

    /// The session whose request the sequence computes.
    pub(crate) fn owner(&self) -> Option<CacheOwner> {
        self.owner
    }

    /// Sets the session whose request the sequence computes.
    pub(crate) fn set_owner(&mut self, owner: Option<CacheOwner>) {
        self.owner = owner;
    }

    /// Reserves capacity for `len` blocks in total, so that growing to that length does not allocate.
    pub fn reserve(&mut self, len: usize) {
        self.ids.reserve_exact(len.saturating_sub(self.ids.len()));
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        debug_assert!(self.ids.is_empty() || std::thread::panicking(), "leaked {:?}", self.ids);
    }
}
