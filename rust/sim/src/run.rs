//! Runs requests through one or more simulated engines.

use crate::fleet::Fleet;
use crate::job::Job;
use crate::machine::Machine;
use crate::report::Report;
use chairlift_core::{Config, ConfigError, Routing};

/// Simulates `jobs`, given in order of arrival, until all have ended.
pub fn simulate(config: Config, jobs: impl IntoIterator<Item = Job>, machine: &Machine) -> Result<Report, ConfigError> {
    let mut reports = simulate_fleet(config, jobs, machine, 1, Routing::RoundRobin)?;
    Ok(reports.pop().expect("there was one"))
}

/// Like [`simulate`], with several equal engines (at least one). Returns a report for each. Under policies with tenants the
/// engines tell each other their tenants' service. Forks need a single engine, because a parent may be on another engine.
pub fn simulate_fleet(
    config: Config,
    jobs: impl IntoIterator<Item = Job>,
    machine: &Machine,
    replicas: usize,
    routing: Routing,
) -> Result<Vec<Report>, ConfigError> {
    let mut fleet = Fleet::new(config, machine, replicas.max(1), routing)?;
    for job in jobs {
        fleet.advance(job.time);
        fleet.route(job);
    }
    Ok(fleet.finish())
}
