//! A fake model: a cell of its paged cache, its recurrent state, and the next token follow from the tokens before.

use chairlift_core::{Config, Lens, Scheduler, StateSlot, StepBuffers, StepPlan, Token};
use std::cell::Cell;

/// Number of tokens.
pub(crate) const VOCABULARY: u32 = 3;
/// Marks an invalid cell. A cell computed from an invalid cell is invalid too, as with NaN.
pub(super) const POISON: u32 = 0xDEAD_DEAD;

/// The key and value of one position. Like real ones, they are a function of the token there and of all tokens before it.
pub(super) fn cell(before: u32, token: Token) -> u32 {
    if before == POISON { POISON } else { (before ^ token).wrapping_mul(0x9E37_79B1).rotate_left(9) }
}

/// The state before position 0. It depends on the salt, so that the test detects a block shared across salts.
pub(super) fn origin(salt: u8) -> u32 {
    1 + u32::from(salt)
}

fn sample(last: u32) -> i32 {
    if last == POISON { -1 } else { (last % VOCABULARY) as i32 }
}

/// The token that the model chooses after `context`.
pub(super) fn oracle(salt: u8, context: &[Token]) -> Token {
    sample(context.iter().fold(origin(salt), |before, token| cell(before, *token))) as Token
}

/// The arrays of a step.
#[derive(Default)]
struct Arrays {
    ids: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i32>,
    starts: Vec<i32>,
    context_lens: Vec<i32>,
    rows: Vec<i32>,
    sample_at: Vec<i32>,
    sample_rows: Vec<i32>,
    copies: Vec<i32>,
    table_writes: Vec<i32>,
    state_slots: Vec<i32>,
    state_copies: Vec<i32>,
    state_saves: Vec<i32>,
    lens: Lens,
}

impl Arrays {
    fn new(config: &Config, table_cells: usize) -> Self {
        let (max_tokens, max_seqs) = (config.max_num_batched_tokens as usize, config.max_num_seqs as usize);
        let state_slots = config.state_slots as usize;
        let zeros = |len| vec![0; len];
        let [ids, positions, slots, sample_at, sample_rows] = [(); 5].map(|()| zeros(max_tokens));
        let [context_lens, rows] = [(); 2].map(|()| zeros(max_seqs));
        let (starts, copies) = (zeros(max_seqs + 1), zeros(2 * max_seqs));
        let table_writes = zeros(2 * table_cells);
        Self {
            ids,
            positions,
            slots,
            starts,
            context_lens,
            rows,
            sample_at,
            sample_rows,
            copies,
            table_writes,
            state_slots: zeros(max_seqs.min(state_slots)),
            state_copies: zeros(2 * max_seqs.min(state_slots)),
            state_saves: zeros(3 * state_slots),
            lens: Lens::default(),
        }
    }

    /// Overwrites the previous step with values that no test accepts.
    fn wipe(&mut self) {
        let Self { ids, positions, slots, starts, context_lens, rows, sample_at, sample_rows, copies, table_writes, .. } = self;
        let per_step = [ids, positions, slots, starts, context_lens, rows, sample_at, sample_rows, copies, table_writes];
        let states = [&mut self.state_slots, &mut self.state_copies, &mut self.state_saves];
        per_step.into_iter().chain(states).for_each(|array| array.fill(i32::MIN));
    }
}

/// The model's cache and its rows.
pub(super) struct FakeModel {
    config: Config,
    cache: Vec<u32>,
    host: Vec<u32>,
    tables: Vec<i32>,
    /// A copy of the block tables, updated only from the changes of each step.
    copied_tables: Vec<i32>,
    last_token: Vec<i32>,
    /// The recurrent state of each slot, and the number of tokens that it follows from.
    states: Vec<(u32, usize)>,
    row_salt: Vec<u8>,
    row_tag: Vec<u64>,
    /// The arrays of the latest step, kept to reuse their memory.
    arrays: Arrays,
}

