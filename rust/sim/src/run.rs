//! The loop of an engine, without an engine.

use crate::Report;
use chairlift_core::{Config, ConfigError, Ledger, Outputs, Request, STOP, Scheduler, SeqId, StepModel, StepPlan, Time, Token};
use std::collections::{BTreeSet, HashMap};

/// A request of a simulation.
#[derive(Clone, Debug)]
pub struct Job {
    /// When it comes, in microseconds.
    pub time: Time,
    /// What it asks for; it stops at [`STOP`].
    pub request: Request,
    /// What it generates if it may go on: the last token is replaced by a stop if there would be room for more.
    pub output: Vec<Token>,
    /// The tag of the request whose sibling it is: that one came before.
    pub sibling_of: Option<u64>,
    /// When its caller goes, if that is before its end.
    pub gone: Option<Time>,
}

/// What steps take.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The time of a step.
    pub step: StepModel,
    /// The time to copy a block to the host pool, or back, in nanoseconds.
    pub swap_ns_per_block: u32,
}

/// What is going on with a job.
struct Live<'a> {
    id: SeqId,
    job: &'a Job,
    made: usize,
}

struct World<'a> {
    scheduler: Scheduler,
    machine: &'a Machine,
    live: HashMap<u64, Live<'a>>,
    by_id: HashMap<SeqId, u64>,
    /// Who goes when.
    going: BTreeSet<(Time, u64)>,
    now: Time,
    report: Report,
}

/// Runs `jobs`, in the order of their times, until all have ended.
pub fn simulate(config: Config, jobs: &[Job], machine: &Machine) -> Result<Report, ConfigError> {
    let mut world = World {
        scheduler: Scheduler::new(Config { swap_ns_per_block: machine.swap_ns_per_block, ..config })?,
        machine,
        live: HashMap::new(),
        by_id: HashMap::new(),
        going: BTreeSet::new(),
        now: 0,
        report: Report::default(),
    };
    let (mut next, mut outputs) = (0, Outputs::default());
    loop {
        while let Some(job) = jobs.get(next).filter(|job| job.time <= world.now) {
            world.arrive(job);
            next += 1;
        }
        world.go();
        if let Some(plan) = world.scheduler.plan(world.now) {
            world.run(plan, &mut outputs);
            continue;
        }
        let coming = jobs.get(next).map(|job| job.time);
        let events = [coming, world.scheduler.wake_at(), world.going.first().map(|&(at, _)| at)];
        let Some(at) = events.into_iter().flatten().min() else { break };
        world.now = world.now.max(at);
    }
    world.report.stats = Some(world.scheduler.stats());
    world.report.ended_at = world.now;
    Ok(world.report)
}

impl<'a> World<'a> {
    fn arrive(&mut self, job: &'a Job) {
        let tag = job.request.tag;
        let id = match job.sibling_of {
            Some(parent) => self.live.get(&parent).and_then(|parent| self.scheduler.fork(parent.id, tag, job.time)),
            None => self.scheduler.add(job.request.clone(), job.time).ok(),
        };
        let Some(id) = id else {
            self.report.refused.push(tag);
            return;
        };
        self.live.insert(tag, Live { id, job, made: 0 });
        self.by_id.insert(id, tag);
        if let Some(gone) = job.gone {
            self.going.insert((gone, tag));
        }
    }

    /// Lets those go whose time has come, by their own will or for a deadline.
    fn go(&mut self) {
        while let Some(&(at, tag)) = self.going.first().filter(|(at, _)| *at <= self.now) {
            self.going.remove(&(at, tag));
            if let Some(live) = self.live.get(&tag) {
                self.scheduler.abort(live.id, self.now);
                let ledger = self.scheduler.explain(tag).expect("one of the last that ended");
                self.end(ledger);
            }
        }
        let mut missed = Vec::new();
        self.scheduler.expire(self.now, &mut missed);
        for ledger in missed {
            self.end(ledger);
        }
    }

    fn run(&mut self, plan: StepPlan, outputs: &mut Outputs) {
        let swaps = (plan.swap_out.len() + plan.swap_in.len()) as u64 * u64::from(self.machine.swap_ns_per_block) / 1000;
        self.now += (self.machine.step.step(&plan.load) as Time).max(1) + swaps;
        let next = |id: &SeqId| self.by_id.get(id).map_or(1, |tag| self.live[tag].next());
        let sampled: Vec<i32> = plan.chunks.iter().filter(|chunk| chunk.samples).map(|chunk| next(&chunk.seq)).collect();
        self.scheduler.commit(plan, &sampled, self.now, outputs);
        for output in &outputs.tokens {
            self.live.get_mut(&output.tag).expect("it lives").made += 1;
        }
        self.report.steps += 1;
        for ledger in outputs.ended.drain(..) {
            self.end(ledger);
        }
    }

    fn end(&mut self, ledger: Ledger) {
        if let Some(live) = self.live.remove(&ledger.tag) {
            self.by_id.remove(&live.id);
        }
        self.report.ended.push(ledger);
    }
}

impl Live<'_> {
    /// The next token: made up, or a stop where the output ends before it must.
    fn next(&self) -> i32 {
        let output = &self.job.output;
        let last = self.made + 1 >= output.len() && output.len() < self.job.request.max_new_tokens as usize;
        if last { STOP as i32 } else { output.get(self.made).map_or(1, |&token| token as i32) }
    }
}
