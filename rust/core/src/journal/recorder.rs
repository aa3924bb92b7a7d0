//! Records the calls of a scheduler.

use super::format::Writer;
use super::record::{Added, Call, EndedRequest, Record, Sampled};
use crate::batch::Outputs;
use crate::error::Rejected;
use crate::ledger::{Snapshot, Timeline, TimelineState};
use crate::memory::{BlockHash, BlockId, CacheChanges, Restored};
use crate::request::{ArrivalNumber, CacheScope, FinishReason, HeldId, Preparation, Request, SeqId, SessionEvent, Time, Token};
use crate::scheduler::Scheduler;
use crate::sequence::Spec;
use crate::step::{Chunk, DraftSource, StepPlan};
use std::ops::Deref;
use std::sync::Arc;

/// Makes a scheduler's calls and, if recording is on, writes them to a journal.
///
/// The scheduler does not know about journals. Read-only calls go directly to the scheduler.
#[derive(Debug)]
pub struct Recorder {
    scheduler: Scheduler,
    journal: Option<Writer>,
    /// Sequences that may fill a block in a step, in batch order. Kept to reuse its memory.
    filling: Vec<Filling>,
}

/// A sequence that may fill a block with the tokens that a step samples.
#[derive(Debug)]
struct Filling {
    seq: SeqId,
    arrival_number: ArrivalNumber,
    tag: u64,
    /// Whether the step verifies drafted tokens, so that the number of new tokens is a result.
    drafted: bool,
    /// Number of new tokens.
    given: usize,
}

impl Deref for Recorder {
    type Target = Scheduler;

    fn deref(&self) -> &Scheduler {
        &self.scheduler
    }
}

/// Makes calls of the scheduler that are not recorded.
macro_rules! unrecorded {
    ($($visibility:vis fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        #[doc = concat!("See [`Scheduler::", stringify!($name), "`]. Not recorded, because no decision depends on it.")]
        $visibility fn $name(&mut self, $($argument: $type),*) $(-> $result)? {
            self.scheduler.$name($($argument),*)
        }
    )*};
}

/// Makes calls of the scheduler that are recorded as they are.
macro_rules! recorded {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $call:expr;)*) => {$(
        #[doc = concat!("See [`Scheduler::", stringify!($name), "`].")]
        pub fn $name(&mut self, $($argument: $type,)* now: Time) $(-> $result)? {
            self.record(now, |_| $call);
            self.scheduler.$name($($argument,)* now)
        }
    )*};
}

impl Recorder {
    recorded! {
        fn open(tenant: &Arc<str>, scope: &Arc<CacheScope>) -> HeldId = Call::Open(tenant.clone());
        fn note_session(tenant: &str, session: &Arc<str>, event: SessionEvent) -> bool =
            Call::NoteSession { tenant: tenant.into(), session: session.clone(), event };
        fn set_block_limit(blocks: u32) -> u32 = Call::SetBlockLimit(blocks);
        fn set_upstream_token_time(ns: u64) = Call::SetUpstreamTokenTime(ns);
        fn evict_cached() = Call::EvictCached;
        fn close_queue(closed: bool) = Call::CloseQueue(closed);
    }

    unrecorded! {
        pub fn cached_blocks(group: &str, tokens: &[Token]) -> usize;
        pub fn take_given_back() -> Vec<BlockId>;
        pub fn take_reads() -> Vec<u64>;
        pub fn remember_users();
        pub fn record_cache_changes();
        pub fn take_cache_changes() -> CacheChanges;
        pub fn take_service() -> Vec<(Arc<str>, Time)>;
        pub fn prepared(id: SeqId, spent: &[(TimelineState, Time)]);
        pub fn read_meter(energy: u64, now: Time);
        pub fn snapshot(now: Time, max_waiting: usize, max_cells: usize) -> Snapshot;
        pub(crate) fn keep_finished();
        pub(crate) fn take_finished() -> Vec<(SeqId, Vec<Token>)>;
    }

