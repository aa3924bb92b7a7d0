//! The running sequences of a step, and its results.
//!
//! This room owns the slots, the order of admission, the running classes, the sequences with special rights (aged,
//! non-preemptible), the blocks reserved for growth, and the budget of preemption.
//!
//! It may not know the queue or the blocks themselves.

mod outputs;
mod preemption_budget;
mod reservation;
mod running;

pub use outputs::{NO_TOKEN, Output, Outputs};
pub(crate) use reservation::{Growth, growth, headroom};
pub(crate) use running::Running;
