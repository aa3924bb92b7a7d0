//! Compares the kernels of recurrent layers with plain arithmetic in fp64, on every instruction set, and checks that a sequence in pieces
//! has the same bits.

use super::*;
use crate::unsafe_slice::UnsafeSlice;

const TOKENS: usize = 70;

/// Numbers between -1 and 1 that look random.
fn numbers(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| (((i + 1) * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn close(found: f32, expected: f64) -> bool {
    (f64::from(found) - expected).abs() <= 1e-5 * expected.abs().max(1.0)
}

struct Conv {
    taps: Vec<f32>,
    bias: Option<Vec<f32>>,
    form: Form,
    all: usize,
    first: usize,
    stride: usize,
}

impl Conv {
    fn new(taps: usize, form: Form) -> Self {
        let (all, first, stride) = if form == Form::Swish { (48, 5, 60) } else { (48, 96, 144) };
        let bias = (taps == 4).then(|| numbers(2, all));
        Self { taps: numbers(1, taps * all), bias, form, all, first, stride }
    }

    /// Runs the convolution of two blocks of channels, in pieces of the tokens, and returns the rows and the state.
    fn run(&self, isa: Isa, mut rows: Vec<f32>, pieces: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let columns = self.taps.len() / self.all - 1;
        let mut state = numbers(3, columns * self.all);
        let mut start = 0;
        for piece in pieces {
            for channels in [0..32, 32..48] {
                isa.run(Convolve {
                    taps: &self.taps,
                    bias: self.bias.as_deref(),
                    all: self.all,
                    channels,
                    form: self.form,
                    rows: UnsafeSlice::new(&mut rows),
                    first: self.first,
                    stride: self.stride,
                    tokens: start..start + piece,
                    states: UnsafeSlice::new(&mut state),
                    state: 0,
                });
            }
            start += piece;
        }
        (rows, state)
    }
}

#[test]
fn convolutions_are_those_of_plain_arithmetic_in_any_pieces() {
    for isa in Isa::without_digits() {
        for (taps, form) in [(2, Form::Swish), (3, Form::Gated(96)), (4, Form::Swish)] {
            let conv = Conv::new(taps, form);
            let rows = numbers(4, TOKENS * conv.stride);
            let whole = conv.run(isa, rows.clone(), &[TOKENS]);
            assert_eq!(whole, conv.run(isa, rows.clone(), &[1, 2, 30, 1, 36]), "{}", isa.name());
            let before = numbers(3, (taps - 1) * conv.all);
            let at = |token: usize, place: usize| f64::from(rows[token * conv.stride + place]);
            let input = |token: usize, channel: usize| match form {
                Form::Swish => at(token, conv.first + channel),
                Form::Gated(_) => at(token, channel) * at(token, conv.first + channel),
            };
            for (token, channel) in (0..TOKENS).flat_map(|token| (0..conv.all).map(move |channel| (token, channel))) {
                let mut sum = conv.bias.as_ref().map_or(0.0, |bias| f64::from(bias[channel]));
                for tap in 0..taps {
                    let x = match (token + tap + 1).checked_sub(taps) {
                        Some(token) => input(token, channel),
                        None => f64::from(before[(token + tap) * conv.all + channel]),
                    };
                    sum += f64::from(conv.taps[tap * conv.all + channel]) * x;
                }
                let expected = match form {
                    Form::Swish => sum * sigmoid(sum),
                    Form::Gated(_) => sum * at(token, 48 + channel),
                };
                let found = whole.0[token * conv.stride + conv.first + channel];
                assert!(close(found, expected), "{} {taps} {token} {channel}: {found} {expected}", isa.name());
            }
        }
    }
}

fn heads(rule: Rule, tiled: bool) -> Heads {
    let (count, groups, key_size, value_size) = (4, 2, 32, 48);
    let rates = numbers(5, count).iter().map(|x| -1.5 - x).collect();
    let (norm, norm_group) = (vec![1.0; value_size], value_size);
    Heads { count, groups, key_size, value_size, tiled, rates, step_bias: numbers(6, count), rule, norm, norm_group }
}

/// Advances all heads, in pieces of the tokens, and returns the rows and the states.
fn advance_all(isa: Isa, heads: &Heads, mut rows: Vec<f32>, pieces: &[usize]) -> (Vec<f32>, Vec<f32>) {
    let matrix = heads.key_size * heads.value_size;
    let mut states = numbers(7, heads.count * matrix);
    let mut start = 0;
    for piece in pieces {
        for (head, state) in states.chunks_exact_mut(matrix).enumerate() {
            let view = UnsafeSlice::new(&mut rows);
            // SAFETY: there is one thread.
            unsafe { advance(isa, heads, head, view, start..start + piece, state, &mut Scratch::default()) };
        }
        start += piece;
    }
    (rows, states)
}

/// The outputs of a head in fp64, \[tokens\]\[value size\].
fn outputs(heads: &Heads, head: usize, rows: &[f32]) -> Vec<Vec<f64>> {
    let (offsets, group) = (heads.offsets(), heads.group_of(head));
    let matrix = heads.key_size * heads.value_size;
    let mut state: Vec<f64> = numbers(7, heads.count * matrix)[head * matrix..][..matrix].iter().map(|&x| f64::from(x)).collect();
    let unit = |x: Vec<f64>| {
        let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        x.into_iter().map(|x| x / length).collect::<Vec<_>>()
    };
    let step = |row: &[f32]| {
        let at = |place: usize, len: usize| row[place..place + len].iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (mut key, mut query) =
            (at(offsets.keys + group * heads.key_size, heads.key_size), at(offsets.queries + group * heads.key_size, heads.key_size));
        let value = at(offsets.values + head * heads.value_size, heads.value_size);
        let mut size = (1.0 + (at(offsets.steps + head, 1)[0] + f64::from(heads.step_bias[head])).exp()).ln();
        if let Rule::Space { steps, .. } = &heads.rule {
            size = size.clamp(f64::from(steps.0), f64::from(steps.1));
        } else {
            (key, query) = (unit(key), unit(query).iter().map(|x| x / (heads.key_size as f64).sqrt()).collect());
        }
        let decay = (f64::from(heads.rates[head]) * size).exp();
        for x in &mut *state {
            *x *= decay;
        }
        let of_state = |state: &[f64], x: &[f64], column: usize| -> f64 {
            x.iter().enumerate().map(|(row, x)| x * state[row * heads.value_size + column]).sum()
        };
        let added: Vec<f64> = match &heads.rule {
            Rule::Space { .. } => value.iter().map(|value| value * size).collect(),
            Rule::Delta => {
                let beta = sigmoid(at(offsets.betas + head, 1)[0]);
                value.iter().enumerate().map(|(column, value)| beta * (value - of_state(&state, &key, column))).collect()
            }
        };
        for (row, key) in key.iter().enumerate() {
            for (column, added) in added.iter().enumerate() {
                state[row * heads.value_size + column] += key * added;
            }
        }
        let skip = if let Rule::Space { skip, .. } = &heads.rule { f64::from(skip[head]) } else { 0.0 };
        value.iter().enumerate().map(|(column, value)| of_state(&state, &query, column) + skip * value).collect()
    };
    rows.chunks_exact(offsets.width).map(step).collect()
}

#[test]
fn recurrences_are_those_of_plain_arithmetic_in_any_pieces() {
    for isa in Isa::without_digits() {
        for tiled in [false, true] {
            for rule in [Rule::Delta, Rule::Space { skip: numbers(8, 4), steps: (0.3, 1.1) }] {
                let heads = heads(rule, tiled);
                let offsets = heads.offsets();
                let rows = numbers(9, TOKENS * offsets.width);
                let whole = advance_all(isa, &heads, rows.clone(), &[TOKENS]);
                assert_eq!(whole, advance_all(isa, &heads, rows.clone(), &[1, 64, 2, 3]), "{}", isa.name());
                for head in 0..heads.count {
                    for (token, expected) in outputs(&heads, head, &rows).into_iter().enumerate() {
                        let found = &whole.0[token * offsets.width + offsets.values + head * heads.value_size..][..heads.value_size];
                        assert!(found.iter().zip(&expected).all(|(x, y)| close(*x, *y)), "{} {head} {token}", isa.name());
                    }
                }
            }
        }
    }
}

#[test]
fn gated_norms_are_those_of_plain_arithmetic() {
    for isa in Isa::without_digits() {
        for (gate_first, weights) in [(true, 96), (false, 48)] {
            let (x, gate, weight) = (numbers(10, 96), numbers(11, 96), numbers(12, weights));
            let mut found = x.clone();
            isa.run(GatedNorm { x: &mut found, gate: &gate, weight: &weight, group: 48, eps: 1e-3, gate_first });
            let swish = |i: usize| f64::from(gate[i]) * sigmoid(f64::from(gate[i]));
            let input = |i: usize| f64::from(x[i]) * if gate_first { swish(i) } else { 1.0 };
            for i in 0..96 {
                let group = i / 48 * 48..(i / 48 + 1) * 48;
                let square = group.map(|i| input(i) * input(i)).sum::<f64>() / 48.0;
                let normed = input(i) / (square + 1e-3).sqrt() * f64::from(weight[i % weights]);
                assert!(close(found[i], normed * if gate_first { 1.0 } else { swish(i) }), "{} {i}", isa.name());
            }
        }
    }
}

#[test]
fn heads_that_do_not_fit_are_refused() {
    assert_eq!(heads(Rule::Delta, false).check(), Ok(()));
    for change in [
        (|heads: &mut Heads| heads.groups = 3) as fn(&mut Heads),
        |heads| heads.key_size = 24,
        |heads| heads.rates[2] = 0.5,
        |heads| heads.rates[2] = f32::NAN,
        |heads| heads.rates.truncate(3),
        |heads| heads.norm.truncate(32),
        |heads| heads.norm_group = 32,
        |heads| heads.rule = Rule::Space { skip: vec![1.0; 3], steps: (0.0, 1.0) },
        |heads| heads.rule = Rule::Space { skip: vec![1.0; 4], steps: (1.0, 1.0) },
    ] {
        let mut wrong = heads(Rule::Delta, false);
        change(&mut wrong);
        assert!(wrong.check().is_err(), "{wrong:?}");
    }
}
