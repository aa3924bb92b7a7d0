//! The simulated device.

use crate::step_time::StepTime;

/// Durations on the simulated device.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Duration of a step.
    pub step: StepTime,
    /// Nanoseconds to copy a block to the host pool or back.
    pub swap_ns_per_block: u32,
}
