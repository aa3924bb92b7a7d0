//! The recurrent states of sequences: what each sequence needs of the pool, and which prefixes a sequence can resume from.

use super::super::block::{BlockId, Chain, Content};
use super::super::hash::BlockHash;
use super::super::state_pool::{End, Run, SaveKind, StateSlot};
use super::{Cached, Kv, SeqBlocks};
use crate::request::Token;

/// Tokens of a prompt that begin its answer, at most: those of the role, and an opening or an empty thought.
const ANSWER_BEGINNING: u32 = 12;

/// A sequence's recurrent state. Only [`Kv`] changes it.
#[derive(Debug, Default)]
pub(super) struct SeqState {
    /// The slot of the live or the parked state.
    slot: Option<StateSlot>,
    run: Run,
    /// The slot of the state before the drafted tokens of a step in flight.
    undo: Option<StateSlot>,
    /// Number of tokens before the state of a held sequence. `None` for other sequences.
    held_at: Option<u32>,
    /// The slot and the run of the held sequence whose state the sequence begins with, by the latest lookup.
    source: Option<(StateSlot, Run)>,
    /// The contents of the blocks in the sequence's chain.
    contents: Vec<Content>,
    /// Numbers of tokens, in ascending order, after which the state is to be saved, and why.
    wanted: Vec<(u32, SaveKind)>,
    /// Tokens that were cached beyond the last block with a state at the latest admission, and those of them that the tenant may see.
    lost: LostHit,
    /// Leading blocks up to the last one with a state at the latest lookup.
    resumable: usize,
}

/// Cached tokens that a sequence computes again, because no state is saved after them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LostHit {
    pub(crate) tokens: u32,
    /// Those of them that requests of the same tenant have computed before.
    pub(crate) own: u32,
}

impl SeqBlocks {
    /// The slot of the sequence's live or parked state, in a model that has states.
    pub(crate) fn state_slot(&self) -> Option<StateSlot> {
        self.state.as_ref()?.slot
    }

    /// The slot of the state before the drafted tokens of a step in flight.
    pub(crate) fn undo_slot(&self) -> Option<StateSlot> {
        self.state.as_ref()?.undo
    }

    /// Number of leading blocks that the sequence could share at the latest lookup.
    pub(crate) fn usable_len(&self) -> usize {
        self.state.as_ref().map_or_else(|| self.cached_len(), |state| state.resumable)
    }

    /// What the latest admission could not share for want of a state.
    pub(crate) fn lost_hit(&self) -> LostHit {
        self.state.as_ref().map_or_else(LostHit::default, |state| state.lost)
    }

    /// Sets the contents of the chain's blocks, in a model that has states.
    pub(super) fn set_contents(&mut self, contents: Vec<Content>) {
        self.state.get_or_insert_default().contents = contents;
    }

    /// Reserves capacity for the contents of `len` blocks, in a model that has states.
    pub(super) fn reserve_contents(&mut self, len: usize) {
        if let Some(state) = &mut self.state {
            state.contents.reserve_exact(len - state.contents.len());
        }
    }

    /// Has the sequence save its state after `position` tokens, if it has yet to compute them, because another one shares them. Called
    /// for models that have states.
    pub(crate) fn wants_state(&mut self, position: u32) {
        let wanted = &mut self.state.get_or_insert_default().wanted;
        if let Err(at) = wanted.binary_search_by_key(&position, |wanted| wanted.0) {
            wanted.insert(at, (position, SaveKind::Shared));
        }
    }
}

impl Kv {
    /// Whether the model has recurrent states.
    #[inline]
    pub(crate) fn has_states(&self) -> bool {
        self.states.exists()
    }

    /// Number of saved states.
    pub(crate) fn saved_states(&self) -> usize {
        self.states.saved()
    }

