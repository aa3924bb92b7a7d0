//! The newest steps, for those who look at them.

use crate::request::Time;
use std::collections::VecDeque;

/// Steps that are kept for the next snapshot.
const MAX_STEPS: usize = 256;
/// How long after a snapshot steps are noted for the next one.
const WATCHED: Time = 3_000_000;

/// A step that was planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepSeen {
    /// Steps planned before it.
    pub step: u64,
    /// When.
    pub planned: Time,
    /// One byte a slot: `d` decodes, `p` computes its prompt, `r` computes again what it had lost, `-` is held
    /// but has no token in this step, and a space is free.
    pub slots: Vec<u8>,
    /// Tokens in the pass.
    pub tokens: u32,
    /// Sequences that wait.
    pub waiting: usize,
    /// Who took a slot in it: slot and tag.
    pub admitted: Vec<(u32, u64)>,
    /// Who lost a slot for it, by tag.
    pub preempted: Vec<u64>,
}

/// The steps since the last snapshot. They are noted only while somebody takes snapshots: that costs O(slots) a step.
#[derive(Debug, Default)]
pub(crate) struct RecentSteps {
    until: Time,
    steps: VecDeque<StepSeen>,
}

impl RecentSteps {
    /// Gives what was noted, and notes steps for some seconds from now on.
    pub(crate) fn take(&mut self, now: Time) -> Vec<StepSeen> {
        self.until = now + WATCHED;
        self.steps.drain(..).collect()
    }

    /// Whether a step that is planned now is to be noted.
    pub(crate) fn wants(&mut self, now: Time) -> bool {
        let wanted = now < self.until;
        if !wanted {
            self.steps.clear();
        }
        wanted
    }

    /// Notes a step.
    pub(crate) fn note(&mut self, step: StepSeen) {
        if self.steps.len() == MAX_STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back(step);
    }
}
