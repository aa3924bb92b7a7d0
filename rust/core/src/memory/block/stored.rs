//! Cached blocks for storage outside.

use super::{BlockId, BlockPool, Content, Name};
use crate::request::Token;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// A cached block, for storage outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// The physical block.
    pub id: BlockId,
    /// Identifies its content together with all content before it. Later contents have larger numbers.
    pub content: u64,
    /// The content before it. 0 for the first block of a prefix.
    pub parent: u64,
    /// The group of tenants whose requests share it.
    pub group: Arc<str>,
    /// The tokens of the block.
    pub tokens: Vec<Token>,
}

impl BlockPool {
    /// The named blocks without a salt that are complete before `step`, whose whole prefix is, and whose content is newer
    /// than `after`. Older content comes first, and so a block comes after the block before it.
    pub fn stored(&self, step: u64, after: u64) -> Vec<StoredBlock> {
        let complete = |name: &&Name| name.step < step && name.scope.as_ref().is_none_or(|scope| scope.salt.is_empty());
        let named = self.blocks.iter().zip(0..).filter_map(|(block, id)| Some((block.name.as_ref().filter(complete)?, BlockId(id))));
        let mut named: Vec<_> = named.collect();
        // A block is named after the block before it.
        named.sort_unstable_by_key(|(name, _)| name.content);
        let mut groups = FxHashMap::<Content, Arc<str>>::default();
        let stored = named.into_iter().filter_map(|(&Name { content, parent, ref scope, .. }, id)| {
            let group = scope.as_ref().map(|scope| &scope.group).or_else(|| groups.get(&parent))?;
            let group = Arc::clone(group);
            groups.insert(content, Arc::clone(&group));
            let tokens = || self.tokens[id.0 as usize * self.block_size..][..self.block_size].to_vec();
            (content > after).then(|| StoredBlock { id, content, parent, group, tokens: tokens() })
        });
        stored.collect()
    }
}
