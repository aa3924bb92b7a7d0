//! Plans what a step does with recurrent states.

use super::Scheduler;
use crate::step::StepPlan;

impl Scheduler {
    /// Adds the slots of the chunks' states to a plan, in a model that has states.
    pub(super) fn plan_states(&mut self, plan: &mut StepPlan) {
        if self.config.state_slots > 0 {
            let slots = plan.chunks.iter().map(|chunk| self.seqs[chunk.seq].blocks.state().expect("it runs"));
            plan.states.slots.extend(slots);
        }
    }
}
