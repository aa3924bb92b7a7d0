//! Several equal engines with clocks of their own and their router. They tell each other their tenants' service.

use crate::goes_on::GoesOn;
use crate::job::Job;
use crate::machine::Machine;
use crate::replica::{Numbered, Replica};
use crate::report::Report;
use chairlift_core::{BlockHasher, Config, ConfigError, Request, Router, RouterRequest, Routing, SessionEvent, Time};
use std::collections::HashMap;
use std::sync::Arc;

/// Interval in microseconds at which each engine learns of tenants' service at the others. The server's is the same.
const EXCHANGE_INTERVAL: Time = 250_000;

pub(crate) struct Fleet {
    engines: Vec<Replica>,
    router: Router,
    /// The router's numbers of the requests whose prompts are not computed, by tag.
    coming: HashMap<u64, u64>,
    block_size: u32,
    /// Whether requests share prefixes, and there is more than one engine to choose from.
    shares_prefixes: bool,
    /// The tenants' service at the other engines, which each engine gets at the next exchange.
    external: Vec<Vec<(Arc<str>, Time)>>,
    /// When engines exchange service next. `None` if they never do.
    exchange_at: Option<Time>,
}

impl Fleet {
    pub(crate) fn new(config: Config, machine: &Machine, engines: usize, routing: Routing) -> Result<Self, ConfigError> {
        let mut engines = (0..engines).map(|_| Replica::new(config, machine)).collect::<Result<Vec<_>, _>>()?;
        let exchanges = engines.len() > 1 && config.scheduling_policy.rules().takes_turns();
        let shares_prefixes = engines.len() > 1 && config.enable_prefix_caching;
        if shares_prefixes {
            for engine in &mut engines {
                engine.scheduler().record_cache_changes();
            }
        }
        Ok(Self {
            router: Router::new(routing),
            coming: HashMap::new(),
            block_size: config.block_size,
            shares_prefixes,
            external: vec![Vec::new(); engines.len()],
            engines,
            exchange_at: exchanges.then_some(EXCHANGE_INTERVAL),
        })
    }

    /// Adds a request to the engine that the router chooses. Call `advance` to its arrival time first.
    pub(crate) fn route(&mut self, job: Job) {
        for (number, engine) in (0..).zip(&mut self.engines) {
            self.router.cache_changed(number, &engine.scheduler().take_cache_changes());
            for tag in engine.take_computed() {
                if let Some(request) = self.coming.remove(&tag) {
                    self.router.computed(request);
                }
            }
        }
        // A scheduler without a key of its own names blocks like this.
        let hasher = BlockHasher::new(0);
        let Request { tag, prompt, scope, .. } = &job.request;
        let names = if self.shares_prefixes { hasher.names(scope, prompt, self.block_size as usize) } else { Vec::new() };
        let request =
            RouterRequest { prompt_tokens: prompt.len() as u32, names: &names, block_size: self.block_size, session: job.session };
        let views: Vec<_> = (0..).zip(&self.engines).map(|(number, engine)| Numbered(number, engine)).collect();
        let chosen = self.router.choose(&views, &request);
        self.coming.insert(*tag, chosen.number);
        self.arrive(chosen.index, job);
    }

    /// Tells all engines what a tenant says of one of its sessions.
    pub(crate) fn note_session(&mut self, tenant: &str, session: &Arc<str>, event: SessionEvent, now: Time) {
        for engine in &mut self.engines {
            engine.scheduler().note_session(tenant, session, event, now);
        }
    }

    /// Adds a request to an engine. Call `advance` to its arrival time first.
    pub(crate) fn arrive(&mut self, engine: usize, job: Job) {
        self.engines[engine].arrive(job);
    }

