//! What each tenant has put into the cache, to check what it is told of cached tokens.

use chairlift_core::Token;
use rustc_hash::{FxHashMap, FxHashSet};

/// The tenants of each prefix of full blocks, by salt.
type Tenants = FxHashMap<(u8, Vec<Token>), FxHashSet<String>>;

/// The prefixes of full blocks that each tenant has sent or received. Storage counts as a tenant.
pub(super) struct UsedPrefixes {
    block_size: usize,
    tenants: Tenants,
    /// Those that the tenant's requests have computed, or would have computed without the blocks of others.
    paid: Tenants,
}

impl UsedPrefixes {
    pub(super) fn new(block_size: u32) -> Self {
        Self { block_size: block_size as usize, tenants: FxHashMap::default(), paid: FxHashMap::default() }
    }

    /// Records all full blocks of a context.
    pub(super) fn add(&mut self, tenant: &str, salt: u8, context: &[Token]) {
        for end in (self.block_size..=context.len()).step_by(self.block_size) {
            self.add_last(tenant, salt, &context[..end]);
        }
    }

    /// Records that a tenant's request has computed all full blocks of a context, or would have without the blocks of others.
    pub(super) fn pay(&mut self, tenant: &str, salt: u8, context: &[Token]) {
        for blocks in (1..=context.len() / self.block_size).rev() {
            let prefix = (salt, context[..blocks * self.block_size].to_vec());
            if !self.paid.entry(prefix).or_default().insert(tenant.to_owned()) {
                break; // it has paid for all shorter ones
            }
        }
    }

    /// Records the last block of a context if it is full.
    pub(super) fn add_last(&mut self, tenant: &str, salt: u8, context: &[Token]) {
        if context.len().is_multiple_of(self.block_size) {
            self.tenants.entry((salt, context.to_vec())).or_default().insert(tenant.to_owned());
        }
    }

    /// A tenant is told only of tokens that it computed before, or of those of a request whose prompt is `in_flight`, and of all of
    /// them if no other tenant used the prefix. A request that shares blocks of others computes the blocks after them sooner than
    /// its tenant may be told of them.
    pub(super) fn check(&self, tenant: &str, salt: u8, context: &[Token], in_flight: usize, own: u32, cached: u32) {
        let users = |blocks: usize| self.tenants.get(&(salt, context[..blocks * self.block_size].to_vec()));
        let own_blocks = own as usize / self.block_size;
        assert!(own <= cached);
        let is_own = {
            let paid = self.paid.get(&(salt, context[..own_blocks * self.block_size].to_vec()));
            own_blocks * self.block_size <= in_flight || paid.is_some_and(|users| users.contains(tenant))
        };
        assert!(is_own, "{tenant} is told of {own} tokens of others");
        let others = own == cached || users(1).is_some_and(|users| users.iter().any(|user| user != tenant));
        assert!(others, "{tenant} is told of {own} of its {cached} cached tokens");
    }
}
