//! The input of one forward pass, and the checks that make it safe to run on several threads.

use crate::cache::KvShape;

/// One forward pass over tokens of some sequences. Python's `StepBuffers` documents the arrays.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Step<'a> {
    pub input_ids: &'a [i32],
    pub positions: &'a [i32],
    pub slots: &'a [i32],
    pub query_starts: &'a [i32],
    pub context_lens: &'a [i32],
    /// Each sequence's row in `block_tables`.
    pub rows: &'a [i32],
    pub block_tables: &'a [i32],
    /// Width of a row of `block_tables`.
    pub max_blocks: usize,
    /// For each row of `block_tables`, the number of its adapter; 0 for none. Empty if no sequence has one.
    pub adapters: &'a [i32],
}

/// The reason why a step cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// The length of an array does not match the other arrays.
    #[error("{what} has {found} entries where the step needs {expected}")]
    Length {
        /// The array.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length that the other arrays imply.
        expected: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("token {at} of the step is {id}, and the vocabulary has {vocabulary} tokens")]
    Token {
        /// The token's index in the step.
        at: usize,
        /// The token id.
        id: i32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
    /// A position is outside the table of their embeddings.
    #[error("token {at} of the step has position {position}, and there are embeddings of {positions} positions")]
    Position {
        /// The token's index in the step.
        at: usize,
        /// The position.
        position: i32,
        /// Number of positions.
        positions: usize,
    },
    /// A slot is outside the cache.
    #[error("token {at} of the step has slot {slot}, and the cache has {slots} slots")]
    Slot {
        /// The token's index in the step.
        at: usize,
        /// The slot.
        slot: i32,
        /// Number of slots in the cache.
        slots: usize,
    },
    /// Two tokens would write their keys and values to the same slot.
    #[error("two tokens of the step have slot {0}")]
    DuplicateSlot(usize),
    /// `query_starts` does not ascend from 0 to the number of tokens. Each token must belong to exactly one sequence.
    #[error("query_starts must ascend from 0 to {tokens}, and entry {at} is {start}")]
    QueryStart {
        /// The entry's index.
        at: usize,
        /// The entry.
        start: i32,
        /// Number of tokens in the step.
        tokens: usize,
    },
    /// A sequence's context is shorter than its tokens in the step, or longer than its row of the block table.
    #[error("sequence {sequence} has a context of {context} tokens: it has {queries} in the step, and room for {room}")]
    Context {
        /// The sequence's index.
        sequence: usize,
        /// The sequence's entry in `context_lens`.
        context: i32,
        /// Number of the sequence's tokens in the step.
        queries: usize,
        /// Number of tokens that fit a row of the block table.
        room: usize,
    },
    /// A sequence's row is outside the block table.
    #[error("sequence {sequence} has row {row}, and the block table has {rows} rows")]
    Row {
        /// The sequence's index.
        sequence: usize,
        /// The row.
        row: i32,
        /// Number of rows in the block table.
        rows: usize,
    },
    /// A sequence's adapter is not loaded.
    #[error("sequence {sequence} has adapter {number}, which is not loaded")]
    Adapter {
        /// The sequence's index.
        sequence: usize,
        /// The adapter's number.
        number: i32,
    },
    /// A state's slot does not exist.
    #[error("a state of the step has slot {slot}, and there are {slots} slots")]
    StateSlot {
        /// The slot.
        slot: i32,
        /// Number of slots.
        slots: usize,
    },
    /// Two states of the step would be written to one slot.
    #[error("two states of the step have slot {0}")]
    DuplicateState(usize),
    /// A sequence's slot does not hold the state before its first token in the step.
    #[error("sequence {sequence} goes on after {expected} tokens, and the state in slot {slot} has seen {found}")]
    StatePosition {
        /// The sequence's index.
        sequence: usize,
        /// Its slot.
        slot: usize,
        /// The tokens that the state has seen.
        found: usize,
        /// The sequence's tokens before the step.
        expected: usize,
    },
    /// A state is to be saved at a position that the step does not compute.
    #[error("the state of sequence {sequence} cannot be saved after {position} tokens: the step computes those from {start} to {end}")]
    StateSave {
        /// The sequence's index.
        sequence: usize,
        /// The position.
        position: i32,
        /// The sequence's tokens before the step.
        start: usize,
        /// Its tokens after the step.
        end: usize,
    },
    /// The model has recurrent layers and the step no states, or the states have other dimensions.
    #[error("the step's states are not those of the model")]
    States,
    /// The dimensions of the cache do not match the model.
    #[error("the KV cache has {found} {what}, and the model has {expected}")]
    Cache {
        /// The dimension that differs.
        what: &'static str,
        /// The cache's value.
        found: usize,
        /// The model's value.
        expected: usize,
    },
}

