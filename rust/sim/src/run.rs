//! Requests, in the order of their coming, through one engine or several.

use crate::replica::Replica;
use crate::{Job, Report, StepTime};
use chairlift_core::{Config, ConfigError};
use std::collections::HashMap;

/// What steps take.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The time of a step.
    pub step: StepTime,
    /// The time to copy a block to the host pool, or back, in nanoseconds.
    pub swap_ns_per_block: u32,
}

/// Who gets a request where there are several engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// Each in turn.
    #[default]
    RoundRobin,
    /// Who has the fewest requests (join the shortest queue).
    LeastLoaded,
    /// Who was sent the longest beginning of its prompt last, if that is half
    /// of it at least and does not unbalance the load; else the least loaded
    /// (`SGLang`'s cache-aware router, Zheng et al., 2024).
    PrefixAware,
}

impl Routing {
    /// Every way, by its name.
    pub const NAMES: [(&'static str, Self); 3] =
        [("round-robin", Self::RoundRobin), ("least-loaded", Self::LeastLoaded), ("prefix-aware", Self::PrefixAware)];
}

/// Requests by which an engine may be ahead of the least loaded and still get one for its cached prefix.
const IMBALANCE: usize = 32;

/// Runs `jobs`, in the order of their times, until all have ended.
pub fn simulate(config: Config, jobs: impl IntoIterator<Item = Job>, machine: &Machine) -> Result<Report, ConfigError> {
    let mut reports = simulate_fleet(config, jobs, machine, 1, Routing::RoundRobin)?;
    Ok(reports.pop().expect("there was one"))
}

/// As [`simulate`], with so many engines alike, at least one; a report for
/// each. Siblings are for one engine only: elsewhere their parents may be.
pub fn simulate_fleet(
    config: Config,
    jobs: impl IntoIterator<Item = Job>,
    machine: &Machine,
    replicas: usize,
    routing: Routing,
) -> Result<Vec<Report>, ConfigError> {
    let mut fleet = (0..replicas.max(1)).map(|_| Replica::new(config, machine)).collect::<Result<Vec<_>, _>>()?;
    // No more names than the engines' caches have blocks: what was sent before those is not cached any more.
    let mut router = Router { routing, next: 0, sent: Recent::new(fleet.len() * config.usable_blocks() as usize) };
    for job in jobs {
        for replica in &mut fleet {
            replica.advance(job.time);
        }
        let to = router.choose(&fleet, &job);
        fleet[to].arrive(job);
    }
    Ok(fleet.into_iter().map(Replica::finish).collect())
}

struct Router {
    routing: Routing,
    next: usize,
    sent: Recent,
}

/// Which engine was sent a block last, by the block's name: the latest `limit` names at least, and twice as many at most.
struct Recent {
    limit: usize,
    new: HashMap<u64, usize>,
    old: HashMap<u64, usize>,
}

impl Recent {
    fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), new: HashMap::new(), old: HashMap::new() }
    }

    fn get(&self, name: u64) -> Option<usize> {
        self.new.get(&name).or_else(|| self.old.get(&name)).copied()
    }

    fn insert(&mut self, name: u64, engine: usize) {
        if self.new.len() == self.limit && !self.new.contains_key(&name) {
            self.old = std::mem::take(&mut self.new);
        }
        self.new.insert(name, engine);
    }
}

impl Router {
    fn choose(&mut self, fleet: &[Replica<'_>], job: &Job) -> usize {
        let least = || (0..fleet.len()).min_by_key(|&at| fleet[at].load()).expect("one at least");
        match self.routing {
            Routing::RoundRobin => {
                self.next += 1;
                (self.next - 1) % fleet.len()
            }
            Routing::LeastLoaded => least(),
            Routing::PrefixAware => {
                let least = least();
                let known = job.names.iter().enumerate().rev().find_map(|(at, &name)| Some((at, self.sent.get(name)?)));
                let holder = known.filter(|(at, _)| 2 * (at + 1) >= job.names.len()).map(|(_, engine)| engine);
                let to = holder.filter(|&at| fleet[at].load() <= fleet[least].load() + IMBALANCE).unwrap_or(least);
                job.names.iter().for_each(|&name| self.sent.insert(name, to));
                to
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_router_remembers_the_latest_names_and_no_more_than_twice_its_limit() {
        let mut sent = Recent::new(100);
        for name in 0..10_000 {
            sent.insert(name, name as usize % 3);
            assert!(sent.new.len() + sent.old.len() <= 200);
            assert_eq!(sent.get(name.saturating_sub(99)), Some(name.saturating_sub(99) as usize % 3));
        }
        assert_eq!(sent.get(0), None);
        sent.insert(9_990, 7);
        assert_eq!(sent.get(9_990), Some(7), "the latest counts");
    }
}
