//! Plans what a step does with recurrent states.

use super::Scheduler;
use crate::step::{StateSave, StepPlan};

impl Scheduler {
    /// Adds the slots of the chunks' states, and the states that the chunks save, to a plan of a model that has states. Called when the
    /// plan is complete otherwise, so that all sequences have their slots.
    pub(super) fn plan_states(&mut self, plan: &mut StepPlan) {
        if self.config.state_slots > 0 {
            self.kv.settle_states();
            for (chunk, index) in plan.chunks.iter().zip(0..) {
                let seq = &mut self.seqs[chunk.seq];
                plan.states.slots.push(seq.blocks.state_slot().expect("it runs"));
                let answer = seq.spec().prompt_len;
                let saves = &mut plan.states.saves;
                if let Some(to) = seq.blocks.undo_slot().filter(|_| chunk.drafted > 0) {
                    saves.push(StateSave { chunk: index, position: chunk.start + chunk.len - chunk.drafted, to });
                }
                self.kv.save_states(&mut seq.blocks, (chunk.start, chunk.start + chunk.len), answer, plan.step, |position, to| {
                    saves.push(StateSave { chunk: index, position, to });
                });
            }
        }
    }
}
