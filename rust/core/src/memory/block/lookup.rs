//! Finds cached blocks.

use super::{BlockHash, BlockId, BlockPool, Chain, Content, Estimate, ROOT};
use crate::request::{CacheScope, Token};
use std::sync::Arc;

impl BlockPool {
    /// Appends the longest run of cached blocks whose content equals `tokens` from the start. Returns the end of their
    /// chain. `names` are the names of the blocks that may be found, computed by [`name_blocks`](Self::name_blocks).
    /// Each candidate's tokens, parent and scope are compared, because names can collide.
    pub fn find(&mut self, scope: &Arc<CacheScope>, names: &[BlockHash], tokens: &[Token], found: &mut Vec<BlockId>) -> Chain {
        self.find_on(Chain::root(scope), names, tokens, found)
    }

    /// Like [`find`](Self::find), but starts after a chain that was found before.
    pub fn find_on(&mut self, mut chain: Chain, names: &[BlockHash], tokens: &[Token], found: &mut Vec<BlockId>) -> Chain {
        let blocks = names.iter().zip(tokens.chunks_exact(self.block_size)).skip(chain.len);
        for (name, tokens) in blocks {
            self.lookups += 1;
            let Some(&id) = self.named.get(name) else { break };
            let Some(content) = self.content_if(id, &chain, tokens) else { break };
            found.push(id);
            chain.advance(content, id);
        }
        chain
    }

    /// Estimates how many blocks of `names` are cached, given that the first `from` are. The search doubles its stride
    /// and compares no content. The estimate is good enough to order requests, but not to share blocks.
    pub(crate) fn estimate(&mut self, names: &[BlockHash], from: usize) -> Estimate {
        let (mut low, mut step) = (from, 1);
        while low + step <= names.len() && self.is_named(names[low + step - 1]) {
            low += step;
            step *= 2;
        }
        let missing = names.get(low + step - 1).map(|&name| (low + step - 1, name));
        let mut high = names.len().min(low + step - 1);
        while low < high {
            let middle = low.midpoint(high);
            (low, high) = if self.is_named(names[middle]) { (middle + 1, high) } else { (low, middle) };
        }
        let last = low.checked_sub(1).and_then(|last| self.named.get(&names[last]));
        let end = last.and_then(|&id| Some((self.blocks[id.0 as usize].name.as_ref()?.content, id)));
        let (content, block) = end.unwrap_or((ROOT, BlockId(0)));
        Estimate { from, missing, content, block, len: low }
    }

    /// Whether a block with this name is cached.
    pub fn is_named(&mut self, name: BlockHash) -> bool {
        self.lookups += 1;
        self.named.contains_key(&name)
    }

    /// Returns the content number of block `id` if it holds `tokens` directly after `chain`.
    pub(super) fn content_if(&self, id: BlockId, chain: &Chain, tokens: &[Token]) -> Option<Content> {
        let name = self.blocks[id.0 as usize].name.as_ref()?;
        let same = chain.is_before(name.parent, name.scope.as_ref())
            && self.tokens[id.0 as usize * self.block_size..][..self.block_size] == *tokens;
        same.then_some(name.content)
    }
}
