//! Compares every instruction set with scalar code.

#![allow(clippy::float_cmp)] // The tests compare exact bits.

use std::marker::PhantomData;

use super::*;
use crate::half;

/// Lanes of the widest register. The length of the inputs is a multiple of it.
const WIDEST: usize = 16;

/// An operation on registers.
trait Op {
    fn apply<S: Simd>(s: S, a: S::F, b: S::F, c: S::F) -> S::F;
}

/// Applies the operation to three slices, element by element.
struct Elementwise<'a, O>([&'a [f32]; 3], PhantomData<O>);

impl<O: Op> Kernel for Elementwise<'_, O> {
    type Output = Vec<f32>;
    #[inline(always)]
    fn run<S: Int8>(self, s: S) -> Vec<f32> {
        let [a, b, c] = self.0;
        let mut out = vec![0.0; a.len()];
        for i in (0..a.len()).step_by(S::LANES) {
            // SAFETY: each pointer is that of a slice of `S::LANES` numbers.
            unsafe {
                let [a, b, c] = [a, b, c].map(|x| s.load(x[i..i + S::LANES].as_ptr()));
                s.store(out[i..i + S::LANES].as_mut_ptr(), O::apply(s, a, b, c));
            }
        }
        out
    }
}

fn apply<O: Op>(isa: Isa, a: &[f32], b: &[f32], c: &[f32]) -> Vec<f32> {
    isa.run(Elementwise([a, b, c], PhantomData::<O>))
}

macro_rules! op {
    ($name:ident, |$s:ident, $a:pat_param, $b:pat_param, $c:pat_param| $result:expr) => {
        struct $name;
        impl Op for $name {
            #[inline(always)]
            fn apply<S: Simd>($s: S, $a: S::F, $b: S::F, $c: S::F) -> S::F {
                $result
            }
        }
    };
}

op!(Splat, |s, _, _, _| s.splat(1.25));
op!(Fma, |s, a, b, c| s.fma(a, b, c));
op!(Add, |s, a, b, _| s.add(a, b));
op!(Sub, |s, a, b, _| s.sub(a, b));
op!(Mul, |s, a, b, _| s.mul(a, b));
op!(Div, |s, a, b, _| s.div(a, b));
op!(Max, |s, a, b, _| s.max(a, b));
op!(Min, |s, a, b, _| s.min(a, b));
op!(Round, |s, a, _, _| s.round(a));
op!(PowerOfTwo, |s, a, _, _| s.power_of_two(a));
op!(Exp, |s, a, _, _| s.exp(a));
op!(Exp13Bits, |s, a, b, _| s.exp_13_bits(a, b));
op!(Tanh, |s, a, _, _| tanh(s, a));

macro_rules! kernel {
    ($name:ident: $from:ty => $to:ty, |$s:ident, $lanes:ident, $numbers:ident| $result:expr) => {
        struct $name<'a>(&'a [$from]);
        impl Kernel for $name<'_> {
            type Output = Vec<$to>;
            #[inline(always)]
            fn run<S: Int8>(self, $s: S) -> Vec<$to> {
                let $lanes = S::LANES;
                let mut out = Vec::new();
                for $numbers in self.0.chunks_exact(S::LANES) {
                    // SAFETY: each chunk, and each output, has `S::LANES` numbers.
                    out.extend_from_slice(&unsafe { $result });
                }
                out
            }
        }
    };
}

kernel!(LoadF16: u16 => f32, |s, lanes, x| {
    let mut out = vec![0.0; lanes];
    s.store(out.as_mut_ptr(), s.load_f16(x.as_ptr()));
    out
});
kernel!(LoadBf16: u16 => f32, |s, lanes, x| {
    let mut out = vec![0.0; lanes];
    s.store(out.as_mut_ptr(), s.load_bf16(x.as_ptr()));
    out
});
kernel!(LoadI8: i8 => f32, |s, lanes, x| {
    let mut out = vec![0.0; lanes];
    s.store(out.as_mut_ptr(), s.load_i8(x.as_ptr()));
    out
});
kernel!(StoreBytes: f32 => i8, |s, lanes, x| {
    let mut out = vec![0; lanes];
    s.store_bytes(out.as_mut_ptr(), s.load(x.as_ptr()));
    out
});
// One number per register, repeated for each lane.
kernel!(Sum: f32 => f32, |s, lanes, x| vec![s.sum(s.load(x.as_ptr())); lanes]);
kernel!(Largest: f32 => f32, |s, lanes, x| vec![s.largest(s.load(x.as_ptr())); lanes]);

