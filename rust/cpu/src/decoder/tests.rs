//! Compares the whole decoder with plain arithmetic, and checks that results have the same bits whatever else is in a step.

mod adapters;

use crate::cache::{KvCache, KvDType, KvShape};
use crate::{
    Activation, Block, BlockKind, DType, Decoder, DecoderConfig, Inner, Input, Isa, KvHeads, KvPlace, Linear, Matrix, Merge, Mlp, Norm,
    Numbers, Rope, SelfAttention, Source, Step, StepError, Tensor, ThreadPool,
};

const HIDDEN: usize = 48;
const INNER: usize = 72;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD: usize = 8;
const VOCABULARY: usize = 101;
const LAYERS: usize = 2;
const BLOCK: usize = 4;
const MAX_BLOCKS: usize = 16;
const WIDE: usize = (HEADS + 2 * KV_HEADS) * HEAD;
const QUERIES: usize = HEADS * HEAD;
const EPS: f32 = 1e-5;
/// The first token of a sequence, whose KV goes into block 1.
const ONE_TOKEN: Step<'static> = Step {
    input_ids: &[1],
    positions: &[0],
    slots: &[4],
    query_starts: &[0, 1],
    context_lens: &[1],
    rows: &[0],
    block_tables: &[1],
    max_blocks: 1,
    adapters: &[],
};

/// Pseudo-random numbers between -1 and 1.
pub(crate) fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn tensor(bytes: &[u8], ins: usize) -> Tensor<'_> {
    let rows = bytes.len() / ins / size_of::<f32>();
    Tensor { numbers: Numbers::F32, rows, ins, source: Source::Memory(bytes), interleaved: 0 }
}

fn config(hidden_size: usize, num_heads: usize, num_kv_heads: usize, head_dim: usize, frequencies: Vec<f32>) -> DecoderConfig {
    let ropes = vec![Rope { frequencies, scale: 1.0 }];
    let kv_heads = vec![KvHeads { count: num_kv_heads, head_dim, latent: None }];
    DecoderConfig { hidden_size, num_heads, kv_heads, rms_norm_eps: EPS, ropes, positions: None, embedding_scale: 1.0, final_softcap: None }
}

fn rms(weight: Vec<f32>) -> Norm {
    Norm { weight, bias: None }
}

/// Weights, row by row. Vectors of vectors have one entry per layer.
#[derive(Clone)]
struct Weights {
    embedding: Vec<f32>,
    qkv: Vec<Vec<f32>>,
    qkv_bias: Vec<Vec<f32>>,
    output: Vec<Vec<f32>>,
    gate_up: Vec<Vec<f32>>,
    gate_up_bias: Vec<Vec<f32>>,
    down: Vec<Vec<f32>>,
    norms: Vec<Vec<f32>>,
    frequencies: Vec<f32>,
}

impl Weights {
    fn new() -> Self {
        let each = |seed: u32, count: usize, scale: f32| -> Vec<Vec<f32>> {
            (0..LAYERS as u32).map(|layer| numbers(seed + layer, count).iter().map(|x| x * scale).collect()).collect()
        };
        Self {
            embedding: numbers(1, VOCABULARY * HIDDEN),
            qkv: each(10, WIDE * HIDDEN, 0.4),
            qkv_bias: each(20, WIDE, 0.3),
            output: each(30, HIDDEN * QUERIES, 0.3),
            gate_up: each(40, 2 * INNER * HIDDEN, 0.3),
            gate_up_bias: each(50, 2 * INNER, 0.3),
            down: each(60, HIDDEN * INNER, 0.2),
            norms: (0..=2 * LAYERS as u32).map(|i| numbers(70 + i, HIDDEN).iter().map(|x| 1.0 + 0.2 * x).collect()).collect(),
            frequencies: (0..HEAD / 2).map(|i| 0.3f32.powi(i as i32)).collect(),
        }
    }

