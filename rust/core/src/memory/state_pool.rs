//! Slots for recurrent states: what a model with recurrent layers keeps of all tokens before a position.

use super::block::Content;
use super::{BlockHash, CacheChanges, ChangeLog};
use rustc_hash::{FxHashMap, FxHashSet};

/// Index of a slot that holds the state of all recurrent layers after some tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateSlot(pub u32);

/// Identifies a sequence from its admission to its end or its preemption. A number is never reused.
pub(super) type Run = u64;

/// How a slot is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    /// The state of a running sequence. Each of its chunks moves the state on.
    Live,
    /// The state of a preempted sequence whose KV is in host memory, or of a held sequence.
    Parked,
    /// The state of a running sequence before its drafted tokens.
    Undo,
    /// The state at the end of a block.
    Saved(Saved),
}

/// A block at whose end a state is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) content: Content,
    pub(super) name: BlockHash,
}

/// A saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Saved {
    /// The run that saves it.
    run: Run,
    /// The latest run of the conversation that it belongs to.
    conversation: Run,
    /// Number of tokens before it.
    position: u32,
    /// The block that ends there. `None` until the tokens are known.
    end: Option<End>,
    /// The step that saves it.
    step: u64,
    kind: SaveKind,
    /// Position in the order of use.
    used: u64,
}

/// Why a state is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SaveKind {
    /// Several conversations begin with the tokens before it.
    Shared,
    /// The prompt of a run, or its last turn, ends there.
    Turn,
    /// An answer grows. Only the last two of a run are kept.
    Rolling,
    /// An earlier request of the run's conversation saved it.
    Earlier,
    /// An earlier request saved it where the user's last turn ends. What follows are calls of tools, and a template may drop their thinking
    /// when the user goes on.
    UserTurn,
}

/// The latest rolling states of a run that are kept: the last one may be undone, with the step that saves it.
const ROLLING: usize = 2;

/// The slots of a model with recurrent layers. Empty for other models.
///
/// A saved state is found under the content of its block. Only later steps may use it: [`save`](Self::save) is called when all states
/// that a step uses are found. If slots are lacking, the least recently used saved state is evicted. The states of a conversation take no
/// more memory than the KV that they make findable, but for its first one.
#[derive(Debug)]
pub(crate) struct StatePool {
    slots: Vec<Use>,
    free: Vec<StateSlot>,
    by_content: FxHashMap<Content, StateSlot>,
    /// Tokens whose KV takes as much memory as a state. 0 for no limit.
    state_tokens: u32,
    changes: ChangeLog,
    /// Number of slots that are parked or hold a state before drafted tokens.
    reserved: usize,
    runs: Run,
    uses: u64,
}

impl StatePool {
    pub(crate) fn new(count: u32, state_tokens: u32) -> Self {
        Self {
            slots: vec![Use::Free; count as usize],
            free: (0..count).rev().map(StateSlot).collect(),
            by_content: FxHashMap::default(),
            state_tokens,
            changes: ChangeLog::default(),
            reserved: 0,
            runs: 0,
            uses: 0,
        }
    }

