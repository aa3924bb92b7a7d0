//! The very scheduler that serves, in virtual time: steps take what a
//! [`StepTime`] says, and nothing is computed.

mod histogram;
mod job;
mod machine;
mod recorded;
mod replica;
mod report;
mod run;
mod service;
mod step_time;
mod utilization;
mod what_if;

pub use histogram::Histogram;
pub use job::{Job, RequestSpec, Workload};
pub use machine::Machine;
pub use recorded::recorded;
pub use report::{Report, percentile};
pub use run::{simulate, simulate_fleet};
pub use service::Service;
pub use step_time::StepTime;
pub use utilization::{Sample, Sums, Utilization};
pub use what_if::jobs;