    fn decoder(&self, isa: Isa, dtype: DType, threads: usize, window: Option<usize>) -> Decoder {
        let mut pool = ThreadPool::new(1).expect("threads");
        let mut linear = |parts: &[&[f32]], ins: usize, merge: Merge, bias: Option<&[f32]>| {
            let bytes: Vec<_> = parts.iter().map(|part| bytes_of(part)).collect();
            let tensors: Vec<_> = bytes.iter().map(|bytes| tensor(bytes, ins)).collect();
            Linear::new(
                Matrix::pack(&mut pool, isa, &tensors.iter().map(std::slice::from_ref).collect::<Vec<_>>(), merge, dtype).expect("it fits"),
                bias,
            )
        };
        let mut blocks = Vec::new();
        for i in 0..LAYERS {
            let (q, kv) = self.qkv[i].split_at(QUERIES * HIDDEN);
            let (gate, up) = self.gate_up[i].split_at(INNER * HIDDEN);
            let attention = SelfAttention {
                qkv_proj: linear(&[q, kv], HIDDEN, Merge::Stacked, Some(&self.qkv_bias[i])),
                o_proj: linear(&[&self.output[i]], QUERIES, Merge::Stacked, None),
                kv: KvPlace { cache: 0, layer: i, shared: false },
                gated: false,
                qk_norm: None,
                rotated_first: false,
                value_norm: None,
                rope: Some(0),
                scale: 1.0 / (HEAD as f32).sqrt(),
                temperature: None,
                softcap: None,
                window,
                sinks: None,
            };
            let mlp = Mlp {
                gate_up_proj: linear(&[gate, up], HIDDEN, Merge::Gated, Some(&self.gate_up_bias[i])),
                down_proj: linear(&[&self.down[i]], INNER, Merge::Stacked, None),
                inner: Inner::Gated(Activation::Silu),
            };
            for (kind, norm) in [BlockKind::Attention(attention), BlockKind::Mlp(mlp)].into_iter().zip(&self.norms[2 * i..]) {
                let input = Input::Normed(rms(norm.clone()));
                blocks.push(Block { input, kind, post_norm: None, residual_scale: 1.0, stream_scale: 1.0 });
            }
        }
        let head = linear(&[&self.embedding], HIDDEN, Merge::Stacked, None);
        let config = config(HIDDEN, HEADS, KV_HEADS, HEAD, self.frequencies.clone());
        Decoder::new(ThreadPool::new(threads).expect("threads"), config, blocks, rms(self.norms[2 * LAYERS].clone()), None, None, head)
            .expect("all fits")
    }

    /// Logits after each token of a sequence, in fp64 and without a cache.
    fn reference(&self, tokens: &[i32], window: Option<usize>) -> Vec<f64> {
        let norm = |x: &[f64], weight: &[f32]| -> Vec<f64> {
            let scale = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(EPS)).sqrt();
            x.iter().zip(weight).map(|(x, &w)| x / scale * f64::from(w)).collect()
        };
        let times = |w: &[f32], x: &[f64]| -> Vec<f64> {
            w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()).collect()
        };
        let plus = |x: Vec<f64>, b: &[f32]| -> Vec<f64> { x.iter().zip(b).map(|(x, &b)| x + f64::from(b)).collect() };
        let row = |token: i32| self.embedding[token as usize * HIDDEN..][..HIDDEN].iter().map(|&x| f64::from(x)).collect();
        let mut states: Vec<Vec<f64>> = tokens.iter().map(|&token| row(token)).collect();
        for layer in 0..LAYERS {
            let project = |x: &Vec<f64>| plus(times(&self.qkv[layer], &norm(x, &self.norms[2 * layer])), &self.qkv_bias[layer]);
            let mut qkv: Vec<Vec<f64>> = states.iter().map(project).collect();
            for (position, row) in qkv.iter_mut().enumerate() {
                for head in row[..QUERIES + KV_HEADS * HEAD].chunks_exact_mut(HEAD) {
                    for i in 0..HEAD / 2 {
                        let (sine, cosine) = (position as f64 * f64::from(self.frequencies[i])).sin_cos();
                        let (x, y) = (head[i], head[i + HEAD / 2]);
                        (head[i], head[i + HEAD / 2]) = (x * cosine - y * sine, y * cosine + x * sine);
                    }
                }
            }
            for t in 0..tokens.len() {
                let mut attended = Vec::new();
                for head in 0..HEADS {
                    let (query, key) = (head * HEAD, QUERIES + head / (HEADS / KV_HEADS) * HEAD);
                    let value = key + KV_HEADS * HEAD;
                    let seen = window.map_or(0, |window| (t + 1).saturating_sub(window))..=t;
                    let score = |s: usize| (0..HEAD).map(|d| qkv[t][query + d] * qkv[s][key + d]).sum::<f64>() / (HEAD as f64).sqrt();
                    let powers: Vec<f64> = seen.clone().map(|s| score(s).exp()).collect();
                    let total: f64 = powers.iter().sum();
                    attended.extend((0..HEAD).map(|d| seen.clone().zip(&powers).map(|(s, p)| qkv[s][value + d] * p / total).sum::<f64>()));
                }
                let x: Vec<f64> = states[t].iter().zip(times(&self.output[layer], &attended)).map(|(x, y)| x + y).collect();
                let both = plus(times(&self.gate_up[layer], &norm(&x, &self.norms[2 * layer + 1])), &self.gate_up_bias[layer]);
                let inner: Vec<f64> = (0..INNER).map(|i| both[i] / (1.0 + (-both[i]).exp()) * both[INNER + i]).collect();
                states[t] = x.iter().zip(times(&self.down[layer], &inner)).map(|(x, y)| x + y).collect();
            }
        }
        states.iter().flat_map(|x| times(&self.embedding, &norm(x, &self.norms[2 * LAYERS]))).collect()
    }
}

