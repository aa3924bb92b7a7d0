//! The contents of cached blocks, for the states that follow them.

use super::{BlockHash, BlockId, BlockPool, Content};
use rustc_hash::FxHashSet;

impl BlockPool {
    /// The content number of a block. `None` without a name.
    pub(in crate::memory) fn content(&self, id: BlockId) -> Option<Content> {
        self.blocks[id.0 as usize].name.as_ref().map(|name| name.content)
    }

    /// The content number of the cached block with this name.
    pub(in crate::memory) fn content_of(&self, name: BlockHash) -> Option<Content> {
        self.named.get(&name).and_then(|&id| self.content(id))
    }

    /// Whether a block with this name and content is cached.
    pub(in crate::memory) fn has(&self, name: BlockHash, content: Content) -> bool {
        self.content_of(name) == Some(content)
    }

    /// Records the contents of blocks that lose their names from now on, for [`take_dropped`](Self::take_dropped).
    pub(in crate::memory) fn record_dropped(&mut self) {
        self.dropped = Some(Vec::new());
        self.host.record_dropped();
    }

    /// The contents of blocks that lost their names since the last call and are not in host memory, if they are recorded.
    pub(in crate::memory) fn take_dropped(&mut self) -> Vec<Content> {
        let Some(dropped) = &mut self.dropped else { return Vec::new() };
        dropped.append(self.host.dropped());
        std::mem::take(dropped)
    }

    /// All contents of cached blocks, and those that [`take_dropped`](Self::take_dropped) has yet to give.
    pub(in crate::memory) fn known_contents(&self) -> FxHashSet<Content> {
        let named = self.blocks.iter().filter_map(|block| block.name.as_ref()).map(|name| name.content);
        named.chain(self.dropped.iter().flatten().copied()).chain(self.host.known_contents()).collect()
    }
}
