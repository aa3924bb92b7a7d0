//! Plans the next tokens of decoding sequences.

use super::Scheduler;
use crate::request::SeqId;
use crate::step::{StepPlan, WHOLE_TABLE};

impl Scheduler {
    /// Plans the next token of each decoding sequence, of the background only as far as it has room, and drops sequences
    /// that have ended. `spare` blocks are free beyond the need of these tokens.
    pub(super) fn plan_decodes(&mut self, plan: &mut StepPlan, mut spare: usize) {
        self.running.clear_prompts();
        let (mut kept, mut fast, mut context) = (0, 0, 0);
        plan.background = self.background_room();
        let mut limited = self.running.take_limited();
        for at in 0..self.running.len() {
            let id = self.running.at(at);
            let Some(seq) = self.seqs.get_mut(id) else { continue };
            let Some(slot) = seq.slot() else { continue };
            self.running.keep(kept, id);
            kept += 1;
            if seq.has_nothing_to_plan() {
                continue;
            }
            if plan.background.is_some() && seq.is_background() && seq.decodes_next() {
                limited.push(id);
                continue;
            }
            if seq.is_on_fast_path() {
                plan.tokens_left -= 1;
                fast += 1;
                context += u64::from(seq.computed()) + 1;
                plan.chunks.push(seq.fast_chunk(id, slot));
            } else if !seq.decodes_next() {
                self.running.add_prompt(id);
            } else {
                let later = self.running.len() - at - 1 + limited.len();
                self.plan_decode(id, plan, &mut spare, later as u32);
            }
        }
        self.running.truncate(kept);
        plan.load.decode_seqs += fast;
        plan.load.context_tokens += context;
        plan.foreground = plan.load;
        self.plan_limited(&mut limited, plan, &mut spare);
        self.running.give_limited(limited);
        self.accounts.counters.computed_tokens += u64::from(plan.load.decode_seqs);
    }

    /// Plans the next tokens of decoding background sequences as far as there is room. The one that has waited longest for a token
    /// comes first, so that all progress.
    fn plan_limited(&mut self, limited: &mut [SeqId], plan: &mut StepPlan, spare: &mut usize) {
        limited.sort_by_key(|&id| self.seqs[id].decoded_in());
        for (at, &id) in limited.iter().enumerate() {
            let seq = &mut self.seqs[id];
            if plan.background.as_mut().is_some_and(|room| room.take_decode(seq.decode_rows(), seq.computed())) {
                seq.note_decode(self.steps.plan_number(), at);
                self.plan_decode(id, plan, spare, (limited.len() - at - 1) as u32);
            } else {
                seq.use_draft(0);
                plan.leaves_out_background = true;
            }
        }
    }

    /// Plans a sequence's last token, which may need or complete a block, and its drafted tokens. Before them come the accepted tokens of
    /// a draft after which the sequence got back an earlier state. Drafted and accepted tokens only use spare tokens and blocks. They never
    /// preempt a sequence or take the tokens of the `later` sequences that are still to be planned.
    fn plan_decode(&mut self, id: SeqId, plan: &mut StepPlan, spare: &mut usize, later: u32) {
        self.resume(id);
        let seq = &mut self.seqs[id];
        let block_size = self.config.block_size;
        let table_from = seq.blocks.held();
        let blocks = |tokens: u32| (tokens.div_ceil(block_size) as usize).max(table_from);
        let room = (plan.tokens_left - 1).saturating_sub(later);
        let again = (seq.uncomputed() - 1).min(room);
        let last = seq.computed() + 1 + again;
        let wanted = (seq.draft().len() as u32).min(room - again);
        let extra = blocks(last + wanted) - blocks(last);
        let drafted = if extra <= *spare && self.kv.can_keep_state(self.config.max_num_seqs) { wanted } else { 0 };
        if drafted > 0 {
            *spare -= extra;
            self.kv.begin_draft(&mut seq.blocks);
        }
        seq.use_draft(drafted);
        let len = 1 + again + drafted;
        seq.blocks.pay(len);
        self.kv.grow(&mut seq.blocks, blocks(last + drafted));
        plan.tokens_left -= len;
        plan.load.decode_seqs += 1;
        plan.load.drafted_tokens += again + drafted;
        plan.load.context_tokens += u64::from(last + drafted);
        let counters = &mut self.accounts.counters;
        counters.computed_tokens += u64::from(again + drafted);
        counters.computed_prompt_tokens += u64::from(last <= seq.spec().prompt_len);
        let grew = seq.blocks.held() > table_from;
        let from = if grew || len > 1 { table_from as u32 } else { WHOLE_TABLE };
        plan.chunks.push(seq.next_chunk(id, len, from, block_size));
        if grew {
            seq.note_blocks(&self.accounts);
        }
        self.seal(id, plan.step);
    }
}
