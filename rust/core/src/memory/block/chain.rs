//! A sequence's chain of cached blocks.

use super::{BlockId, Content, ROOT};
use crate::memory::hash::BlockHash;
use crate::request::CacheScope;
use std::sync::Arc;

/// The end of a sequence's chain of cached full blocks.
#[derive(Clone, Debug)]
pub struct Chain {
    pub(super) scope: Arc<CacheScope>,
    pub(super) content: Content,
    /// The block with this content.
    pub(super) block: BlockId,
    pub(super) len: usize,
}

impl Chain {
    /// The chain of a sequence without named blocks.
    pub fn root(scope: &Arc<CacheScope>) -> Self {
        Self { scope: Arc::clone(scope), content: ROOT, block: BlockId(0), len: 0 }
    }

    /// Number of blocks in the chain.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The content of the last block.
    pub(in crate::memory) fn content(&self) -> Content {
        self.content
    }

    /// Shortens the chain to these blocks with these contents, which must be its first ones.
    pub(in crate::memory) fn truncate(&mut self, blocks: &[BlockId], contents: &[Content]) {
        self.block = blocks.last().copied().unwrap_or(BlockId(0));
        (self.content, self.len) = (contents.last().copied().unwrap_or(ROOT), contents.len());
    }

    /// Whether a block with this parent, and this scope if it is the first one, continues the chain.
    pub(super) fn is_before(&self, parent: Content, scope: Option<&Arc<CacheScope>>) -> bool {
        parent == self.content && scope.is_none_or(|scope| *scope == self.scope)
    }

    pub(super) fn advance(&mut self, content: Content, block: BlockId) {
        (self.content, self.block, self.len) = (content, block, self.len + 1);
    }
}

/// Estimate of how many names at the start of a list are cached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Estimate {
    pub(super) from: usize,
    /// The furthest name that was looked up and is not cached.
    pub(super) missing: Option<(usize, BlockHash)>,
    pub(super) content: Content,
    pub(super) block: BlockId,
    pub(super) len: usize,
}

impl Estimate {
    /// Whether `names` give the same estimate. A name covers its block and all blocks before it. If the missing name is
    /// equal, all names looked up before it are equal too.
    pub(crate) fn holds_for(&self, names: &[BlockHash], from: usize) -> bool {
        self.from == from && self.missing.is_some_and(|(at, name)| names.get(at) == Some(&name))
    }

    /// The chain of a sequence with `names`.
    pub(crate) fn chain(&self, scope: &Arc<CacheScope>) -> Chain {
        Chain { scope: Arc::clone(scope), content: self.content, block: self.block, len: self.len }
    }
}
