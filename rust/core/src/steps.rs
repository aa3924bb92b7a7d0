//! The steps that were planned: which are committed, and how long they take.

use crate::batch::StepPlan;
use crate::block::BlockId;
use crate::request::Time;
use crate::stats::Stall;

/// The steps that were planned.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    /// Plans made, empty ones too.
    plans: u64,
    planned: u64,
    committed: u64,
    last_commit: Time,
    /// Whether there was more to do after the last commit: the next step began then.
    goes_on: bool,
    /// What the last planned step should take, in microseconds.
    predicted: u64,
    /// Why the last plan is empty, if there was something to do.
    stall: Option<Stall>,
    /// Copies to the host that an empty plan could not carry out.
    swaps_due: Vec<(BlockId, u32)>,
    /// Plans spent, kept for their memory.
    spare: Vec<StepPlan>,
}

/// When a committed step ran.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ran {
    /// Microseconds that it took.
    pub(crate) took: Time,
    /// When it began.
    pub(crate) from: Time,
}

impl Steps {
    /// Begins a plan.
    pub(crate) fn begin(&mut self) {
        self.plans += 1;
    }

    /// The plan that was begun, empty but for copies that must not be lost.
    pub(crate) fn plan(&mut self, now: Time) -> StepPlan {
        let mut plan = self.spare.pop().unwrap_or_default().reuse(self.planned, now);
        plan.swap_out.append(&mut self.swaps_due);
        plan
    }

    /// Takes back an empty plan; `stall` is why it is empty.
    pub(crate) fn abandon(&mut self, mut plan: StepPlan, stall: Option<Stall>) {
        self.stall = stall;
        self.goes_on &= self.in_flight();
        // Whoever lost its blocks for want of room still needs their copies.
        self.swaps_due.append(&mut plan.swap_out);
        self.spare.push(plan);
    }

    /// Counts a planned step that should take so many microseconds.
    pub(crate) fn launch(&mut self, predicted: u64) {
        self.planned += 1;
        self.predicted = predicted;
        self.stall = None;
    }

    /// Notes that a step ended `now`. Panics unless it is the oldest not yet committed.
    pub(crate) fn commit(&mut self, plan: &StepPlan, now: Time) -> Ran {
        assert_eq!(plan.step, self.committed, "plans must be committed in order");
        self.committed += 1;
        let due = plan.planned.max(self.last_commit);
        let from = if self.goes_on { self.last_commit } else { due };
        self.last_commit = now;
        Ran { took: now - due, from }
    }

    /// Takes back a plan that is committed; `more` if there is more to do.
    pub(crate) fn end(&mut self, plan: StepPlan, more: bool) {
        self.goes_on = more;
        self.spare.push(plan);
    }

    /// The number of the present plan, empty ones counted.
    pub(crate) fn plan_number(&self) -> u64 {
        self.plans
    }

    /// Steps planned.
    pub(crate) fn planned(&self) -> u64 {
        self.planned
    }

    /// Steps committed: the number of the first that is not.
    pub(crate) fn committed(&self) -> u64 {
        self.committed
    }

    /// Whether a step is planned and not committed.
    pub(crate) fn in_flight(&self) -> bool {
        self.committed < self.planned
    }

    /// Why the last plan is empty, if there was something to do.
    pub(crate) fn stall(&self) -> Option<Stall> {
        self.stall
    }

    /// What the last planned step should take, in microseconds.
    pub(crate) fn predicted(&self) -> u64 {
        self.predicted
    }
}
