//! Evicted blocks of sessions in host memory: whether they are copied there, and how many a step reads back.

use super::Scheduler;
use crate::memory::Grant;
use crate::request::SeqId;
use crate::step::StepPlan;

impl Scheduler {
    /// Whether evicted blocks of sessions go to host memory: if it takes less time to copy a block there and back than to compute it at the
    /// start of a prompt, where it is cheapest.
    pub(super) fn keeps_on_host(&self) -> bool {
        let compute = || self.model.prefill(0.0, self.config.block_size.into());
        self.config.host_blocks > 0 && (!self.model.knows() || self.copy_time(1) < compute())
    }

    /// Microseconds to copy blocks to host memory and back.
    pub(super) fn copy_time(&self, blocks: u32) -> f64 {
        2.0 * f64::from(blocks) * f64::from(self.config.swap_ns_per_block) / 1000.0
    }

    /// Reads a part of the prefix that a waiting sequence has in host memory back into the cache. Returns whether all of it is read, or the
    /// number of free blocks required as an error.
    pub(super) fn read_back(&mut self, id: SeqId, grant: Grant, plan: &mut StepPlan) -> Result<bool, usize> {
        let seq = &self.seqs[id];
        // A fork and a sequence that continues a held one share the blocks of another sequence.
        if !self.kv.has_kept() || seq.parent().is_some() || seq.request().continues.is_some() {
            return Ok(true);
        }
        let most = self.max_reads(plan);
        let (blocks, tokens) = self.seqs[id].blocks_and_tokens();
        let waiting = &mut self.waiting;
        self.kv.read_back(blocks, tokens, (grant, most), &mut plan.swap_in, |name| waiting.block_ready(name))
    }

    /// Number of blocks that a plan may still read back: copies take at most as long as the rest of the step, so that they do not stop
    /// running sequences. A step without other work may read all.
    fn max_reads(&self, plan: &StepPlan) -> usize {
        let each = f64::from(self.config.swap_ns_per_block) / 1000.0;
        if plan.chunks.is_empty() || each == 0.0 || !self.model.knows() {
            return usize::MAX;
        }
        ((self.model.step(&plan.load) / each) as usize).max(1).saturating_sub(plan.swap_in.len())
    }
}
