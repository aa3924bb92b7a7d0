//! Usage of requests, tenants and classes, and counters for operators.

use super::compute::{Compute, StepParts};
use super::energy::Energy;
use super::group::{Groups, Member, Usage};
use super::recent_steps::RecentSteps;
use super::saturation::Saturation;
use super::service::{CostMeter, ServiceCost, Totals};
use super::stats::Counters;
use super::timeline::{Account, Clocks, StateInGroup, Timeline, TimelineState};
use crate::memory::User;
use crate::policy::{Grouping, PreemptionReason, Rules};
use crate::request::{FinishReason, SeqId, Time};
use crate::step::StepPlan;
use crate::step_time::StepModel;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::Arc;

/// Number of ended requests with a stored timeline.
const EXPLAINED: usize = 10_000;

/// The accounts of the live sequences.
pub(crate) trait LiveAccounts {
    /// A sequence's account. `None` if the sequence has ended.
    fn account(&mut self, id: SeqId) -> Option<&mut Account>;

    /// Calls `visit` with every account.
    fn each(&mut self, visit: impl FnMut(&mut Account));
}

/// Usage of requests, tenants and classes, and counters for operators.
#[derive(Debug)]
pub(crate) struct Accounts {
    grouping: Grouping,
    clocks: Clocks,
    compute: Compute,
    /// None without a meter.
    energy: Option<Energy>,
    tenants: Groups<Arc<str>>,
    classes: Groups<i32>,
    pub(crate) counters: Counters,
    /// Mean output tokens of recent requests.
    mean_output: Option<f64>,
    ended: VecDeque<Timeline>,
    /// Timelines that were in `ended` before its first.
    forgotten: u64,
    /// The number of the newest ended request with a tag, counted from the first one.
    by_tag: FxHashMap<u64, u64>,
    saturation: Saturation,
    recent: RecentSteps,
    /// Prompt tokens that were not cached when their request was first admitted, and samples that were no errors.
    prompt_tokens_served: u64,
    samples_served: u64,
    cost_meter: CostMeter,
}

impl Accounts {
    pub(crate) fn new(slots: u32, rules: Rules) -> Self {
        let mut clocks = Clocks::default();
        clocks.admit_group(0);
        Self {
            grouping: rules.grouping,
            clocks,
            compute: Compute::new(slots),
            energy: None,
            tenants: Groups::new(),
            classes: Groups::new(),
            counters: Counters::default(),
            mean_output: None,
            ended: VecDeque::new(),
            forgotten: 0,
            by_tag: FxHashMap::default(),
            saturation: Saturation::default(),
            recent: RecentSteps::default(),
            prompt_tokens_served: 0,
            samples_served: 0,
            cost_meter: CostMeter::default(),
        }
    }

    /// Advances the clocks to `now`.
    #[inline]
    pub(crate) fn tick(&mut self, now: Time) {
        self.clocks.tick(now);
    }

    /// The time of events. It never decreases.
    #[inline]
    pub(crate) fn now(&self) -> Time {
        self.clocks.now()
    }

    /// Sets the step that runs from now on: its number of sequences, and whether it has prompt pieces.
    pub(crate) fn run_step(&mut self, sequences: usize, prefill: bool) {
        self.clocks.step(sequences, prefill);
    }

    /// Sets the group that is next in the queue from now on, and the limit that blocks it.
    pub(crate) fn block(&mut self, blocked: Option<(u32, TimelineState)>) {
        self.clocks.block(blocked);
    }

    /// The group that is next in the queue, and the limit that blocks it.
    pub(crate) fn blocked(&self) -> Option<(u32, TimelineState)> {
        self.clocks.blocked()
    }

    /// The timeline state of a sequence while another group is next.
    pub(crate) fn others(&self) -> TimelineState {
        if matches!(self.grouping, Grouping::Tenants(_)) { TimelineState::WaitFairness } else { TimelineState::WaitPolicy }
    }

    /// Adds a request to its tenant and class. Returns whether the tenant is new.
    pub(crate) fn enroll(&mut self, tenant: &Arc<str>, priority: i32) -> (Member, bool) {
        let (tenant, new) = self.tenants.enter(tenant);
        let (class, _) = self.classes.enter(&priority);
        let group = match self.grouping {
            Grouping::Single => 0,
            Grouping::Classes => class,
            Grouping::Tenants(_) => tenant,
        };
        self.clocks.admit_group(group);
        (Member { tenant, class, group }, new)
    }

