//! Attention's work on a GPU, cut into pieces before the kernels run: a fixed
//! grid of programs takes them from a list, so that long contexts are shared
//! out and padding costs nothing (as in `FlashInfer`).
//!
//! A sequence's pieces follow from its own lengths alone, so its result does
//! not depend on who shares the step. All lists are rows of integers, with
//! counts in the first, as the kernels read them.

/// Chunks of up to so many tokens are attended to as decodes.
pub const MAX_DECODE: i32 = 4;
/// Keys in a split, which ends at a multiple of it, and how many splits a
/// context has before they grow.
const SPLIT: i32 = 512;
const MAX_SPLITS: i32 = 64;

/// A step's sequences: `query_starts` (one more than there are) and
/// `context_lens` of the step buffers. Yields (place, queries, context) of
/// those that are no padding.
fn sequences<'a>(query_starts: &'a [i32], context_lens: &'a [i32]) -> impl Iterator<Item = (i32, i32, i32)> + 'a {
    let queries = query_starts.windows(2).map(|pair| pair[1] - pair[0]);
    (0..)
        .zip(queries)
        .zip(context_lens)
        .map(|((place, queries), &context)| (place, queries, context))
        .filter(|&(_, _, context)| context > 0)
}

/// Which keys each unit of decode attention reads, through a sliding window
/// if there is one, and which partial results make one.
///
/// After the counts `[splits, merges, parts, longest chunk]` come splits
/// `[sequence, first key, end, part]` and merges `[token, part, step, parts]`.
/// A split's part is that of its first token, and the next token's is the next;
/// it is -1 where a split is all that its tokens see. A merge's parts lie
/// `step` apart.
pub fn decode_work(query_starts: &[i32], context_lens: &[i32], window: Option<i32>) -> Vec<[i32; 4]> {
    let (mut work, mut merges) = (vec![[0; 4]], Vec::new());
    let (mut parts, mut longest) = (0, 0);
    for (place, queries, context) in sequences(query_starts, context_lens).filter(|&(_, queries, _)| queries <= MAX_DECODE) {
        longest = longest.max(queries);
        let first = window.map_or(0, |window| (context - queries + 1 - window).max(0));
        // Not the keys of this chunk: drafted tokens must not change how a context is split.
        let seen = window.map_or(context, |window| window.min(context));
        let mut length = SPLIT;
        while seen > length * MAX_SPLITS {
            length *= 2;
        }
        let splits = (context - 1) / length - first / length + 1;
        for (split, nth) in (first / length..).zip(0..splits) {
            let part = if splits == 1 { -1 } else { parts + nth * queries };
            work.push([place, first.max(split * length), context.min((split + 1) * length), part]);
        }
        if splits > 1 {
            merges.extend((0..queries).map(|query| [query_starts[place as usize] + query, parts + query, queries, splits]));
            parts += splits * queries;
        }
    }
    work[0] = [work.len() as i32 - 1, merges.len() as i32, parts, longest];
    work.append(&mut merges);
    work
}

/// The most splits that `decode_work` makes of a sequence with one token in
/// the step and up to `longest` in its context: what a graph must have room
/// for, whatever the steps that it is kept for.
pub fn most_splits(longest: i32, window: Option<i32>) -> i32 {
    let splits = |seen: i32| MAX_SPLITS.min((seen - 1) / SPLIT + 1);
    match window {
        // It may begin and end within a split.
        Some(window) if window < longest => splits(window) + 1,
        _ => splits(longest),
    }
}

/// The pieces of longer chunks, of up to `tokens` each: after the count
/// `[tiles, 0]` come `[sequence, first token of its chunk]`. Of a chunk the
/// last come first: they see the most keys, and what takes longest starts first.
pub fn prefill_work(query_starts: &[i32], context_lens: &[i32], tokens: i32) -> Vec<[i32; 2]> {
    let mut work = vec![[0; 2]];
    for (place, queries, _) in sequences(query_starts, context_lens).filter(|&(_, queries, _)| queries > MAX_DECODE) {
        work.extend((0..=(queries - 1) / tokens).rev().map(|tile| [place, tile * tokens]));
    }
    work[0][0] = work.len() as i32 - 1;
    work
}

#[cfg(test)]
mod tests {
    use super::{MAX_DECODE, MAX_SPLITS, SPLIT, decode_work, most_splits, prefill_work};
    use proptest::prelude::*;

    /// (queries, context) of a sequence, around what matters; context 0 is padding.
    fn sequence() -> impl Strategy<Value = (i32, i32)> {
        let context = prop_oneof![Just(0), 1..40, (1..80i32, -2..=2i32).prop_map(|(splits, off)| splits * SPLIT + off), 1..200_000];
        (1..9i32, context).prop_map(|(queries, context)| (if context == 0 { 1 } else { queries.min(context) }, context))
    }

    fn step() -> impl Strategy<Value = (Vec<(i32, i32)>, Option<i32>)> {
        (prop::collection::vec(sequence(), 1..6), prop_oneof![Just(None), (1..3000i32).prop_map(Some)])
    }

    fn arrays(lengths: &[(i32, i32)]) -> (Vec<i32>, Vec<i32>) {
        let mut starts = vec![0];
        starts.extend(lengths.iter().scan(0, |at, &(queries, _)| {
            *at += queries;
            Some(*at)
        }));
        (starts, lengths.iter().map(|&(_, context)| context).collect())
    }

