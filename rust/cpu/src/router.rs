//! How a mixture's router chooses experts for a token, and their weights.

/// What makes scores of a router's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// The softmax over all experts (Qwen, `OLMoE`).
    Softmax,
    /// The sigmoid of each logit (`DeepSeek` V3).
    Sigmoid,
    /// The logits. Weights are the softmax over the chosen experts (Granite, gpt-oss).
    Logits,
}

/// Experts in groups of equal size, of which few are used (`DeepSeek`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups whose experts may be chosen: those with the largest sums of their best experts.
    pub used: usize,
    /// Number of a group's experts that are in the sum: one in `DeepSeek` V2, two in V3.
    pub best: usize,
}

/// The choice of experts for a token.
#[derive(Clone, Debug)]
pub struct Choice {
    /// What makes scores of the logits.
    pub scores: Scores,
    /// Number of experts of a token.
    pub used: usize,
    /// Added to each expert's score before experts are compared. Weights do not include it.
    pub bias: Option<Vec<f32>>,
    /// Groups of experts. `None`: all experts can be chosen.
    pub groups: Option<ExpertGroups>,
    /// What is added to the sum of a token's weights, by which they are divided then. `None`: they are not.
    pub normalised: Option<f32>,
    /// Factor of the weights.
    pub scale: f32,
    /// For each expert, another factor of its weights (Gemma 4).
    pub expert_scales: Option<Vec<f32>>,
}

impl Choice {
    /// Whether `experts` experts can be chosen from.
    pub(crate) fn fits(&self, experts: usize) -> bool {
        let groups = self.groups.unwrap_or(ExpertGroups { count: 1, used: 1, best: 1 });
        let whole =
            groups.count > 0 && groups.best > 0 && experts.is_multiple_of(groups.count) && (1..=groups.count).contains(&groups.used);
        let listed = [&self.bias, &self.expert_scales].into_iter().flatten().all(|list| list.len() == experts);
        whole && listed && self.scale.is_finite() && (1..=experts / groups.count.max(1) * groups.used).contains(&self.used)
    }

    /// Chooses experts for a token, in ascending order, and their weights. `logits` become scores. Of equal experts, the first is chosen.
    /// An expert whose score is NaN comes last; the weights are NaN then.
    pub(crate) fn choose(&self, logits: &mut [f32], scratch: &mut Vec<f32>, experts: &mut [u32], weights: &mut [f32]) {
        match self.scores {
            Scores::Softmax => softmax(logits),
            Scores::Sigmoid => logits.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
            Scores::Logits => {}
        }
        scratch.clear();
        scratch.extend_from_slice(logits);
        for (rank, bias) in scratch.iter_mut().zip(self.bias.iter().flatten()) {
            *rank += bias;
        }
        if let Some(groups) = self.groups {
            hide_groups(scratch, groups);
        }
        largest(scratch, experts);
        experts.sort_unstable();
        for (weight, &expert) in weights.iter_mut().zip(&*experts) {
            *weight = logits[expert as usize];
        }
        if self.scores == Scores::Logits {
            softmax(weights);
        }
        let sum = self.normalised.map_or(1.0, |epsilon| weights.iter().sum::<f32>() + epsilon);
        for (weight, &expert) in weights.iter_mut().zip(&*experts) {
            let scale = self.expert_scales.as_ref().map_or(self.scale, |scales| scales[expert as usize] * self.scale);
            *weight = *weight / sum * scale;
        }
    }
}

/// Replaces numbers by their softmax.
fn softmax(numbers: &mut [f32]) {
    let most = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for x in &mut *numbers {
        *x = (*x - most).exp();
    }
    let sum: f32 = numbers.iter().sum();
    for x in numbers {
        *x /= sum;
    }
}

/// Writes the indices of the largest numbers, in descending order.
fn largest(numbers: &[f32], indices: &mut [u32]) {
    let value = |index: u32| if numbers[index as usize].is_nan() { f32::NEG_INFINITY } else { numbers[index as usize] };
    let mut count = 0;
    for index in 0..numbers.len() as u32 {
        let place = indices[..count].partition_point(|&other| value(other) >= value(index));
        if place < indices.len() {
            count = (count + 1).min(indices.len());
            indices[place..count].rotate_right(1);
            indices[place] = index;
        }
    }
}

