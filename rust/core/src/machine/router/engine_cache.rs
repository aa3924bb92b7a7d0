//! What a router knows of an engine's prefix cache.

use crate::memory::{BlockHash, CacheChanges};
use rustc_hash::{FxHashMap, FxHashSet};

/// The blocks after which an engine can begin, by its reports, and those of the prompts that it was sent and has not computed.
#[derive(Debug, Default)]
pub(super) struct EngineCache {
    cached: FxHashSet<BlockHash>,
    /// Blocks of prompts that are not computed, with the number of these prompts.
    coming: FxHashMap<BlockHash, u32>,
}

impl EngineCache {
    /// Number of leading blocks of a prompt that the engine has, or will have before it computes the prompt. With recurrent states it
    /// reports only the blocks after which one is saved, and has all blocks before.
    pub(super) fn prefix(&self, names: &[BlockHash], has_states: bool) -> usize {
        let has = |name: &BlockHash| self.cached.contains(name) || self.coming.contains_key(name);
        if has_states { names.iter().rposition(has).map_or(0, |last| last + 1) } else { names.iter().take_while(|name| has(name)).count() }
    }

    /// Takes a report of the engine.
    pub(super) fn change(&mut self, changes: &CacheChanges) {
        for name in &changes.dropped {
            self.cached.remove(name);
        }
        self.cached.extend(&changes.added);
    }

    /// Expects the blocks of a prompt that the engine is sent.
    pub(super) fn expect(&mut self, names: &[BlockHash]) {
        for &name in names {
            *self.coming.entry(name).or_default() += 1;
        }
    }

    /// Expects the blocks of a prompt no more: it is computed, or has ended.
    pub(super) fn settle(&mut self, names: &[BlockHash]) {
        for name in names {
            if let Some(prompts) = self.coming.get_mut(name) {
                *prompts -= 1;
                if *prompts == 0 {
                    self.coming.remove(name);
                }
            }
        }
    }
}
