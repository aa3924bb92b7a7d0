//! Compares attention with its definition, and checks that a token's output has the same bits in every step that computes it.

use proptest::prelude::*;

use super::plan::Part;
use super::*;
use crate::cache::{KvCache, KvShape};
use crate::half;
use crate::pool::ThreadPool;

/// The tests use the second layer.
const LAYER: usize = 1;

#[derive(Clone, Debug)]
struct Case {
    /// Number of KV heads. `group` is the number of query heads that share one.
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    /// The size of the values, if they are a part of the keys.
    latent: Option<usize>,
    block_size: usize,
    dtype: KvDType,
    window: Option<usize>,
    softcap: Option<f32>,
    /// Whether each head has a sink.
    sinks: bool,
    contexts: Vec<usize>,
    scale: f32,
    seed: u64,
}

/// A pseudo-random generator.
struct Random(u64);

impl Random {
    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    fn numbers(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| (self.below(20_001) as f32 / 10_000.0 - 1.0) * scale).collect()
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

/// The nearest bfloat16 number.
fn bf16(x: f32) -> f64 {
    f64::from(f32::from_bits(u32::from(half::bf16_from_f32(x)) << 16))
}

/// A sequence's queries, keys and values, [tokens][heads * head dim] each.
struct Tokens {
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Case {
    /// The score of each head's sink.
    fn sinks(&self) -> Option<Vec<f32>> {
        self.sinks.then(|| Random(self.seed ^ 1).numbers(self.kv_heads * self.group, 6.0))
    }

    fn tokens(&self) -> Vec<Tokens> {
        let mut random = Random(self.seed);
        let (width, kv_width) = (self.kv_heads * self.group * self.head_dim, self.kv_heads * self.head_dim);
        let one = |&count: &usize| {
            let [queries, keys, values] = [width, kv_width, kv_width].map(|width| random.numbers(count * width, self.scale));
            let values = if self.latent.is_some() { keys.clone() } else { values };
            Tokens { queries, keys, values }
        };
        self.contexts.iter().map(one).collect()
    }

    fn shape(&self, blocks: usize) -> KvShape {
        let &Self { kv_heads, block_size, head_dim, latent, .. } = self;
        KvShape { layers: 2, blocks, kv_heads, block_size, head_dim, latent }
    }

    /// The width of a token's outputs.
    fn outputs(&self) -> usize {
        self.kv_heads * self.group * self.latent.unwrap_or(self.head_dim)
    }

    /// Splits a step into tasks. Those of one KV head are for half of its query heads, if these are even.
    fn plan<'a>(&self, sequences: Sequences<'a>, threads: usize) -> Plan<'a> {
        let halves = if self.kv_heads == 1 && self.group.is_multiple_of(2) { 2 } else { 1 };
        Plan::new(sequences, self.kv_heads * self.group, self.kv_heads * halves, threads)
    }

