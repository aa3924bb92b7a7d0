//! The planned steps, their commits and their times.

use super::plan::StepPlan;
use crate::memory::BlockId;
use crate::request::{Time, named_enum};
use crate::step_time::Load;

named_enum! {
    /// Why the scheduler planned no step although requests exist.
    pub enum Stall {
        /// Every running sequence waits for a commit.
        InFlight = "in_flight",
        /// A static or dynamic batch waits for more requests.
        Batch = "batch",
        /// Only requests wait whose sessions are parked.
        Session = "session",
    }
}

/// The planned steps.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    /// Number of plans, including empty ones.
    plans: u64,
    planned: u64,
    committed: u64,
    last_commit: Time,
    /// Whether work was left after the last commit. The next step then began at that commit.
    goes_on: bool,
    /// Work of the latest planned step.
    load: Load,
    /// Why the latest plan is empty although there was work.
    stall: Option<Stall>,
    /// Copies to host memory, and from it, that an empty plan could not carry out.
    swaps_due: Vec<(BlockId, u32)>,
    reads_due: Vec<(u32, BlockId)>,
    /// Used plans, kept to reuse their memory.
    #[expect(clippy::vec_box, reason = "a plan is large, and the scheduler gives and takes it in a box")]
    spare: Vec<Box<StepPlan>>,
}

/// The time of a committed step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ran {
    /// Duration in microseconds.
    pub(crate) took: Time,
    /// Start time.
    pub(crate) from: Time,
}

impl Steps {
    /// Whether copies to host memory or from it are outstanding. Their blocks are free and must keep their content until the next step.
    pub(crate) fn owes_copies(&self) -> bool {
        !self.swaps_due.is_empty() || self.owes_reads()
    }

    /// Whether copies from host memory are outstanding.
    pub(crate) fn owes_reads(&self) -> bool {
        !self.reads_due.is_empty()
    }

    /// Begins a plan.
    pub(crate) fn begin(&mut self) {
        self.plans += 1;
    }

    /// The current plan. It is empty except for outstanding copies.
    pub(crate) fn plan(&mut self, now: Time) -> Box<StepPlan> {
        let mut plan = self.spare.pop().unwrap_or_default();
        plan.reset(self.planned, now);
        plan.swap_out.append(&mut self.swaps_due);
        plan.swap_in.append(&mut self.reads_due);
        plan
    }

    /// Discards an empty plan. `stall` is the reason why it is empty.
    pub(crate) fn abandon(&mut self, mut plan: Box<StepPlan>, stall: Option<Stall>) {
        self.stall = stall;
        self.goes_on &= self.in_flight();
        // Preempted sequences and cached blocks still need their copies.
        self.swaps_due.append(&mut plan.swap_out);
        self.reads_due.append(&mut plan.swap_in);
        self.spare.push(plan);
    }

    /// Records a planned step.
    pub(crate) fn launch(&mut self, load: Load) {
        self.planned += 1;
        self.load = load;
        self.stall = None;
    }

    /// Records that a step ended at `now`. Panics unless it is the oldest uncommitted step.
    pub(crate) fn commit(&mut self, plan: &StepPlan, now: Time) -> Ran {
        assert_eq!(plan.step, self.committed, "plans must be committed in order");
        self.committed += 1;
        let due = plan.planned.max(self.last_commit);
        let from = if self.goes_on { self.last_commit } else { due };
        self.last_commit = now;
        Ran { took: now - due, from }
    }

    /// Returns the memory of a committed plan. `more` is set if work is left.
    pub(crate) fn end(&mut self, plan: Box<StepPlan>, more: bool) {
        self.goes_on = more;
        self.spare.push(plan);
    }

    /// Number of the current plan, counting empty plans.
    pub(crate) fn plan_number(&self) -> u64 {
        self.plans
    }

    /// Number of planned steps.
    pub(crate) fn planned(&self) -> u64 {
        self.planned
    }

    /// Number of committed steps, which is also the number of the first uncommitted step.
    pub(crate) fn committed(&self) -> u64 {
        self.committed
    }

    /// Whether a planned step is not committed yet.
    pub(crate) fn in_flight(&self) -> bool {
        self.committed < self.planned
    }

    /// Why the latest plan is empty although there was work.
    pub(crate) fn stall(&self) -> Option<Stall> {
        self.stall
    }

    /// Work of the latest planned step.
    pub(crate) fn load(&self) -> &Load {
        &self.load
    }
}