/// Whether the bits are equal, or both numbers are NaN. The bits of NaN differ between processors.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Numbers at the limits of fp32, and pseudo-random numbers.
fn numbers() -> Vec<f32> {
    let borders = [0.0, 1.0, 0.5, 1.5, 2.5, 8_388_607.5, 1e-45, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NAN];
    let mut state = 1_u32;
    let others = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 65536.0 - 100.0
    });
    borders.iter().flat_map(|&x| [x, -x]).chain(others.take(42)).collect()
}

#[test]
fn arithmetic_is_that_of_scalars() {
    let numbers = numbers();
    assert_eq!(numbers.len() % WIDEST, 0);
    let n = numbers.len();
    for isa in Isa::without_digits() {
        for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let a = vec![numbers[i]; n];
            let b = vec![numbers[j]; n];
            let check = |name: &str, got: Vec<f32>, want: &dyn Fn(f32, f32, f32) -> f32| {
                for (got, &c) in got.into_iter().zip(&numbers) {
                    let (a, b) = (numbers[i], numbers[j]);
                    assert!(same(got, want(a, b, c)), "{} {name}({a}, {b}, {c}): {got}", isa.name());
                }
            };
            let fma = |a: f32, b: f32, c: f32| if isa.is_portable() { a * b + c } else { a.mul_add(b, c) };
            check("fma", apply::<Fma>(isa, &a, &b, &numbers), &fma);
        }
        for i in 0..n {
            // Pairs each number with all others.
            let b: Vec<f32> = (0..n).map(|j| numbers[(i + j) % n]).collect();
            let check = |name: &str, got: Vec<f32>, want: fn(f32, f32) -> f32| {
                for (got, (&a, &b)) in got.into_iter().zip(numbers.iter().zip(&b)) {
                    assert!(same(got, want(a, b)), "{} {name}({a}, {b}): {got}", isa.name());
                }
            };
            check("splat", apply::<Splat>(isa, &numbers, &b, &b), |_, _| 1.25);
            check("add", apply::<Add>(isa, &numbers, &b, &b), |a, b| a + b);
            check("sub", apply::<Sub>(isa, &numbers, &b, &b), |a, b| a - b);
            check("mul", apply::<Mul>(isa, &numbers, &b, &b), |a, b| a * b);
            check("div", apply::<Div>(isa, &numbers, &b, &b), |a, b| a / b);
            check("max", apply::<Max>(isa, &numbers, &b, &b), |a, b| if a > b { a } else { b });
            check("min", apply::<Min>(isa, &numbers, &b, &b), |a, b| if a < b { a } else { b });
            check("round", apply::<Round>(isa, &numbers, &b, &b), |a, _| a.round_ties_even());
        }
    }
}

#[test]
fn powers_of_two_are_exact() {
    let exponents: Vec<f32> = (-127..=128).map(|n: i32| n.clamp(-126, 127) as f32).collect();
    for isa in Isa::without_digits() {
        for (n, got) in exponents.iter().zip(apply::<PowerOfTwo>(isa, &exponents, &exponents, &exponents)) {
            assert_eq!(f64::from(got), f64::from(*n).exp2(), "{} {n}", isa.name());
        }
    }
}

