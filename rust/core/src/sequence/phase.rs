//! The phases of a request, and the resources that a waiting request lacks.

use crate::ledger::TimelineState;
use crate::request::Preparation;

/// The phase of a request. No other state repeats it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Added to the queue since the last plan.
    New,
    /// In the queue. The request has not run yet.
    Queued,
    /// Cannot run until its caller has prepared it. It is not in the queue, and counts against the queue's limits.
    Preparing(Preparation),
    /// Waits for the turn of its session. It is not in the queue, and counts against the queue's limits.
    WaitSession {
        /// Whether its caller reads its prefix from storage once the turn has come.
        reads: bool,
    },
    /// A fork that waits for its parent's prompt to be computed. It is not in the queue.
    WaitingOnParent,
    /// In the queue after a preemption that discarded the KV.
    Preempted,
    /// In the queue after a preemption, with KV in host memory.
    Swapped {
        /// Tokens with KV in host memory.
        tokens: u32,
    },
    /// Has a slot of the batch.
    Running {
        /// The slot in the step buffers until the request ends or is preempted.
        slot: u32,
        /// The stage of the running request.
        stage: Stage,
    },
}

/// The stage of a running sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Computes its prompt.
    Prefill,
    /// Recomputes tokens lost in a preemption.
    Recompute,
    /// Got no tokens for its prompt in the last step.
    Stalled,
    /// Has generated a token since it was last admitted.
    Decode,
}

impl Phase {
    /// The state for the timeline. `None` in the queue, where it depends on the group that is next.
    pub(crate) fn state(self) -> Option<TimelineState> {
        Some(match self {
            Self::New => TimelineState::WaitStep,
            Self::Queued => return None,
            Self::Preparing(Preparation::Grammar) => TimelineState::Grammar,
            Self::Preparing(Preparation::ReadCache) => TimelineState::ReadCache,
            Self::WaitSession { .. } => TimelineState::WaitSession,
            Self::WaitingOnParent => TimelineState::WaitFork,
            Self::Preempted => TimelineState::Preempted,
            Self::Swapped { .. } => TimelineState::Swapped,
            Self::Running { stage: Stage::Prefill, .. } => TimelineState::Prefill,
            Self::Running { stage: Stage::Recompute, .. } => TimelineState::Recompute,
            Self::Running { stage: Stage::Stalled, .. } => TimelineState::Stalled,
            Self::Running { stage: Stage::Decode, .. } => TimelineState::Decode,
        })
    }

    /// Tokens with KV in host memory.
    pub(crate) fn swapped_tokens(self) -> u32 {
        if let Self::Swapped { tokens } = self { tokens } else { 0 }
    }
}

/// The resource that a waiting sequence lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A slot of the batch.
    Slot,
    /// Tokens of the step's budget.
    Budget,
    /// This many free blocks, beyond those held back for others.
    Blocks(usize),
    /// The next step. The blocks and slots freed by this step's preemptions are reserved.
    NextStep,
    /// The commit of a token sampled before the sequence was preempted.
    Commit,
    /// The end of the non-preemptible sequence. There can be only one at a time.
    NonPreemptible,
    /// The start of a batch.
    Batch,
    /// A prefix that a running prompt is about to cache.
    Prefix,
    /// A prefix in host memory, which the next steps read back.
    Read,
}

impl Need {
    /// The state for the timeline.
    pub(crate) fn state(self) -> TimelineState {
        match self {
            Self::Slot => TimelineState::WaitSlots,
            // The running prompt takes the step's tokens.
            Self::Budget | Self::Prefix => TimelineState::WaitBudget,
            Self::Blocks(_) | Self::NextStep | Self::Read | Self::Commit | Self::NonPreemptible => TimelineState::WaitBlocks,
            Self::Batch => TimelineState::WaitBatch,
        }
    }
}