    /// Wraps a scheduler without recording.
    pub fn off(scheduler: Scheduler) -> Self {
        Self { scheduler, journal: None, filling: Vec::new() }
    }

    /// Records every call. Panics if the scheduler already received a request, because a journal must contain all requests.
    pub fn on(scheduler: Scheduler) -> Self {
        assert_eq!((scheduler.arrived(), scheduler.opened()), (0, 0), "a journal has all from the first request on");
        let journal = Some(Writer::new(scheduler.config()));
        Self { scheduler, journal, filling: Vec::new() }
    }

    /// Appends everything recorded since the previous call to `bytes`.
    pub fn take_journal(&mut self, bytes: &mut Vec<u8>) {
        if let Some(journal) = &mut self.journal {
            journal.take(bytes);
        }
    }

    /// Records a call before it is made, if recording is on.
    fn record(&mut self, now: Time, call: impl FnOnce(&mut Scheduler) -> Call) {
        if let Some(journal) = &mut self.journal {
            journal.record(now, &Record::Call(call(&mut self.scheduler)));
        }
    }

    /// See [`Scheduler::add`].
    pub fn add(&mut self, request: Request, now: Time) -> Result<SeqId, Rejected> {
        let id = self.scheduler.add(request, now)?;
        if let Some(journal) = &mut self.journal {
            let seq = self.scheduler.sequence(id).expect("it was just added");
            let request = seq.request();
            let held = |held| self.scheduler.held_number(held).expect("it was added to a held sequence");
            let added = Added {
                prompt_tokens: seq.spec().prompt_len,
                answered: request.resumed.map(|resumed| resumed.answered),
                continues: request.continues.map(|continues| (held(continues.held), continues.tokens)),
                request: request.to_bytes(),
                names: self.scheduler.block_names(seq, 0).map(BlockHash::to_bits).collect(),
            };
            journal.record(now, &Record::Add(added));
        }
        Ok(id)
    }

    /// See [`Scheduler::prepare`].
    pub fn prepare(&mut self, id: SeqId, next: Option<Preparation>, now: Time) -> bool {
        let Some(seq) = self.scheduler.sequence(id).filter(|seq| seq.preparation().is_some()) else { return false };
        let arrival_number = seq.spec().arrival_number;
        self.record(now, |_| Call::Prepare { arrival_number, next });
        self.scheduler.prepare(id, next, now)
    }

    /// See [`Scheduler::fork`].
    pub fn fork(&mut self, parent: SeqId, tag: u64, now: Time) -> Option<SeqId> {
        let arrival_number = self.scheduler.sequence(parent)?.spec().arrival_number;
        let id = self.scheduler.fork(parent, tag, now)?;
        self.record(now, |_| Call::Fork { parent: arrival_number, tag });
        Some(id)
    }

    /// See [`Scheduler::fork_held`].
    pub fn fork_held(&mut self, id: HeldId, now: Time) -> Option<HeldId> {
        self.record_held(Call::ForkHeld, id, now);
        self.scheduler.fork_held(id, now)
    }

    /// See [`Scheduler::drop_held`].
    pub fn drop_held(&mut self, id: HeldId, now: Time) -> bool {
        self.record_held(Call::DropHeld, id, now);
        self.scheduler.drop_held(id, now)
    }

    fn record_held(&mut self, call: impl FnOnce(u64) -> Call, id: HeldId, now: Time) {
        if let Some(number) = self.scheduler.held_number(id) {
            self.record(now, |_| call(number));
        }
    }

    /// See [`Scheduler::restore`].
    pub fn restore(&mut self, group: &str, tokens: &[Token], now: Time) -> Restored {
        self.record(now, |scheduler| Call::Restore(scheduler.restored_names(group, tokens).into_iter().map(BlockHash::to_bits).collect()));
        self.scheduler.restore(group, tokens, now)
    }

    /// See [`Scheduler::set_priority`].
    pub fn set_priority(&mut self, id: SeqId, priority: i32, now: Time) -> bool {
        let Some(seq) = self.scheduler.sequence(id) else { return false };
        let arrival_number = seq.spec().arrival_number;
        self.record(now, |_| Call::SetPriority { arrival_number, priority });
        self.scheduler.set_priority(id, priority, now)
    }