    /// Moves a request to another class. Returns its new groups.
    pub(crate) fn change_class(&mut self, before: Member, priority: i32) -> Member {
        let (class, _) = self.classes.enter(&priority);
        let group = if self.grouping == Grouping::Classes { class } else { before.group };
        self.clocks.admit_group(group);
        self.classes.leave(before.class);
        Member { class, group, ..before }
    }

    /// Counts a held sequence for its tenant. Returns the tenant and whether it is new.
    pub(crate) fn open_held(&mut self, tenant: &Arc<str>) -> (u32, bool) {
        let (tenant, new) = self.tenants.enter(tenant);
        self.tenants.usage(tenant).held += 1;
        (tenant, new)
    }

    /// Removes a held sequence from its tenant.
    pub(crate) fn close_held(&mut self, tenant: u32) {
        self.tenants.usage(tenant).held -= 1;
        self.tenants.leave(tenant);
    }

    /// Adds the time for which a held sequence held `blocks`.
    pub(crate) fn book_held(&mut self, tenant: u32, blocks: usize, time: Time) {
        self.tenants.usage(tenant).held_block_us += blocks as u64 * time;
    }

    /// Closes an account's state and begins the next one.
    pub(crate) fn enter(&self, account: &mut Account, leaves: StateInGroup, enters: StateInGroup) {
        account.enter(leaves, enters, &self.clocks, self.others());
    }

    /// Records the number of blocks that a sequence holds from now on.
    pub(crate) fn hold_blocks(&self, account: &mut Account, blocks: usize) {
        account.hold(blocks, &self.clocks);
    }

    /// Counts a request that enters the queue.
    pub(crate) fn waits(&mut self, member: Member) {
        self.tenants.usage(member.tenant).waiting += 1;
        self.classes.usage(member.class).waiting += 1;
    }

    /// Counts a request that leaves the queue.
    pub(crate) fn leaves_queue(&mut self, member: Member) {
        self.tenants.usage(member.tenant).waiting -= 1;
        self.classes.usage(member.class).waiting -= 1;
    }

    /// Counts a request that runs.
    pub(crate) fn runs(&mut self, member: Member) {
        self.tenants.usage(member.tenant).running += 1;
        self.classes.usage(member.class).running += 1;
    }

    /// Counts a request that no longer runs.
    pub(crate) fn leaves_slot(&mut self, member: Member) {
        self.tenants.usage(member.tenant).running -= 1;
        self.classes.usage(member.class).running -= 1;
    }

    /// Begins to count the steps of a sequence that was given a slot.
    pub(crate) fn begin_compute(&mut self, slot: u32, seq: SeqId) {
        self.compute.begin(slot, seq);
    }

    /// Books the steps of a sequence that loses its slot.
    pub(crate) fn end_compute(&mut self, slot: u32, id: SeqId, account: &mut Account) {
        account.add_unmetered(self.compute.end(slot));
        if let Some(energy) = &mut self.energy {
            energy.leave(id);
        }
    }

    /// Divides the time of a committed step among its sequences.
    pub(crate) fn divide_step(&mut self, plan: &StepPlan, took: Time, model: &StepModel, live: &mut impl LiveAccounts) {
        let parts = StepParts::new(model, plan, took);
        let energy = &mut self.energy;
        self.compute.divide(&plan.chunks, &parts, 1000 * took, |id, ns| {
            let Some(account) = live.account(id) else { return false };
            account.add_unmetered(ns);
            if let Some(energy) = energy {
                energy.leave(id);
            }
            true
        });
    }

    /// Records the energy that a meter measured since the last call, in microjoules.
    pub(crate) fn read_meter(&mut self, energy: u64, now: Time, live: &mut impl LiveAccounts) {
        if let Some(meter) = &mut self.energy {
            meter.read(energy, now);
            return;
        }
        // The steps before the first reading took none of the energy that follows.
        for (id, ns) in self.compute.take_all() {
            if let Some(account) = live.account(id) {
                account.add_unmetered(ns);
            }
        }
        live.each(Account::begin_meter);
        self.energy = Some(Energy::begin(now, self.compute.total()));
    }

