//! What each tenant has put into the cache, to check what it is told of cached tokens.

use chairlift_core::Token;
use std::collections::{HashMap, HashSet};

/// The prefixes of full blocks that each tenant has sent or received, by salt. Storage counts as a tenant.
pub(super) struct UsedPrefixes {
    block_size: usize,
    tenants: HashMap<(u8, Vec<Token>), HashSet<String>>,
}

impl UsedPrefixes {
    pub(super) fn new(block_size: u32) -> Self {
        Self { block_size: block_size as usize, tenants: HashMap::new() }
    }

    /// Records all full blocks of a context.
    pub(super) fn add(&mut self, tenant: &str, salt: u8, context: &[Token]) {
        for end in (self.block_size..=context.len()).step_by(self.block_size) {
            self.add_last(tenant, salt, &context[..end]);
        }
    }

    /// Records the last block of a context if it is full.
    pub(super) fn add_last(&mut self, tenant: &str, salt: u8, context: &[Token]) {
        if context.len().is_multiple_of(self.block_size) {
            self.tenants.entry((salt, context.to_vec())).or_default().insert(tenant.to_owned());
        }
    }

    /// A tenant is told only of tokens that it used before, and of all of them if no other tenant put the next block there.
    pub(super) fn check(&self, tenant: &str, salt: u8, context: &[Token], own: u32, cached: u32) {
        let users = |blocks: usize| self.tenants.get(&(salt, context[..blocks * self.block_size].to_vec()));
        let own_blocks = own as usize / self.block_size;
        assert!(own <= cached);
        let is_own = own_blocks == 0 || users(own_blocks).is_some_and(|users| users.contains(tenant));
        assert!(is_own, "{tenant} is told of {own} tokens of others");
        let others = own == cached || users(own_blocks + 1).is_some_and(|users| users.iter().any(|user| user != tenant));
        assert!(others, "{tenant} is told of {own} of its {cached} cached tokens");
    }
}
