//! Simulation of the scheduler in virtual time. The scheduler is the same code that serves. Step durations come from a
//! [`StepTime`], and no model runs.

mod drafts;
mod fleet;
mod goes_on;
mod histogram;
mod job;
mod live;
mod machine;
mod models;
mod random;
mod recorded;
mod replica;
mod report;
mod run;
mod service;
mod session;
mod sessions;
mod shadow;
mod step_time;
mod storage;
mod utilization;
mod what_if;

pub use histogram::Histogram;
pub use job::{Job, RequestSpec, Workload};
pub use machine::Machine;
pub use models::{SharedModel, simulate_models};
pub use recorded::recorded;
pub use report::{Report, percentile};
pub use run::{simulate, simulate_fleet, what_if};
pub use service::Service;
pub use session::{Session, Turn};
pub use sessions::{ClosedLoop, SessionSeen, SessionsReport, simulate_sessions};
pub use shadow::{Counts, Recorded, Shadow};
pub use step_time::StepTime;
pub use utilization::{Sample, Sums, Utilization};
pub use what_if::{jobs, recorded_workload};
