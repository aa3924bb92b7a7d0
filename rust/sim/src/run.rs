//! Runs requests through one or more simulated engines.

use crate::fleet::Fleet;
use crate::goes_on::GoesOn;
use crate::job::Job;
use crate::machine::Machine;
use crate::replica::Replica;
use crate::report::Report;
use crate::what_if::inputs;
use chairlift_core::{Config, ConfigError, ParsedJournal, Replayed, Routing, Time};

/// Simulates `jobs`, given in order of arrival, until all have ended.
pub fn simulate(config: Config, jobs: impl IntoIterator<Item = Job>, machine: &Machine) -> Result<Report, ConfigError> {
    let mut reports = simulate_fleet(config, jobs, machine, 1, Routing::RoundRobin, || true)?;
    Ok(reports.pop().expect("there was one"))
}

/// Like [`simulate`], with several equal engines (at least one). Returns a report for each. Under policies with tenants the
/// engines tell each other their tenants' service. Forks need a single engine, because a parent may be on another engine. Asks `goes_on`
/// now and then whether to go on.
pub fn simulate_fleet(
    config: Config,
    jobs: impl IntoIterator<Item = Job>,
    machine: &Machine,
    replicas: usize,
    routing: Routing,
    goes_on: impl FnMut() -> bool,
) -> Result<Vec<Report>, ConfigError> {
    let mut fleet = Fleet::new(config, machine, replicas.max(1), routing)?;
    let mut goes_on = GoesOn::new(goes_on);
    for job in jobs {
        if !goes_on.ask() {
            break;
        }
        fleet.advance(job.time, &mut goes_on);
        fleet.route(job);
    }
    fleet.advance(Time::MAX, &mut goes_on);
    Ok(fleet.into_reports())
}

/// Simulates what a journal has in other circumstances, taken from its [replay](ParsedJournal::replay): its requests, and what callers said
/// of their sessions. Asks `goes_on` now and then whether to go on.
pub fn what_if(
    config: Config,
    journal: &ParsedJournal,
    replayed: &Replayed,
    machine: &Machine,
    goes_on: impl FnMut() -> bool,
) -> Result<Report, ConfigError> {
    let mut engine = Replica::new(config, machine)?;
    let mut goes_on = GoesOn::new(goes_on);
    for (time, input) in inputs(journal, replayed) {
        engine.advance(time, &mut goes_on);
        engine.enter(input, time);
    }
    engine.advance(Time::MAX, &mut goes_on);
    Ok(engine.take_report())
}