#[test]
fn reductions_count_each_lane_once() {
    let ones: Vec<f32> = (0..WIDEST).map(|i| (1 << i) as f32).collect();
    for isa in Isa::without_digits() {
        let lanes = isa.run(Lanes);
        let sums = isa.run(Sum(&ones));
        for (got, ones) in sums.chunks(lanes).zip(ones.chunks(lanes)) {
            assert_eq!(got[0], ones.iter().sum::<f32>(), "{}", isa.name());
        }
        for place in 0..lanes {
            let mut numbers = vec![f32::NEG_INFINITY; lanes];
            assert_eq!(isa.run(Largest(&numbers))[0], f32::NEG_INFINITY, "{}", isa.name());
            numbers[place] = -3.0;
            assert_eq!(isa.run(Largest(&numbers))[0], -3.0, "{}", isa.name());
        }
    }
}

struct Lanes;
impl Kernel for Lanes {
    type Output = usize;
    #[inline(always)]
    fn run<S: Int8>(self, _: S) -> usize {
        S::LANES
    }
}

/// Copies one register of numbers.
struct Copies<'a>(&'a [f32], &'a mut [f32]);
impl Kernel for Copies<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        let Self(from, to) = self;
        assert!(from.len() >= S::LANES && to.len() >= S::LANES);
        // SAFETY: the lengths are asserted above.
        unsafe { s.store(to.as_mut_ptr(), s.load(from.as_ptr())) }
    }
}

#[test]
fn a_register_is_read_and_written_wherever_it_lies() {
    let from: Vec<f32> = (0..2 * WIDEST).map(|i| i as f32).collect();
    for isa in Isa::without_digits() {
        let lanes = isa.run(Lanes);
        for (start, end) in (0..WIDEST).flat_map(|i| (0..WIDEST).map(move |j| (i, j))) {
            let mut to = [-1.0; 2 * WIDEST];
            isa.run(Copies(&from[start..], &mut to[end..]));
            for (i, &x) in to.iter().enumerate() {
                let want = if (end..end + lanes).contains(&i) { from[start + i - end] } else { -1.0 };
                assert_eq!(x, want, "{} {start} {end} {i}", isa.name());
            }
        }
    }
}

#[test]
fn halves_of_both_kinds_are_read_as_what_they_are() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for isa in Isa::without_digits() {
        for (bits, got) in all.iter().zip(isa.run(LoadF16(&all))) {
            assert!(same(got, half::to_f32(*bits)), "{} {bits:#x}: {got}", isa.name());
        }
        for (bits, got) in all.iter().zip(isa.run(LoadBf16(&all))) {
            assert!(same(got, f32::from_bits(u32::from(*bits) << 16)), "{} {bits:#x}: {got}", isa.name());
        }
    }
}

#[test]
fn bytes_are_read_as_they_are_and_written_as_the_nearest() {
    let all: Vec<i8> = (i8::MIN..=i8::MAX).collect();
    let numbers: Vec<f32> = (-1024..1016).map(|i| i as f32 / 8.0).collect();
    let numbers = &numbers[..numbers.len() / WIDEST * WIDEST];
    for isa in Isa::without_digits() {
        for (byte, got) in all.iter().zip(isa.run(LoadI8(&all))) {
            assert_eq!(got, f32::from(*byte), "{}", isa.name());
        }
        for (x, got) in numbers.iter().zip(isa.run(StoreBytes(numbers))) {
            assert_eq!(got, x.round_ties_even() as i8, "{} {x}", isa.name());
        }
    }
}

/// The error of `got` compared with e^`x`, in units in the last place.
fn exp_error(x: f32, got: f32) -> f64 {
    let want = f64::from(x).exp();
    let place = f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
    (f64::from(got) - want).abs() / place
}

#[test]
fn exp_is_near_over_its_whole_range() {
    // The step has no common factor with the spacing of the numbers. The test below covers the limits.
    let positive = (0..88.0_f32.to_bits()).step_by(60_013).map(f32::from_bits);
    let negative = (0..87.3_f32.to_bits()).step_by(60_013).map(|bits| -f32::from_bits(bits));
    let dense = (0..176_000).map(|i| (i - 87_300) as f32 * 1e-3 + 3e-5);
    let numbers: Vec<f32> = positive.chain(negative).chain(dense.filter(|&x| x < 88.0)).collect();
    let numbers = &numbers[..numbers.len() / WIDEST * WIDEST];
    for isa in Isa::without_digits() {
        for (&x, got) in numbers.iter().zip(apply::<Exp>(isa, numbers, numbers, numbers)) {
            assert!(exp_error(x, got) <= 2.0, "{} exp({x}): {got}", isa.name());
        }
    }
}

