//! The recurrent state of sequences, in slots that the scheduler owns, and the parts of a step that change it.

use std::ops::Range;

use crate::step::{Step, StepError};
use crate::unsafe_slice::UnsafeSlice;
use crate::zeroed::{OutOfMemory, Zeroed};

/// Dimensions of the state of one sequence. All layers have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Number of layers.
    pub layers: usize,
    /// Number of earlier inputs that a convolution keeps of each channel.
    pub columns: usize,
    /// Number of channels of a convolution.
    pub channels: usize,
    /// Number of heads. 0 if layers have a convolution alone.
    pub heads: usize,
    /// Numbers in the matrix of a head.
    pub matrix: usize,
}

/// What the memory of states is for.
const WHAT: &str = "recurrent states";

impl StateShape {
    /// Numbers of a layer: \[columns\]\[channels\] of the convolution, then \[heads\]\[matrix\].
    fn layer(self) -> usize {
        self.columns * self.channels + self.heads * self.matrix
    }

    /// Bytes of a slot.
    pub fn bytes(self) -> usize {
        self.layers * self.layer() * size_of::<f32>()
    }
}

/// The states of sequences, one in each slot: fp32, \[slots\]\[layers\]\[numbers of a layer\].
pub struct StateCache {
    shape: StateShape,
    memory: Zeroed,
    /// For each slot, the number of tokens that its state has seen.
    positions: Vec<usize>,
}

impl StateCache {
    /// Creates slots. Physical memory is used only when states are written.
    pub fn new(shape: StateShape, slots: usize) -> Result<Self, OutOfMemory> {
        let bytes = slots.checked_mul(shape.bytes()).ok_or(OutOfMemory { bytes: usize::MAX, what: WHAT })?;
        Ok(Self { shape, memory: Zeroed::new(bytes, WHAT)?, positions: vec![0; slots] })
    }

    /// The dimensions of a state.
    pub fn shape(&self) -> StateShape {
        self.shape
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.positions.len()
    }

    /// Copies states. Each pair is (source, target), and pairs are copied in order. Panics if a slot does not exist.
    pub fn copy(&mut self, pairs: &[(u32, u32)]) {
        let bytes = self.shape.bytes();
        for (source, target) in pairs.iter().map(|&(source, target)| (source as usize, target as usize)) {
            self.positions[target] = self.positions[source];
            self.memory.copy_within(source * bytes..(source + 1) * bytes, target * bytes);
        }
    }

    /// The bytes of a slot, which [`write`](Self::write) takes. Panics if the slot does not exist.
    pub fn read(&self, slot: u32) -> &[u8] {
        let bytes = self.shape.bytes();
        &self.memory[slot as usize * bytes..][..bytes]
    }

    /// Overwrites a slot with bytes of [`read`](Self::read): the state after `position` tokens. Panics if the slot does not exist or their
    /// number differs.
    pub fn write(&mut self, slot: u32, position: usize, state: &[u8]) {
        let bytes = self.shape.bytes();
        self.memory[slot as usize * bytes..][..bytes].copy_from_slice(state);
        self.positions[slot as usize] = position;
    }

    /// Returns a view that several threads can write to.
    pub(crate) fn view(&mut self) -> States<'_> {
        // SAFETY: every bit pattern is a number. The memory starts at a page, or is empty.
        let (_, numbers, _) = unsafe { self.memory.align_to_mut::<f32>() };
        States { numbers: UnsafeSlice::new(numbers), shape: self.shape }
    }

    /// Notes which tokens the states have seen after a step.
    pub(crate) fn advance(&mut self, chunks: &Chunks) {
        for chunk in &chunks.chunks {
            for &(row, slot) in &chunks.saves[chunk.saves.clone()] {
                self.positions[slot] = chunk.start + row - chunk.rows.start;
            }
            self.positions[chunk.slot] = chunk.start + chunk.rows.len();
        }
    }
}

/// The states, shared by the threads of a step.
#[derive(Clone, Copy)]
pub(crate) struct States<'a> {
    pub(crate) numbers: UnsafeSlice<'a, f32>,
    pub(crate) shape: StateShape,
}