    /// Divides the energy that the meter measured, if any, among the sequences whose steps ran since it was last divided.
    #[inline]
    pub(crate) fn divide_energy(&mut self, live: &mut impl LiveAccounts) {
        let steps = self.compute.total();
        let Some(energy) = &mut self.energy else { return };
        let Some((window, left)) = energy.end_window(steps) else { return };
        let mut rest = window.energy();
        let ended_slots = left.into_iter().map(|id| (id, 0));
        for (id, ns) in self.compute.take_all().chain(ended_slots) {
            if let Some(account) = live.account(id) {
                account.add_unmetered(ns);
                rest -= account.meter(&window);
            }
        }
        energy.add_idle(rest);
    }

    /// Microjoules that the meter measured and that were divided, and those of them that no request took.
    pub(crate) fn energy(&self) -> Option<(u64, u64)> {
        self.energy.as_ref().map(|energy| (energy.total(), energy.idle()))
    }

    /// Nanoseconds of steps of a sequence, which runs in `slot` if it has one.
    fn compute_ns(&self, account: &Account, slot: Option<u32>) -> u64 {
        account.compute_ns() + slot.map_or(0, |slot| self.compute.of(slot))
    }

    /// Nanoseconds of all committed steps.
    pub(crate) fn step_time(&self) -> u64 {
        self.compute.total()
    }

    /// Running sequences of a tenant.
    pub(crate) fn running_of(&self, tenant: u32) -> u32 {
        self.tenants.peek(tenant).running
    }

    /// Queued sequences of a group. `None` if all sequences are in one group.
    pub(crate) fn waiting_of(&self, group: u32) -> Option<usize> {
        match self.grouping {
            Grouping::Single => None,
            Grouping::Classes => Some(self.classes.peek(group).waiting as usize),
            Grouping::Tenants(_) => Some(self.tenants.peek(group).waiting as usize),
        }
    }

    /// The user that stands for a tenant at cached blocks.
    pub(crate) fn user(&self, tenant: u32) -> User {
        User::new(self.tenants.serial(tenant))
    }

    /// The tenant with this name, if it has or had requests.
    pub(crate) fn user_named(&self, tenant: &str) -> Option<User> {
        self.tenants.number(tenant).map(|number| self.user(number))
    }

    pub(crate) fn tenant_name(&self, tenant: u32) -> &Arc<str> {
        self.tenants.name(tenant)
    }

    /// The number of a tenant that has had a request.
    pub(crate) fn known_tenant(&self, name: &str) -> Option<u32> {
        self.tenants.number(name)
    }

    pub(crate) fn tenants(&self) -> impl Iterator<Item = (&Arc<str>, &Usage)> {
        self.tenants.iter()
    }

    pub(crate) fn classes(&self) -> impl Iterator<Item = (&i32, &Usage)> {
        self.classes.iter()
    }

    /// Counts a request's first admission, with `computed` tokens of its prompt, which were looked for in the cache if
    /// `looked_for`. `lost` tokens more were cached without a state.
    pub(crate) fn count_admission(&mut self, prompt_tokens: u32, computed: u32, looked_for: bool, lost: u32) {
        self.counters.prompt_tokens += u64::from(prompt_tokens);
        self.prompt_tokens_served += u64::from(prompt_tokens - computed);
        if looked_for {
            self.counters.prefix_queries += u64::from(prompt_tokens);
            self.counters.prefix_hits += u64::from(computed);
            self.counters.lost_hit_tokens += u64::from(lost);
        }
    }

    fn service_totals(&self) -> Totals {
        let service = match self.grouping {
            Grouping::Tenants(charges) => charges.service(self.prompt_tokens_served, self.samples_served),
            Grouping::Single | Grouping::Classes => 0,
        };
        Totals { ns: self.compute.total(), service }
    }

    /// Counts the samples of a committed step, of which `none` gave no token, and measures the engine time per unit of service.
    #[inline]
    pub(crate) fn count_outputs(&mut self, samples: u64, none: u64) {
        self.counters.generated_tokens += samples - none;
        self.samples_served += samples;
        self.cost_meter.observe(self.service_totals());
    }

    /// The engine time per unit of service in recent steps.
    pub(crate) fn service_cost(&self) -> Option<ServiceCost> {
        self.cost_meter.cost(self.service_totals())
    }

    /// The engine time per unit of service since the last call.
    pub(crate) fn take_service_cost(&mut self) -> Option<ServiceCost> {
        self.cost_meter.take(self.service_totals())
    }

