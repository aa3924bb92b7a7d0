//! Divides the work of GPU attention before the kernels run. A fixed grid of programs takes work items from a list.
//! Long contexts are split across programs, and padding costs nothing (as in `FlashInfer`).
//!
//! All lists are rows of integers with the counts in the first row, as the kernels read them.

/// Chunks of up to this many tokens use decode attention.
pub const MAX_DECODE: i32 = 4;
/// Keys in the shortest split. A split ends at a multiple of this number. Splits are longer, by a power of two, where the
/// step has enough of them to keep the device busy, and where a context would need more than `MAX_SPLITS`.
const SPLIT: i32 = 512;
const MAX_SPLITS: i32 = 64;
/// The most keys that a split is lengthened to for want of idle multiprocessors.
const LONGEST: i32 = 1 << 20;

/// Iterates over a step's sequences. `query_starts` (one entry more than sequences) and `context_lens` are the step
/// buffers. Yields (index, queries, context) and skips padding.
fn sequences<'a>(query_starts: &'a [i32], context_lens: &'a [i32]) -> impl Iterator<Item = (i32, i32, i32)> + 'a {
    let queries = query_starts.windows(2).map(|pair| pair[1] - pair[0]);
    (0..)
        .zip(queries)
        .zip(context_lens)
        .map(|((place, queries), &context)| (place, queries, context))
        .filter(|&(_, _, context)| context > 0)
}

/// Lists the keys that each unit of decode attention reads, within the sliding window if there is one, and the partial
/// results to merge.
///
/// After the counts `[splits, merges, parts, longest chunk]` come splits `[sequence, first key, end, part]` and merges
/// `[token, part, step, parts]`. The part of a split belongs to its first token, and each further token has the next
/// part. The part is -1 if one split covers all keys of its tokens. Parts of a merge are `step` apart.
///
/// The device works on `at_once` splits at a time: splits are no shorter than an equal share of the step's keys, up to a
/// power of two. Shorter ones would only be more to merge.
pub fn decode_work(query_starts: &[i32], context_lens: &[i32], window: Option<i32>, at_once: i32) -> Vec<[i32; 4]> {
    let (mut work, mut merges) = (vec![[0; 4]], Vec::new());
    let (mut parts, mut longest) = (0, 0);
    // The chunk's own keys are excluded: drafted tokens must not change how a context is split.
    let seen = |context: i32| window.map_or(context, |window| window.min(context));
    let decodes = || sequences(query_starts, context_lens).filter(|&(_, queries, _)| queries <= MAX_DECODE);
    let keys: i64 = decodes().map(|(_, _, context)| i64::from(seen(context))).sum();
    let mut shortest = SPLIT;
    while i64::from(shortest) * i64::from(at_once) < keys && shortest < LONGEST {
        shortest *= 2;
    }
    for (place, queries, context) in decodes() {
        longest = longest.max(queries);
        let first = window.map_or(0, |window| (context - window - queries + 1).max(0));
        let mut length = shortest;
        while (seen(context) - 1) / MAX_SPLITS >= length {
            length *= 2;
        }
        // What is left behind the last split is a part of it if it is less than half as long.
        let splits = ((context - 1 - length / 2) / length - first / length).max(0) + 1;
        for (split, nth) in (first / length..).zip(0..splits) {
            let part = if splits == 1 { -1 } else { parts + nth * queries };
            let end = if nth == splits - 1 { context } else { (split + 1) * length };
            work.push([place, first.max(split * length), end, part]);
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

/// The largest number of splits that `decode_work` makes for a sequence with one token in the step and a context of up
/// to `longest`. A captured graph must have room for them in every step that it serves.
pub fn most_splits(longest: i32, window: Option<i32>) -> i32 {
    let splits = |seen: i32| MAX_SPLITS.min((seen - 1) / SPLIT + 1);
    match window {
        // The window may begin and end within a split.
        Some(window) if window < longest => splits(window) + 1,
        _ => splits(longest),
    }
}

/// Lists the pieces of longer chunks, up to `tokens` each. After the count `[tiles, 0]` come `[sequence, first token of
/// its chunk]`. The last pieces of a chunk come first: they read the most keys, and the longest work starts first.
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

    /// More splits at once than any step has: contexts are split as far as they may be.
    const ALL: i32 = i32::MAX;

    /// (queries, context) of a sequence near the boundary values. Context 0 is padding.
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
        fn splits_are_what_each_decode_sees_in_order_and_parts_are_written_and_merged_once(
            (lengths, window) in step(),
            at_once in prop_oneof![1..40i32, Just(ALL)],
        ) {
            let (starts, lens) = arrays(&lengths);
            let work = decode_work(&starts, &lens, window, at_once);
            let decodes = lengths.iter().filter(|(queries, _)| *queries <= MAX_DECODE);
            let keys: i32 = decodes.map(|&(_, context)| window.map_or(context, |window| window.min(context))).sum();
            let share = (keys - 1) / at_once + 1;
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
                    prop_assert!(start == at && end > start && end - start <= SPLIT.max(context / MAX_SPLITS * 2).max(2 * share) * 3 / 2);
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
        fn a_sequence_is_split_as_it_would_be_alone_while_multiprocessors_are_idle((lengths, window) in step()) {
            let cut = |lengths: &[(i32, i32)], place: i32| -> Vec<_> {
                let (starts, lens) = arrays(lengths);
                let work = decode_work(&starts, &lens, window, ALL);
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
                prop_assert!(decode_work(&[0, 1], &[context], window, ALL)[0][0] <= most);
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
        assert_eq!(decode_work(&[0, 1], &[512], None, ALL), [[1, 0, 0, 1], [0, 0, 512, -1]]);
        assert_eq!(decode_work(&[0, 1], &[768], None, ALL), [[1, 0, 0, 1], [0, 0, 768, -1]]);
        assert_eq!(
            decode_work(&[0, 1, 3], &[0, 770], None, ALL),
            [[2, 2, 4, 2], [1, 0, 512, 0], [1, 512, 770, 2], [1, 0, 2, 2], [2, 1, 2, 2]]
        );
        assert_eq!(decode_work(&[0, 1], &[SPLIT * MAX_SPLITS], None, ALL)[0][0], MAX_SPLITS);
        assert_eq!(decode_work(&[0, 1], &[SPLIT * MAX_SPLITS + 1], None, ALL)[0][0], MAX_SPLITS / 2);
        assert_eq!(decode_work(&[0, 1], &[i32::MAX], None, ALL)[0][0], MAX_SPLITS);
        assert_eq!(decode_work(&[0, 1], &[100_000], Some(SPLIT), ALL), [[1, 0, 0, 1], [0, 100_000 - SPLIT, 100_000, -1]]);
        assert_eq!(decode_work(&[0, 1], &[100_000], Some(2 * SPLIT), ALL).len(), 1 + 2 + 1);
        // Of two contexts of 800 keys, an equal share is 1,600 keys, 800, or 400.
        let splits = |at_once| decode_work(&[0, 1, 2], &[800, 800], None, at_once)[0][0];
        assert_eq!([splits(1), splits(2), splits(4)], [2, 2, 4]);
        assert_eq!([most_splits(1, None), most_splits(SPLIT + 1, None), most_splits(SPLIT, Some(SPLIT))], [1, 2, 1]);
        assert_eq!([most_splits(100_000, Some(SPLIT)), most_splits(i32::MAX, None)], [2, MAX_SPLITS]);
    }
}