    /// Runs all sequences to their ends and returns their outputs. Each step adds `cut` tokens of a sequence.
    ///
    /// Every cell that no query attends to is NaN: cells that were never written, and cells that have left the window.
    fn serve(&self, isa: Isa, threads: usize, random: &mut Random, mut cut: impl FnMut(&mut Random) -> usize) -> Vec<Vec<f32>> {
        let size = self.block_size;
        let (width, kv_width) = (self.kv_heads * self.group * self.head_dim, self.kv_heads * self.head_dim);
        let (stride, outs) = (width + 5, self.outputs());
        let tokens = self.tokens();
        let max_blocks = self.contexts.iter().max().expect("sequences").div_ceil(size) + 1;
        let count = self.contexts.len();
        let mut blocks: Vec<i32> = (0..(count * max_blocks) as i32).collect();
        random.shuffle(&mut blocks);
        let mut rows: Vec<usize> = (0..count).collect();
        random.shuffle(&mut rows);
        let shape = self.shape(blocks.len());
        let mut cache = KvCache::new(shape, self.dtype, 0).expect("memory");
        let pages = cache.pages();
        let slot =
            |sequence: usize, position: usize| blocks[rows[sequence] * max_blocks + position / size] as usize * size + position % size;
        let write = |slot: usize, keys: &[f32], values: &[f32]| {
            // SAFETY: no other thread uses the cache.
            unsafe { pages.write(LAYER, slot, keys, values) };
        };
        let nothing = vec![f32::NAN; kv_width];
        (0..shape.blocks * size).for_each(|slot| write(slot, &nothing, &nothing));
        let mut pool = ThreadPool::new(threads).expect("threads");
        let mut done = vec![0; count];
        let mut outputs: Vec<Vec<f32>> = self.contexts.iter().map(|tokens| vec![f32::NAN; tokens * outs]).collect();
        while done != self.contexts {
            let mut members: Vec<usize> = (0..count).filter(|&i| done[i] < self.contexts[i] && random.below(4) > 0).collect();
            random.shuffle(&mut members);
            let (mut starts, mut lens, mut tables, mut query) = (vec![0], Vec::new(), Vec::new(), Vec::new());
            for &i in &members {
                let end = self.contexts[i].min(done[i] + cut(random).max(1));
                for position in done[i]..end {
                    let [keys, values] = [&tokens[i].keys, &tokens[i].values].map(|x| &x[position * kv_width..][..kv_width]);
                    write(slot(i, position), keys, values);
                    query.extend_from_slice(&tokens[i].queries[position * width..][..width]);
                    query.extend_from_slice(&[f32::NAN; 5]);
                }
                starts.push(starts[starts.len() - 1] + (end - done[i]) as i32);
                lens.push(end as i32);
                tables.push(rows[i] as i32);
            }
            let block_tables = &blocks;
            let sequences =
                Sequences { query_starts: &starts, context_lens: &lens, rows: &tables, block_tables, max_blocks, block_size: size };
            let plan = self.plan(sequences, threads);
            let mut out = vec![f32::NAN; query.len() / stride * outs];
            let shared = UnsafeSlice::new(&mut out);
            let (&Self { window, softcap, .. }, sinks) = (self, self.sinks());
            let (scale, sinks) = (1.0 / (self.head_dim as f32).sqrt(), sinks.as_deref());
            let (query, head_stride) = (&query, self.head_dim);
            let attention =
                Attention { plan: &plan, pages, layer: LAYER, window, scale, softcap, sinks, query, stride, head_stride, out: shared };
            pool.run(|worker| {
                let mut scratch = Scratch::default();
                // SAFETY: one thread runs each task, and all tokens have been written.
                worker.parallel_for(plan.len(), |task| unsafe { attention.attend(isa, task, &mut scratch) });
            });
            for (&i, step) in members.iter().zip(starts.windows(2)) {
                let (end, step) = (done[i] + (step[1] - step[0]) as usize, step[0] as usize..step[1] as usize);
                outputs[i][done[i] * outs..end * outs].copy_from_slice(&out[step.start * outs..step.end * outs]);
                let left = |tokens: usize| self.window.map_or(0, |window| (tokens + 1).saturating_sub(window));
                (left(done[i])..left(end)).for_each(|position| write(slot(i, position), &nothing, &nothing));
                done[i] = end;
            }
        }
        outputs
    }

    /// A head's numbers, rounded as the cache stores them.
    fn stored(&self, numbers: &[f32]) -> Vec<f64> {
        let largest = numbers.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        let store = |&x: &f32| match self.dtype {
            KvDType::F32 => f64::from(x),
            KvDType::F16 => f64::from(half::to_f32(half::from_f32(x))),
            KvDType::Bf16 => bf16(x),
            KvDType::Int8 if largest == 0.0 => 0.0,
            KvDType::Int8 => f64::from((x * (127.0 / largest)).round_ties_even() * (largest / 127.0)),
        };
        numbers.iter().map(store).collect()
    }

