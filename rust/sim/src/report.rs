//! The results of a simulation.

use crate::histogram::Histogram;
use crate::service::Service;
use crate::utilization::Utilization;
use chairlift_core::{FinishReason, Stats, Time, Timeline};

/// The results of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Timelines of ended requests, in the order they ended.
    pub ended: Vec<Timeline>,
    /// For each ended request, the longest gap between two tokens.
    pub longest_gaps: Vec<Time>,
    /// Tags of rejected requests, with the reasons' names.
    pub refused: Vec<(u64, &'static str)>,
    /// Number of steps.
    pub steps: u64,
    /// Number of chunks planned. A chunk is one sequence's tokens in one step.
    pub chunks: u64,
    /// The virtual time at which the last request ended.
    pub ended_at: Time,
    /// The scheduler's counters at the end.
    pub stats: Option<Stats>,
    /// Gaps between two tokens of a request, over all requests.
    pub gaps: Histogram,
    /// Durations of steps.
    pub step_times: Histogram,
    /// Utilisation over time.
    pub utilization: Utilization,
    /// Service of each tenant over time.
    pub service: Service,
}

impl Report {
    /// Sorted TTFT in microseconds of the requests that `which` selects and that generated a token.
    pub fn ttft(&self, which: impl Fn(&Timeline) -> bool) -> Vec<Time> {
        let picked = self.ended.iter().filter(|timeline| which(timeline));
        let mut times: Vec<Time> = picked.filter_map(|timeline| Some(timeline.first_token? - timeline.arrived)).collect();
        times.sort_unstable();
        times
    }

    /// Number of requests that ended by length or by a stop.
    pub fn completed(&self) -> usize {
        self.ended.iter().filter(|timeline| matches!(timeline.finish, Some(FinishReason::Stop | FinishReason::Length))).count()
    }
}

/// The smallest value of `sorted` such that `percent` percent of the values are at or below it. 0 if `sorted` is empty.
pub fn percentile(sorted: &[Time], percent: usize) -> Time {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}