    proptest! {
        #[test]
        fn splits_are_what_each_decode_sees_in_order_and_parts_are_written_and_merged_once((lengths, window) in step()) {
            let (starts, lens) = arrays(&lengths);
            let work = decode_work(&starts, &lens, window);
            let [splits, merges, parts, longest] = work[0].map(|count| count as usize);
            prop_assert_eq!(work.len(), 1 + splits + merges);
            let mut written = vec![0; parts];
            let mut merged = vec![0; parts];
            let mut longest_seen = 0;
            for (place, &(queries, context)) in (0..).zip(&lengths) {
                let own: Vec<_> = work[1..=splits].iter().filter(|split| split[0] == place).collect();
                if context == 0 || queries > MAX_DECODE {
                    prop_assert!(own.is_empty());
                    continue;
                }
                longest_seen = longest_seen.max(queries as usize);
                let mut at = window.map_or(0, |window| (context - queries + 1 - window).max(0));
                for &&[_, start, end, part] in &own {
                    prop_assert!(start == at && end > start && end - start <= SPLIT.max(context / MAX_SPLITS * 2));
                    prop_assert!(end == context || end % SPLIT == 0);
                    at = end;
                    prop_assert_eq!(part < 0, own.len() == 1);
                    if part >= 0 {
                        (part..part + queries).for_each(|part| written[part as usize] += 1);
                    }
                }
                prop_assert_eq!(at, context);
                prop_assert!(own.len() as i32 <= MAX_SPLITS + 2);
                for query in 0..queries {
                    let token = starts[place as usize] + query;
                    let found: Vec<_> = work[1 + splits..].iter().filter(|merge| merge[0] == token).collect();
                    prop_assert_eq!(found.len(), usize::from(own.len() > 1));
                    for &&[_, part, step, count] in &found {
                        let named: Vec<_> = (0..count).map(|nth| part + nth * step).collect();
                        prop_assert_eq!(&named, &own.iter().map(|split| split[3] + query).collect::<Vec<_>>());
                        for part in named {
                            merged[part as usize] += 1;
                        }
                    }
                }
            }
            prop_assert_eq!(longest, longest_seen);
            prop_assert!(written.iter().chain(&merged).all(|&times| times == 1));
        }

        #[test]
        fn a_sequence_is_split_as_it_would_be_alone((lengths, window) in step()) {
            let cut = |lengths: &[(i32, i32)], place: i32| -> Vec<_> {
                let (starts, lens) = arrays(lengths);
                let work = decode_work(&starts, &lens, window);
                let splits = work[1..=work[0][0] as usize].iter().filter(|split| split[0] == place);
                splits.map(|&[_, start, end, part]| (start, end, part < 0)).collect()
            };
            for (place, own) in (0..).zip(&lengths) {
                prop_assert_eq!(cut(&lengths, place), cut(&[*own], 0));
            }
        }

        #[test]
        fn a_sequence_with_one_token_has_no_more_splits_than_there_is_room_for((lengths, window) in step(), more in 0..1000i32) {
            for &(_, context) in lengths.iter().filter(|(_, context)| *context > 0) {
                let most = most_splits(context + more, window);
                prop_assert!(decode_work(&[0, 1], &[context], window)[0][0] <= most);
                prop_assert!(most <= MAX_SPLITS + 1);
            }
        }

        #[test]
        fn tiles_cover_each_longer_chunk_from_its_end((lengths, _) in step(), tokens in 1..9i32) {
            let (starts, lens) = arrays(&lengths);
            let work = prefill_work(&starts, &lens, tokens);
            prop_assert_eq!(work[0], [work.len() as i32 - 1, 0]);
            let mut expected = Vec::new();
            for (place, &(queries, _)) in (0..).zip(&lengths).filter(|(_, sequence)| sequence.1 > 0 && sequence.0 > MAX_DECODE) {
                expected.extend((0..queries).filter(|first| first % tokens == 0).rev().map(|first| [place, first]));
            }
            prop_assert_eq!(&work[1..], &expected);
        }
    }

    #[test]
    fn one_split_is_written_directly_and_long_contexts_have_few() {
        assert_eq!(decode_work(&[0, 1], &[512], None), [[1, 0, 0, 1], [0, 0, 512, -1]]);
        assert_eq!(decode_work(&[0, 1, 3], &[0, 514], None), [[2, 2, 4, 2], [1, 0, 512, 0], [1, 512, 514, 2], [1, 0, 2, 2], [2, 1, 2, 2]]);
        assert_eq!(decode_work(&[0, 1], &[SPLIT * MAX_SPLITS], None)[0][0], MAX_SPLITS);
        assert_eq!(decode_work(&[0, 1], &[SPLIT * MAX_SPLITS + 1], None)[0][0], MAX_SPLITS / 2 + 1);
        assert_eq!(decode_work(&[0, 1], &[100_000], Some(SPLIT)).len(), 1 + 2 + 1);
        assert_eq!([most_splits(1, None), most_splits(SPLIT + 1, None), most_splits(SPLIT, Some(SPLIT))], [1, 2, 1]);
        assert_eq!([most_splits(100_000, Some(SPLIT)), most_splits(i32::MAX, None)], [2, MAX_SPLITS]);
    }
}