    /// Attention by its definition, in fp64.
    fn expected(&self, tokens: &Tokens) -> Vec<f64> {
        let (dim, heads) = (self.head_dim, self.kv_heads * self.group);
        let [keys, values] = [&tokens.keys, &tokens.values].map(|x| x.chunks(dim).map(|x| self.stored(x)).collect::<Vec<_>>());
        let root = 1.0 / (dim as f32).sqrt();
        let factor = |&x: &f32| if self.dtype == KvDType::Bf16 { bf16(x * root) } else { f64::from(x) / (dim as f64).sqrt() };
        let (mut expected, sinks) = (Vec::new(), self.sinks());
        for (i, query) in tokens.queries.chunks(dim).enumerate() {
            let (position, head) = (i / heads, i % heads / self.group);
            let seen = self.window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1;
            let query: Vec<f64> = query.iter().map(factor).collect();
            let dot = |key: &Vec<f64>| query.iter().zip(key).map(|(x, y)| x * y).sum::<f64>();
            let capped = |score: f64| self.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
            let scores: Vec<f64> = seen.clone().map(|token| capped(dot(&keys[token * self.kv_heads + head]))).collect();
            let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[i % heads]));
            let largest = scores.iter().copied().fold(sink, f64::max);
            let powers: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum = powers.iter().sum::<f64>() + (sink - largest).exp();
            let mut weighted = vec![0.0; self.latent.unwrap_or(dim)];
            for (token, power) in seen.zip(&powers) {
                weighted.iter_mut().zip(&values[token * self.kv_heads + head]).for_each(|(total, value)| *total += power * value);
            }
            expected.extend(weighted.iter().map(|x| x / sum));
        }
        expected
    }

    /// The instruction sets that are tested: also the oracle of matrix tiles, if the cache has a format that they multiply.
    fn isas(&self) -> Vec<Isa> {
        let mut isas = Isa::without_digits();
        isas.extend((self.dtype == KvDType::Bf16).then(|| Isa::best().with_oracle()));
        isas
    }

    fn check(&self) {
        let mut random = Random(!self.seed);
        let bits = |outputs: &[Vec<f32>]| outputs.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect::<Vec<Vec<_>>>();
        let expected: Vec<_> = self.tokens().iter().map(|tokens| self.expected(tokens)).collect();
        // The weights of the values are rounded to bfloat16, which has 8 bits.
        let error = if self.dtype == KvDType::Bf16 { 1.0 / 256.0 } else { 2e-5 };
        for isa in self.isas() {
            let whole = self.serve(isa, 1, &mut random, |_| usize::MAX / 2);
            for (output, expected) in whole.iter().zip(&expected) {
                for (i, (&x, y)) in output.iter().zip(expected).enumerate() {
                    let close = (f64::from(x) - y).abs() <= error * f64::from(self.scale * self.scale.max(1.0));
                    assert!(close, "{isa:?}, number {i}: {x} is not {y}");
                }
            }
            let decoded = self.serve(isa, 2, &mut random, |_| 1);
            assert!(bits(&decoded) == bits(&whole), "{isa:?}: token by token");
            let cut = self.serve(isa, 3, &mut random, |random| random.below(90));
            assert!(bits(&cut) == bits(&whole), "{isa:?}: in pieces");
        }
    }
}

prop_compose! {
    fn case()(
        kv_heads in 1..4_usize,
        group in 1..9_usize,
        head_dim in prop::sample::select(vec![2, 8, 16, 32, 64, 72, 80, 96, 128, 256]),
        own in prop::option::of(0..4_usize),
        block_size in prop::sample::select(vec![1, 2, 3, 4, 8, 16, 24, 32, 128]),
        dtype in prop::sample::select(vec![KvDType::F32, KvDType::F16, KvDType::Bf16, KvDType::Int8]),
        window in prop::option::of(prop::sample::select(vec![1, 2, 16, 37, 64, 100])),
        softcap in prop::option::of(prop::sample::select(vec![0.5, 5.0, 50.0])),
        sinks in any::<bool>(),
        contexts in prop::collection::vec(1..180_usize, 1..4),
        scale in prop::sample::select(vec![0.1, 1.0, 4.0]),
        seed in any::<u64>(),
    ) -> Case {
        let block_size = if dtype == KvDType::Bf16 { block_size + block_size % 2 } else { block_size };
        let latent = own.map(|own| head_dim - head_dim * own / 4);
        Case { kv_heads, group, head_dim, latent, block_size, dtype, window, softcap, sinks, contexts, scale, seed }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(16) })]

    #[test]
    fn a_token_attends_to_what_it_sees_and_to_nothing_else(case in case()) {
        case.check();
    }
}

