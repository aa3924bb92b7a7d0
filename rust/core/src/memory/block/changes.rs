//! Changes of the cached blocks, for a router that knows what each engine has.

use super::super::hash::BlockHash;
use super::BlockPool;
use rustc_hash::FxHashMap;

/// Names of the blocks that are cached now and were not, and of those that are no longer cached. In a model with recurrent states, those
/// of the blocks after which a state is saved: a sequence can begin only there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheChanges {
    /// Names of blocks that can be found now.
    pub added: Vec<BlockHash>,
    /// Names of blocks that cannot be found any more.
    pub dropped: Vec<BlockHash>,
}

/// Names in the order in which they were added (true) and dropped. `None` until they are recorded.
#[derive(Debug, Default)]
pub(in crate::memory) struct ChangeLog(Option<Vec<(BlockHash, bool)>>);

impl ChangeLog {
    /// Records changes from now on. Call [`take`](Self::take) after each step, because the record grows.
    pub(in crate::memory) fn start(&mut self) {
        self.0 = Some(Vec::new());
    }

    /// The changes since the last call. Empty unless they are recorded.
    pub(in crate::memory) fn take(&mut self) -> CacheChanges {
        let mut changes = CacheChanges::default();
        let Some(recorded) = &mut self.0 else { return changes };
        // The last change of a name counts.
        let last: FxHashMap<BlockHash, bool> = recorded.drain(..).collect();
        for (name, cached) in last {
            if cached { &mut changes.added } else { &mut changes.dropped }.push(name);
        }
        changes
    }

    pub(in crate::memory) fn record(&mut self, name: BlockHash, cached: bool) {
        if let Some(recorded) = &mut self.0 {
            recorded.push((name, cached));
        }
    }
}

impl BlockPool {
    /// Records changes of the cached blocks from now on, for [`take_changes`](Self::take_changes).
    pub fn record_changes(&mut self) {
        self.changes.start();
    }

    /// The changes of the cached blocks since the last call. Empty unless they are recorded.
    pub fn take_changes(&mut self) -> CacheChanges {
        self.changes.take()
    }
}