    /// Whether the model has states.
    #[inline]
    pub(crate) fn exists(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Number of slots with a saved state.
    pub(crate) fn saved(&self) -> usize {
        self.slots.iter().filter(|slot| matches!(slot, Use::Saved(_))).count()
    }

    /// Number of slots that hold nothing. Once there are none, new states evict saved ones.
    pub(crate) fn unused(&self) -> usize {
        self.free.len()
    }

    /// Records from now on which blocks have a saved state, for [`take_changes`](Self::take_changes).
    pub(super) fn record_changes(&mut self) {
        self.changes.start();
    }

    /// The names of the blocks whose states were saved and dropped since the last call. Empty unless they are recorded.
    pub(super) fn take_changes(&mut self) -> CacheChanges {
        self.changes.take()
    }

    /// Most states of a conversation of `tokens` tokens. Those where several conversations part do not count. One whose KV is worth less
    /// than a state has no limit: it is soon evicted.
    pub(super) fn most(&self, tokens: u32) -> usize {
        tokens.checked_div(self.state_tokens).filter(|&most| most > 0).map_or(usize::MAX, |most| most as usize)
    }

    /// Most states of a run's conversation when it saves one after `position` tokens. Where a text of less than a state's worth continues
    /// an earlier turn, the longer texts that the conversation had limit it.
    fn max_beside(&self, run: Run, position: u32) -> usize {
        let longer = self.of_conversation(run).map(|(_, saved)| saved.position).filter(|&other| other > position);
        longer.fold(self.most(position), |most, longer| most.min(self.most(longer)))
    }

    /// Whether a slot can be reserved so that `running` sequences still find slots: for a parked state, or for one before drafted tokens.
    pub(crate) fn can_reserve(&self, running: usize) -> bool {
        self.reserved + 1 + running <= self.slots.len()
    }

    /// Takes a slot for a sequence that begins to run. There is one, because no more sequences run than there are slots that are not
    /// reserved. If it resumes the conversation of the run `before`, the states of that conversation are now those of its own.
    pub(super) fn begin(&mut self, before: Option<Run>) -> (StateSlot, Run) {
        self.runs += 1;
        let run = self.runs;
        if let Some(before) = before {
            self.change_saved(before, |saved| {
                if saved.end.is_some() {
                    (saved.conversation, saved.kind) = (run, SaveKind::Earlier);
                }
            });
        }
        (self.take(Use::Live), run)
    }

    /// Keeps the state that an earlier request of a run's conversation saved after the block with this content, where the user's last turn
    /// ends, as long as the conversation may have others.
    pub(super) fn keep_user_turn(&mut self, run: Run, content: Content) {
        if let Some(slot) = self.find(content)
            && let Use::Saved(saved) = &mut self.slots[slot.0 as usize]
            && (saved.conversation, saved.kind) == (run, SaveKind::Earlier)
        {
            saved.kind = SaveKind::UserTurn;
            self.touch(content);
        }
    }

    /// The run whose conversation a saved state belongs to. `None` if several conversations begin with the tokens before it.
    pub(super) fn conversation(&self, slot: StateSlot) -> Option<Run> {
        self.saved_in(slot).filter(|saved| saved.kind != SaveKind::Shared).map(|saved| saved.conversation)
    }

    /// Ends a run, or a parked state. Only later steps may write the slot. Saved states stay if their tokens are known.
    pub(super) fn end(&mut self, slot: StateSlot, run: Run) {
        self.reserved -= usize::from(self.slots[slot.0 as usize] == Use::Parked);
        self.release(slot);
        self.end_run(run);
    }

    /// Ends a run and keeps its state. The slot [can be reserved](Self::can_reserve).
    pub(super) fn hold(&mut self, slot: StateSlot, run: Run) {
        self.park(slot);
        self.end_run(run);
    }

    /// Drops the states of a run whose tokens are not known. Its answer grows no more.
    fn end_run(&mut self, run: Run) {
        self.release_if(|saved| saved.run == run && saved.end.is_none());
        self.change_saved(run, |saved| saved.kind = SaveKind::Turn);
    }

    /// Keeps the state of a sequence that is preempted.
    pub(super) fn park(&mut self, slot: StateSlot) {
        self.slots[slot.0 as usize] = Use::Parked;
        self.reserved += 1;
    }

    /// Makes a parked state live again.
    pub(super) fn unpark(&mut self, slot: StateSlot) {
        debug_assert_eq!(self.slots[slot.0 as usize], Use::Parked);
        self.slots[slot.0 as usize] = Use::Live;
        self.reserved -= 1;
    }

    /// Takes a slot for the state before drafted tokens. There is one if it [can be reserved](Self::can_reserve).
    pub(super) fn begin_draft(&mut self) -> StateSlot {
        self.reserved += 1;
        self.take(Use::Undo)
    }

    /// Releases the slot of the state before drafted tokens, which are accepted.
    pub(super) fn accept_draft(&mut self, undo: StateSlot) {
        debug_assert_eq!(self.slots[undo.0 as usize], Use::Undo);
        self.reserved -= 1;
        self.release(undo);
    }

    /// Makes the state before drafted tokens, that after `position` tokens of a run, its live state, because a drafted token is rejected.
    /// What was saved after drafted tokens is dropped.
    pub(super) fn reject_draft(&mut self, undo: StateSlot, live: StateSlot, run: Run, position: u32) {
        debug_assert_eq!((self.slots[undo.0 as usize], self.slots[live.0 as usize]), (Use::Undo, Use::Live));
        self.slots.swap(undo.0 as usize, live.0 as usize);
        self.accept_draft(live);
        self.release_if(|saved| saved.run == run && saved.end.is_none() && saved.position > position);
    }

    /// The slot with the state after the block with this content.
    pub(super) fn find(&self, content: Content) -> Option<StateSlot> {
        self.by_content.get(&content).copied()
    }

    /// Makes a saved state the most recently used. Returns whether there is one.
    pub(super) fn touch(&mut self, content: Content) -> bool {
        let Some(&slot) = self.by_content.get(&content) else { return false };
        self.uses += 1;
        if let Use::Saved(saved) = &mut self.slots[slot.0 as usize] {
            saved.used = self.uses;
        }
        true
    }

    /// Takes a slot for the state after `position` tokens, which `step` saves. `end` is the block that ends there, if it is known;
    /// [`name`](Self::name) gives it otherwise. Returns `None` if each slot is live or saved by this step, or if the run's conversation has
    /// as many states as are worth their memory and none that the new one replaces.
    pub(super) fn save(&mut self, run: Run, position: u32, end: Option<End>, step: u64, kind: SaveKind) -> Option<StateSlot> {
        if kind == SaveKind::Rolling && self.of_conversation(run).filter(|(_, saved)| saved.kind == kind).count() >= ROLLING {
            self.release_oldest(run, kind, step);
        }
        // An answer replaces its own earlier states, and a prompt those of earlier prompts and their answers: that of the user's turn only
        // if it may have no other.
        let replaced = if kind == SaveKind::Rolling { kind } else { SaveKind::Earlier };
        while kind != SaveKind::Shared && self.of_conversation(run).count() >= self.max_beside(run, position) {
            let may_replace_turn = kind == SaveKind::Turn && self.max_beside(run, position) == 1;
            let released =
                self.release_oldest(run, replaced, step) || may_replace_turn && self.release_oldest(run, SaveKind::UserTurn, step);
            if !released {
                return None;
            }
        }
        let slot = self.take_slot(step)?;
        self.fill(slot, run, position, end, step, kind);
        Some(slot)
    }

    /// Takes a slot for the state at the end of a block, which the caller writes before the next step. `None` if it is saved, or no slot
    /// is left. No step may be in flight.
    pub(super) fn restore(&mut self, end: End, position: u32) -> Option<StateSlot> {
        if self.touch(end.content) {
            return None;
        }
        let slot = self.take_slot(u64::MAX)?;
        self.runs += 1;
        self.fill(slot, self.runs, position, Some(end), 0, SaveKind::Turn);
        Some(slot)
    }

    /// The contents of blocks at whose ends states are saved for longer than an answer grows, by a step before `step`, and their slots.
    pub(super) fn stored(&self, step: u64) -> Vec<(Content, StateSlot)> {
        let lasting = self.all_saved().filter(|(_, saved)| saved.step < step && saved.kind != SaveKind::Rolling);
        lasting.filter_map(|(slot, saved)| Some((saved.end?.content, slot))).collect()
    }

    /// Records the block that ends after `position` tokens of a run. If the run saves the state there, it can be found from now on.
    pub(super) fn name(&mut self, run: Run, position: u32, end: End) {
        let is_it = |slot: &Use| matches!(slot, Use::Saved(saved) if saved.end.is_none() && (saved.run, saved.position) == (run, position));
        let Some(at) = self.slots.iter().position(is_it) else { return };
        let slot = StateSlot(at as u32);
        if self.touch(end.content) {
            self.release(slot);
        } else if let Use::Saved(saved) = &mut self.slots[at] {
            saved.end = Some(end);
            self.insert(end, slot);
        }
    }

    /// Drops the state after a block that is no longer cached.
    pub(super) fn drop_content(&mut self, content: Content) {
        if let Some(&slot) = self.by_content.get(&content) {
            self.release(slot);
        }
    }

    /// Drops the states that step `since` or a later step saves for a run, because these steps may fail.
    pub(super) fn forget(&mut self, run: Run, since: u64) {
        self.release_if(|saved| saved.run == run && saved.step >= since);
    }

    /// Records the saved state that a slot is to hold.
    fn fill(&mut self, slot: StateSlot, run: Run, position: u32, end: Option<End>, step: u64, kind: SaveKind) {
        self.uses += 1;
        self.slots[slot.0 as usize] = Use::Saved(Saved { run, conversation: run, position, end, step, kind, used: self.uses });
        if let Some(end) = end {
            self.insert(end, slot);
        }
    }

    fn insert(&mut self, end: End, slot: StateSlot) {
        self.by_content.insert(end.content, slot);
        self.changes.record(end.name, true);
    }

    fn take(&mut self, owner: Use) -> StateSlot {
        let slot = self.take_slot(u64::MAX).expect("no more slots are in use than there are");
        self.slots[slot.0 as usize] = owner;
        slot
    }

    fn saved_in(&self, slot: StateSlot) -> Option<&Saved> {
        if let Use::Saved(saved) = &self.slots[slot.0 as usize] { Some(saved) } else { None }
    }

    fn all_saved(&self) -> impl Iterator<Item = (StateSlot, &Saved)> {
        (0..self.slots.len() as u32).map(StateSlot).filter_map(|slot| Some((slot, self.saved_in(slot)?)))
    }

    /// Takes a free slot, or that of the least recently used of the states that a step before `step` saves.
    fn take_slot(&mut self, step: u64) -> Option<StateSlot> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        let (slot, _) = self.all_saved().filter(|(_, saved)| saved.step < step).min_by_key(|(_, saved)| saved.used)?;
        self.release(slot);
        self.free.pop()
    }

