//! A sequence's part of the KV cache.

use super::super::block::{BlockId, BlockTable, CacheOwner, Chain, Content, User};
use super::super::hash::BlockHash;
use super::states::SeqState;
use crate::request::CacheScope;
use std::sync::Arc;

/// A sequence's part of the KV cache. Only [`Kv`](super::Kv) changes it.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct SeqBlocks {
    /// Number of known and computed tokens at which the next block is named. `None` without a prefix cache.
    pub(super) seal_at: Option<u32>,
    pub(super) table: BlockTable,
    /// Names of the sequence's full blocks computed so far. Empty without a prefix cache.
    pub(super) names: Vec<BlockHash>,
    /// The named blocks in the cache at the latest lookup.
    pub(super) chain: Chain,
    pub(super) scope: Arc<CacheScope>,
    /// The tenant that is told of the blocks that it used before.
    pub(super) user: User,
    /// Leading tokens that the tenant's own requests have computed, or would have computed without the blocks of others.
    pub(super) paid: u32,
    /// Blocks of which the tenant became a user before the prompt was computed, each with the step that made it so.
    pub(super) tentative: Vec<(u64, BlockHash, Content)>,
    /// Leading blocks of which the tenant is a user.
    pub(super) used: u32,
    /// Host blocks that hold the sequence's KV while it is swapped out.
    pub(super) host: Vec<u32>,
    /// The recurrent state, in a model that has states.
    pub(super) state: Option<Box<SeqState>>,
}

impl SeqBlocks {
    /// The state of a sequence without blocks.
    pub(crate) fn new(scope: Arc<CacheScope>) -> Self {
        let chain = Chain::root(&scope);
        Self {
            seal_at: None,
            table: BlockTable::default(),
            names: Vec::new(),
            chain,
            scope,
            user: User::default(),
            paid: 0,
            tentative: Vec::new(),
            used: 0,
            host: Vec::new(),
            state: None,
        }
    }

    pub(crate) fn ids(&self) -> &[BlockId] {
        self.table.ids()
    }

    /// Number of blocks that the sequence holds.
    #[inline]
    pub(crate) fn held(&self) -> usize {
        self.table.ids().len()
    }

    pub(crate) fn names(&self) -> &[BlockHash] {
        &self.names
    }

    /// Number of leading blocks that were cached at the latest lookup.
    pub(crate) fn cached_len(&self) -> usize {
        self.chain.len()
    }

    pub(crate) fn scope(&self) -> &Arc<CacheScope> {
        &self.scope
    }

    /// Sets the tenant of the sequence.
    pub(crate) fn set_user(&mut self, user: User) {
        self.user = user;
    }

    /// Sets the session whose request the sequence computes.
    pub(crate) fn set_owner(&mut self, owner: CacheOwner) {
        self.table.set_owner(Some(owner));
    }

    /// Records that a step has room for `tokens` more tokens of the prompt. Without the blocks of others it would compute as many.
    pub(crate) fn pay(&mut self, tokens: u32) {
        self.paid = self.paid.saturating_add(tokens);
    }

    /// Records that the prompt is computed and that its first token is known.
    pub(crate) fn pay_all(&mut self) {
        self.paid = u32::MAX;
        self.tentative = Vec::new();
    }

    pub(crate) fn host(&self) -> &[u32] {
        &self.host
    }

    /// Whether a block must be named once `known` tokens are known and computed.
    #[inline]
    pub(crate) fn is_due(&self, known: u32) -> bool {
        self.seal_at.is_some_and(|at| at <= known)
    }

    /// KV slot of the token at `position`. The sequence must hold its block.
    pub(crate) fn kv_slot(&self, position: u32, block_size: u32) -> u32 {
        self.table.ids()[(position / block_size) as usize].0 * block_size + position % block_size
    }

    /// Clears the chain of cached blocks.
    pub(crate) fn reset_chain(&mut self) {
        self.chain = Chain::root(&self.scope);
    }
}
