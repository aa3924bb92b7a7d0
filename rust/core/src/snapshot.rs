//! What a dashboard shows: who has which row, who waits and why, which blocks
//! are held, and who rode in the newest steps.
//!
//! Steps are noted only while somebody looks: that costs O(rows) a step.

use crate::Scheduler;
use crate::batch::StepPlan;
use crate::ledger::{Cause, State};
use crate::request::Time;
use crate::sequence::Sequence;
use std::collections::VecDeque;
use std::sync::Arc;

/// Steps that are kept for the next look.
const STEPS: usize = 256;
/// How long after a look steps are noted for the next one.
const WATCHED: Time = 3_000_000;

/// A sequence that has a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowSeen {
    /// Its row.
    pub row: u32,
    /// Which sequence.
    pub tag: u64,
    /// Whose.
    pub tenant: Arc<str>,
    /// Its class.
    pub priority: i32,
    /// `prefill`, `recompute`, `decode` or `stalled`.
    pub state: &'static str,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Leading tokens whose KV is in the cache, or will be after the step under way.
    pub computed_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
    /// Blocks in its table.
    pub blocks: usize,
    /// Microseconds since it was added.
    pub age: Time,
}

/// A sequence that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitSeen {
    /// Which sequence.
    pub tag: u64,
    /// Whose.
    pub tenant: Arc<str>,
    /// Its class.
    pub priority: i32,
    /// What it waits for at present.
    pub cause: Cause,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens generated before it lost its row.
    pub output_tokens: u32,
    /// Microseconds since it was added, or lost its row.
    pub waited: Time,
}

/// A step that was planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepSeen {
    /// Steps planned before it.
    pub step: u64,
    /// When.
    pub planned: Time,
    /// One byte a row: `d` decodes, `p` computes its prompt, `r` computes again what it had lost, `-` is held
    /// but has no token in this step, and a space is free.
    pub rows: Vec<u8>,
    /// Tokens in the pass.
    pub tokens: u32,
    /// Sequences that wait.
    pub waiting: usize,
    /// Who took a row in it: row and tag.
    pub seated: Vec<(u32, u64)>,
    /// Who lost a row for it, by tag.
    pub preempted: Vec<u64>,
}

/// A look at everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Those with rows, in the order of their admission.
    pub rows: Vec<RowSeen>,
    /// The first of those that wait, in the queue's order; siblings that wait for a prompt are in no queue.
    pub waiting: Vec<WaitSeen>,
    /// The KV blocks in their order: [`FREE`](Self::FREE), [`CACHED`](Self::CACHED), [`SHARED`](Self::SHARED), or
    /// [`HELD`](Self::HELD) plus the row of its one holder. A cell of several blocks shows what most of them are.
    pub cells: Vec<u32>,
    /// Blocks to a cell.
    pub blocks_per_cell: usize,
    /// The steps planned since the last look, as long as that was not long ago, the oldest first.
    pub steps: Vec<StepSeen>,
}

impl Snapshot {
    /// Nobody holds it, and there is nothing in it.
    pub const FREE: u32 = 0;
    /// Nobody holds it, and a prompt may find it.
    pub const CACHED: u32 = 1;
    /// Several sequences hold it.
    pub const SHARED: u32 = 2;
    /// The sequence of row 0 holds it.
    pub const HELD: u32 = 3;
}

/// The steps since the last look.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    until: Time,
    steps: VecDeque<StepSeen>,
}

impl Scheduler {
    /// What there is at `now`, with at most so many of the waiting and so many
    /// cells; for some seconds from now on, steps are noted for the next look.
    /// O(rows + blocks).
    pub fn snapshot(&mut self, now: Time, most_waiting: usize, most_cells: usize) -> Snapshot {
        self.watch.until = now + WATCHED;
        let (cells, blocks_per_cell) = self.cells(most_cells);
        Snapshot {
            rows: self.seated().map(|seq| self.row_seen(seq, now)).collect(),
            waiting: self.queue.iter().take(most_waiting).map(|(_, id)| self.wait_seen(&self.seqs[id], now)).collect(),
            cells,
            blocks_per_cell,
            steps: self.watch.steps.drain(..).collect(),
        }
    }

