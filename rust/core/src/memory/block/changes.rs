//! Changes of the cached blocks, for a router that knows what each engine has.

use super::super::hash::BlockHash;
use super::BlockPool;
use rustc_hash::FxHashMap;

/// Names of the blocks that are cached now and were not, and of those that are no longer cached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheChanges {
    /// Names of blocks that can be found now.
    pub added: Vec<BlockHash>,
    /// Names of blocks that cannot be found any more.
    pub dropped: Vec<BlockHash>,
}

impl BlockPool {
    /// Records changes of the cached blocks from now on. Call [`take_changes`](Self::take_changes) after each step,
    /// because the record grows.
    pub fn record_changes(&mut self) {
        self.changes = Some(Vec::new());
    }

    /// The changes since the last call. Empty unless they are recorded.
    pub fn take_changes(&mut self) -> CacheChanges {
        let mut changes = CacheChanges::default();
        let Some(recorded) = &mut self.changes else { return changes };
        // The last change of a name counts.
        let last: FxHashMap<BlockHash, bool> = recorded.drain(..).collect();
        for (name, cached) in last {
            if cached { &mut changes.added } else { &mut changes.dropped }.push(name);
        }
        changes
    }

    pub(super) fn record(&mut self, name: BlockHash, cached: bool) {
        if let Some(recorded) = &mut self.changes {
            recorded.push((name, cached));
        }
    }
}