    /// See [`Scheduler::charge_external`].
    pub fn charge_external(&mut self, tenant: &str, us: Time) {
        if let Some(journal) = self.journal.as_mut().filter(|_| self.scheduler.rules().takes_turns()) {
            journal.note(&Record::Call(Call::ChargeExternal { tenant: tenant.into(), us }));
        }
        self.scheduler.charge_external(tenant, us);
    }

    /// See [`Scheduler::end`].
    pub fn end(&mut self, id: SeqId, reason: FinishReason, now: Time) -> bool {
        let Some(seq) = self.scheduler.sequence(id) else { return false };
        let Spec { arrival_number, tag, .. } = *seq.spec();
        self.record(now, |_| Call::End { arrival_number, reason });
        let ended = self.scheduler.end(id, reason, now);
        if let Some(timeline) = self.journal.is_some().then(|| self.scheduler.explain(tag)).flatten() {
            self.record_ended(now, &[timeline]);
        }
        ended
    }

    /// Records what requests that ended had, for readers that do not replay.
    fn record_ended(&mut self, now: Time, ended: &[Timeline]) {
        let Some(journal) = &mut self.journal else { return };
        for timeline in ended {
            let ended = EndedRequest {
                tag: timeline.tag,
                time: now,
                finish: timeline.finish.expect("it has ended"),
                output_tokens: timeline.output_tokens,
                cached_tokens: timeline.cached_tokens,
                preemptions: timeline.preemptions,
                first_token: timeline.first_token,
            };
            journal.record(now, &Record::Ended(ended));
        }
    }

    /// See [`Scheduler::expire`].
    pub fn expire(&mut self, now: Time, ended: &mut Vec<Timeline>) {
        if self.scheduler.has_due(now) {
            self.record(now, |_| Call::Expire);
        }
        let before = ended.len();
        self.scheduler.expire(now, ended);
        self.record_ended(now, &ended[before..]);
    }

    /// See [`Scheduler::draft`]. The source is recorded for simulations.
    pub fn draft(&mut self, id: SeqId, tokens: &[Token], source: DraftSource) -> bool {
        let taken = self.scheduler.draft(id, tokens);
        if let Some(journal) = self.journal.as_mut().filter(|_| taken) {
            let seq = self.scheduler.sequence(id).expect("it took the draft");
            let (arrival_number, tokens) = (seq.spec().arrival_number, seq.draft().len() as u32);
            journal.note(&Record::Call(Call::Draft { arrival_number, tokens, accepted: 0, source }));
        }
        taken
    }

    /// See [`Scheduler::plan`].
    pub fn plan(&mut self, now: Time) -> Option<Box<StepPlan>> {
        let plan = self.scheduler.plan(now);
        if let Some(journal) = &mut self.journal {
            journal.plan(now, plan.as_deref());
        }
        plan
    }

    /// See [`Scheduler::commit`].
    pub fn commit(&mut self, plan: Box<StepPlan>, sampled: &[i32], now: Time, outputs: &mut Outputs) {
        if self.journal.is_some() {
            self.note_filling(&plan);
        }
        let steps = plan.step + 1;
        self.scheduler.commit(plan, sampled, now, outputs);
        self.count_given(outputs);
        self.record_commit(now, outputs);
        self.record_ended(now, &outputs.ended);
        self.record_names();
        self.record_step_model(steps);
    }

    /// Notes the sequences that may fill a block in this step. A sequence that ends in the commit is removed by it.
    fn note_filling(&mut self, plan: &StepPlan) {
        let size = self.scheduler.config().block_size;
        let mask = if size.is_power_of_two() { size - 1 } else { 0 };
        // A division per chunk would be measurable.
        let is_full = |tokens: u32| if mask > 0 { tokens & mask == 0 } else { tokens.is_multiple_of(size) };
        // The sampled token follows the chunk's last token.
        let fills = |chunk: &&Chunk| chunk.samples && (chunk.drafted > 0 || is_full(chunk.start + chunk.len + 1));
        let scheduler = &self.scheduler;
        self.filling.clear();
        self.filling.extend(plan.chunks.iter().filter(fills).filter_map(|chunk| {
            let Spec { arrival_number, tag, .. } = *scheduler.sequence(chunk.seq)?.spec();
            Some(Filling { seq: chunk.seq, arrival_number, tag, drafted: chunk.drafted > 0, given: 0 })
        }));
    }

