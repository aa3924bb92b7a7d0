//! Looks up cached prefixes, and lets requests wait for prefixes that running prompts compute.

use super::Scheduler;
use crate::memory::Cached;
use crate::policy::CacheUse;
use crate::request::SeqId;
use crate::sequence::{AwaitedBlock, Need, Sequence};

impl Scheduler {
    /// Finds the cached blocks that a sequence can share. Returns an error if a running prompt is about to extend them.
    pub(super) fn find_cached(&mut self, id: SeqId, step: u64) -> Result<Cached, Need> {
        if self.is_being_computed(id) {
            return Err(Need::Prefix);
        }
        let seq = &self.seqs[id];
        let known = seq.blocks.cached_len();
        let continues = seq.request().continues.map(|continues| (continues.held, continues.tokens.min(seq.len() - 1)));
        let shares = |parent: &Sequence| parent.is_decoding() && !seq.has_started();
        let parent = seq.parent().filter(|&parent| self.seqs.get(parent).is_some_and(shares));
        let cached = if let Some([seq, parent]) = parent.and_then(|parent| self.seqs.get_disjoint_mut([id, parent])) {
            let (blocks, tokens) = seq.blocks_and_tokens();
            self.kv.find(blocks, tokens, Some(&parent.blocks), step)
        } else {
            let held = continues.and_then(|(held, known)| Some((self.held.get(held)?, known)));
            let (blocks, tokens) = self.seqs[id].blocks_and_tokens();
            match held {
                Some((held, known)) => self.kv.find_held(blocks, tokens, &held.blocks, held.computed.min(known), step),
                None => self.kv.find(blocks, tokens, None, step),
            }
        };
        // Some blocks found earlier may have been evicted.
        if self.seqs[id].blocks.cached_len() < known && self.is_being_computed(id) {
            self.kv.discard(cached);
            return Err(Need::Prefix);
        }
        Ok(cached)
    }

    /// Whether a running prompt will cache the block that `id` needs next. The sequence then waits instead of computing
    /// the block twice. Under the prefix policy the answer is kept until all blocks that both have in common are computed.
    pub(super) fn is_being_computed(&mut self, id: SeqId) -> bool {
        if self.rules.orders_prompts || !self.config.enable_prefix_caching {
            return false;
        }
        let seq = &self.seqs[id];
        if let Some(AwaitedBlock { block, computed_by: Some(other) }) = seq.queue_entry.awaited()
            && self.seqs.get(other).is_some_and(|other| other.computes(block))
        {
            return true;
        }
        let (own, followed) = (seq.blocks.cached_len(), self.rules.cache == CacheUse::Followed);
        let same = self.running.prompts().iter().find_map(|&other| {
            // A prompt of a less urgent tier may wait for long, so others do not wait for it.
            let running = self.seqs.get(other).filter(|running| running.request().tier <= seq.request().tier)?;
            let next = running.blocks.cached_len();
            let name = seq.blocks.names().get(next)?;
            let same = next >= own && running.computes(next) && running.blocks.names().get(next)? == name;
            // The prefix policy has looked the block up, and serves others meanwhile. Elsewhere a stalled prompt holds nobody up.
            let waits = same && (followed || !running.is_stalled() && !self.kv.is_named(*name));
            waits.then_some((other, next))
        });
        let Some((other, next)) = same else { return false };
        if !followed && !self.kv.has_states() {
            return true;
        }
        let common = next + common_len(&seq.blocks.names()[next..], &self.seqs[other].blocks.names()[next..]);
        if self.kv.has_states() {
            // The sequence can share the blocks that both have in common only with the state after them.
            let whole = (seq.len() - 1) / self.config.block_size;
            self.seqs[other].blocks.wants_state((common as u32).min(whole) * self.config.block_size);
        }
        if followed {
            let seq = &mut self.seqs[id];
            self.waiting.await_nothing(seq);
            self.waiting.await_block(seq, id, common - 1, Some(other));
        }
        true
    }
}

/// Length of the common prefix of two lists whose first names are equal. A name covers its block and all blocks before
/// it, so all names after the first difference differ.
fn common_len<T: PartialEq>(ours: &[T], theirs: &[T]) -> usize {
    let (mut low, mut high) = (1, ours.len().min(theirs.len()));
    while low < high {
        let middle = low.midpoint(high);
        (low, high) = if ours[middle] == theirs[middle] { (middle + 1, high) } else { (low, middle) };
    }
    low
}
