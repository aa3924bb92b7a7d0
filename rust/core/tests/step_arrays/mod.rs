//! The arrays of a step, for the benchmark too.

use chairlift_core::{Config, Lens, Scheduler, StepBuffers, StepPlan};
use std::cell::Cell;

/// The arrays that steps are written to, without a copy of the changes of block tables.
pub(crate) struct StepArrays([Vec<i32>; 13]);

impl StepArrays {
    pub(crate) fn new(config: &Config) -> Self {
        let (tokens, seqs, states) = (config.max_num_batched_tokens as usize, config.max_num_seqs as usize, config.state_slots as usize);
        let tables = seqs * config.max_blocks_per_seq() as usize;
        let lens = [tokens, tokens, tokens, seqs + 1, seqs, seqs, tokens, tokens, 2 * seqs, tables, seqs, 2 * seqs, 3 * states];
        Self(lens.map(|len| vec![0; len]))
    }

    /// Writes a step.
    pub(crate) fn fill(&mut self, scheduler: &Scheduler, plan: &StepPlan) -> Lens {
        let mut arrays = self.0.iter_mut();
        let mut next = || Cell::from_mut(arrays.next().expect("an array for each field").as_mut_slice()).as_slice_of_cells();
        let buffers = StepBuffers {
            input_ids: next(),
            positions: next(),
            slot_mapping: next(),
            query_starts: next(),
            context_lens: next(),
            batch_slots: next(),
            sample_at: next(),
            sample_slots: next(),
            copies: next(),
            block_tables: next(),
            table_writes: &[],
            state_slots: next(),
            state_copies: next(),
            state_saves: next(),
            max_blocks: scheduler.config().max_blocks_per_seq() as usize,
        };
        plan.fill(scheduler, &buffers)
    }
}