    /// Counts the new tokens of each noted sequence. Both lists are in batch order, and each noted sequence has a token.
    fn count_given(&mut self, outputs: &Outputs) {
        let mut tokens = outputs.tokens.iter().peekable();
        for filling in &mut self.filling {
            while tokens.next_if(|output| output.tag != filling.tag).is_some() {}
            while tokens.next_if(|output| output.tag == filling.tag).is_some() {
                filling.given += 1;
            }
        }
    }

    /// Records the requests that ended for a reason other than length, and the number of new tokens of each drafted
    /// sequence.
    fn record_commit(&mut self, now: Time, outputs: &Outputs) {
        let Some(journal) = &mut self.journal else { return };
        let ended = outputs.ended.iter().filter_map(|timeline| match timeline.finish {
            Some(FinishReason::Stop) => Some((timeline.tag, false)),
            Some(FinishReason::Error) => Some((timeline.tag, true)),
            _ => None,
        });
        let drafted = self.filling.iter().filter(|filling| filling.drafted);
        let drafted = drafted.map(|filling| (filling.arrival_number, filling.given as u32));
        journal.record(now, &Record::Call(Call::Commit(Sampled { ended: ended.collect(), drafted: drafted.collect() })));
    }

    /// Records the step-time model after `steps` steps, often while it learns most and rarely later.
    fn record_step_model(&mut self, steps: u64) {
        if let Some(journal) = self.journal.as_mut().filter(|_| steps.is_power_of_two() || steps.is_multiple_of(1024)) {
            journal.note(&Record::StepModel(self.scheduler.model().raw()));
        }
    }

    /// Records the names of blocks just filled by generated tokens. Other sequences may share these blocks, now or
    /// after a preemption.
    fn record_names(&mut self) {
        let Some(journal) = self.journal.as_mut().filter(|_| self.scheduler.config().enable_prefix_caching) else { return };
        for &Filling { seq: id, arrival_number, given, .. } in &self.filling {
            let Some(seq) = self.scheduler.sequence(id) else { continue };
            let first = (seq.tokens().len() - given) / self.scheduler.config().block_size as usize;
            // The sequence does not keep these names, because decisions must not depend on the journal.
            for (name, block) in self.scheduler.block_names(seq, first).zip(first as u32..) {
                journal.note(&Record::Name { arrival_number, block, name: name.to_bits() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Recorder;
    use crate::{Config, Outputs, Request, Scheduler};

    /// A recorder that computed all names of a sequence for each filled block would take quadratic time.
    #[test]
    fn recording_a_filled_block_computes_at_most_one_name() {
        for lag in 0..2 {
            let config = Config { num_kv_blocks: 400, block_size: 4, max_model_len: 1500, ..Config::default() };
            let mut recorder = Recorder::on(Scheduler::new(config).expect("a sound config"));
            let request = Request { prompt: vec![1; 10], max_new_tokens: 1400, ..Request::default() };
            let id = recorder.add(request, 0).expect("it fits");
            let mut planned = std::collections::VecDeque::new();
            loop {
                planned.extend(recorder.plan(0));
                while planned.len() > lag {
                    recorder.commit(planned.pop_front().expect("a plan"), &[7], 0, &mut Outputs::default());
                }
                let Some(seq) = recorder.sequence(id).filter(|seq| seq.len() < 1400) else { break };
                let missing = seq.tokens().len() / 4 - seq.blocks.names().len();
                assert!(missing <= 1, "{missing} names are missing at {} tokens", seq.len());
            }
        }
    }
}
