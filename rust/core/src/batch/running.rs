//! The running sequences, their slots, and the sequences with special rights.

use super::preemption_budget::PreemptionBudget;
use super::reservation::Reserved;
use crate::policy::Class;
use crate::request::{SeqId, Time};
use crate::sequence::Sequence;
use std::collections::BTreeMap;

/// The running sequences.
#[derive(Debug)]
pub(crate) struct Running {
    /// Sequences in the order of admission. The list may contain sequences that have ended or were preempted. The next
    /// plan drops them.
    order: Vec<SeqId>,
    free_slots: Vec<u32>,
    slots: u32,
    /// Number of running sequences in each class.
    classes: BTreeMap<Class, u32>,
    /// Sequences whose known tokens were not all computed when the plan began, in the order in which they get tokens.
    prompts: Vec<SeqId>,
    /// An empty list, kept to reuse its memory.
    limited: Vec<SeqId>,
    /// The sequence that was admitted because it had waited too long.
    aged: Option<SeqId>,
    /// The sequence that is never preempted. It guarantees progress.
    non_preemptible: Option<SeqId>,
    /// The waiting sequence for which no sequence could be preempted. Reset when a sequence is admitted, leaves or changes its class, or
    /// when there are more blocks.
    refused: Option<SeqId>,
    preemption_budget: PreemptionBudget,
    reserved: Reserved,
}

impl Running {
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            order: Vec::with_capacity(2 * slots as usize),
            free_slots: (0..slots).rev().collect(),
            slots,
            classes: BTreeMap::new(),
            prompts: Vec::new(),
            limited: Vec::new(),
            aged: None,
            non_preemptible: None,
            refused: None,
            preemption_budget: PreemptionBudget::default(),
            reserved: Reserved::default(),
        }
    }

    /// Resets the state that depends on steps.
    pub(crate) fn begin_plan(&mut self) {
        self.reserved.invalidate();
    }

    /// Gives a sequence a slot. Panics if no slot is free.
    pub(crate) fn assign(&mut self, id: SeqId, seq: &Sequence) -> u32 {
        let slot = self.free_slots.pop().expect("the caller looked");
        *self.classes.entry(seq.class()).or_default() += 1;
        if seq.is_protected() {
            self.non_preemptible.get_or_insert(id);
        }
        self.order.push(id);
        self.reserved.invalidate();
        self.refused = None;
        slot
    }

    /// Releases a slot.
    pub(crate) fn release(&mut self, id: SeqId, slot: u32, class: Class) {
        self.free_slots.push(slot);
        self.reserved.invalidate();
        // More space is free now than when the request was refused.
        self.refused = None;
        self.leave_class(class);
        self.aged = self.aged.filter(|&aged| aged != id);
        self.non_preemptible = self.non_preemptible.filter(|&other| other != id);
    }

    /// Moves a running sequence to another class.
    pub(crate) fn change_class(&mut self, from: Class, to: Class) {
        *self.classes.entry(to).or_default() += 1;
        self.leave_class(from);
        self.refused = None;
    }

    fn leave_class(&mut self, class: Class) {
        let count = self.classes.get_mut(&class).expect("it runs");
        *count -= 1;
        if *count == 0 {
            self.classes.remove(&class);
        }
    }

    /// Number of free slots.
    pub(crate) fn free_slots(&self) -> usize {
        self.free_slots.len()
    }

    pub(crate) fn has_slot(&self) -> bool {
        !self.free_slots.is_empty()
    }

    /// Number of slots.
    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    /// Length of the admission order. It may include sequences that left since the last plan.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    #[inline]
    pub(crate) fn at(&self, at: usize) -> SeqId {
        self.order[at]
    }

    /// Sequences in the order of admission. Some may have left since the last plan.
    pub(crate) fn iter(&self) -> impl Iterator<Item = SeqId> + '_ {
        self.order.iter().copied()
    }

    /// Moves a sequence to an earlier place that is vacant.
    #[inline]
    pub(crate) fn keep(&mut self, place: usize, id: SeqId) {
        self.order[place] = id;
    }

    /// Keeps the first `len` sequences.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.order.truncate(len);
    }

    /// The prompts in progress when the plan began.
    pub(crate) fn prompts(&self) -> &[SeqId] {
        &self.prompts
    }

    pub(crate) fn clear_prompts(&mut self) {
        self.prompts.clear();
    }

    pub(crate) fn add_prompt(&mut self, id: SeqId) {
        self.prompts.push(id);
    }

    /// An empty list for the decoding sequences whose tokens are limited: see [`give_limited`](Self::give_limited).
    pub(crate) fn take_limited(&mut self) -> Vec<SeqId> {
        std::mem::take(&mut self.limited)
    }

    /// Takes the list back to reuse its memory.
    pub(crate) fn give_limited(&mut self, mut list: Vec<SeqId>) {
        list.clear();
        self.limited = list;
    }

    /// Sorts the prompts by `key`.
    pub(crate) fn sort_prompts<K: Ord>(&mut self, key: impl FnMut(&SeqId) -> K) {
        self.prompts.sort_unstable_by_key(key);
    }

    /// The least urgent class with running sequences.
    pub(crate) fn least_urgent_class(&self) -> Option<Class> {
        self.classes.last_key_value().map(|(&class, _)| class)
    }

    /// The sequence that was admitted because it had waited too long.
    pub(crate) fn aged(&self) -> Option<SeqId> {
        self.aged
    }

    pub(crate) fn set_aged(&mut self, id: SeqId) {
        self.aged = Some(id);
    }

    /// The sequence that is never preempted.
    pub(crate) fn non_preemptible(&self) -> Option<SeqId> {
        self.non_preemptible
    }

    /// Records that no sequence can be preempted for this request. Reset when a sequence is admitted or leaves.
    pub(crate) fn refuse(&mut self, id: SeqId) {
        self.refused = Some(id);
    }

    pub(crate) fn is_refused(&self, id: SeqId) -> bool {
        self.refused == Some(id)
    }

    /// Records that there may be more blocks than when a request was refused, or that it may be more urgent.
    pub(crate) fn retry_refused(&mut self) {
        self.refused = None;
    }

    /// The budget of preemption at `now`.
    pub(crate) fn preemption_budget(&mut self, now: Time) -> &mut PreemptionBudget {
        self.preemption_budget.grow(now);
        &mut self.preemption_budget
    }

    /// Expected growth of the running sequences.
    pub(crate) fn reserved(&mut self) -> &mut Reserved {
        &mut self.reserved
    }

    /// Panics unless `running` are all running sequences.
    pub(crate) fn check<'a>(&self, running: impl Iterator<Item = (SeqId, &'a Sequence)>) {
        let mut slots = self.free_slots.clone();
        for (id, seq) in running {
            assert!(!seq.is_last_chance() || self.non_preemptible == Some(id), "two sequences that nobody may preempt");
            assert!(self.order.contains(&id), "a slot without a running sequence");
            slots.extend(seq.slot());
        }
        let count = self.slots as usize - self.free_slots.len();
        assert_eq!(self.classes.values().sum::<u32>() as usize, count, "classes that run");
        slots.sort_unstable();
        assert!(slots.into_iter().eq(0..self.slots), "a slot is lost or taken twice");
    }
}