    /// The states of the conversation that a run resumes, apart from those where several conversations part.
    fn of_conversation(&self, run: Run) -> impl Iterator<Item = (StateSlot, &Saved)> {
        self.all_saved().filter(move |(_, saved)| saved.conversation == run && saved.kind != SaveKind::Shared)
    }

    /// Releases a state of a kind that a conversation has and a step before `step` saves: the first one of an answer, the least recently
    /// used one otherwise. Returns whether there is one.
    fn release_oldest(&mut self, run: Run, kind: SaveKind, step: u64) -> bool {
        let candidates = self.of_conversation(run).filter(|(_, saved)| saved.kind == kind && saved.step < step);
        let age = |saved: &Saved| if kind == SaveKind::Rolling { saved.position.into() } else { saved.used };
        let Some((oldest, _)) = candidates.min_by_key(|(_, saved)| age(saved)) else { return false };
        self.release(oldest);
        true
    }

    /// Changes the states of a conversation, apart from those where several conversations part.
    fn change_saved(&mut self, run: Run, change: impl Fn(&mut Saved)) {
        for slot in &mut self.slots {
            if let Use::Saved(saved) = slot
                && saved.conversation == run
                && saved.kind != SaveKind::Shared
            {
                change(saved);
            }
        }
    }

    fn release_if(&mut self, released: impl Fn(&Saved) -> bool) {
        for slot in (0..self.slots.len() as u32).map(StateSlot) {
            if self.saved_in(slot).is_some_and(&released) {
                self.release(slot);
            }
        }
    }