#[test]
fn the_shapes_of_models_do() {
    let shapes = [(9, 3, 64, None), (14, 2, 64, None), (8, 1, 128, None), (4, 4, 96, None), (4, 2, 80, None), (5, 1, 576, Some(512))];
    for (at, (heads, kv_heads, head_dim, latent)) in shapes.into_iter().enumerate() {
        for dtype in [KvDType::F32, KvDType::F16, KvDType::Bf16, KvDType::Int8] {
            // The other test has windows of all shapes.
            for window in [None, Some(70)].into_iter().take(if at == 0 { 2 } else { 1 }) {
                let contexts = vec![131, 17];
                let group = heads / kv_heads;
                Case {
                    kv_heads,
                    group,
                    head_dim,
                    latent,
                    block_size: 16,
                    dtype,
                    window,
                    softcap: None,
                    sinks: false,
                    contexts,
                    scale: 2.0,
                    seed: 0,
                }
                .check();
            }
        }
    }
}

/// Sequences that share blocks: pairs share all but their last tokens, and all sequences share the first `prefix` tokens.
#[derive(Clone, Debug)]
struct Shared {
    case: Case,
    prefix: usize,
    queries: usize,
}

impl Shared {
    /// The outputs of a step that decodes all `members`, and the number of its tasks that share tokens.
    fn step(&self, isa: Isa, members: &[usize], cache: &mut KvCache, tables: &[i32], max_blocks: usize) -> (Vec<f32>, usize) {
        let Self { case, queries, .. } = self;
        let width = case.kv_heads * case.group * case.head_dim;
        let query: Vec<f32> = members.iter().flat_map(|&i| Random(case.seed + i as u64).numbers(queries * width, case.scale)).collect();
        let starts: Vec<i32> = (0..=members.len()).map(|i| (i * queries) as i32).collect();
        let lens: Vec<i32> = members.iter().map(|&i| case.contexts[i] as i32).collect();
        let rows: Vec<i32> = members.iter().map(|&i| i as i32).collect();
        let (query_starts, context_lens, block_size) = (&starts, &lens, case.block_size);
        let sequences = Sequences { query_starts, context_lens, rows: &rows, block_tables: tables, max_blocks, block_size };
        let plan = case.plan(sequences, 1);
        let mut out = vec![f32::NAN; members.len() * queries * case.outputs()];
        let (&Case { window, softcap, .. }, sinks) = (case, case.sinks());
        let (pages, shared, sinks) = (cache.pages(), UnsafeSlice::new(&mut out), sinks.as_deref());
        let (query, stride, head_stride, scale) = (&query, width, case.head_dim, 0.3);
        let attention =
            Attention { plan: &plan, pages, layer: LAYER, window, scale, softcap, sinks, query, stride, head_stride, out: shared };
        let mut scratch = Scratch::default();
        // SAFETY: there is one thread, and all tokens have been written.
        (0..plan.len()).for_each(|task| unsafe { attention.attend(isa, task, &mut scratch) });
        (out, (0..plan.len()).filter(|&task| plan.task(task).shared > 0).count())
    }