impl States<'_> {
    /// Where the columns of a layer's convolution begin.
    pub(crate) fn columns(self, slot: usize, layer: usize) -> usize {
        (slot * self.shape.layers + layer) * self.shape.layer()
    }

    /// Where the matrix of a head begins.
    pub(crate) fn matrix(self, slot: usize, layer: usize, head: usize) -> usize {
        self.columns(slot, layer) + self.shape.columns * self.shape.channels + head * self.shape.matrix
    }

    /// Copies `len` numbers from one place to another one.
    ///
    /// # Safety
    ///
    /// The places do not overlap, no other thread writes the source, and none uses the target.
    pub(crate) unsafe fn copy(self, from: usize, to: usize, len: usize) {
        // SAFETY: the caller guarantees it.
        unsafe { self.numbers.write(to, len).copy_from_slice(self.numbers.read(from, len)) };
    }
}

/// The states of a step's sequences.
pub struct StateStep<'a> {
    /// The slots.
    pub cache: &'a mut StateCache,
    /// For each sequence, the slot of its state.
    pub slots: &'a [i32],
    /// Triples (sequence, position, slot): the state after this number of the sequence's tokens is also written to the slot.
    pub saves: &'a [[i32; 3]],
}

/// The tokens of one sequence in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) slot: usize,
    /// Tokens of the sequence before this step. If there are none, the state starts from zeros.
    pub(crate) start: usize,
    /// The tokens, by their index in the step.
    rows: Range<usize>,
    /// Its entries in [`Chunks::saves`].
    saves: Range<usize>,
}

/// The chunks of a step, and where states are saved.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Chunks {
    pub(crate) chunks: Vec<Chunk>,
    /// Chunk by chunk and in ascending order: the index of the token before which the state is saved, and the slot.
    saves: Vec<(usize, usize)>,
}

impl Chunks {
    /// Checks the slots of a step whose other arrays have been checked. The threads rely on it that no two states of a step are written to
    /// one slot.
    pub(crate) fn new(step: &Step<'_>, state: &StateStep<'_>) -> Result<Self, StepError> {
        let sequences = step.context_lens.len();
        if state.slots.len() != sequences {
            return Err(StepError::Length { what: "state_slots", found: state.slots.len(), expected: sequences });
        }
        let mut written = vec![false; state.cache.slots()];
        let mut claim = |slot: i32| match usize::try_from(slot).ok().and_then(|slot| written.get_mut(slot).map(|taken| (slot, taken))) {
            None => Err(StepError::StateSlot { slot, slots: state.cache.slots() }),
            Some((slot, true)) => Err(StepError::DuplicateState(slot)),
            Some((slot, taken)) => {
                *taken = true;
                Ok(slot)
            }
        };
        let mut listed = Vec::with_capacity(state.saves.len());
        for &[sequence, position, slot] in state.saves {
            listed.push((usize::try_from(sequence).unwrap_or(usize::MAX), position, claim(slot)?));
        }
        listed.sort_unstable();
        let (mut chunks, mut saves) = (Vec::with_capacity(sequences), Vec::with_capacity(listed.len()));
        for (sequence, &slot) in state.slots.iter().enumerate() {
            let rows = step.query_starts[sequence] as usize..step.query_starts[sequence + 1] as usize;
            let start = step.context_lens[sequence] as usize - rows.len();
            let slot = claim(slot)?;
            if start > 0 && state.cache.positions[slot] != start {
                return Err(StepError::StatePosition { sequence, slot, found: state.cache.positions[slot], expected: start });
            }
            let first = saves.len();
            while let Some(&(_, position, to)) = listed.get(saves.len()).filter(|save| save.0 == sequence) {
                let Some(row) = usize::try_from(position).ok().filter(|position| (start + 1..=start + rows.len()).contains(position))
                else {
                    return Err(StepError::StateSave { sequence, position, start, end: start + rows.len() });
                };
                saves.push((rows.start + row - start, to));
            }
            chunks.push(Chunk { slot, start, rows, saves: first..saves.len() });
        }
        match listed.get(saves.len()) {
            Some(&(sequence, position, _)) => Err(StepError::StateSave { sequence, position, start: 0, end: 0 }),
            None => Ok(Self { chunks, saves }),
        }
    }