    /// Runs until `until`, until no engine has work, or while `goes_on`. Steps in flight at `until` are completed.
    pub(crate) fn advance(&mut self, until: Time, goes_on: &mut GoesOn<'_>) {
        let mut can_go_on = true;
        while let Some(at) = self.exchange_at.filter(|&at| can_go_on && at < until) {
            can_go_on = self.advance_each(at, goes_on);
            self.exchange();
            self.exchange_at = Some(at + EXCHANGE_INTERVAL);
        }
        self.advance_each(until, goes_on);
        self.exchange_at = self.exchange_at.map(|at| at.max(until));
    }

    /// Runs a step of the engine whose clock is the earliest, or lets it wait for at most until `until`. Returns false if no engine has
    /// work before.
    pub(crate) fn advance_a_step(&mut self, until: Time) -> bool {
        let working = self.engines.iter_mut().filter(|engine| engine.has_work(until));
        let Some(engine) = working.min_by_key(|engine| engine.now()) else { return false };
        engine.advance_a_step(until);
        let now = engine.now();
        if let Some(at) = self.exchange_at.filter(|&at| at <= now) {
            self.exchange();
            self.exchange_at = Some(at.max(now) + EXCHANGE_INTERVAL);
        }
        true
    }

    /// The engines' results so far.
    pub(crate) fn reports(&self) -> impl Iterator<Item = &Report> {
        self.engines.iter().map(Replica::report)
    }

    /// The engines' results, whatever is left to do.
    pub(crate) fn into_reports(mut self) -> Vec<Report> {
        self.engines.iter_mut().map(Replica::take_report).collect()
    }

    /// Returns whether an engine can go on without a new request.
    fn advance_each(&mut self, until: Time, goes_on: &mut GoesOn<'_>) -> bool {
        self.engines.iter_mut().fold(false, |can_go_on, engine| engine.advance(until, goes_on) | can_go_on)
    }

