//! Writes a plan to the arrays that the model reads.

use super::Scheduler;
use crate::sequence::Sequence;
use crate::step::{Chunk, Lens, StateMoves, StepBuffers, StepPlan, WHOLE_TABLE};

impl StepPlan {
    /// Writes the plan to `out`. Call it directly after [`Scheduler::plan`]. Panics if an array is too short.
    pub fn fill(&self, scheduler: &Scheduler, out: &StepBuffers<'_>) -> Lens {
        let block_size = scheduler.config().block_size;
        let mut lens = Lens { seqs: self.chunks.len(), copies: self.copies.len(), ..Lens::default() };
        assert!(lens.seqs < out.query_starts.len() && lens.seqs <= out.context_lens.len() && lens.seqs <= out.batch_slots.len());
        out.query_starts[0].set(0);
        let decodes = self.fill_decodes(scheduler, &mut lens, out);
        let per_seq = out.query_starts[1..].iter().zip(out.context_lens).zip(out.batch_slots);
        for (chunk, ((end, context), slot)) in self.chunks.iter().zip(per_seq).skip(decodes) {
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
        self.fill_states(&mut lens, out);
        lens
    }

    /// Writes what the step does with recurrent states.
    fn fill_states(&self, lens: &mut Lens, out: &StepBuffers<'_>) {
        let StateMoves { slots, copies, saves } = &self.states;
        assert!(
            slots.len() <= out.state_slots.len() && 2 * copies.len() <= out.state_copies.len() && 3 * saves.len() <= out.state_saves.len()
        );
        out.state_slots.iter().zip(slots).for_each(|(cell, slot)| cell.set(slot.0 as i32));
        for (pair, (from, to)) in out.state_copies.chunks_exact(2).zip(copies) {
            pair[0].set(from.0 as i32);
            pair[1].set(to.0 as i32);
        }
        for (triple, save) in out.state_saves.chunks_exact(3).zip(saves) {
            triple[0].set(save.chunk as i32);
            triple[1].set(save.position as i32);
            triple[2].set(save.to.0 as i32);
        }
        (lens.state_copies, lens.state_saves) = (copies.len(), saves.len());
    }

    /// Writes the chunks before the first with a drafted or a second token. Each has one token and one sample, so their
    /// entries have the same place in all arrays. Returns their number.
    fn fill_decodes(&self, scheduler: &Scheduler, lens: &mut Lens, out: &StepBuffers<'_>) -> usize {
        let block_size = scheduler.config().block_size;
        let per_token = out.input_ids.iter().zip(out.positions).zip(out.slot_mapping);
        let per_seq = out.query_starts[1..].iter().zip(out.context_lens).zip(out.batch_slots);
        let per_sample = out.sample_at.iter().zip(out.sample_slots);
        let mut count = 0;
        for (((chunk, ((id, position), kv_slot)), ((end, context), slot)), (at, sample_slot)) in
            self.chunks.iter().zip(per_token).zip(per_seq).zip(per_sample)
        {
            if chunk.len > 1 || !chunk.samples {
                break;
            }
            id.set(chunk.token);
            position.set(chunk.start as i32);
            kv_slot.set(chunk.kv_slot as i32);
            at.set(count);
            sample_slot.set(chunk.slot as i32);
            slot.set(chunk.slot as i32);
            context.set(chunk.start as i32 + 1);
            count += 1;
            end.set(count);
            if chunk.table_from != WHOLE_TABLE {
                lens.tokens = count as usize;
                fill_rest(chunk, &scheduler.seqs[chunk.seq], block_size, lens, out);
            }
        }
        (lens.tokens, lens.samples) = (count as usize, count as usize);
        count as usize
    }
}

/// Writes a chunk's tokens after the first, and new entries of the block table.
fn fill_rest(chunk: &Chunk, seq: &Sequence, block_size: u32, lens: &mut Lens, out: &StepBuffers<'_>) {
    if chunk.len > 1 {
        fill_tokens(chunk, seq, block_size, lens, out);
    }
    let fresh = &seq.blocks.ids()[chunk.table_from as usize..];
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

/// Writes a chunk's tokens after the first.
fn fill_tokens(chunk: &Chunk, seq: &Sequence, block_size: u32, lens: &mut Lens, out: &StepBuffers<'_>) {
    let (first, end, at) = (chunk.start + 1, chunk.start + chunk.len, lens.tokens);
    lens.tokens += chunk.len as usize - 1;
    let known = seq.tokens().get(first as usize..end.min(seq.len()) as usize).unwrap_or_default();
    out.input_ids[at..lens.tokens].iter().zip(known).for_each(|(cell, &token)| cell.set(token as i32));
    // Drafted tokens, or the token that the step before samples.
    let unknown = (first as usize..end as usize).skip(known.len());
    out.input_ids[at + known.len()..lens.tokens].iter().zip(unknown).for_each(|(cell, at)| cell.set(seq.input_at(chunk.slot, at)));
    out.positions[at..lens.tokens].iter().zip(first as i32..).for_each(|(cell, position)| cell.set(position));
    let (mut position, mut cells) = (first, &out.slot_mapping[at..lens.tokens]);
    while position < end {
        let (in_block, later) = cells.split_at((block_size - position % block_size).min(end - position) as usize);
        let slots = seq.blocks.kv_slot(position, block_size) as i32..;
        in_block.iter().zip(slots).for_each(|(cell, slot)| cell.set(slot));
        position += in_block.len() as u32;
        cells = later;
    }
}
