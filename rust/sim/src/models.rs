//! Several models on one machine, whose engines take turns: a step of one model runs at a time, as in a server with
//! several models.

use crate::goes_on::GoesOn;
use crate::job::Job;
use crate::machine::Machine;
use crate::replica::Replica;
use crate::report::Report;
use chairlift_core::{Arbiter, Config, ConfigError, Time};

/// Interval in microseconds at which engines learn of tenants' service at the others. The server's is the same.
const SHARE_INTERVAL: Time = 100_000;

/// One of several models.
#[derive(Clone, Debug)]
pub struct SharedModel {
    /// Settings of its scheduler.
    pub config: Config,
    /// Durations of its steps.
    pub machine: Machine,
    /// Its share of the time while others have work too.
    pub weight: u32,
    /// Longest time in microseconds that should pass between two of its steps.
    pub itl: Option<Time>,
}

/// Simulates `jobs`, given in order of arrival, until all have ended. [`Job::model`] is an index into `models`. Returns
/// a report for each model. All models are loaded from the start. Asks `goes_on` now and then whether to go on.
///
/// Panics if a job's model is missing.
pub fn simulate_models(
    models: &[SharedModel],
    jobs: impl IntoIterator<Item = Job>,
    goes_on: impl FnMut() -> bool,
) -> Result<Vec<Report>, ConfigError> {
    let mut turns = Turns::new(models)?;
    let mut goes_on = GoesOn::new(goes_on);
    for job in jobs {
        if !goes_on.ask() {
            break;
        }
        turns.advance(job.time, &mut goes_on);
        turns.arrive(job);
    }
    turns.advance(Time::MAX, &mut goes_on);
    Ok(turns.engines.iter_mut().map(Replica::take_report).collect())
}

/// The engines, and the arbiter that chooses whose step is next.
struct Turns {
    engines: Vec<Replica>,
    /// When each engine may have a step without a new request, if it has none now.
    wakes_at: Vec<Option<Time>>,
    arbiter: Arbiter,
    now: Time,
    /// When engines next learn of tenants' service at the others.
    share_at: Time,
}

impl Turns {
    fn new(models: &[SharedModel]) -> Result<Self, ConfigError> {
        let mut arbiter = Arbiter::default();
        for (number, model) in (0..).zip(models) {
            arbiter.add(number, model.weight, 0, model.itl);
        }
        let engines = models.iter().map(|model| Replica::new(model.config, &model.machine)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { wakes_at: vec![None; engines.len()], engines, arbiter, now: 0, share_at: 0 })
    }

    /// Runs until `until`, until no engine has work, or while `goes_on`. A step in flight at `until` is completed.
    fn advance(&mut self, until: Time, goes_on: &mut GoesOn<'_>) {
        while self.now < until && goes_on.ask() {
            self.wake();
            self.predict();
            if let Some(model) = self.arbiter.choose(self.now) {
                self.step(model);
            } else if let Some(next) = self.wakes_at.iter().flatten().min() {
                self.now = until.min(*next);
            } else {
                return;
            }
        }
    }

    /// Adds a request. Call `advance` to its arrival time first.
    fn arrive(&mut self, job: Job) {
        self.now = self.now.max(job.time);
        let model = job.model;
        self.engines[model].arrive(job);
        self.ready(model);
    }

    /// Makes the engines ready whose time has come.
    fn wake(&mut self) {
        for model in 0..self.engines.len() {
            if self.wakes_at[model].is_some_and(|at| at <= self.now) {
                self.ready(model);
            }
        }
    }

    /// Tells the arbiter how long the next steps would take, as the server does.
    fn predict(&mut self) {
        for (model, engine) in (0..).zip(&mut self.engines) {
            if let Some((us, begins)) = engine.scheduler().next_step() {
                self.arbiter.expect(model, us, begins);
            }
        }
    }

    fn ready(&mut self, model: usize) {
        self.wakes_at[model] = None;
        self.arbiter.ready(model as u32, self.now);
    }

    fn step(&mut self, model: u32) {
        let engine = &mut self.engines[model as usize];
        let Some(ended) = engine.step(self.now) else {
            self.wakes_at[model as usize] = engine.wakes_at();
            self.arbiter.idle(model);
            return;
        };
        engine.rest();
        self.arbiter.charge(model, ended - self.now, ended);
        self.now = ended;
        if self.now >= self.share_at {
            self.share_at = self.now + SHARE_INTERVAL;
            self.share_service();
        }
    }

    /// Tells each engine what tenants had at the others, so that a tenant has one share of all.
    fn share_service(&mut self) {
        let taken: Vec<_> = self.engines.iter_mut().map(|engine| engine.scheduler().take_service()).collect();
        for (model, engine) in self.engines.iter_mut().enumerate() {
            for (_, service) in taken.iter().enumerate().filter(|&(other, _)| other != model) {
                for (tenant, us) in service {
                    engine.scheduler().charge_external(tenant, *us);
                }
            }
        }
    }
}