impl FakeModel {
    pub(super) fn new(config: Config) -> Self {
        let rows = config.max_num_seqs as usize;
        let table_cells = rows * config.max_blocks_per_seq() as usize;
        Self {
            config,
            host: vec![8; (config.host_blocks * config.block_size) as usize],
            cache: vec![7; (config.num_kv_blocks * config.block_size) as usize],
            tables: vec![0; table_cells],
            copied_tables: vec![0; table_cells],
            last_token: vec![-99; rows],
            states: vec![(9, usize::MAX); config.state_slots as usize],
            arrays: Arrays::new(&config, table_cells),
            row_salt: vec![0; rows],
            row_tag: vec![0; rows],
        }
    }

    /// The cells of a block.
    pub(super) fn block(&self, id: u32) -> &[u32] {
        let size = self.config.block_size as usize;
        &self.cache[id as usize * size..][..size]
    }

    /// The cells of a block, to write what no step computes.
    pub(super) fn block_mut(&mut self, id: u32) -> &mut [u32] {
        let size = self.config.block_size as usize;
        &mut self.cache[id as usize * size..][..size]
    }

    /// Gives a row to a request.
    pub(super) fn admit(&mut self, row: u32, tag: u64, salt: u8) {
        self.row_tag[row as usize] = tag;
        self.row_salt[row as usize] = salt;
    }

    /// Runs a step, except for the part of the request `lost`. `longest` gives the length of a request's text when it ends. Returns the
    /// sampled tokens, and the requests that fail without that part.
    pub(super) fn run(
        &mut self,
        scheduler: &Scheduler,
        plan: &StepPlan,
        poison: Option<u64>,
        lost: Option<u64>,
        longest: impl Fn(u64) -> Option<usize>,
    ) -> (Vec<i32>, Vec<u64>) {
        let arrays = self.fill(scheduler, plan);
        self.copy_blocks(plan, &arrays);
        self.check_slots(&arrays);
        let missing = self.compute(plan, &arrays, poison, lost, longest);
        self.check_writes(plan, &arrays.starts, &arrays.positions, &arrays.slots);
        let sampled: Vec<i32> =
            arrays.sample_at[..arrays.lens.samples].iter().map(|&at| sample(self.cache[arrays.slots[at as usize] as usize])).collect();
        for (&row, &token) in arrays.sample_rows.iter().zip(&sampled) {
            self.last_token[row as usize] = token;
        }
        let config = self.config;
        let lacks = |i: &usize| {
            let first = arrays.rows[*i] as usize * config.max_blocks_per_seq() as usize;
            let blocks = (arrays.context_lens[*i] as u32).div_ceil(config.block_size) as usize;
            self.tables[first..first + blocks].iter().any(|block| missing.contains(block))
        };
        let fail = (0..arrays.lens.seqs).filter(lacks).map(|i| self.row_tag[arrays.rows[i] as usize]).collect();
        self.arrays = arrays;
        (sampled, fail)
    }

    /// The arrays that the model reads. The block tables are brought up to date.
    fn fill(&mut self, scheduler: &Scheduler, plan: &StepPlan) -> Arrays {
        let config = self.config;
        let (max_tokens, max_seqs) = (config.max_num_batched_tokens as usize, config.max_num_seqs as usize);
        let mut arrays = std::mem::take(&mut self.arrays);
        arrays.wipe();
        let lens = plan.fill(
            scheduler,
            &StepBuffers {
                input_ids: cells(&mut arrays.ids),
                positions: cells(&mut arrays.positions),
                slot_mapping: cells(&mut arrays.slots),
                query_starts: cells(&mut arrays.starts),
                context_lens: cells(&mut arrays.context_lens),
                batch_slots: cells(&mut arrays.rows),
                sample_at: cells(&mut arrays.sample_at),
                sample_slots: cells(&mut arrays.sample_rows),
                copies: cells(&mut arrays.copies),
                block_tables: cells(&mut self.tables),
                table_writes: cells(&mut arrays.table_writes),
                state_slots: cells(&mut arrays.state_slots),
                state_copies: cells(&mut arrays.state_copies),
                state_saves: cells(&mut arrays.state_saves),
                max_blocks: config.max_blocks_per_seq() as usize,
            },
        );
        assert!(0 < lens.tokens && lens.tokens <= max_tokens && lens.seqs <= max_seqs, "{lens:?}");
        arrays.table_writes.chunks(2).take(lens.table_writes).for_each(|pair| self.copied_tables[pair[0] as usize] = pair[1]);
        assert_eq!(self.copied_tables, self.tables);
        Arrays { lens, ..arrays }
    }