/// Makes the experts of the groups that are not used worse than all others.
fn hide_groups(ranks: &mut [f32], groups: ExpertGroups) {
    let size = ranks.len() / groups.count;
    let mut best = vec![0; size.min(groups.best)];
    let sum_of_best = |group: &[f32]| {
        largest(group, &mut best);
        best.iter().map(|&expert| group[expert as usize]).sum::<f32>()
    };
    let sums: Vec<f32> = ranks.chunks_exact(size).map(sum_of_best).collect();
    let mut used = vec![0; groups.used];
    largest(&sums, &mut used);
    for (group, ranks) in ranks.chunks_exact_mut(size).enumerate() {
        if !used.contains(&(group as u32)) {
            ranks.fill(f32::NEG_INFINITY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Choice =
        Choice { scores: Scores::Softmax, used: 2, bias: None, groups: None, normalised: None, scale: 1.0, expert_scales: None };

    fn choose(choice: &Choice, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let (mut experts, mut weights) = (vec![9; choice.used], vec![9.0; choice.used]);
        choice.choose(&mut logits.to_vec(), &mut Vec::new(), &mut experts, &mut weights);
        (experts, weights)
    }

    fn close(found: &[f32], expected: &[f32]) {
        assert!(found.len() == expected.len() && found.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6), "{found:?} {expected:?}");
    }

    #[test]
    fn the_best_experts_are_chosen_in_ascending_order_and_the_first_of_equal_ones() {
        for scores in [Scores::Softmax, Scores::Sigmoid, Scores::Logits] {
            let choice = Choice { scores, used: 3, ..PLAIN };
            assert_eq!(choose(&choice, &[1.0, 5.0, 1.0, 3.0, 1.0]).0, [0, 1, 3]);
            assert_eq!(choose(&choice, &[0.0; 5]).0, [0, 1, 2]);
            assert_eq!(choose(&choice, &[0.0, 1.0, 2.0, 3.0, 4.0]).0, [2, 3, 4]);
        }
    }

    #[test]
    fn weights_are_scores_their_shares_or_the_softmax_of_the_chosen() {
        let logits = [0.5_f32, 2.0, -1.0, 1.0];
        let exponentials = logits.map(f32::exp);
        let (all, two) = (exponentials.iter().sum::<f32>(), exponentials[1] + exponentials[3]);
        let [first, second] = [exponentials[1], exponentials[3]];
        close(&choose(&PLAIN, &logits).1, &[first / all, second / all]);
        close(&choose(&Choice { normalised: Some(1e-20), scale: 2.0, ..PLAIN }, &logits).1, &[2.0 * first / two, 2.0 * second / two]);
        close(&choose(&Choice { scores: Scores::Logits, ..PLAIN }, &logits).1, &[first / two, second / two]);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        close(&choose(&Choice { scores: Scores::Sigmoid, ..PLAIN }, &logits).1, &[sigmoid(2.0), sigmoid(1.0)]);
    }

    #[test]
    fn an_experts_scale_changes_its_weight_after_the_division_by_the_sum() {
        let choice = Choice { normalised: Some(0.0), expert_scales: Some(vec![9.0, 2.0, 9.0, 0.5]), ..PLAIN };
        let share = 1.0 / (1.0 + (-1.0_f32).exp());
        close(&choose(&choice, &[0.5, 2.0, -1.0, 1.0]).1, &[2.0 * share, 0.5 * (1.0 - share)]);
    }

    #[test]
    fn a_bias_changes_the_choice_and_not_the_weights() {
        let choice = Choice { scores: Scores::Sigmoid, bias: Some(vec![0.0, -9.0, 0.0, 9.0]), ..PLAIN };
        let (experts, weights) = choose(&choice, &[0.0, 4.0, 1.0, -1.0]);
        assert_eq!(experts, [2, 3]);
        close(&weights, &[1.0 / (1.0 + (-1.0_f32).exp()), 1.0 / (1.0 + 1.0_f32.exp())]);
    }

    #[test]
    fn groups_are_compared_by_their_best_experts() {
        let grouped = |best: usize| Choice { scores: Scores::Logits, groups: Some(ExpertGroups { count: 3, used: 1, best }), ..PLAIN };
        let choice = grouped(2);
        // The best expert of all is in a group that is not used.
        assert_eq!(choose(&choice, &[9.0, 0.0, 5.0, 6.0, 1.0, 1.0]).0, [2, 3]);
        assert_eq!(choose(&choice, &[9.0, 3.0, 5.0, 6.0, 1.0, 1.0]).0, [0, 1]);
        // By the best one alone, the first group is the best.
        assert_eq!(choose(&grouped(1), &[9.0, 0.0, 5.0, 6.0, 1.0, 1.0]).0, [0, 1]);
    }

    #[test]
    fn logits_that_are_not_numbers_give_weights_that_are_none() {
        let (experts, weights) = choose(&Choice { scores: Scores::Logits, ..PLAIN }, &[f32::NAN, 1.0, f32::NAN, f32::NAN]);
        assert_eq!(experts, [0, 1]);
        assert!(weights.iter().all(|weight| weight.is_nan()));
        assert!(choose(&PLAIN, &[f32::NAN; 3]).1.iter().all(|weight| weight.is_nan()));
    }

    #[test]
    fn choices_that_need_more_experts_than_there_are_do_not_fit() {
        assert!(PLAIN.fits(2) && !PLAIN.fits(1) && !Choice { used: 0, ..PLAIN }.fits(4));
        let grouped = |count: usize, used: usize| Choice { groups: Some(ExpertGroups { count, used, best: 2 }), ..PLAIN };
        assert!(
            grouped(4, 2).fits(4) && !grouped(4, 1).fits(4) && !grouped(3, 2).fits(4) && !grouped(4, 5).fits(8) && !grouped(0, 1).fits(8)
        );
        assert!(!Choice { bias: Some(vec![0.0; 3]), ..PLAIN }.fits(4));
        assert!(!Choice { expert_scales: Some(vec![1.0; 5]), ..PLAIN }.fits(4));
    }
}
