//! Runs requests through one or more simulated engines.

use crate::job::Job;
use crate::machine::Machine;
use crate::replica::{Numbered, Replica};
use crate::report::Report;
use chairlift_core::{Config, ConfigError, Router, RouterRequest, Routing};

/// Simulates `jobs`, given in order of arrival, until all have ended.
pub fn simulate(config: Config, jobs: impl IntoIterator<Item = Job>, machine: &Machine) -> Result<Report, ConfigError> {
    let mut reports = simulate_fleet(config, jobs, machine, 1, Routing::RoundRobin)?;
    Ok(reports.pop().expect("there was one"))
}

/// Like [`simulate`], with several equal engines (at least one). Returns a report for each. Forks need a single engine,
/// because a parent may be on another engine.
pub fn simulate_fleet(
    config: Config,
    jobs: impl IntoIterator<Item = Job>,
    machine: &Machine,
    replicas: usize,
    routing: Routing,
) -> Result<Vec<Report>, ConfigError> {
    let mut fleet = (0..replicas.max(1)).map(|_| Replica::new(config, machine)).collect::<Result<Vec<_>, _>>()?;
    let mut router = Router::new(routing, fleet.len() * config.usable_blocks() as usize);
    for job in jobs {
        for replica in &mut fleet {
            replica.advance(job.time);
        }
        let prompt_tokens = job.request.prompt.len() as u32;
        let request = RouterRequest { prompt_tokens, names: &job.names, name_block: job.name_block, session: None };
        let engines: Vec<_> = (0..).zip(&fleet).map(|(number, replica)| Numbered(number, replica)).collect();
        let to = router.choose(&engines, &request).index;
        fleet[to].arrive(job);
    }
    Ok(fleet.into_iter().map(Replica::finish).collect())
}