    /// Makes the step's copies of blocks, in the order that the plan states.
    fn copy_blocks(&mut self, plan: &StepPlan, arrays: &Arrays) {
        let size = self.config.block_size as usize;
        for &(block, host) in &plan.swap_out {
            let (from, to) = (block.0 as usize * size, host as usize * size);
            self.host[to..to + size].copy_from_slice(&self.cache[from..from + size]);
        }
        for &(host, block) in &plan.swap_in {
            let (from, to) = (host as usize * size, block.0 as usize * size);
            self.cache[to..to + size].copy_from_slice(&self.host[from..from + size]);
        }
        for pair in arrays.copies.chunks(2).take(arrays.lens.copies) {
            let (from, to) = (pair[0] as usize * size, pair[1] as usize * size);
            self.cache.copy_within(from..from + size, to);
        }
        for pair in arrays.state_copies.chunks(2).take(arrays.lens.state_copies) {
            self.states[pair[1] as usize] = self.states[pair[0] as usize];
        }
    }

    /// The state before a chunk, if the model has states: the cell of the last token before it, as in the cache, and the number of tokens.
    fn state_before(&self, arrays: &Arrays, i: usize, before: u32) -> Option<(u32, usize)> {
        let start = arrays.positions[arrays.starts[i] as usize] as usize;
        let (state, position) = self.states[*arrays.state_slots.get(i)? as usize];
        if start == 0 {
            return Some((before, 0));
        }
        assert_eq!(position, start, "the state is that after the computed tokens");
        assert!(state == before || state == POISON || before == POISON, "the state and the cache follow from other tokens");
        Some((state, position))
    }

    /// Writes the state after `position` tokens, the last of which has this cell.
    pub(super) fn set_state(&mut self, slot: StateSlot, cell: u32, position: usize) {
        self.states[slot.0 as usize] = (cell, position);
    }

    /// The state in a slot, and the number of tokens that it follows from.
    pub(super) fn state(&self, slot: StateSlot) -> (u32, usize) {
        self.states[slot.0 as usize]
    }

    /// Moves the state of a chunk on over its cells, and saves it where the step says so.
    fn advance_state(&mut self, arrays: &Arrays, i: usize, (_, start): (u32, usize)) {
        let chunk = arrays.starts[i] as usize..arrays.starts[i + 1] as usize;
        let saves = arrays.state_saves.chunks(3).take(arrays.lens.state_saves).filter(|save| save[0] == i as i32);
        for save in saves {
            let position = save[1] as usize;
            assert!((start + 1..=start + chunk.len()).contains(&position), "a save outside of its chunk");
            let last = arrays.slots[chunk.start + position - start - 1] as usize;
            self.states[save[2] as usize] = (self.cache[last], position);
        }
        let last = arrays.slots[chunk.end - 1] as usize;
        self.states[arrays.state_slots[i] as usize] = (self.cache[last], start + chunk.len());
    }

    /// Every slot that a step writes is written for one purpose.
    fn check_slots(&self, arrays: &Arrays) {
        let lens = arrays.lens;
        let saves = arrays.state_saves.chunks(3).take(lens.state_saves).map(|save| save[2]);
        let mut written: Vec<i32> = arrays.state_slots.iter().copied().take(lens.seqs).chain(saves).collect();
        let count = written.len();
        written.sort_unstable();
        written.dedup();
        assert_eq!(written.len(), count, "a state slot has two owners in a step");
        assert!(written.iter().all(|&slot| (0..self.config.state_slots as i32).contains(&slot)));
    }