#[test]
fn exp_at_its_borders() {
    let lowest = -87.3_f32;
    let below = f32::from_bits(lowest.to_bits() + 1);
    let cases = [
        (0.0, 1.0),
        (-0.0, 1.0),
        (f32::NEG_INFINITY, 0.0),
        (f32::MIN, 0.0),
        (-100.0, 0.0),
        (below, 0.0),
        (1e-45, 1.0),
        (-1e-45, 1.0),
        (f32::NAN, f32::NAN),
        (-f32::NAN, f32::NAN),
    ];
    for isa in Isa::without_digits() {
        for (x, want) in cases {
            let x = vec![x; WIDEST];
            let got = apply::<Exp>(isa, &x, &x, &x);
            assert!(got.iter().all(|&got| same(got, want)), "{} exp({}): {got:?}", isa.name(), x[0]);
        }
        let at = |x: f32| apply::<Exp>(isa, &[x; WIDEST], &[x; WIDEST], &[x; WIDEST])[0];
        assert!(exp_error(lowest, at(lowest)) <= 2.0 && at(lowest) >= f32::MIN_POSITIVE, "{}: {:e}", isa.name(), at(lowest));
        for x in [88.0, 88.1, f32::MAX, f32::INFINITY] {
            assert_eq!(at(x), at(88.0), "{} exp({x})", isa.name());
        }
        assert!(exp_error(88.0, at(88.0)) <= 2.0, "{}", isa.name());
    }
}

#[test]
fn exp_to_13_bits_is_near_and_0_far_below() {
    let numbers: Vec<f32> = (-86_000..88_000).map(|x| x as f32 / 1000.0).collect();
    for isa in Isa::without_digits() {
        for base in [0.0, 7.25, -30.5] {
            let scores: Vec<f32> = numbers.iter().map(|x| x + base).collect();
            let bases = vec![base; scores.len()];
            for (x, got) in scores.iter().zip(apply::<Exp13Bits>(isa, &scores, &bases, &bases)) {
                let want = (f64::from(*x) - f64::from(base)).exp();
                assert!((f64::from(got) - want).abs() <= 1.4e-4 * want, "{} exp({x} - {base}): {got}", isa.name());
            }
        }
        let [low, none, zeros] = [-88.0, f32::NEG_INFINITY, 0.0].map(|x| [x; WIDEST]);
        for x in [low, none] {
            assert!(apply::<Exp13Bits>(isa, &x, &zeros, &zeros).iter().all(|&x| x.to_bits() == 0), "{} exp({})", isa.name(), x[0]);
        }
    }
}

#[test]
fn tanh_is_near_over_its_whole_range() {
    let positive = (0..12.0_f32.to_bits()).step_by(60_013).map(f32::from_bits);
    let numbers: Vec<f32> = positive.flat_map(|x| [x, -x]).chain([f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -0.0]).collect();
    let numbers = &numbers[numbers.len() % WIDEST..];
    for isa in Isa::without_digits() {
        for (&x, got) in numbers.iter().zip(apply::<Tanh>(isa, numbers, numbers, numbers)) {
            let want = f64::from(x).tanh();
            assert!((f64::from(got) - want).abs() <= 4e-7 * want.abs(), "{} tanh({x}): {got}", isa.name());
        }
        let nan = [f32::NAN; WIDEST];
        assert!(apply::<Tanh>(isa, &nan, &nan, &nan).iter().all(|x| x.is_nan()));
    }
}

