//! Writes a plan to the arrays that the model reads.

use super::Scheduler;
use crate::batch::{Chunk, Lens, StepBuffers, StepPlan, WHOLE_TABLE};
use crate::sequence::Sequence;

impl StepPlan {
    /// Writes the plan to `out`. Call it directly after [`Scheduler::plan`]. Panics if an array is too short.
    pub fn fill(&self, scheduler: &Scheduler, out: &StepBuffers<'_>) -> Lens {
        let block_size = scheduler.config().block_size;
        let mut lens = Lens { seqs: self.chunks.len(), copies: self.copies.len(), ..Lens::default() };
        assert!(lens.seqs < out.query_starts.len() && lens.seqs <= out.context_lens.len() && lens.seqs <= out.batch_slots.len());
        out.query_starts[0].set(0);
        let per_seq = out.query_starts[1..].iter().zip(out.context_lens).zip(out.batch_slots);
        for (chunk, ((end, context), slot)) in self.chunks.iter().zip(per_seq) {
            out.input_ids[lens.tokens].set(chunk.token);
            out.positions[lens.tokens].set(chunk.start as i32);
            out.slot_mapping[lens.tokens].set(chunk.kv_slot as i32);
            lens.tokens += 1;
            if chunk.table_from != WHOLE_TABLE {
                fill_rest(chunk, &scheduler.seqs[chunk.seq], block_size, &mut lens, out);
            }
            end.set(lens.tokens as i32);
            context.set((chunk.start + chunk.len) as i32);
            slot.set(chunk.slot as i32);
            if chunk.samples && chunk.drafted == 0 {
                out.sample_at[lens.samples].set(lens.tokens as i32 - 1);
                out.sample_slots[lens.samples].set(chunk.slot as i32);
                lens.samples += 1;
            } else if chunk.samples {
                for back in (0..=chunk.drafted as usize).rev() {
                    out.sample_at[lens.samples].set((lens.tokens - 1 - back) as i32);
                    out.sample_slots[lens.samples].set(chunk.slot as i32);
                    lens.samples += 1;
                }
            }
        }
        for (pair, (from, to)) in out.copies.chunks_exact(2).zip(&self.copies) {
            pair[0].set(from.0 as i32);
            pair[1].set(to.0 as i32);
        }
        lens
    }
}

/// Writes a chunk's tokens after the first, and new entries of the block table.
fn fill_rest(chunk: &Chunk, seq: &Sequence, block_size: u32, lens: &mut Lens, out: &StepBuffers<'_>) {
    let ids = seq.blocks.ids();
    for position in chunk.start + 1..chunk.start + chunk.len {
        out.input_ids[lens.tokens].set(seq.input_at(chunk.slot, position as usize));
        out.positions[lens.tokens].set(position as i32);
        out.slot_mapping[lens.tokens].set(seq.blocks.kv_slot(position, block_size) as i32);
        lens.tokens += 1;
    }
    let fresh = &ids[chunk.table_from as usize..];
    let first = chunk.slot as usize * out.max_blocks + chunk.table_from as usize;
    out.block_tables[first..][..fresh.len()].iter().zip(fresh).for_each(|(cell, id)| cell.set(id.0 as i32));
    if !out.table_writes.is_empty() {
        let pairs = &out.table_writes[2 * lens.table_writes..][..2 * fresh.len()];
        for (pair, (place, id)) in pairs.chunks_exact(2).zip((first..).zip(fresh)) {
            pair[0].set(place as i32);
            pair[1].set(id.0 as i32);
        }
        lens.table_writes += fresh.len();
    }
}
