//! The sequences that run: their slots, and who of them has a special right.

use crate::request::{SeqId, Time};
use crate::reservation::Reserved;
use crate::sequence::Sequence;
use crate::share::PreemptionBudget;
use std::collections::BTreeMap;

/// The sequences that run.
#[derive(Debug)]
pub(crate) struct Running {
    /// In the order of their admission. May name sequences that ended or were
    /// preempted: the next plan drops them.
    order: Vec<SeqId>,
    free_slots: Vec<u32>,
    slots: u32,
    /// How many of each class run.
    classes: BTreeMap<i32, u32>,
    /// Those whose known tokens were not all computed when the plan began, in the order of their turn.
    prompts: Vec<SeqId>,
    /// The one that runs because it had waited too long.
    aged: Option<SeqId>,
    /// The one that nobody preempts, so that one always ends.
    non_preemptible: Option<SeqId>,
    /// The one that waits and found nobody to be preempted for it, until somebody comes or goes.
    refused: Option<SeqId>,
    fairness: PreemptionBudget,
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
            aged: None,
            non_preemptible: None,
            refused: None,
            fairness: PreemptionBudget::default(),
            reserved: Reserved::default(),
        }
    }

    /// Has what depends on the time, or on steps, computed anew.
    pub(crate) fn begin_plan(&mut self, now: Time) {
        self.fairness.grow(now);
        self.reserved.invalidate();
    }

    /// Gives a sequence a slot. Panics if none is free.
    pub(crate) fn assign(&mut self, id: SeqId, seq: &Sequence) -> u32 {
        let slot = self.free_slots.pop().expect("the caller looked");
        *self.classes.entry(seq.spec().priority).or_default() += 1;
        if seq.is_protected() {
            self.non_preemptible.get_or_insert(id);
        }
        self.order.push(id);
        self.reserved.invalidate();
        self.refused = None;
        slot
    }

    /// Takes a slot back.
    pub(crate) fn release(&mut self, id: SeqId, slot: u32, priority: i32) {
        self.free_slots.push(slot);
        self.reserved.invalidate();
        // There is more room now than when somebody was refused.
        self.refused = None;
        let count = self.classes.get_mut(&priority).expect("it runs");
        *count -= 1;
        if *count == 0 {
            self.classes.remove(&priority);
        }
        self.aged = self.aged.filter(|&aged| aged != id);
        self.non_preemptible = self.non_preemptible.filter(|&other| other != id);
    }

    /// Slots that nobody has.
    pub(crate) fn free_slots(&self) -> usize {
        self.free_slots.len()
    }

    pub(crate) fn has_slot(&self) -> bool {
        !self.free_slots.is_empty()
    }

    /// Slots there are.
    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    /// Sequences in the order, some of which may have left since the last plan.
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

    /// Those in the order of their admission, some of which may have left since the last plan.
    pub(crate) fn iter(&self) -> impl Iterator<Item = SeqId> + '_ {
        self.order.iter().copied()
    }

    /// Moves a sequence to an earlier place, which another has left.
    #[inline]
    pub(crate) fn keep(&mut self, place: usize, id: SeqId) {
        self.order[place] = id;
    }

    /// Drops all but the first.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.order.truncate(len);
    }

    /// The prompts that had begun when the plan did.
    pub(crate) fn prompts(&self) -> &[SeqId] {
        &self.prompts
    }

    pub(crate) fn clear_prompts(&mut self) {
        self.prompts.clear();
    }

    pub(crate) fn add_prompt(&mut self, id: SeqId) {
        self.prompts.push(id);
    }

    /// Has the prompts take turns in another order.
    pub(crate) fn sort_prompts<K: Ord>(&mut self, key: impl FnMut(&SeqId) -> K) {
        self.prompts.sort_unstable_by_key(key);
    }

    /// The least urgent class that runs.
    pub(crate) fn least_urgent_class(&self) -> Option<i32> {
        self.classes.last_key_value().map(|(&class, _)| class)
    }

    /// The one that runs because it had waited too long.
    pub(crate) fn aged(&self) -> Option<SeqId> {
        self.aged
    }

    pub(crate) fn set_aged(&mut self, id: SeqId) {
        self.aged = Some(id);
    }

    /// The one that nobody preempts.
    pub(crate) fn non_preemptible(&self) -> Option<SeqId> {
        self.non_preemptible
    }

    /// Notes that nobody can be preempted for a request, as long as nobody comes or goes.
    pub(crate) fn refuse(&mut self, id: SeqId) {
        self.refused = Some(id);
    }

    pub(crate) fn is_refused(&self, id: SeqId) -> bool {
        self.refused == Some(id)
    }

    /// What preemption for fairness may cost.
    pub(crate) fn fairness(&mut self) -> &mut PreemptionBudget {
        &mut self.fairness
    }

    /// What running sequences are expected to take of the cache.
    pub(crate) fn reserved(&mut self) -> &mut Reserved {
        &mut self.reserved
    }

    /// Panics unless `running` are all that run.
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
