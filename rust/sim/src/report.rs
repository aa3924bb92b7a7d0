//! What came of a simulation.

use crate::histogram::Histogram;
use crate::service::Service;
use crate::utilization::Utilization;
use chairlift_core::{FinishReason, Stats, Time, Timeline};

/// What came of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The accounts of the requests that ended, in that order.
    pub ended: Vec<Timeline>,
    /// For each of them, the longest time between two of its tokens.
    pub longest_gaps: Vec<Time>,
    /// Tags of those that were turned away.
    pub refused: Vec<u64>,
    /// Steps.
    pub steps: u64,
    /// Decisions: who computes how many tokens in which step.
    pub chunks: u64,
    /// The virtual time at which the last request ended.
    pub ended_at: Time,
    /// The scheduler's counters at the end.
    pub stats: Option<Stats>,
    /// Times between two tokens of a request, of all of them.
    pub gaps: Histogram,
    /// What steps took.
    pub step_times: Histogram,
    /// How full the machine was.
    pub utilization: Utilization,
    /// What each tenant was given over time.
    pub service: Service,
}

impl Report {
    /// Microseconds to the first token of the requests that `which` picks and that got one, sorted.
    pub fn ttft(&self, which: impl Fn(&Timeline) -> bool) -> Vec<Time> {
        let picked = self.ended.iter().filter(|timeline| which(timeline));
        let mut times: Vec<Time> = picked.filter_map(|timeline| Some(timeline.first_token? - timeline.arrived)).collect();
        times.sort_unstable();
        times
    }

    /// Requests that came to their own end.
    pub fn completed(&self) -> usize {
        self.ended.iter().filter(|timeline| matches!(timeline.finish, Some(FinishReason::Stop | FinishReason::Length))).count()
    }
}

/// The value below or at which so many percent of `sorted` lie; 0 of nothing.
pub fn percentile(sorted: &[Time], percent: usize) -> Time {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}
