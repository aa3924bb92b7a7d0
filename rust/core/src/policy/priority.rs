//! `priority`: lower classes strictly first.

use super::{Candidate, Grouping, Policy, Preemption, PreemptionReason, Rules};

/// Lower classes strictly first. First come, first served within a class.
#[derive(Debug)]
pub struct Priority;

impl Policy for Priority {
    fn name(&self) -> &'static str {
        "priority"
    }

    fn help(&self) -> &'static str {
        "the lowest priority number"
    }

    fn rules(&self) -> Rules {
        Rules {
            grouping: Grouping::Classes,
            orders_prompts: true,
            preemption: Preemption::Free(PreemptionReason::Priority),
            ..Rules::default()
        }
    }

    fn may_preempt(&self, _waiting: &Candidate, _running: &Candidate) -> bool {
        true
    }

    fn victim_rank(&self, running: &Candidate) -> i64 {
        running.priority.into()
    }
}
