//! The simulated device.

use crate::step_time::StepTime;

/// Durations on the simulated device, and what its engine drafts. The duration of a swap is in the scheduler's configuration.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Duration of a step.
    pub step: StepTime,
    /// Nanoseconds to read a block from storage that has all contexts, such as a disk; 0 without storage.
    pub read_ns_per_block: u32,
    /// Maximum number of tokens of recorded drafts that a sequence proposes in a step; 0 for none.
    pub draft_tokens: usize,
}

impl Machine {
    /// A machine without storage, whose engine drafts nothing.
    pub fn new(step: StepTime) -> Self {
        Self { step, read_ns_per_block: 0, draft_tokens: 0 }
    }
}
