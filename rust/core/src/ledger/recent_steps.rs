//! The latest steps, recorded for snapshots.

use crate::request::Time;
use serde::{Serialize, Serializer};
use std::collections::VecDeque;

/// Maximum number of steps kept for the next snapshot.
const MAX_STEPS: usize = 256;
/// Microseconds after a snapshot in which steps are recorded for the next one.
const WATCHED: Time = 3_000_000;

/// A planned step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StepSeen {
    /// Number of steps planned before this one.
    pub step: u64,
    /// When the step was planned.
    #[serde(rename = "planned_us")]
    pub planned: Time,
    /// One byte per slot: `d` decodes, `p` computes its prompt, `r` recomputes lost tokens, `-` is held but has no
    /// token in this step, and a space is free.
    #[serde(serialize_with = "text")]
    pub slots: Vec<u8>,
    /// Tokens in the pass.
    pub tokens: u32,
    /// Waiting sequences.
    pub waiting: usize,
    /// Sequences admitted in this step: slot and tag.
    pub admitted: Vec<(u32, u64)>,
    /// Tags of the sequences preempted for this step.
    pub preempted: Vec<u64>,
}

fn text<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&bytes.escape_ascii())
}

/// The steps since the last snapshot. Steps are recorded only while snapshots are taken, because recording costs
/// O(slots) per step.
#[derive(Debug, Default)]
pub(crate) struct RecentSteps {
    until: Time,
    steps: VecDeque<StepSeen>,
}

impl RecentSteps {
    /// Returns the recorded steps and keeps recording for some seconds.
    pub(crate) fn take(&mut self, now: Time) -> Vec<StepSeen> {
        self.until = now + WATCHED;
        self.steps.drain(..).collect()
    }

    /// Whether a step planned now must be recorded.
    pub(crate) fn wants(&mut self, now: Time) -> bool {
        let wanted = now < self.until;
        if !wanted {
            self.steps.clear();
        }
        wanted
    }

    /// Records a step.
    pub(crate) fn note(&mut self, step: StepSeen) {
        if self.steps.len() == MAX_STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back(step);
    }
}
