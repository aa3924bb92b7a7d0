//! Runs requests through one or more simulated engines.

use crate::fleet::Fleet;
use crate::job::Job;
use crate::machine::Machine;
use crate::report::Report;
use chairlift_core::{Config, ConfigError, Router, RouterRequest, Routing};

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
    let mut fleet = Fleet::new(config, machine, replicas.max(1))?;
    let mut router = Router::new(routing, replicas.max(1) * config.usable_blocks() as usize);
    for job in jobs {
        fleet.advance(job.time);
        let prompt_tokens = job.request.prompt.len() as u32;
        let request = RouterRequest { prompt_tokens, names: &job.names, name_block: job.name_block, session: None };
        let to = router.choose(&fleet.views(), &request).index;
        fleet.arrive(to, job);
    }
    Ok(fleet.finish())
}
