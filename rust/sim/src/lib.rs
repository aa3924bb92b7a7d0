//! The very scheduler that serves, in virtual time: steps take what a
//! [`StepModel`] says, and nothing is computed.

mod report;
mod run;
mod what_if;

pub use report::{Report, percentile};
pub use run::{Job, Machine, simulate};
pub use what_if::jobs;