    /// Counts a preemption, and whether the KV was `swapped` to host memory.
    pub(crate) fn count_preemption(&mut self, reason: PreemptionReason, swapped: bool) {
        self.counters.preemptions_by_reason[reason as usize] += 1;
        if swapped {
            self.counters.preemptions_swap += 1;
        } else {
            self.counters.preemptions_recompute += 1;
        }
    }

    /// Mean output tokens of recent requests. `None` if no request has ended.
    pub(crate) fn mean_output(&self) -> Option<f64> {
        self.mean_output
    }

    /// The part of a timeline that is in the account of a sequence, up to now. The sequence runs in `slot` if it has one.
    pub(crate) fn read(&self, account: &Account, state: StateInGroup, slot: Option<u32>) -> Timeline {
        Timeline {
            compute_ns: self.compute_ns(account, slot),
            energy_uj: self.energy.as_ref().map(|_| account.energy_uj()),
            ..account.read(state, &self.clocks, self.others())
        }
    }

    /// Stores the timeline of an ended request.
    pub(crate) fn close(&mut self, member: Member, timeline: &Timeline) {
        self.tenants.usage(member.tenant).book(timeline);
        self.classes.usage(member.class).book(timeline);
        self.tenants.leave(member.tenant);
        self.classes.leave(member.class);
        if matches!(timeline.finish, Some(FinishReason::Stop | FinishReason::Length)) {
            let (mean, gain) = self.mean_output.map_or((0.0, 1.0), |mean| (mean, 0.05));
            // In a replay, a request without output has one token.
            self.mean_output = Some(mean + gain * (f64::from(timeline.output_tokens.max(1)) - mean));
        }
        if self.ended.len() == EXPLAINED
            && let Some(oldest) = self.ended.pop_front()
        {
            if self.by_tag.get(&oldest.tag) == Some(&self.forgotten) {
                self.by_tag.remove(&oldest.tag);
            }
            self.forgotten += 1;
        }
        self.by_tag.insert(timeline.tag, self.forgotten + self.ended.len() as u64);
        self.ended.push_back(timeline.clone());
    }

    /// The timeline of the newest ended request with this tag, if it is one of the latest.
    pub(crate) fn ended(&self, tag: u64) -> Option<&Timeline> {
        self.ended.get((self.by_tag.get(&tag)? - self.forgotten) as usize)
    }

    /// Timelines of the latest ended requests, as far as they ended at `time` or later, in that order.
    pub(crate) fn ended_since(&self, time: Time) -> impl Iterator<Item = &Timeline> {
        self.ended.range(self.ended.partition_point(|timeline| timeline.ended < time)..)
    }

    /// Measures demand against capacity.
    pub(crate) fn saturation(&mut self) -> &mut Saturation {
        &mut self.saturation
    }

    /// See [`Saturation::permille`].
    pub(crate) fn saturation_permille(&self, now: Time) -> u32 {
        self.saturation.permille(now.max(self.clocks.now()))
    }

    /// The steps since the last snapshot.
    pub(crate) fn recent(&mut self) -> &mut RecentSteps {
        &mut self.recent
    }

    /// Panics unless the groups' counts of waiting and running requests match. `live` has the accounts and slots of live sequences.
    pub(crate) fn check<'a>(&self, waiting: usize, running: usize, live: impl Iterator<Item = (&'a Account, Option<u32>)>) {
        let (ended, ended_energy) = self.tenants.compute_and_energy();
        let (live, live_energy) =
            live.fold((0, 0), |(time, energy), (account, slot)| (time + self.compute_ns(account, slot), energy + account.energy_uj()));
        assert_eq!(ended + live + self.compute.ended(), self.compute.total(), "step time of requests");
        if let Some((total, idle)) = self.energy() {
            assert_eq!(ended_energy + live_energy + idle, total, "energy of requests");
        }
        let tenants = self.tenants.iter().map(|(_, usage)| *usage).collect::<Vec<_>>();
        for groups in [tenants, self.classes.iter().map(|(_, usage)| *usage).collect()] {
            let (waits, runs) = groups.iter().fold((0, 0), |(waits, runs), usage| (waits + usage.waiting, runs + usage.running));
            assert_eq!((waits as usize, runs as usize), (waiting, running), "usage of groups");
        }
    }
}