    /// Computes the cells of the step's tokens, except those of `lost`. Returns the blocks that lack them.
    fn compute(
        &mut self,
        plan: &StepPlan,
        arrays: &Arrays,
        poison: Option<u64>,
        lost: Option<u64>,
        longest: impl Fn(u64) -> Option<usize>,
    ) -> Vec<i32> {
        let config = self.config;
        let (size, max_blocks) = (config.block_size as usize, config.max_blocks_per_seq() as usize);
        let mut missing = Vec::new();
        for i in 0..arrays.lens.seqs {
            let (row, from, to) = (arrays.rows[i] as usize, arrays.starts[i] as usize, arrays.starts[i + 1] as usize);
            if lost == Some(self.row_tag[row]) {
                for &slot in &arrays.slots[from..to] {
                    missing.push(slot / size as i32);
                    self.cache[slot as usize] = POISON; // what is not computed is not valid
                }
                continue;
            }
            assert!(from < to, "an empty chunk");
            let slot = |position: usize| self.tables[row * max_blocks + position / size] as usize * size + position % size;
            assert_eq!(arrays.context_lens[i], arrays.positions[to - 1] + 1);
            if let Some(limit) = longest(self.row_tag[row]) {
                let context = arrays.context_lens[i] as usize;
                assert!(context < limit + usize::from(limit == 1), "planned past the last token that can matter");
            }
            let first = arrays.positions[from] as usize;
            let before = if first == 0 { origin(self.row_salt[row]) } else { self.cache[slot(first - 1)] };
            let state = self.state_before(arrays, i, before);
            let spoiled = state.is_some_and(|(state, _)| state == POISON);
            for at in from..to {
                let (id, position) = (arrays.ids[at], arrays.positions[at] as usize);
                assert_eq!(arrays.slots[at] as usize, slot(position));
                assert!(arrays.slots[at] as usize >= size, "wrote the scratch block");
                let before = if position == 0 { origin(self.row_salt[row]) } else { self.cache[slot(position - 1)] };
                let token = if id < 0 { self.last_token[(-id - 1) as usize] } else { id };
                // A slot whose request failed in the previous step has no token. The commit drops it.
                let broken = (poison == Some(self.row_tag[row]) && plan.chunks[i].samples) || token < 0 || spoiled;
                self.cache[arrays.slots[at] as usize] = if broken { POISON } else { cell(before, token as Token) };
            }
            if let Some(state) = state {
                self.advance_state(arrays, i, state);
            }
        }
        missing
    }

    /// No step writes a cell that belonged to another sequence before the step.
    fn check_writes(&self, plan: &StepPlan, starts: &[i32], positions: &[i32], slots: &[i32]) {
        let config = self.config;
        let (size, max_blocks) = (config.block_size as usize, config.max_blocks_per_seq() as usize);
        for (reader, chunk) in plan.chunks.iter().enumerate() {
            if plan.admitted.iter().any(|admitted| admitted.seq == chunk.seq) {
                continue; // a block found in the cache may be completed in this same step
            }
            let (row, start) = (chunk.slot as usize, positions[starts[reader] as usize] as usize);
            let had: Vec<usize> = (0..start).map(|p| self.tables[row * max_blocks + p / size] as usize * size + p % size).collect();
            let written = &slots[..*starts[..=plan.chunks.len()].last().unwrap() as usize];
            assert!(written.iter().all(|&slot| !had.contains(&(slot as usize))), "wrote into a cell that row {row} reads");
        }
    }
}

fn cells(array: &mut [i32]) -> &[Cell<i32>] {
    Cell::from_mut(array).as_slice_of_cells()
}
