//! Drafts with recorded acceptance.

use crate::live::Live;
use chairlift_core::{Chunk, DraftLengths, Load, Scheduler, SeqId, Token, VerifiedDraft};
use slotmap::SecondaryMap;
use std::collections::HashMap;

/// The token that stands for a rejected drafted token. No output has it.
const REJECTED: Token = i32::MAX as Token;

/// Proposes recorded drafts. The step-time model and learned acceptance rates decide how much of them, as in the engine.
pub(crate) struct Drafts {
    /// Maximum number of tokens for a sequence and step.
    max_tokens: usize,
    lengths: DraftLengths,
    /// The drafts of the current step.
    proposed: HashMap<SeqId, VerifiedDraft>,
}

impl Drafts {
    pub(crate) fn new(max_tokens: usize) -> Self {
        Self { max_tokens, lengths: DraftLengths::default(), proposed: HashMap::new() }
    }

    /// Proposes tokens for the next step of decoding jobs.
    pub(crate) fn propose(&mut self, scheduler: &mut Scheduler, live: &SecondaryMap<SeqId, Live>) {
        self.proposed.clear();
        if self.max_tokens == 0 || !scheduler.model().knows() {
            return;
        }
        let (mut load, mut found) = (Load::default(), Vec::new());
        for (id, tokens, room) in scheduler.decoding() {
            load.decode_seqs += 1;
            load.context_tokens += tokens.len() as u64;
            let Some(live) = live.get(id) else { continue };
            let most = self.max_tokens.min(room) as u32;
            if let Some(draft) = live.draft(tokens.len() as u32).filter(|_| most > 0) {
                let (tokens, accepted) = (draft.tokens.min(most), draft.accepted.min(most));
                found.push((id, live, VerifiedDraft { tokens, accepted, ..draft }));
            }
        }
        let lengths: Vec<_> = found.iter().map(|(_, _, draft)| (draft.source, draft.tokens as usize)).collect();
        let admitted = self.lengths.admit(&load, scheduler.model(), &lengths);
        for ((id, live, draft), admitted) in found.into_iter().zip(admitted).filter(|(_, admitted)| *admitted > 0) {
            let token = |ahead| if ahead < draft.accepted { live.token(ahead) } else { REJECTED };
            scheduler.draft(id, &(0..admitted as u32).map(token).collect::<Vec<_>>());
            self.proposed.insert(id, draft);
        }
    }

    /// The number of accepted tokens of a computed chunk.
    pub(crate) fn accepted(&mut self, chunk: &Chunk) -> u32 {
        let Some(draft) = self.proposed.get(&chunk.seq).filter(|_| chunk.drafted > 0) else { return 0 };
        let accepted = draft.accepted.min(chunk.drafted);
        self.lengths.observe(draft.source, chunk.drafted as usize, accepted as usize);
        accepted
    }
}