/// Runs the sequences in steps. `cuts` gives the number of tokens that each step adds to a sequence. Returns the logits of each sequence,
/// token by token.
fn run(decoder: &mut Decoder, dtype: KvDType, sequences: &[&[i32]], cuts: &[usize]) -> Vec<Vec<f32>> {
    run_adapted(decoder, dtype, sequences, cuts, &[])
}

/// As `run`. Sequence i has the adapter with the number `adapters[i]`.
fn run_adapted(decoder: &mut Decoder, dtype: KvDType, sequences: &[&[i32]], cuts: &[usize], adapters: &[i32]) -> Vec<Vec<f32>> {
    let blocks = 1 + MAX_BLOCKS * sequences.len();
    let shape = KvShape { layers: LAYERS, blocks, kv_heads: KV_HEADS, block_size: BLOCK, head_dim: HEAD, latent: None };
    let mut cache = KvCache::new(shape, dtype, 0).expect("there is memory");
    let mut logits = vec![Vec::new(); sequences.len()];
    // Each sequence has its own blocks, in shuffled order.
    let block = |s: usize, i: usize| (1 + s * MAX_BLOCKS + (i * 7 + s) % MAX_BLOCKS) as i32;
    for cut in cuts.iter().cycle() {
        let (mut input_ids, mut positions, mut slots, mut who) = (vec![], vec![], vec![], vec![]);
        let (mut query_starts, mut context_lens, mut rows) = (vec![0], vec![], vec![]);
        // Each sequence keeps its row, whatever other sequences are in the step.
        let block_tables: Vec<i32> = (0..sequences.len()).flat_map(|s| (0..MAX_BLOCKS).map(move |i| block(s, i))).collect();
        for (s, tokens) in sequences.iter().enumerate() {
            let done = logits[s].len() / VOCABULARY;
            let end = tokens.len().min(done + cut);
            if done == end {
                continue;
            }
            input_ids.extend_from_slice(&tokens[done..end]);
            positions.extend((done..end).map(|p| p as i32));
            slots.extend((done..end).map(|p| block(s, p / BLOCK) * BLOCK as i32 + (p % BLOCK) as i32));
            who.extend(std::iter::repeat_n(s, end - done));
            query_starts.push(input_ids.len() as i32);
            context_lens.push(end as i32);
            rows.push(s as i32);
        }
        if input_ids.is_empty() {
            break;
        }
        let step = Step {
            input_ids: &input_ids,
            positions: &positions,
            slots: &slots,
            query_starts: &query_starts,
            context_lens: &context_lens,
            rows: &rows,
            block_tables: &block_tables,
            max_blocks: MAX_BLOCKS,
            adapters,
        };
        decoder.forward(&step, std::slice::from_mut(&mut cache), None).expect("a sound step");
        let at: Vec<i32> = (0..input_ids.len() as i32).collect();
        let mut out = vec![0.0; at.len() * VOCABULARY];
        decoder.logits(&at, &mut out);
        for (row, s) in out.chunks_exact(VOCABULARY).zip(who) {
            logits[s].extend_from_slice(row);
        }
    }
    logits
}

fn tokens(seed: u32, count: usize) -> Vec<i32> {
    numbers(seed, count).iter().map(|x| ((x + 1.0) * 50.0) as i32).collect()
}