    fn release(&mut self, slot: StateSlot) {
        if let Use::Saved(Saved { end: Some(end), .. }) = self.slots[slot.0 as usize] {
            self.by_content.remove(&end.content);
            self.changes.record(end.name, false);
        }
        self.slots[slot.0 as usize] = Use::Free;
        self.free.push(slot);
    }

    /// Panics unless `live` and `parked` are the slots and runs of all sequences, `undo` those before drafted tokens, and all contents with
    /// a saved state are `cached`.
    pub(super) fn check(
        &self,
        live: &[(StateSlot, Run)],
        parked: &[(StateSlot, Run)],
        undo: &[StateSlot],
        cached: impl Fn(Content) -> bool,
    ) {
        let mut used = vec![Use::Free; self.slots.len()];
        let owned = live.iter().map(|&(slot, _)| (slot, Use::Live)).chain(parked.iter().map(|&(slot, _)| (slot, Use::Parked)));
        let owned = owned.chain(undo.iter().map(|&slot| (slot, Use::Undo)));
        let saved = self.all_saved().map(|(slot, &saved)| (slot, Use::Saved(saved)));
        for (slot, owner) in owned.chain(saved) {
            assert_eq!(std::mem::replace(&mut used[slot.0 as usize], owner), Use::Free, "{slot:?} has two owners");
        }
        assert_eq!(used, self.slots, "a state slot is lost");
        let mut free = self.free.clone();
        free.sort_unstable();
        let unused = (0..).map(StateSlot).zip(&used).filter(|&(_, slot)| *slot == Use::Free).map(|(slot, _)| slot);
        assert!(free.into_iter().eq(unused), "a free state slot is lost or free twice");
        assert_eq!(self.reserved, parked.len() + undo.len(), "reserved slots");
        for (_, saved) in self.all_saved().filter(|(_, saved)| saved.end.is_none()) {
            assert!(live.iter().any(|&(_, run)| run == saved.run), "a saved state without a live run to name it");
        }
        // The states of earlier requests may be of a longer text, until the conversation saves its own.
        for (_, last) in self.all_saved().filter(|(_, saved)| matches!(saved.kind, SaveKind::Turn | SaveKind::Rolling)) {
            let upto = self
                .of_conversation(last.conversation)
                .filter(|(_, saved)| saved.kind == SaveKind::Earlier || saved.position <= last.position);
            assert!(upto.count() <= self.most(last.position), "more states of {last:?} than their KV is worth");
        }
        let turns = self.all_saved().filter(|(_, saved)| saved.kind == SaveKind::UserTurn).map(|(_, saved)| saved.conversation);
        let mut conversations = FxHashSet::default();
        assert!({ turns }.all(|turn| conversations.insert(turn)), "two ends of the user's turn in a conversation");
        let named = self.all_saved().filter_map(|(slot, saved)| Some((saved.end?.content, slot)));
        assert_eq!(named.collect::<FxHashMap<_, _>>(), self.by_content, "saved states by content");
        assert!(self.by_content.keys().all(|&content| cached(content)), "a saved state whose block is not cached");
    }
}

#[cfg(test)]
mod tests;