    /// Finds the blocks that a sequence can share in a model that has states: those up to the last one after which a state is saved.
    /// Where more are cached, the sequence is to save its state, because others may begin like it.
    pub(super) fn find_resumable(&mut self, blocks: &mut SeqBlocks, tokens: &[Token]) -> Cached {
        let whole = if self.sharing { (tokens.len() - 1) / self.block_size as usize } else { 0 };
        let mut found = std::mem::take(&mut self.spare);
        let names = blocks.names.get(..whole).unwrap_or_default();
        blocks.chain = self.pool.find(&blocks.scope, names, tokens, &mut found);
        let mut contents = self.contents(&found);
        let usable = self.resumable(contents.iter().copied().map(Some));
        let used = found.iter().take_while(|&&id| self.pool.is_used_by(id, blocks.user)).count();
        let tokens_of = |blocks: usize| blocks.saturating_sub(usable) as u32 * self.block_size;
        let lost = LostHit { tokens: tokens_of(found.len()), own: tokens_of(used) };
        let state = blocks.state.get_or_insert_default();
        (state.lost, state.source) = (lost, None);
        state.wanted.clear();
        if lost.tokens > 0 {
            state.wanted.push((found.len() as u32 * self.block_size, SaveKind::Shared));
        }
        contents.truncate(usable);
        found.truncate(usable);
        blocks.chain.truncate(&found, &contents);
        blocks.set_contents(contents);
        Cached { blocks: found, tail: None }
    }

    /// The contents of cached blocks.
    pub(super) fn contents(&self, found: &[BlockId]) -> Vec<Content> {
        found.iter().map(|&id| self.pool.content(id).expect("it is cached")).collect()
    }

    /// Has a sequence begin with the state of a held one, if that is the state after `computed` tokens. Returns whether it does.
    pub(super) fn resume_held(blocks: &mut SeqBlocks, held: &SeqBlocks, computed: u32) -> bool {
        let (Some(state), Some(of)) = (&mut blocks.state, &held.state) else { return false };
        if of.held_at != Some(computed) {
            return false;
        }
        (state.source, state.lost) = (of.slot.map(|slot| (slot, of.run)), LostHit::default());
        state.contents.clone_from(&of.contents);
        true
    }

    /// Keeps the state of a sequence that ends for `held`, if it is that after `computed` tokens and slots are left for `running` sequences.
    /// `position` is the number of tokens that the sequence has computed.
    pub(super) fn hold_state(&mut self, blocks: &mut SeqBlocks, held: &mut SeqBlocks, computed: u32, position: u32, running: u32) {
        if position == computed
            && self.can_keep_state(running)
            && let Some(mut state) = blocks.state.take()
            && let Some(slot) = state.slot
        {
            self.states.hold(slot, state.run);
            state.held_at = Some(computed);
            state.contents.truncate(held.chain.len());
            held.state = Some(state);
        }
    }

    /// Number of leading blocks with these contents, those that are cached, up to the last one after which a state is saved.
    pub(super) fn resumable(&self, mut contents: impl DoubleEndedIterator<Item = Option<Content>> + ExactSizeIterator) -> usize {
        let has_state = |content: Option<Content>| content.is_some_and(|content| self.states.find(content).is_some());
        contents.rposition(has_state).map_or(0, |last| last + 1)
    }

    /// Number of leading blocks of `cached` ones with these names that a sequence can share: all, or those up to the last one after which
    /// a state is saved.
    pub(crate) fn usable(&self, names: &[BlockHash], cached: usize) -> usize {
        if !self.states.exists() {
            return cached;
        }
        self.resumable(names[..cached].iter().map(|&name| self.pool.content_of(name)))
    }

    /// Sets the chain of cached blocks of a waiting sequence, and how many of them it could share.
    pub(crate) fn set_chain(&self, blocks: &mut SeqBlocks, chain: Chain) {
        blocks.chain = chain;
        if self.states.exists() {
            let usable = self.usable(&blocks.names, blocks.chain.len());
            blocks.state.get_or_insert_default().resumable = usable;
        }
    }

    /// Number of computed tokens of a sequence that a preemption would not lose, if it lost the blocks now.
    pub(crate) fn kept_tokens(&self, blocks: &SeqBlocks) -> u32 {
        blocks.state.as_ref().map_or(0, |state| self.resumable(state.contents.iter().copied().map(Some)) as u32 * self.block_size)
    }

    /// Whether a preempted sequence's state can stay in its slot, or another state of a running one be kept, beside the states of `running`
    /// sequences.
    pub(crate) fn can_keep_state(&self, running: u32) -> bool {
        !self.states.exists() || self.states.can_reserve(running as usize)
    }