    /// Checks that every sequence has the same bits in a step of all sequences and alone. Returns the number of tasks that share tokens.
    fn check(&self) -> usize {
        let Self { case, prefix, .. } = self;
        let Case { kv_heads, block_size, head_dim, .. } = *case;
        let (count, mut random) = (case.contexts.len(), Random(case.seed));
        let max_blocks = case.contexts.iter().max().expect("sequences").div_ceil(block_size);
        let mut tables: Vec<i32> = (0..(count * max_blocks) as i32).collect();
        random.shuffle(&mut tables);
        for i in 1..count {
            let twin = if i % 2 == 1 { i - 1 } else { 0 };
            let equal = if i % 2 == 1 { case.contexts[i].min(case.contexts[twin]) - self.queries } else { *prefix };
            let blocks = tables[twin * max_blocks..][..equal / block_size].to_vec();
            tables[i * max_blocks..][..blocks.len()].copy_from_slice(&blocks);
        }
        let mut cache = KvCache::new(case.shape(tables.len()), case.dtype, 0).expect("memory");
        for slot in 0..tables.len() * block_size {
            let [keys, values] = [(); 2].map(|()| random.numbers(kv_heads * head_dim, case.scale));
            // SAFETY: no other thread uses the cache.
            unsafe { cache.pages().write(LAYER, slot, &keys, &values) };
        }
        let all: Vec<usize> = (0..count).collect();
        let width = self.queries * case.outputs();
        let mut sharing = 0;
        for isa in case.isas() {
            let (together, tasks) = self.step(isa, &all, &mut cache, &tables, max_blocks);
            for (i, together) in together.chunks(width).enumerate() {
                let (alone, _) = self.step(isa, &[i], &mut cache, &tables, max_blocks);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(bits(together) == bits(&alone), "{isa:?}, sequence {i}");
            }
            sharing = tasks;
        }
        sharing
    }
}

prop_compose! {
    fn shared()(
        case in case(),
        prefix in 0..200_usize,
        own in prop::collection::vec(1..100_usize, 2..9),
        queries in 1..4_usize,
    ) -> Shared {
        let contexts = own.into_iter().map(|own| prefix + queries + own).collect();
        Shared { case: Case { contexts, ..case }, prefix, queries }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]

    #[test]
    fn sequences_that_share_blocks_have_the_bits_that_they_have_alone(shared in shared()) {
        shared.check();
    }
}

#[test]
fn decodes_that_share_blocks_share_tasks() {
    let case = |group| Case {
        kv_heads: 3,
        group,
        head_dim: 16,
        latent: None,
        block_size: 16,
        dtype: KvDType::F32,
        window: None,
        softcap: None,
        sinks: true,
        contexts: (0..16).map(|i| 200 + i).collect(),
        scale: 1.0,
        seed: 1,
    };
    // 16 sequences share 128 tokens and pairs share more. With one thread, 12 queries fit a task: two tasks for each KV head.
    assert_eq!(Shared { case: case(3), prefix: 128, queries: 1 }.check(), 2 * 3);
    // Pairs share 192 tokens, and all share none.
    assert_eq!(Shared { case: case(3), prefix: 63, queries: 1 }.check(), 8 * 3);
    // The query heads of one sequence fill a task.
    assert_eq!(Shared { case: case(192), prefix: 128, queries: 1 }.check(), 0);
}

#[test]
fn the_longest_tasks_come_first() {
    let sequences = Sequences {
        query_starts: &[0, 1, 1, 41, 42],
        context_lens: &[7, 0, 40, 5000],
        rows: &[0, 1, 2, 3],
        block_tables: &(0..4 * 313).collect::<Vec<_>>(),
        max_blocks: 313,
        block_size: 16,
    };
    let plan = Plan::new(sequences, 9, 3, 2);
    let tasks = (0..plan.len()).map(|task| plan.task(task)).map(|task| (task.parts.to_vec(), task.shared, task.kv_head));
    let tasks: Vec<_> = tasks.collect();
    let heads = |sequence, first, queries| (0..3).map(move |kv_head| (vec![Part { sequence, first, queries }], 0, kv_head));
    let expected = heads(3, 0, 1).chain(heads(2, 16, 16)).chain(heads(2, 32, 8)).chain(heads(2, 0, 16)).chain(heads(0, 0, 1));
    assert_eq!(tasks, expected.collect::<Vec<_>>());
}