#[test]
fn logits_are_those_of_plain_arithmetic() {
    let weights = Weights::new();
    let sequence = tokens(5, 37);
    for window in [None, Some(9)] {
        let expected = weights.reference(&sequence, window);
        let scale = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        for isa in Isa::without_digits() {
            for (dtype, kv, tolerance) in [
                (DType::F32, KvDType::F32, 5e-6),
                (DType::F16, KvDType::F32, 2e-3),
                (DType::Bf16, KvDType::F16, 1e-2),
                (DType::Int8, KvDType::F32, 8e-2),
                (DType::F32, KvDType::Int8, 4e-2),
            ] {
                let found = run(&mut weights.decoder(isa, dtype, 2, window), kv, &[&sequence], &[11]).remove(0);
                assert_eq!(found.len(), expected.len());
                let off = found.iter().zip(&expected).fold(0.0, |most: f64, (&x, y)| most.max((f64::from(x) - y).abs())) / scale;
                assert!(off < tolerance, "{isa:?} {dtype:?} {kv:?} {window:?}: {off:e}");
            }
        }
    }
}

#[test]
fn a_sequence_is_computed_bit_for_bit_the_same_in_any_company_and_any_pieces() {
    let weights = Weights::new();
    let sequence = tokens(5, 37);
    let others: Vec<_> = (0..20).map(|i| tokens(100 + i, 5 + 2 * i as usize)).collect();
    let mut company: Vec<&[i32]> = others.iter().map(Vec::as_slice).collect();
    company.insert(7, &sequence);
    for isa in Isa::without_digits() {
        for (dtype, kv) in
            [(DType::F32, KvDType::F32), (DType::F16, KvDType::F16), (DType::Bf16, KvDType::Int8), (DType::Int8, KvDType::F32)]
        {
            let alone = run(&mut weights.decoder(isa, dtype, 1, Some(21)), kv, &[&sequence], &[64]).remove(0);
            for threads in [1, 3] {
                for cuts in [&[1][..], &[5, 1, 17], &[64]] {
                    let found = run(&mut weights.decoder(isa, dtype, threads, Some(21)), kv, &company, cuts).remove(7);
                    assert!(found == alone, "{isa:?} {dtype:?} {kv:?} on {threads} threads, cut by {cuts:?}");
                }
            }
        }
    }
}

#[test]
fn a_step_that_threads_could_not_share_is_refused_and_the_next_one_runs() {
    let weights = Weights::new();
    let sequence = tokens(5, 7);
    let mut decoder = weights.decoder(Isa::best(), DType::F32, 3, None);
    let expected = run(&mut decoder, KvDType::F32, &[&sequence], &[64]);
    let shape = KvShape { layers: LAYERS, blocks: 8, kv_heads: KV_HEADS, block_size: BLOCK, head_dim: HEAD, latent: None };
    let mut cache = KvCache::new(shape, KvDType::F32, 0).expect("there is memory");
    let step = Step {
        input_ids: &[1, 2, 3],
        positions: &[0, 1, 0],
        slots: &[4, 5, 8],
        query_starts: &[0, 2, 3],
        context_lens: &[2, 1],
        rows: &[0, 1],
        block_tables: &[1, 0, 2, 0],
        max_blocks: 2,
        adapters: &[],
    };
    assert_eq!(decoder.forward(&step, std::slice::from_mut(&mut cache), None), Ok(()));
    let twice = Step { slots: &[4, 5, 4], ..step };
    assert_eq!(decoder.forward(&twice, std::slice::from_mut(&mut cache), None), Err(StepError::DuplicateSlot(4)));
    let overlapping = Step { query_starts: &[0, 3, 2], context_lens: &[3, 2], ..step };
    assert_eq!(
        decoder.forward(&overlapping, std::slice::from_mut(&mut cache), None),
        Err(StepError::QueryStart { at: 2, start: 2, tokens: 3 })
    );
    for wrong in [-1, VOCABULARY as i32, i32::MAX] {
        let unknown = Step { input_ids: &[1, wrong, 3], ..step };
        assert_eq!(
            decoder.forward(&unknown, std::slice::from_mut(&mut cache), None),
            Err(StepError::Token { at: 1, id: wrong, vocabulary: VOCABULARY })
        );
    }
    let mut other = KvCache::new(KvShape { head_dim: HEAD / 2, ..shape }, KvDType::F32, 0).expect("there is memory");
    let error = StepError::Cache { what: "numbers a head", found: HEAD / 2, expected: HEAD };
    assert_eq!(decoder.forward(&step, std::slice::from_mut(&mut other), None), Err(error));
    assert!(run(&mut decoder, KvDType::F32, &[&sequence], &[64]) == expected);
}

