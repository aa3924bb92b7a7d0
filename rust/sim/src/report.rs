//! What came of a simulation.

use crate::Histogram;
use chairlift_core::{FinishReason, Ledger, Stats, Time};

/// What came of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The accounts of the requests that ended, in that order.
    pub ended: Vec<Ledger>,
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
    pub timeline: Timeline,
}

impl Report {
    /// Microseconds to the first token of the requests that `which` picks and that got one, sorted.
    pub fn ttft(&self, which: impl Fn(&Ledger) -> bool) -> Vec<Time> {
        let picked = self.ended.iter().filter(|ledger| which(ledger));
        let mut times: Vec<Time> = picked.filter_map(|ledger| Some(ledger.first_token? - ledger.arrived)).collect();
        times.sort_unstable();
        times
    }

    /// Requests that came to their own end.
    pub fn completed(&self) -> usize {
        self.ended.iter().filter(|ledger| matches!(ledger.finish, Some(FinishReason::Stop | FinishReason::Length))).count()
    }
}

/// The value below or at which so many percent of `sorted` lie; 0 of nothing.
pub fn percentile(sorted: &[Time], percent: usize) -> Time {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

/// How full the machine was at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When, in microseconds.
    pub time: Time,
    /// Sequences in the step that began then; 0 if none did.
    pub batch: usize,
    /// Its tokens.
    pub tokens: usize,
    /// Sequences with a row.
    pub running: usize,
    /// Sequences without.
    pub waiting: usize,
    /// Blocks of the KV cache that sequences hold.
    pub blocks: usize,
}

/// The most samples that are kept.
const MOST: usize = 4096;

/// Samples over time: one in a hundredth of a second, and half as many each
/// time that there are too many.
#[derive(Clone, Debug)]
pub struct Timeline {
    samples: Vec<Sample>,
    every: Time,
    due: Time,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { samples: Vec::new(), every: 10_000, due: 0 }
    }
}

impl Timeline {
    /// The samples, by time.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// Whether one is due; the first of a pause always is.
    pub(crate) fn wants(&self, time: Time, busy: bool) -> bool {
        time >= self.due || (!busy && self.samples.last().is_some_and(|last| last.batch > 0))
    }

    pub(crate) fn add(&mut self, sample: Sample) {
        if self.samples.len() == MOST {
            self.every *= 2;
            let mut keep = false;
            self.samples.retain(|_| {
                keep = !keep;
                keep
            });
        }
        self.due = sample.time + self.every;
        self.samples.push(sample);
    }
}
