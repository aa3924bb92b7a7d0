//! The world's steps: each is planned, run on the fake model, committed and checked.

use super::fake_model::oracle;
use super::{Live, World};
use chairlift_core::{FinishReason, Grouping, Preemption, Preparation, Reservation, StepPlan, Tier, Timeline};

impl World {
    /// Runs a step and fails the requests whose part of it was lost.
    pub(super) fn run_step(&mut self, poison: Option<u64>, lost: Option<u64>) {
        if let Some(tag) = poison {
            let family = self.live[&tag].family;
            self.live.values_mut().filter(|live| live.family == family).for_each(|live| live.exposed = true);
        }
        for tag in self.step(poison, lost).unwrap_or_default() {
            while self.in_flight.len() > 1 {
                self.commit();
            }
            if self.live.contains_key(&tag) {
                self.end(tag, FinishReason::Error);
            }
        }
    }

    /// Plans a step and runs it on the fake model, except for `lost`. Returns the requests that fail without it, or
    /// `None` if there was nothing to run.
    pub(super) fn step(&mut self, poison: Option<u64>, lost: Option<u64>) -> Option<Vec<u64>> {
        self.expire();
        self.propose();
        let poison = poison.filter(|tag| self.live.contains_key(tag));
        let plan = self.scheduler.plan(self.now);
        for wait in self.live.values().filter_map(|live| self.scheduler.session_wait(live.seq)) {
            assert!(wait.expected <= wait.longest && wait.longest > 0, "{wait:?}: a plan queues a request whose wait is over");
        }
        let plan = plan?;
        for admitted in &plan.admitted {
            let live = &self.live[&admitted.tag];
            let may_run = self.unprepared.get(&live.family).is_none_or(|pending| *pending == (Preparation::ReadCache, true));
            assert!(may_run && !self.reads.contains(&admitted.tag), "request {} runs before it is prepared", admitted.tag);
            self.model.admit(admitted.slot, admitted.tag, live.salt);
            let common = |other: &&Live| other.context.iter().zip(&live.context).take_while(|(a, b)| a == b).count();
            let same = |other: &&Live| other.paid.is_some() && (&other.tenant, other.salt) == (&live.tenant, live.salt);
            let in_flight = self.live.values().filter(same).map(|other| common(&other)).max().unwrap_or(0);
            self.used.check(&live.tenant, live.salt, &live.context, in_flight, admitted.own_cached_tokens, admitted.cached_tokens);
            self.used.add(&live.tenant, live.salt, &live.context);
            // What a request had when it was admitted again is not reported.
            let live = self.live.get_mut(&admitted.tag).expect("it lives");
            live.paid = Some(live.paid.map_or(admitted.own_cached_tokens as usize, |_| usize::MAX));
        }
        self.pay(&plan);
        if self.scheduler.config().kv_reservation == Reservation::MaxTokens {
            assert!(plan.preempted.is_empty(), "preempted though blocks were reserved");
        }
        self.check_order(&plan);
        let longest = |tag| self.live.get(&tag).map(|live| live.context.len() + live.left as usize);
        let (sampled, lost) = self.model.run(&self.scheduler, &plan, poison, lost, longest);
        self.in_flight.push_back((plan, sampled));
        Some(lost)
    }

    /// Drops requests that missed their deadline.
    fn expire(&mut self) {
        let mut ended = Vec::new();
        self.scheduler.expire(self.now, &mut ended);
        for timeline in ended {
            assert_eq!(timeline.finish, Some(FinishReason::Deadline));
            self.settle(&timeline);
        }
    }

    /// Lets the drafter propose. For every third request the next tokens are forced.
    fn propose(&mut self) {
        let Some(drafter) = &mut self.drafter else { return };
        let forced = self.live.iter().filter(|(tag, _)| *tag % 3 == 0).map(|(_, live)| {
            let mut context = live.context.clone();
            (0..2).for_each(|_| context.push(oracle(live.salt, &context)));
            (live.seq, context.split_off(live.context.len()))
        });
        drafter.propose(&mut self.scheduler, forced);
    }

    /// Records what the sequences of a step would have computed without the blocks of others: as much as the step had room for.
    fn pay(&mut self, plan: &StepPlan) {
        let mut room = self.scheduler.config().max_num_batched_tokens as usize;
        for chunk in &plan.chunks {
            let live = self.live.values_mut().find(|live| live.seq == chunk.seq).expect("it lives");
            let paid = live.paid.expect("it was admitted").saturating_add(room);
            live.paid = Some(paid);
            self.used.pay(&live.tenant, live.salt, &live.context[..paid.min(live.context.len())]);
            room -= chunk.len as usize;
        }
    }