    /// The parts of a chunk: its tokens up to the next save or the end, and the slots to which the state is copied then.
    pub(crate) fn segments<'a>(&'a self, chunk: &'a Chunk) -> impl Iterator<Item = (Range<usize>, &'a [(usize, usize)])> {
        let saves = self.saves[chunk.saves.clone()].chunk_by(|one, next| one.0 == next.0);
        let mut next = chunk.rows.start;
        let rest: &[(usize, usize)] = &[];
        saves.chain(std::iter::once(rest)).map(move |saves| {
            let end = saves.first().map_or(chunk.rows.end, |save| save.0);
            (std::mem::replace(&mut next, end)..end, saves)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: StateShape = StateShape { layers: 2, columns: 3, channels: 16, heads: 2, matrix: 32 };

    /// A step of a sequence's first 10 tokens, and of 5 tokens after 20 of another one.
    const STEP: Step<'_> = Step {
        input_ids: &[],
        positions: &[],
        slots: &[],
        query_starts: &[0, 10, 15],
        context_lens: &[10, 25],
        rows: &[],
        block_tables: &[],
        max_blocks: 0,
        adapters: &[],
    };

    fn cache() -> StateCache {
        let mut cache = StateCache::new(SHAPE, 6).expect("memory");
        cache.positions[1] = 20;
        cache
    }

    fn chunks(cache: &mut StateCache, slots: &[i32], saves: &[[i32; 3]]) -> Result<Chunks, StepError> {
        Chunks::new(&STEP, &StateStep { cache, slots, saves })
    }

    #[test]
    fn chunks_end_in_segments_at_saves_in_any_order() {
        let mut cache = cache();
        let chunks = chunks(&mut cache, &[4, 1], &[[1, 25, 0], [0, 7, 5], [1, 21, 2], [0, 7, 3]]).expect("it fits");
        let parts = |chunk: usize| {
            let saved = |saves: &[(usize, usize)]| saves.iter().map(|save| save.1).collect::<Vec<_>>();
            let all = chunks.segments(&chunks.chunks[chunk]).map(|(rows, saves)| (rows, saved(saves)));
            all.collect::<Vec<_>>()
        };
        assert_eq!(parts(0), [(0..7, vec![3, 5]), (7..10, vec![])]);
        assert_eq!(parts(1), [(10..11, vec![2]), (11..15, vec![0]), (15..15, vec![])]);
        cache.advance(&chunks);
        assert_eq!(cache.positions, [25, 25, 21, 7, 10, 7]);
    }

    #[test]
    fn states_that_do_not_fit_the_step_are_refused() {
        let refused = |slots: &[i32], saves: &[[i32; 3]]| chunks(&mut cache(), slots, saves).expect_err("it does not fit");
        assert_eq!(refused(&[4], &[]), StepError::Length { what: "state_slots", found: 1, expected: 2 });
        assert_eq!(refused(&[6, 1], &[]), StepError::StateSlot { slot: 6, slots: 6 });
        assert_eq!(refused(&[4, -1], &[]), StepError::StateSlot { slot: -1, slots: 6 });
        assert_eq!(refused(&[1, 1], &[]), StepError::DuplicateState(1));
        assert_eq!(refused(&[4, 1], &[[0, 7, 1]]), StepError::DuplicateState(1));
        assert_eq!(refused(&[4, 1], &[[0, 7, 5], [1, 21, 5]]), StepError::DuplicateState(5));
        assert_eq!(refused(&[4, 2], &[]), StepError::StatePosition { sequence: 1, slot: 2, found: 0, expected: 20 });
        for position in [0, 11, -3] {
            assert_eq!(refused(&[4, 1], &[[0, position, 5]]), StepError::StateSave { sequence: 0, position, start: 0, end: 10 });
        }
        assert_eq!(refused(&[4, 1], &[[1, 20, 5]]), StepError::StateSave { sequence: 1, position: 20, start: 20, end: 25 });
        assert!(matches!(refused(&[4, 1], &[[2, 20, 5]]), StepError::StateSave { .. }));
        assert!(matches!(refused(&[4, 1], &[[-1, 7, 5]]), StepError::StateSave { .. }));
    }

    #[test]
    fn copies_follow_each_other_and_take_positions_along() {
        let mut cache = cache();
        let view = cache.view();
        // SAFETY: there is one thread.
        unsafe { view.numbers.write(view.columns(1, 0), SHAPE.bytes() / 4) }.fill(1.5);
        cache.copy(&[(1, 3), (3, 0), (2, 1)]);
        let sums = |cache: &mut StateCache| {
            let view = cache.view();
            // SAFETY: as above.
            (0..6)
                .map(|slot| unsafe { view.numbers.read(view.columns(slot, 0), SHAPE.bytes() / 4) }.iter().sum::<f32>())
                .collect::<Vec<_>>()
        };
        let whole = 1.5 * (SHAPE.bytes() / 4) as f32;
        assert_eq!(sums(&mut cache), [whole, 0.0, 0.0, whole, 0.0, 0.0]);
        assert_eq!(cache.positions, [20, 0, 0, 20, 0, 0]);
        let view = cache.view();
        assert_eq!(view.matrix(1, 1, 1), (SHAPE.bytes() / 4) + 112 + 48 + 32);
    }
}
