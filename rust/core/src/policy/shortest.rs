//! `shortest`: the least remaining work first (SRPT).

use super::{CacheUse, Candidate, Policy, Preemption, PreemptionReason, Rules};

/// Least remaining work first (SRPT), by `predicted_tokens` or `max_new_tokens`.
#[derive(Debug)]
pub struct Shortest;

impl Policy for Shortest {
    fn name(&self) -> &'static str {
        "shortest"
    }

    fn help(&self) -> &'static str {
        "the least remaining work"
    }

    fn rules(&self) -> Rules {
        Rules {
            ranked: true,
            orders_prompts: true,
            cache: CacheUse::WhenQueued,
            preemption: Preemption::Free(PreemptionReason::Shortest),
            ..Rules::default()
        }
    }

    fn rank(&self, request: &Candidate) -> u64 {
        request.work_left()
    }

    /// The gain must exceed the cost: the running request has more than twice as much work left as the waiting one needs and the
    /// preemption costs.
    fn may_preempt(&self, waiting: &Candidate, running: &Candidate) -> bool {
        running.work_left() > 2 * (waiting.work_left() + running.preemption_cost())
    }

    fn victim_rank(&self, running: &Candidate) -> i64 {
        running.work_left() as i64
    }
}