    /// A step that preempted sequences admits only the requests they were preempted for.
    fn check_order(&self, plan: &StepPlan) {
        if plan.preempted.is_empty() || plan.admitted.is_empty() {
            return;
        }
        let class = |tag: &u64| (self.live[tag].tier, self.live[tag].priority);
        let least_urgent = plan.admitted.iter().map(|admitted| class(&admitted.tag).0).max().expect("not empty");
        assert!(least_urgent < Tier::Background, "preempted for a background request");
        // A more urgent tier may take the place of a less urgent one, unless tenants take turns.
        let rules = self.scheduler.rules();
        let kept = if rules.takes_turns() { Tier::Flex } else { least_urgent };
        let others: Vec<_> = plan.preempted.iter().filter(|tag| class(tag).0 <= kept).collect();
        if others.is_empty() {
            return;
        }
        assert_ne!(rules.preemption, Preemption::Never, "admitted in a step that preempted");
        match rules.grouping {
            Grouping::Single => assert!(others.iter().all(|tag| class(tag).0 == least_urgent), "preempted for a less urgent tier"),
            Grouping::Tenants(_) => {
                let whose = |tag: &u64| &self.live[tag].tenant;
                assert_eq!(plan.admitted.len(), 1, "preempted for more than one");
                assert!(others.iter().all(|tag| whose(tag) != whose(&plan.admitted[0].tag)), "preempted for its own tenant");
            }
            Grouping::Classes => {
                let most = plan.admitted.iter().map(|admitted| class(&admitted.tag)).max();
                assert!(most < plan.preempted.iter().map(class).min(), "preempted for one that is no more urgent");
            }
        }
    }

    pub(super) fn commit(&mut self) {
        let (plan, sampled) = self.in_flight.pop_front().unwrap();
        let mut outputs = std::mem::take(&mut self.outputs);
        if let Some(drafter) = &mut self.drafter {
            drafter.observe(&plan, &sampled);
        }
        self.read_meter();
        let may_end = self.scheduler.may_end(&plan, &sampled);
        self.scheduler.commit(plan, &sampled, self.now, &mut outputs);
        assert!(may_end || outputs.ended.is_empty());
        for output in &outputs.tokens {
            let live = self.live.get_mut(&output.tag).expect("output of a request that is over");
            if output.finish == Some(FinishReason::Error) {
                assert!(live.exposed, "request {} failed for another's fault", output.tag);
                // A sequence that shares its blocks in the same step comes later in the batch.
                self.live.values_mut().for_each(|live| live.exposed = true);
                continue;
            }
            assert_eq!(output.token, oracle(live.salt, &live.context), "request {}", output.tag);
            live.context.push(output.token);
            self.used.add_last(&live.tenant, live.salt, &live.context);
            self.used.pay(&live.tenant, live.salt, &live.context);
            live.left -= 1;
            let expected = match () {
                () if live.stop == Some(output.token) => Some(FinishReason::Stop),
                () if live.left == 0 => Some(FinishReason::Length),
                () => None,
            };
            assert_eq!(output.finish, expected);
        }
        for timeline in &outputs.ended {
            self.settle(timeline);
        }
        let finished = outputs.tokens.iter().filter(|output| output.finish.is_some()).count();
        assert_eq!(outputs.ended.len(), finished);
        self.outputs = outputs;
        self.scheduler.check();
    }

    /// Removes a request that ended and checks its timeline.
    pub(super) fn settle(&mut self, timeline: &Timeline) {
        assert_eq!(timeline.states.iter().sum::<u64>(), timeline.ended - timeline.arrived, "{timeline:?}");
        assert!(timeline.preemptions <= 8 || timeline.tier == Tier::Background, "{timeline:?}");
        // A step gives a token of its own beside the drafted ones.
        assert!(timeline.accepted_draft_tokens <= timeline.draft_tokens.min(timeline.output_tokens.saturating_sub(1)), "{timeline:?}");
        let early = matches!(timeline.finish, Some(FinishReason::Abort | FinishReason::Deadline | FinishReason::Error));
        self.ended.push((timeline.tag, timeline.finish));
        let ended = self.live.remove(&timeline.tag);
        self.reads.remove(&timeline.tag);
        let Some(live) = ended else { return };
        if live.exposed && timeline.finish != Some(FinishReason::Length) {
            // Others may share blocks that a step in flight spoils, also if the request was stopped meanwhile.
            self.live.values_mut().for_each(|other| other.exposed = true);
        }
        if !early && let Some(held) = self.held.iter_mut().find(|held| live.continues == Some(held.id)) {
            held.tokens = live.context;
        }
    }

    /// Reads a meter at three of four commits, of which some find no energy.
    fn read_meter(&mut self) {
        if !self.now.is_multiple_of(4) {
            let energy = (self.now % 1009).pow(2) % 1009;
            self.energy += if self.scheduler.stats().counters.energy_uj.is_some() { energy } else { 0 };
            self.scheduler.read_meter(energy, self.now);
        }
    }
}
