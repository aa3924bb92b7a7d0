//! Takes in a step's tokens and ends sequences.

use super::Scheduler;
use crate::batch::{NO_TOKEN, Output, Outputs};
use crate::ledger::Timeline;
use crate::request::{FinishReason, Preparation, SeqId, Time, Token};
use crate::sequence::{Phase, Sequence, Stage};
use crate::step::Chunk;

impl Scheduler {
    /// Appends the tokens that one chunk sampled, and ends the request or continues it.
    pub(super) fn commit_chunk(&mut self, chunk: &Chunk, sampled: &[i32], outputs: &mut Outputs) {
        let Some(seq) = self.seqs.get_mut(chunk.seq) else { return };
        seq.take_sample();
        let before = outputs.tokens.len();
        let finish = deliver_accepted(seq, sampled, outputs);
        let given = (outputs.tokens.len() - before) as u64 - u64::from(finish == Some(FinishReason::Error));
        if let Some(charges) = self.rules.charges().filter(|_| !seq.is_background()) {
            self.waiting.shares_mut().charge(seq.member().tenant, charges.service(0, given), seq.request().weight);
        }
        let was_decoding = seq.is_decoding();
        if !was_decoding {
            seq.note_first_token(self.accounts.now());
            seq.blocks.pay_all();
            if let Phase::Running { slot, .. } = seq.phase()
                && seq.preemptions() == chunk.preemptions
            {
                seq.enter(Phase::Running { slot, stage: Stage::Decode }, &self.accounts);
            }
        }
        if chunk.drafted > 0 {
            seq.account.draft(chunk.drafted, (given as u32).saturating_sub(1));
            let (end, len) = (chunk.start + chunk.len, seq.len());
            let goes_back = self.kv.end_draft(&mut seq.blocks, len <= end, end - chunk.drafted);
            seq.settle_draft(chunk, if goes_back { end - chunk.drafted } else { len - 1 });
        }
        match finish {
            None => {
                // The token is known only now, but a later plan may compute its KV.
                let known = seq.known();
                if seq.blocks.is_due(known) {
                    self.seal(chunk.seq, self.steps.planned() - 1);
                }
                if !was_decoding {
                    self.release_forks(chunk.seq);
                }
            }
            Some(reason) => {
                if reason == FinishReason::Error {
                    self.kv.forget_failed(&mut seq.blocks);
                }
                let timeline = self.remove(chunk.seq, reason);
                outputs.ended.push(timeline);
            }
        }
    }

    /// Names the blocks of a sequence that hold only known tokens once `step` has run.
    pub(super) fn seal(&mut self, id: SeqId, step: u64) {
        let seq = &mut self.seqs[id];
        let known = seq.known() as usize;
        let (blocks, tokens) = seq.blocks_and_tokens();
        self.kv.seal(blocks, &tokens[..known], step, |name| self.waiting.block_ready(name));
        if seq.pending() > 0 {
            self.kv.use_all(&mut seq.blocks, step);
        }
    }

    /// The preparation that a sequence needs, or the one whose prompt it waits for.
    fn awaited_preparation(&self, id: SeqId) -> Option<Preparation> {
        let waits_for = |id: &SeqId| self.seqs[*id].parent().filter(|_| self.seqs[*id].phase() == Phase::WaitingOnParent);
        let reads = |id: SeqId| self.reads_at_turn(id).then_some(Preparation::ReadCache);
        std::iter::successors(Some(id), waits_for).find_map(|id| self.seqs[id].preparation().or_else(|| reads(id)))
    }

    /// Moves the forks that waited for a sequence's prompt into the queue. Those of a sequence that is still prepared wait for
    /// the preparation themselves.
    fn release_forks(&mut self, id: SeqId) {
        let preparation = self.awaited_preparation(id);
        for fork in self.seqs[id].take_waiting_forks() {
            if !self.seqs.contains_key(fork) {
                continue;
            }
            self.waiting.leave_parent();
            if let Some(preparation) = preparation {
                self.begin_preparation(fork, preparation);
            } else {
                self.enter(fork, Phase::Queued);
                self.enqueue(fork, false);
            }
        }
    }

    /// Ends a request in any state without further output and frees its resources. The caller's reason is [`FinishReason::Abort`],
    /// [`FinishReason::Stop`] if it detects the end itself, for example at a stop string, or [`FinishReason::Error`] if the request cannot
    /// be computed. Returns false if the request has already ended.
    pub fn end(&mut self, id: SeqId, reason: FinishReason, now: Time) -> bool {
        if !self.seqs.contains_key(id) {
            return false;
        }
        self.accounts.tick(now);
        self.accounts.divide_energy(&mut self.seqs);
        self.leave_early(id, reason);
        true
    }

    /// Ends a request between steps. Blocks completed by uncommitted steps lose their names, because these steps may
    /// fail after the sequence is gone.
    pub(super) fn leave_early(&mut self, id: SeqId, reason: FinishReason) -> Timeline {
        self.kv.forget(&mut self.seqs[id].blocks, self.steps.committed());
        self.remove(id, reason)
    }

    /// Frees everything a sequence holds, removes the sequence and closes its timeline.
    fn remove(&mut self, id: SeqId, reason: FinishReason) -> Timeline {
        self.release_forks(id);
        let seq = &self.seqs[id];
        let timeline = seq.timeline(Some(reason), &self.accounts);
        match seq.phase() {
            Phase::Running { .. } => self.release_slot(id),
            Phase::Preparing(preparation) => {
                self.waiting.end_preparation(seq, preparation);
                if self.reads.forget(id, seq.spec().tag) {
                    self.waiting.end_reload(seq);
                }
            }
            Phase::WaitSession { .. } => self.waiting.end_session_wait(seq),
            Phase::WaitingOnParent => self.waiting.leave_parent(),
            Phase::New | Phase::Queued | Phase::Preempted | Phase::Swapped { .. } => self.dequeue(id),
        }
        let mut seq = self.seqs.remove(id).expect("the caller looked");
        self.leave_blocks(&mut seq, reason);
        self.kv.free_all(&mut seq.blocks);
        self.leave_session(id, &seq, reason);
        self.deadlines.forget(&seq);
        self.accounts.close(seq.member(), &timeline);
        if let Some(finished) = &mut self.finished
            && matches!(reason, FinishReason::Stop | FinishReason::Length)
        {
            finished.push((id, seq.into_tokens()));
        }
        timeline
    }
}

/// Appends sampled tokens up to the first after a drafted token that the model would not have chosen, or to the request's
/// end. Returns the finish reason if the request ends.
#[inline]
fn deliver_accepted(seq: &mut Sequence, sampled: &[i32], outputs: &mut Outputs) -> Option<FinishReason> {
    let mut at = 0;
    loop {
        let finish = deliver(seq, sampled[at], outputs);
        at += 1;
        if finish.is_some() || at == sampled.len() || seq.draft().get(at - 1) != Some(&(sampled[at - 1] as Token)) {
            return finish;
        }
    }
}

/// Appends a sampled token, unless it is negative. Returns the finish reason if the request ends.
#[inline]
fn deliver(seq: &mut Sequence, token: i32, outputs: &mut Outputs) -> Option<FinishReason> {
    let finish = match token {
        0.. => seq.push(token as Token),
        NO_TOKEN => Some(FinishReason::Stop),
        _ => Some(FinishReason::Error),
    };
    outputs.tokens.push(Output { tag: seq.spec().tag, token: token as Token, finish });
    finish
}