#[test]
fn the_oracle_of_tiles_sums_even_and_odd_inputs_apart_and_flushes_denormal_numbers() {
    let bf16 = |x: f32| (x.to_bits() >> 16) as u16;
    let pair = |even: f32, odd: f32| [u32::from(bf16(even)) | u32::from(bf16(odd)) << 16; TILE];
    let sum = |start: f32, row: &[f32], weights: &[[u32; TILE]]| {
        let mut sums = [start; TILE];
        let row: Vec<u32> = row.chunks_exact(2).map(|x| pair(x[0], x[1])[0]).collect();
        oracle::add(&mut sums, &row, weights.as_flattened());
        assert!(sums.iter().all(|x| x.to_bits() == sums[0].to_bits()));
        sums[0]
    };
    let (large, ones) = ((1_u32 << 24) as f32, [pair(1.0, 1.0); 2]);
    assert_eq!(sum(3.0, &[1.0, 2.0, 4.0, 8.0], &ones), 18.0);
    // One chain would lose both ones. Here they meet in the odd chain and survive.
    assert_eq!(sum(0.0, &[large, 1.0, 0.0, 1.0], &ones), large + 2.0);
    // The accumulator is added last.
    assert_eq!(sum(large, &[1.0, 1.0, 0.0, 0.0], &ones), large + 2.0);
    // 1 + 2^-14 and its square's last bit: the products are not rounded.
    assert_eq!(sum(0.0, &[1.0, 0.0, -1.0, 0.0], &[pair(1.007_812_5, 0.0), pair(1.0, 0.0)]), 0.007_812_5);
    let smallest = f32::MIN_POSITIVE;
    assert_eq!(sum(0.0, &[smallest / 2.0, 0.0, 0.0, 0.0], &ones), 0.0, "an input");
    assert_eq!(sum(0.0, &[smallest, 0.0, 0.0, 0.0], &[pair(0.5, 0.0), pair(0.0, 0.0)]).to_bits(), 0, "a product");
    assert_eq!(sum(-smallest, &[1.5 * smallest, 0.0, 0.0, 0.0], &ones).to_bits(), 0, "a sum");
}

/// Rounds `a` and `b` to pairs and adds their products to `c`.
struct Pairs<'a>(&'a [f32], &'a [f32], &'a [f32]);

impl Kernel for Pairs<'_> {
    type Output = Vec<u32>;
    #[inline(always)]
    fn run<S: Int8>(self, s: S) -> Vec<u32> {
        let Pairs(a, b, c) = self;
        let mut out = vec![0.0; c.len()];
        for i in (0..c.len()).step_by(S::LANES) {
            // SAFETY: `c` and `out` have whole registers, and `a` and `b` have twice as many numbers.
            unsafe {
                let [a, b] = [a, b].map(|x| {
                    let x = x[2 * i..2 * (i + S::LANES)].as_ptr();
                    s.round_bf16_pairs(s.load(x), s.load(x.add(S::LANES)))
                });
                let sum = s.dot_bf16_pairs(a, b, s.load(c[i..i + S::LANES].as_ptr()));
                s.store(out[i..i + S::LANES].as_mut_ptr(), sum);
            }
        }
        out.iter().map(|x: &f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    }
}

#[test]
fn pairs_of_bfloat16_are_multiplied_as_by_scalars() {
    let mut state = 1_u64;
    let mut number = |spread: i32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let exponent = (state >> 40) as i32 % (2 * spread + 1) - spread;
        ((state >> 33) as i32 as f32 / 1e9 - 1.0) * 2.0_f32.powi(exponent)
    };
    for spread in [0, 3, 10, 70] {
        let mut numbers = |count: usize| (0..count).map(|_| number(spread)).collect::<Vec<_>>();
        let (a, b, c) = (numbers(4096), numbers(4096), numbers(2048));
        let expected = Isa::PORTABLE.run(Pairs(&a, &b, &c));
        for isa in Isa::without_digits() {
            let found = isa.run_bf16(Pairs(&a, &b, &c));
            let differ = found.iter().zip(&expected).filter(|(x, y)| x != y).count();
            assert_eq!(differ, 0, "{isa:?}, numbers of 2^{spread}");
        }
    }
}