    /// Keeps who rides in a step, if somebody looked of late.
    pub(crate) fn note_step(&mut self, plan: &StepPlan) {
        if self.watch.until <= plan.planned {
            self.watch.steps.clear();
            return;
        }
        let mut rows = vec![b' '; self.config.max_seqs as usize];
        for seq in self.seated() {
            rows[seq.row as usize] = b'-';
        }
        for chunk in &plan.chunks {
            let seq = &self.seqs[chunk.seq];
            rows[chunk.row as usize] = match () {
                () if seq.lost > 0 && !seq.decoding => b'r',
                () if chunk.start < seq.prompt_len => b'p',
                () => b'd',
            };
        }
        if self.watch.steps.len() == STEPS {
            self.watch.steps.pop_front();
        }
        self.watch.steps.push_back(StepSeen {
            step: plan.step,
            planned: plan.planned,
            rows,
            tokens: plan.chunks.iter().map(|chunk| chunk.len).sum(),
            waiting: self.queue.len() + self.parked,
            seated: plan.seated.iter().map(|one| (one.row, one.tag)).collect(),
            preempted: plan.preempted.clone(),
        });
    }

    fn row_seen(&self, seq: &Sequence, now: Time) -> RowSeen {
        let state = match seq.account.state() {
            State::Decode => "decode",
            State::Recompute => "recompute",
            State::Stalled => "stalled",
            _ => "prefill",
        };
        RowSeen {
            row: seq.row,
            tag: seq.tag,
            tenant: Arc::clone(self.tenants.name(seq.tenant)),
            priority: seq.priority,
            state,
            prompt_tokens: seq.prompt_len,
            computed_tokens: seq.computed,
            output_tokens: seq.output_tokens(),
            blocks: seq.table.ids().len(),
            age: now.saturating_sub(seq.arrived),
        }
    }

    fn wait_seen(&self, seq: &Sequence, now: Time) -> WaitSeen {
        let cause = match (seq.account.state(), self.clocks.turn()) {
            (State::Swapped, _) => Cause::Swapped,
            (State::Preempted, _) => Cause::Preempted,
            (State::Fresh, _) => Cause::WaitStep,
            (_, Some((group, limit))) if group == seq.group => limit,
            _ => self.others(),
        };
        let since = if seq.started.is_some() { seq.account.since() } else { seq.arrived };
        WaitSeen {
            tag: seq.tag,
            tenant: Arc::clone(self.tenants.name(seq.tenant)),
            priority: seq.priority,
            cause,
            prompt_tokens: seq.prompt_len,
            output_tokens: seq.output_tokens(),
            waited: now.saturating_sub(since),
        }
    }

    /// Who holds each block, the scratch block left out, and how many blocks there are to a cell.
    fn cells(&self, most: usize) -> (Vec<u32>, usize) {
        let mut blocks: Vec<u32> = self.pool.kinds().collect();
        for seq in self.seated() {
            for id in seq.table.ids() {
                let block = &mut blocks[id.0 as usize - 1];
                if *block == Snapshot::HELD {
                    *block += seq.row;
                }
            }
        }
        let to_a_cell = blocks.len().div_ceil(most.max(1)).max(1);
        if to_a_cell == 1 {
            return (blocks, 1);
        }
        let cells = blocks.chunks_mut(to_a_cell).map(|cell| {
            cell.sort_unstable();
            cell.chunk_by(|one, next| one == next).max_by_key(|same| same.len()).map_or(Snapshot::FREE, |same| same[0])
        });
        (cells.collect(), to_a_cell)
    }
}
