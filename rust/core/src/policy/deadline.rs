//! `deadline`: the least slack first within a class, and no work for requests that will miss their deadline.

use super::{CacheUse, Candidate, Grouping, Policy, Preemption, PreemptionReason, Rules};
use crate::request::Time;

/// Safety margin. A waiting request must be able to meet its deadline with its estimate multiplied by the first factor.
/// A running request is ended only if it misses its deadline even with the second factor. Without the gap, EDF under
/// overload starts requests that barely miss (the "domino effect" of earliest-deadline-first).
const TO_START: f64 = 1.25;
const TO_GO_ON: f64 = 0.75;

/// Within a class, the request that must start soonest to meet its deadline first. A request that cannot meet its
/// deadline is dropped.
#[derive(Debug)]
pub struct Deadline;

impl Policy for Deadline {
    fn name(&self) -> &'static str {
        "deadline"
    }

    fn help(&self) -> &'static str {
        "the lowest priority number, then the least slack"
    }

    fn rules(&self) -> Rules {
        Rules {
            grouping: Grouping::Classes,
            ranked: true,
            orders_prompts: true,
            cache: CacheUse::WhenQueued,
            preemption: Preemption::Free(PreemptionReason::Priority),
        }
    }

    /// Requests without a deadline come last.
    fn rank(&self, request: &Candidate) -> u64 {
        latest_start(request).unwrap_or(Time::MAX)
    }

    fn drop_at(&self, request: &Candidate) -> Option<Time> {
        latest_start(request)
    }

    fn may_preempt(&self, _waiting: &Candidate, _running: &Candidate) -> bool {
        true
    }

    fn victim_rank(&self, running: &Candidate) -> i64 {
        running.priority.into()
    }
}

/// The latest time at which a request can still meet its deadlines, by its caller's prediction. Without a prediction, only one more
/// token is certain.
fn latest_start(request: &Candidate) -> Option<Time> {
    let margin = if request.started { TO_GO_ON } else { TO_START };
    let estimate = request.estimate();
    let before = |at: Time, output: u32| {
        let work = if estimate.is_learned { estimate.time(output) } else { 0 };
        at.saturating_sub((work as f64 * margin) as Time)
    };
    let last = request.deadline.map(|at| before(at, if request.is_predicted { request.output_left() } else { 1 }));
    let first = request.ttft_deadline.map(|at| before(at, 1));
    last.into_iter().chain(first).min()
}
