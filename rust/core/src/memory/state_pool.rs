//! Slots for recurrent states: what a model with recurrent layers keeps of all tokens of a sequence before a position.

/// Index of a slot that holds the recurrent state of all layers after some tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateSlot(pub u32);

/// How a slot is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    /// The state of a running sequence. Each of its chunks moves the state on.
    Live,
}

/// The slots of a model with recurrent layers. Empty for other models.
#[derive(Debug)]
pub(crate) struct StatePool {
    slots: Vec<Use>,
    free: Vec<StateSlot>,
}

impl StatePool {
    pub(crate) fn new(count: u32) -> Self {
        Self { slots: vec![Use::Free; count as usize], free: (0..count).rev().map(StateSlot).collect() }
    }

    /// Whether the model keeps states.
    #[inline]
    pub(crate) fn exists(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Takes a slot for a sequence that begins to run. There is one, because no more sequences run than there are slots.
    pub(crate) fn begin(&mut self) -> StateSlot {
        let slot = self.free.pop().expect("as many slots as running sequences");
        self.slots[slot.0 as usize] = Use::Live;
        slot
    }

    /// Releases the slot of a sequence that runs no more. Only later steps may write it.
    pub(crate) fn end(&mut self, slot: StateSlot) {
        self.slots[slot.0 as usize] = Use::Free;
        self.free.push(slot);
    }

    /// Panics unless `live` are all slots of running sequences.
    pub(crate) fn check(&self, live: impl Iterator<Item = StateSlot>) {
        let mut used = vec![Use::Free; self.slots.len()];
        for slot in live {
            assert_eq!(std::mem::replace(&mut used[slot.0 as usize], Use::Live), Use::Free, "slot {slot:?} has two owners");
        }
        assert_eq!(used, self.slots, "a state slot is lost");
        let mut free = self.free.clone();
        free.sort_unstable();
        let unused = (0..).map(StateSlot).zip(&used).filter(|&(_, slot)| *slot == Use::Free);
        assert!(free.into_iter().eq(unused.map(|(slot, _)| slot)), "a free state slot is lost or free twice");
    }
}