#[test]
fn a_block_table_without_such_blocks_panics_and_the_next_step_runs() {
    let weights = Weights::new();
    let sequence = tokens(5, 7);
    let mut decoder = weights.decoder(Isa::best(), DType::F32, 3, None);
    let expected = run(&mut decoder, KvDType::F32, &[&sequence], &[64]);
    let shape = KvShape { layers: LAYERS, blocks: 2, kv_heads: KV_HEADS, block_size: BLOCK, head_dim: HEAD, latent: None };
    let mut cache = KvCache::new(shape, KvDType::F32, 0).expect("there is memory");
    let step = Step { block_tables: &[2], ..ONE_TOKEN };
    assert!(
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| decoder.forward(&step, std::slice::from_mut(&mut cache), None))).is_err()
    );
    assert!(run(&mut decoder, KvDType::F32, &[&sequence], &[64]) == expected);
}

fn small_mlp(linear: &impl Fn(usize, usize) -> Linear) -> Mlp {
    Mlp { gate_up_proj: linear(4, 8), down_proj: linear(8, 4), inner: Inner::GeluTanh }
}

#[test]
fn weights_that_do_not_fit_each_other_are_refused() {
    let packed = |isa: Isa, outs: usize, ins: usize| {
        let bytes = vec![0; outs * ins * size_of::<f32>()];
        let mut pool = ThreadPool::new(1).expect("threads");
        Matrix::pack(&mut pool, isa, &[&[tensor(&bytes, ins)]], Merge::Stacked, DType::F32).expect("it fits")
    };
    let wide = |outs: usize, ins: usize| Linear::new(packed(Isa::best(), outs, ins), None);
    let made = |norm: usize, head: Linear| {
        let config = config(8, 2, 1, 4, vec![1.0, 0.1]);
        Decoder::new(ThreadPool::new(1).expect("threads"), config, Vec::new(), rms(vec![1.0; norm]), None, None, head).is_ok()
    };
    assert!(made(8, wide(10, 8)));
    assert!(!made(7, wide(10, 8)));
    assert!(!made(8, wide(10, 9)));
    for isa in Isa::available() {
        let (config, embedding) = (config(8, 2, 1, 4, vec![1.0, 0.1]), Some(packed(isa, 10, 8)));
        let made = Decoder::new(ThreadPool::new(1).expect("threads"), config, Vec::new(), rms(vec![1.0; 8]), embedding, None, wide(10, 8));
        assert_eq!(made.is_ok(), isa == Isa::best(), "all weights must be packed for one instruction set");
    }
    let after = |kind: BlockKind| {
        let block = |input, kind| Block { input, kind, post_norm: None, residual_scale: 1.0, stream_scale: 1.0 };
        let blocks = vec![block(Input::Stream, kind), block(Input::Before(None), BlockKind::Mlp(small_mlp(&wide)))];
        let config = config(8, 2, 1, 4, vec![1.0, 0.1]);
        Decoder::new(ThreadPool::new(1).expect("threads"), config, blocks, rms(vec![1.0; 8]), None, None, wide(10, 8)).is_ok()
    };
    assert!(!after(BlockKind::Mlp(small_mlp(&wide))), "only attention keeps its input");
    let with = |config: DecoderConfig| {
        Decoder::new(ThreadPool::new(1).expect("threads"), config, Vec::new(), rms(vec![1.0; 8]), None, None, wide(10, 8)).is_ok()
    };
    assert!(with(config(8, 2, 1, 4, vec![1.0])), "a part of a head's numbers may be turned");
    assert!(!with(config(8, 2, 1, 4, vec![1.0; 3])));
    assert!(!with(config(8, 3, 2, 4, vec![1.0])));
    assert!(with(DecoderConfig { positions: Some(vec![0.0; 24]), ..config(8, 2, 1, 4, vec![1.0]) }));
    assert!(!with(DecoderConfig { positions: Some(vec![0.0; 25]), ..config(8, 2, 1, 4, vec![1.0]) }));
    assert!(!with(DecoderConfig { final_softcap: Some(0.0), ..config(8, 2, 1, 4, vec![1.0]) }));
}