    /// Gives a sequence whose next tokens are drafted a slot for the state before them, which the step is to save. Call it if a state
    /// [can be kept](Self::can_keep_state).
    pub(crate) fn begin_draft(&mut self, blocks: &mut SeqBlocks) {
        if let Some(state) = &mut blocks.state {
            state.undo = Some(self.states.begin_draft());
        }
    }

    /// Ends a draft. If a token of it was `rejected`, the sequence gets back its state after the `known` tokens before the draft. Returns
    /// whether it did.
    pub(crate) fn end_draft(&mut self, blocks: &mut SeqBlocks, rejected: bool, known: u32) -> bool {
        let Some(state) = &mut blocks.state else { return false };
        let Some(undo) = state.undo.take() else { return false };
        if rejected {
            let live = state.slot.replace(undo).expect("it runs");
            self.states.reject_draft(undo, live, state.run, known);
        } else {
            self.states.accept_draft(undo);
        }
        rejected
    }

    /// Gives a sequence that begins to run, in a model that has states, a slot with the state after its `computed` tokens. Chooses where it
    /// saves its state, by `len` and the end of the user's turn, and keeps the state at that end if it is saved.
    pub(crate) fn begin_state(
        &mut self,
        blocks: &mut SeqBlocks,
        computed: u32,
        len: u32,
        turn: Option<u32>,
        copies: &mut Vec<(StateSlot, StateSlot)>,
    ) {
        if !self.states.exists() {
            return;
        }
        let state = blocks.state.get_or_insert_default();
        let held = state.source.take();
        if let Some(slot) = state.slot {
            self.states.unpark(slot);
            return;
        }
        let from = state.contents.last().filter(|_| computed > 0).copied();
        let source = held.map(|(slot, _)| slot).or_else(|| {
            self.states.touch(from?);
            Some(self.states.find(from?).expect("it was found before"))
        });
        self.settle_states();
        let before = held.map(|(_, run)| run).or_else(|| self.states.conversation(source?));
        self.want_turns(state, (computed, len), turn, before.is_some());
        let (slot, run) = self.states.begin(before);
        (state.slot, state.run) = (Some(slot), run);
        let turn_blocks = turn.map_or(0, |turn| turn.min(len - 1) / self.block_size) as usize;
        if let Some(&content) = turn_blocks.checked_sub(1).and_then(|block| state.contents.get(block)) {
            self.states.keep_user_turn(run, content);
        }
        // The only saved state may have been evicted for this sequence.
        copies.extend(source.filter(|&source| source != slot).map(|source| (source, slot)));
    }

    /// Has a sequence that begins to run save its state at the last full block before the token `turn`, if there is one, and at that before
    /// its last token, as far as its conversation may have as many states. If more than the beginning of an answer follows the user's turn,
    /// the latter is that before the answer, which the next prompt may begin in another way. A sequence that resumes a conversation saves
    /// none where the cached blocks end, because the next turn finds the later ones.
    fn want_turns(&self, state: &mut SeqState, (computed, len): (u32, u32), turn: Option<u32>, resumes: bool) {
        let whole = |tokens: u32| tokens.min(len - 1) / self.block_size * self.block_size;
        let end = if turn.is_some_and(|turn| turn + ANSWER_BEGINNING < len) { len - ANSWER_BEGINNING } else { len };
        let most = self.states.most(len);
        if resumes && most < usize::MAX {
            state.wanted.clear();
        }
        let mut turns: Vec<_> = turn.map(whole).into_iter().chain([whole(end)]).filter(|&position| position > computed).collect();
        turns.dedup();
        turns.truncate(most);
        state.wanted.retain(|(position, _)| !turns.contains(position));
        state.wanted.extend(turns.into_iter().map(|position| (position, SaveKind::Turn)));
        state.wanted.sort_unstable_by_key(|wanted| wanted.0);
    }

