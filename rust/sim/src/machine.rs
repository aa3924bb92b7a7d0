//! What a machine takes for a scheduler's decisions.

use crate::step_time::StepTime;

/// What steps take.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The time of a step.
    pub step: StepTime,
    /// The time to copy a block to the host pool, or back, in nanoseconds.
    pub swap_ns_per_block: u32,
}
