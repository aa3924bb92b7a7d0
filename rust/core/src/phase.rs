//! Where a request is in its life, and what one that waits lacks.

use crate::timeline::{AccountState, TimelineState};

/// Where a request is in its life. Nothing else says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// In the queue since the last plan.
    New,
    /// In the queue; it never ran.
    Queued,
    /// A fork that waits for its parent's prompt to be computed. It is in no queue.
    WaitingOnParent,
    /// In the queue again, without its KV.
    Preempted,
    /// In the queue again; the KV of so many tokens is in host memory.
    Swapped {
        /// Tokens whose KV is there.
        tokens: u32,
    },
    /// It has a slot of the batch.
    Running {
        /// Its place in the step buffers until it ends or is preempted.
        slot: u32,
        /// What it does there.
        stage: Stage,
    },
}

/// What a running sequence does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its prompt is computed.
    Prefill,
    /// What it lost in a preemption is computed again.
    Recompute,
    /// The last step had no tokens for its prompt.
    Stalled,
    /// It has generated a token since it was admitted last.
    Decode,
}

impl Phase {
    /// The state that a timeline books.
    pub(crate) fn state(self) -> AccountState {
        match self {
            Self::New => AccountState::New,
            Self::Queued => AccountState::Waiting,
            Self::WaitingOnParent => AccountState::Fork,
            Self::Preempted => AccountState::Preempted,
            Self::Swapped { .. } => AccountState::Swapped,
            Self::Running { stage: Stage::Prefill, .. } => AccountState::Prefill,
            Self::Running { stage: Stage::Recompute, .. } => AccountState::Recompute,
            Self::Running { stage: Stage::Stalled, .. } => AccountState::Stalled,
            Self::Running { stage: Stage::Decode, .. } => AccountState::Decode,
        }
    }

    /// Tokens whose KV is in host memory.
    pub(crate) fn swapped_tokens(self) -> u32 {
        if let Self::Swapped { tokens } = self { tokens } else { 0 }
    }
}

/// What a waiting sequence lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A slot of the batch.
    Slot,
    /// Tokens of the step's budget.
    Budget,
    /// So many free blocks, beyond those that are held back for others.
    Blocks(usize),
    /// The next step: the room that this one's preemptions made is for others.
    NextStep,
    /// The commit of a token that was sampled before it was preempted.
    Commit,
    /// The end of the one sequence that cannot be preempted: it would be another.
    NonPreemptible,
    /// A batch that may start.
    Batch,
    /// The prefix that a running prompt is about to put into the cache.
    Prefix,
}

impl Need {
    /// What the timeline calls it.
    pub(crate) fn state(self) -> TimelineState {
        match self {
            Self::Slot => TimelineState::WaitSlots,
            Self::Budget => TimelineState::WaitBudget,
            Self::Blocks(_) | Self::NextStep | Self::Commit | Self::NonPreemptible => TimelineState::WaitBlocks,
            Self::Batch => TimelineState::WaitBatch,
            Self::Prefix => TimelineState::WaitPolicy,
        }
    }
}