    /// Chooses the states that `step` saves while a sequence computes the tokens from `start` to `end`. From `answer` tokens on, its
    /// answer grows. Calls `save` with the number of tokens before each and its slot.
    pub(crate) fn save_states(
        &mut self,
        blocks: &mut SeqBlocks,
        (start, end): (u32, u32),
        answer: u32,
        step: u64,
        mut save: impl FnMut(u32, StateSlot),
    ) {
        let Some(state) = blocks.state.as_mut().filter(|_| self.sharing) else { return };
        let passed = state.wanted.partition_point(|wanted| wanted.0 <= end);
        let wanted = state.wanted.drain(..passed).filter(|wanted| wanted.0 > start);
        let last = end / self.block_size * self.block_size;
        let rolling = (last > start && last >= answer).then_some((last, SaveKind::Rolling));
        let mut before = start;
        for (position, kind) in wanted.chain(rolling) {
            let block = (position / self.block_size) as usize - 1;
            // The content is not known yet if the last token of the block is not.
            let end = state.contents.get(block).map(|&content| End { content, name: blocks.names[block] });
            let useful = end.is_none_or(|end| self.pool.has(end.name, end.content) && !self.states.touch(end.content));
            if position > before
                && useful
                && let Some(slot) = self.states.save(state.run, position, end, step, kind)
            {
                save(position, slot);
            }
            before = position;
        }
    }

    /// Records that a block of a sequence is named, and that its chain is longer by one.
    pub(super) fn name_state(&mut self, blocks: &mut SeqBlocks, position: u32, name: BlockHash) {
        if let Some(state) = &mut blocks.state {
            // The name may be that of a block that is no longer cached.
            self.settle_states();
            let end = End { content: blocks.chain.content(), name };
            state.contents.push(end.content);
            self.states.name(state.run, position, end);
        }
    }

    /// Takes a slot for the state after the blocks that were restored with these names, whose last content is `content`.
    pub(super) fn restore_state(&mut self, names: &[BlockHash], content: Content) -> Option<StateSlot> {
        let name = *names.last().filter(|_| self.states.exists())?;
        self.settle_states();
        self.states.restore(End { content, name }, names.len() as u32 * self.block_size)
    }

    /// The contents of cached blocks after which a state is saved, complete before `step`, and its slot.
    pub(crate) fn stored_states(&self, step: u64) -> Vec<(Content, StateSlot)> {
        self.states.stored(step)
    }

    /// Drops the states that step `since` or a later step saves for a sequence.
    pub(super) fn forget_states(&mut self, blocks: &SeqBlocks, since: u64) {
        if let Some(state) = &blocks.state {
            self.states.forget(state.run, since);
        }
    }

    /// Keeps the state of a sequence whose KV is copied to host memory.
    pub(super) fn park_state(&mut self, blocks: &SeqBlocks) {
        if let Some(slot) = blocks.state_slot() {
            self.states.park(slot);
        }
    }

    /// Releases a sequence's slot.
    pub(super) fn end_state(&mut self, blocks: &mut SeqBlocks) {
        if let Some(state) = blocks.state.take()
            && let Some(slot) = state.slot
        {
            if let Some(undo) = state.undo {
                self.states.accept_draft(undo);
            }
            self.states.end(slot, state.run);
        }
    }

    /// Drops the states after blocks that are no longer cached.
    pub(crate) fn settle_states(&mut self) {
        for content in self.pool.take_dropped() {
            self.states.drop_content(content);
        }
    }

    /// Panics unless the slots agree with the sequences.
    pub(super) fn check_states<'a>(&self, all: impl Iterator<Item = &'a SeqBlocks> + Clone) {
        let of = |blocks: &SeqBlocks| blocks.state.as_ref().and_then(|state| Some((state.slot?, state.run)));
        let is_held = |blocks: &SeqBlocks| blocks.state.as_ref().is_some_and(|state| state.held_at.is_some());
        let is_parked = |blocks: &SeqBlocks| !blocks.host.is_empty() || is_held(blocks);
        let slots = |parked: bool| all.clone().filter(move |blocks| is_parked(blocks) == parked).filter_map(of).collect::<Vec<_>>();
        let known = self.pool.known_contents();
        let undo: Vec<_> = all.clone().filter_map(SeqBlocks::undo_slot).collect();
        self.states.check(&slots(false), &slots(true), &undo, |content| known.contains(&content));
        for blocks in all.filter(|blocks| !blocks.ids().is_empty()) {
            if let Some(state) = &blocks.state {
                assert_eq!(state.contents.len(), blocks.chain.len(), "contents of a chain");
            }
        }
    }
}