/// One bit for each slot of the cache. All bits are clear between steps.
#[derive(Debug, Default)]
pub(crate) struct SlotSet(Vec<u64>);

impl SlotSet {
    /// Checks that all slots exist and are distinct. The time is proportional to the number of slots given.
    fn check(&mut self, slots: &[i32], count: usize) -> Result<(), StepError> {
        self.0.resize(count.div_ceil(64), 0);
        let mut result = Ok(());
        let mut marked = 0;
        for (at, &slot) in slots.iter().enumerate() {
            let Some(index) = usize::try_from(slot).ok().filter(|&index| index < count) else {
                result = Err(StepError::Slot { at, slot, slots: count });
                break;
            };
            let (word, bit) = (&mut self.0[index / 64], 1 << (index % 64));
            if *word & bit != 0 {
                result = Err(StepError::DuplicateSlot(index));
                break;
            }
            *word |= bit;
            marked += 1;
        }
        for &slot in &slots[..marked] {
            self.0[slot as usize / 64] = 0;
        }
        result
    }
}

impl Step<'_> {
    /// Checks all conditions that the threads rely on when they write to the cache and to the step's buffers. The time is proportional to
    /// the number of tokens and sequences.
    pub(crate) fn check(&self, vocabulary: usize, positions: usize, cache: KvShape, slots: &mut SlotSet) -> Result<(), StepError> {
        let (tokens, sequences) = (self.input_ids.len(), self.context_lens.len());
        let lengths = [
            ("positions", self.positions.len(), tokens),
            ("slots", self.slots.len(), tokens),
            ("query_starts", self.query_starts.len(), sequences + 1),
            ("rows", self.rows.len(), sequences),
        ];
        for (what, found, expected) in lengths {
            if found != expected {
                return Err(StepError::Length { what, found, expected });
            }
        }
        let rows = self.block_tables.len() / self.max_blocks.max(1);
        if !self.adapters.is_empty() && self.adapters.len() != rows {
            return Err(StepError::Length { what: "adapters", found: self.adapters.len(), expected: rows });
        }
        for (sequence, &row) in self.rows.iter().enumerate() {
            if usize::try_from(row).is_ok_and(|row| row < rows) {
                continue;
            }
            return Err(StepError::Row { sequence, row, rows });
        }
        for (at, &id) in self.input_ids.iter().enumerate() {
            if usize::try_from(id).is_ok_and(|id| id < vocabulary) {
                continue;
            }
            return Err(StepError::Token { at, id, vocabulary });
        }
        for (at, &position) in self.positions.iter().enumerate() {
            if usize::try_from(position).is_ok_and(|position| position < positions) {
                continue;
            }
            return Err(StepError::Position { at, position, positions });
        }
        self.check_sequences(self.max_blocks * cache.block_size)?;
        slots.check(self.slots, cache.blocks * cache.block_size)
    }

    /// The adapter's number of each token; 0 for none. `loaded` says whether there is an adapter with this number. The step's other arrays
    /// must have been checked.
    pub(crate) fn adapters_by_token(&self, loaded: impl Fn(usize) -> bool) -> Result<Vec<usize>, StepError> {
        let mut numbers = Vec::new();
        if self.adapters.is_empty() {
            return Ok(numbers);
        }
        for (sequence, &row) in self.rows.iter().enumerate() {
            let number = self.adapters[row as usize];
            let Some(known) = usize::try_from(number).ok().filter(|&number| number == 0 || loaded(number)) else {
                return Err(StepError::Adapter { sequence, number });
            };
            let queries = self.query_starts[sequence + 1] - self.query_starts[sequence];
            numbers.extend(std::iter::repeat_n(known, queries as usize));
        }
        Ok(numbers)
    }

    /// Checks that each token belongs to one sequence, and that no context is longer than `room`.
    fn check_sequences(&self, room: usize) -> Result<(), StepError> {
        let tokens = self.input_ids.len();
        let mut end = 0;
        for (at, &start) in self.query_starts.iter().enumerate() {
            let last = at == self.context_lens.len();
            let next = usize::try_from(start).unwrap_or(usize::MAX);
            if next < end || next > tokens || (at == 0 && next != 0) || (last && next != tokens) {
                return Err(StepError::QueryStart { at, start, tokens });
            }
            if at > 0 {
                let (sequence, queries) = (at - 1, next - end);
                let context = self.context_lens[sequence];
                if usize::try_from(context).is_ok_and(|context| context >= queries && context <= room) {
                    end = next;
                    continue;
                }
                return Err(StepError::Context { sequence, context, queries, room });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHE: KvShape = KvShape { layers: 1, blocks: 40, kv_heads: 1, block_size: 4, head_dim: 2, latent: None };
    const STEP: Step<'_> = Step {
        input_ids: &[5, 6, 7],
        positions: &[0, 1, 4],
        slots: &[4, 5, 159],
        query_starts: &[0, 2, 3],
        context_lens: &[2, 5],
        rows: &[2, 0],
        block_tables: &[2, 39, 9, 9, 1, 0],
        max_blocks: 2,
        adapters: &[],
    };

    fn check(step: Step<'_>) -> Result<(), StepError> {
        let mut slots = SlotSet::default();
        let result = step.check(10, 100, CACHE, &mut slots);
        assert!(slots.0.iter().all(|&word| word == 0), "the set must be empty for the next step");
        result
    }

    #[test]
    fn a_sound_step_passes_again_and_again() {
        let mut slots = SlotSet::default();
        for _ in 0..3 {
            assert_eq!(STEP.check(10, 100, CACHE, &mut slots), Ok(()));
        }
        let empty = Step { input_ids: &[], positions: &[], slots: &[], query_starts: &[0], context_lens: &[], rows: &[], ..STEP };
        assert_eq!(check(empty), Ok(()));
    }

    #[test]
    fn tokens_that_would_write_to_one_slot_are_refused() {
        assert_eq!(check(Step { slots: &[4, 159, 4], ..STEP }), Err(StepError::DuplicateSlot(4)));
        assert_eq!(check(Step { slots: &[4, 5, 160], ..STEP }), Err(StepError::Slot { at: 2, slot: 160, slots: 160 }));
        assert_eq!(check(Step { slots: &[-1, 5, 6], ..STEP }), Err(StepError::Slot { at: 0, slot: -1, slots: 160 }));
    }

    #[test]
    fn sequences_that_overlap_or_leave_tokens_out_are_refused() {
        let error = |at: usize, start: i32| Err(StepError::QueryStart { at, start, tokens: 3 });
        let with = |starts: &[i32]| check(Step { query_starts: starts, context_lens: &[3, 5], ..STEP });
        assert_eq!(with(&[0, 3, 2]), error(2, 2));
        assert_eq!(with(&[1, 2, 3]), error(0, 1));
        assert_eq!(with(&[0, 2, 2]), error(2, 2));
        assert_eq!(with(&[0, 2, 4]), error(2, 4));
        assert_eq!(with(&[0, -1, 3]), error(1, -1));
        assert_eq!(with(&[0, i32::MAX, 3]), error(1, i32::MAX));
    }

    #[test]
    fn contexts_that_do_not_hold_their_tokens_are_refused() {
        let with = |lens: &[i32]| check(Step { context_lens: lens, ..STEP });
        assert_eq!(with(&[1, 5]), Err(StepError::Context { sequence: 0, context: 1, queries: 2, room: 8 }));
        assert_eq!(with(&[2, 9]), Err(StepError::Context { sequence: 1, context: 9, queries: 1, room: 8 }));
        assert_eq!(with(&[2, -5]), Err(StepError::Context { sequence: 1, context: -5, queries: 1, room: 8 }));
    }

    #[test]
    fn arrays_of_other_lengths_and_unknown_tokens_are_refused() {
        let length = |what: &'static str, found: usize, expected: usize| Err(StepError::Length { what, found, expected });
        assert_eq!(check(Step { positions: &[0], ..STEP }), length("positions", 1, 3));
        assert_eq!(check(Step { slots: &[4, 5, 6, 7], ..STEP }), length("slots", 4, 3));
        assert_eq!(check(Step { query_starts: &[0, 3], ..STEP }), length("query_starts", 2, 3));
        assert_eq!(check(Step { rows: &[1], ..STEP }), length("rows", 1, 2));
        assert_eq!(check(Step { rows: &[1, 3], ..STEP }), Err(StepError::Row { sequence: 1, row: 3, rows: 3 }));
        assert_eq!(check(Step { rows: &[-1, 0], ..STEP }), Err(StepError::Row { sequence: 0, row: -1, rows: 3 }));
        assert_eq!(check(Step { block_tables: &[1, 0, 2], ..STEP }), Err(StepError::Row { sequence: 0, row: 2, rows: 1 }));
        assert_eq!(check(Step { input_ids: &[5, 10, 7], ..STEP }), Err(StepError::Token { at: 1, id: 10, vocabulary: 10 }));
        assert_eq!(check(Step { input_ids: &[5, 6, -7], ..STEP }), Err(StepError::Token { at: 2, id: -7, vocabulary: 10 }));
        let position = |position| Err(StepError::Position { at: 1, position, positions: 100 });
        assert_eq!(check(Step { positions: &[0, 100, 4], ..STEP }), position(100));
        assert_eq!(check(Step { positions: &[0, -1, 4], ..STEP }), position(-1));
    }
}