    /// Tells each engine what the others had reported at the last exchange, and asks it for its own. The server asks all
    /// engines at the same time, so that it has no newer answers either.
    fn exchange(&mut self) {
        let taken: Vec<_> = self.engines.iter_mut().map(|engine| engine.scheduler().take_service()).collect();
        for (number, engine) in self.engines.iter_mut().enumerate() {
            for (tenant, us) in self.external[number].drain(..) {
                engine.scheduler().charge_external(&tenant, us);
            }
            let others = taken.iter().enumerate().filter(|&(other, _)| other != number);
            self.external[number].extend(others.flat_map(|(_, service)| service.iter().cloned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step_time::StepTime;
    use chairlift_core::{Fair, Policy, STOP, Token, Vtc};

    const SECOND: Time = 1_000_000;
    const ENGINES: usize = 4;
    /// Sequences in a batch.
    const ROWS: u32 = 8;
    const PROMPT: u32 = 128;
    /// Longest output in tokens.
    const OUTPUT: u32 = 96;
    /// Units of service per second of an engine: a prompt token takes 0.1 ms and an output token, which counts twice, 0.2 ms.
    const RATE: f64 = 10_000.0;
    /// The bound of one engine, in units of service: twice the larger of the longest prompt and the outputs of a full batch.
    const ONE_ENGINE: f64 = 2.0 * (2 * ROWS * OUTPUT) as f64;
    /// The longest step in seconds.
    const STEP: f64 = 256.0 * 100e-6;

    /// A tenant's traffic.
    struct Tenant {
        name: &'static str,
        weight: u32,
        /// Requests for each engine as a part of what it can compute. Above 1 they wait.
        load: [f64; ENGINES],
    }

    fn job(tenant: &Tenant, time: Time, tag: u64, open_ended: bool) -> Job {
        let len = 33 + (tag * 7919 % 64) as u32;
        let prompt = (0..PROMPT).map(|i| (tag as Token).wrapping_mul(0x9E37_79B1).wrapping_add(i) % 50_000 + 1).collect();
        let max_new_tokens = if open_ended { 2000 } else { len };
        let stop = vec![STOP];
        let request =
            Request { tag, prompt, max_new_tokens, stop, tenant: tenant.name.into(), weight: tenant.weight, ..Request::default() };
        Job { time, request, len, ..Job::default() }
    }

    /// The tenants' requests for 120 s, with their engines, in order of arrival.
    fn jobs(tenants: &[Tenant; 2], open_ended: bool) -> Vec<(usize, Job)> {
        let service = f64::from(PROMPT + 2 * (33 + 32));
        let mut jobs = Vec::new();
        for tenant in tenants {
            for (engine, load) in tenant.load.into_iter().enumerate() {
                let count = (load * RATE * 120.0 / service) as u64;
                for number in 0..count {
                    let tag = jobs.len() as u64;
                    jobs.push((engine, job(tenant, number * 120 * SECOND / count, tag, open_ended)));
                }
            }
        }
        jobs.sort_by_key(|(_, job)| job.time);
        jobs
    }

    fn given(fleet: &Fleet, tenant: &Tenant) -> f64 {
        let of = |engine: &Replica| {
            let tenants = engine.report().service.tenants();
            let found = tenants.iter().find(|(name, _)| **name == *tenant.name);
            found.map_or(0, |(_, windows)| windows.iter().sum::<u64>())
        };
        fleet.engines.iter().map(of).sum::<u64>() as f64 / f64::from(tenant.weight)
    }

    /// Runs 100 s. Returns by how much the second tenant's service, divided by its weight, was above the first one's: the
    /// least and the most, in units.
    fn differences(tenants: &[Tenant; 2], open_ended: bool, policy: &'static dyn Policy) -> (f64, f64) {
        let machine = Machine::new(StepTime::linear([0.0, 100.0, 200.0, 0.0, 0.0]));
        let base =
            Config { max_num_batched_tokens: 256, max_num_seqs: ROWS, num_kv_blocks: 2001, max_model_len: 4096, ..Config::default() };
        let config = Config { scheduling_policy: policy, enable_prefix_caching: false, ..base };
        let mut fleet = Fleet::new(config, &machine, ENGINES, Routing::RoundRobin).expect("a sound config");
        let (mut least, mut most, mut looked_at) = (f64::MAX, f64::MIN, 0);
        for (engine, job) in jobs(tenants, open_ended) {
            if job.time > 100 * SECOND {
                break;
            }
            fleet.advance(job.time, &mut GoesOn::new(|| true));
            if looked_at + 10_000 <= job.time {
                looked_at = job.time;
                let difference = given(&fleet, &tenants[1]) - given(&fleet, &tenants[0]);
                (least, most) = (least.min(difference), most.max(difference));
            }
            fleet.arrive(engine, job);
        }
        (least, most)
    }

    /// What tenants' service may differ by, divided by their weights: the bound of the engine that has both tenants, and
    /// what the other engines give in two intervals and a step, which is this part of an engine's time in all. Under
    /// `fair` also a fiftieth of the time, in which sequences are computed again: engines compare time, not tokens.
    fn bound(external: f64, policy: &'static dyn Policy) -> f64 {
        let again = if policy.name() == "fair" { 100.0 / 50.0 } else { 0.0 };
        ONE_ENGINE + RATE * (external * (2.0 * EXCHANGE_INTERVAL as f64 / 1e6 + STEP) + again)
    }

    #[test]
    fn tenants_of_which_one_uses_a_single_engine_get_equal_service_for_their_weights() {
        for (weight, external) in [(1, 0.2), (3, 0.2), (3, 0.9)] {
            for (open_ended, policy) in [(false, &Fair as &dyn Policy), (true, &Vtc)] {
                let x = Tenant { name: "x", weight: 1, load: [2.0, 0.0, 0.0, 0.0] };
                let y = Tenant { name: "y", weight, load: [2.0, external, external, external] };
                let (least, most) = differences(&[x, y], open_ended, policy);
                let bound = bound(3.0 * external, policy);
                println!("weight {weight}, {external}, open {open_ended}, {policy:?}: {least:.0} to {most:.0}, bound {bound:.0}");
                assert!(-bound <= least && most <= bound, "weight {weight}: {least:.0} to {most:.0}, bound {bound:.0}");
            }
        }
    }
}
