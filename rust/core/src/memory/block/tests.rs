use super::*;

fn salt(text: &str) -> Arc<CacheScope> {
    CacheScope::salted(text.as_bytes()).into()
}

/// A table holding `tokens` in full blocks, sealed under `name`.
fn cache(pool: &mut BlockPool, name: &str, tokens: &[Token]) -> BlockTable {
    let (mut table, mut chain) = (BlockTable::default(), Chain::root(&salt(name)));
    assert!(pool.grow(&mut table, tokens.len() / pool.block_size));
    let mut names = Vec::new();
    pool.name_blocks(&salt(name), tokens, &mut names);
    for (tokens, name) in tokens.chunks_exact(pool.block_size).zip(names) {
        pool.seal(&table, &mut chain, name, tokens, 0);
    }
    table
}

fn hits(pool: &mut BlockPool, name: &str, tokens: &[Token]) -> Vec<u32> {
    let (mut found, mut names) = (Vec::new(), Vec::new());
    pool.name_blocks(&salt(name), tokens, &mut names);
    pool.find(&salt(name), &names, tokens, &mut found);
    found.into_iter().map(|id| id.0).collect()
}

#[test]
fn blocks_without_a_name_go_first_then_the_least_recently_freed_tail() {
    let mut pool = BlockPool::new(8, 2, BlockHasher::new(0));
    let mut first = cache(&mut pool, "", &[1, 2, 3, 4]); // blocks 1, 2
    let mut second = cache(&mut pool, "", &[5, 6, 7, 8]); // blocks 3, 4
    pool.release(&mut second);
    pool.release(&mut first);
    let mut table = BlockTable::default();
    assert!(pool.grow(&mut table, 7));
    let order: Vec<u32> = table.ids().iter().map(|id| id.0).collect();
    assert_eq!(order, [5, 6, 7, 4, 3, 2, 1]);
    assert!(hits(&mut pool, "", &[1, 2]).is_empty(), "a taken block lost its name");
    pool.release(&mut table);
    pool.check(std::iter::empty());
}

#[test]
fn a_block_is_found_only_with_its_tokens_its_past_and_its_salt() {
    let mut pool = BlockPool::new(8, 2, BlockHasher::new(0));
    let mut table = cache(&mut pool, "a", &[1, 2, 3, 4]);
    assert_eq!(hits(&mut pool, "a", &[1, 2, 3, 4, 5]), [1, 2]);
    assert_eq!(hits(&mut pool, "a", &[1, 2, 3, 5]), [1]);
    assert!(hits(&mut pool, "a", &[3, 4]).is_empty());
    assert!(hits(&mut pool, "b", &[1, 2, 3, 4]).is_empty());
    pool.release(&mut table);
}

#[test]
fn groups_share_nothing_and_only_blocks_without_a_salt_are_stored() {
    let mut pool = BlockPool::new(20, 2, BlockHasher::new(0));
    let scopes = [("", ""), ("team", ""), ("strangers", ""), ("", "team"), ("team", "salt")];
    let scopes = scopes.map(|(group, salt)| Arc::new(CacheScope { group: group.into(), salt: salt.as_bytes().into() }));
    let tokens = [1, 2, 3, 4];
    let mut tables = Vec::new();
    for scope in &scopes {
        let (mut table, mut chain, mut names, mut found) = (BlockTable::default(), Chain::root(scope), Vec::new(), Vec::new());
        pool.name_blocks(scope, &tokens, &mut names);
        pool.find(scope, &names, &tokens, &mut found);
        assert!(found.is_empty(), "{scope:?}");
        assert!(pool.grow(&mut table, 2));
        tokens.chunks_exact(2).zip(names).for_each(|(tokens, name)| pool.seal(&table, &mut chain, name, tokens, 0));
        tables.push(table);
    }
    let stored = pool.stored(1, 0);
    let groups = stored.iter().map(|block| (&*block.group, &*block.tokens)).collect::<Vec<_>>();
    let each = |group| [(group, &tokens[..2]), (group, &tokens[2..])];
    assert_eq!(groups, ["", "team", "strangers"].map(each).concat());
    assert_eq!(pool.stored(1, stored[0].content), stored[1..], "the group of a block is that of its first block");
    for table in &mut tables {
        pool.release(table);
    }
}

#[test]
fn equal_names_with_other_content_are_not_shared() {
    let mut pool = BlockPool::new(8, 2, BlockHasher::new(0));
    let mut table = cache(&mut pool, "a", &[1, 2]);
    // Force a collision: the block's name now also stands for other tokens, and for another salt.
    for (salt_text, tokens) in [("a", [9, 9]), ("b", [1, 2])] {
        let hash = pool.hasher.child(pool.hasher.root(&salt(salt_text)), &tokens);
        pool.named.insert(hash, BlockId(1));
        assert!(hits(&mut pool, salt_text, &tokens).is_empty());
        pool.named.remove(&hash);
    }
    pool.release(&mut table);
}

#[test]
fn the_second_of_two_equal_blocks_stays_unnamed_and_chains_to_the_first() {
    let mut pool = BlockPool::new(8, 2, BlockHasher::new(0));
    let mut first = cache(&mut pool, "", &[1, 2]); // block 1
    let mut second = cache(&mut pool, "", &[1, 2, 3, 4]); // blocks 2, 3: the first duplicates block 1
    assert_eq!(hits(&mut pool, "", &[1, 2, 3, 4]), [1, 3]);
    pool.release(&mut second);
    assert_eq!(pool.unnamed.last(), Some(&BlockId(2)));
    pool.release(&mut first);
    pool.check(std::iter::empty());
}

#[test]
fn a_name_whose_parent_is_forgotten_passes_to_the_next_block_of_that_content() {
    let mut pool = BlockPool::new(8, 2, BlockHasher::new(0));
    let mut first = cache(&mut pool, "", &[1, 2, 3, 4]); // blocks 1, 2
    let head = BlockTable { ids: vec![first.ids[0]], owner: None };
    pool.forget(&head, 0);
    std::mem::forget(head);
    pool.release(&mut first);
    assert!(hits(&mut pool, "", &[1, 2, 3, 4]).is_empty(), "block 2 is an orphan");
    let mut second = cache(&mut pool, "", &[1, 2, 3, 4]);
    assert_eq!(hits(&mut pool, "", &[1, 2, 3, 4]).len(), 2);
    pool.check(std::iter::once(&second));
    pool.release(&mut second);
    pool.check(std::iter::empty());
}

#[test]
fn an_allocation_that_fails_touches_nothing() {
    let mut pool = BlockPool::new(4, 2, BlockHasher::new(0));
    let mut table = cache(&mut pool, "", &[1, 2]);
    let mut other = BlockTable::default();
    assert!(!pool.grow(&mut other, 3));
    assert_eq!((pool.free(), other.ids().len()), (2, 0));
    pool.release(&mut table);
    assert_eq!(hits(&mut pool, "", &[1, 2]), [1]);
}

#[test]
fn unsharing_keeps_the_shared_block_for_its_other_holder() {
    let mut pool = BlockPool::new(8, 2, BlockHasher::new(0));
    let mut first = cache(&mut pool, "", &[1, 2]);
    let mut second = BlockTable::default();
    pool.share(&mut second, BlockId(1));
    assert_eq!(pool.unshare_last(&mut second), (BlockId(1), BlockId(2)));
    assert_eq!((pool.holders(BlockId(1)), pool.holders(BlockId(2))), (1, 1));
    pool.check([&first, &second].into_iter());
    pool.release(&mut first);
    pool.release(&mut second);
}

#[test]
fn a_smaller_limit_gives_back_unused_blocks_then_the_oldest_cached_and_never_held_ones() {
    let mut pool = BlockPool::new(9, 2, BlockHasher::new(0));
    let mut first = cache(&mut pool, "", &[1, 2, 3, 4]); // blocks 1, 2
    let mut second = cache(&mut pool, "", &[5, 6]); // block 3
    let mut other = BlockTable::default();
    assert!(pool.grow(&mut other, 1)); // block 4
    pool.release(&mut first);
    pool.release(&mut other);
    assert_eq!((pool.backed(), pool.held(), pool.free(), pool.unused()), (4, 1, 7, 5));
    pool.set_limit(2);
    assert_eq!((pool.backed(), pool.held(), pool.free(), pool.unused()), (2, 1, 1, 0));
    assert_eq!(pool.take_given_back(), [BlockId(4), BlockId(2)]);
    assert_eq!(hits(&mut pool, "", &[1, 2, 3, 4]), [1], "the tail went first");
    pool.set_limit(0);
    assert_eq!((pool.backed(), pool.free(), pool.free_after(1)), (1, 0, 0));
    assert!(!pool.grow(&mut other, 1));
    pool.check(std::iter::once(&second));
    pool.release(&mut second);
    assert_eq!((pool.backed(), pool.take_given_back()), (0, vec![BlockId(1), BlockId(3)]));
    pool.set_limit(100);
    assert!(pool.grow(&mut other, 8) && !pool.grow(&mut second, 1));
    pool.release(&mut other);
    pool.check(std::iter::empty());
}

#[test]
fn a_block_that_is_used_again_is_not_discarded() {
    let mut pool = BlockPool::new(9, 2, BlockHasher::new(0));
    let mut table = cache(&mut pool, "", &[1, 2, 3, 4, 5, 6]); // blocks 1, 2, 3
    pool.set_limit(1);
    pool.release(&mut table);
    pool.set_limit(3);
    assert!(pool.grow(&mut table, 1)); // the one given back last
    assert_eq!(table.ids(), [BlockId(2)]);
    assert_eq!(pool.take_given_back(), [BlockId(3)]);
    pool.release(&mut table);
}

#[test]
fn the_recorded_changes_give_the_names_that_are_cached() {
    let mut pool = BlockPool::new(12, 2, BlockHasher::new(0));
    let mut one = cache(&mut pool, "", &[1, 2, 3, 4]);
    assert_eq!(pool.take_changes(), CacheChanges::default(), "nothing is recorded yet");
    pool.release(&mut one);
    pool.set_limit(0); // drops the names
    pool.set_limit(11);
    pool.record_changes();
    let (mut reported, mut dice) = (rustc_hash::FxHashSet::default(), 1_u64);
    for round in 0..2000 {
        let mut tables = Vec::new();
        for _ in 0..=round % 3 {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let salt = ["", "salt"][(dice >> 40) as usize % 2];
            let tokens: Vec<Token> = (0..6).map(|at| (dice >> (33 + at / 2)) as Token & 1).collect();
            if pool.free() >= 3 {
                tables.push(cache(&mut pool, salt, &tokens));
            }
        }
        if dice.is_multiple_of(5) {
            pool.forget(&tables[0], 0);
        }
        for table in &mut tables {
            pool.release(table);
        }
        if dice.is_multiple_of(7) {
            pool.set_limit((dice >> 20) as usize % 12);
            pool.set_limit(11);
            pool.take_given_back();
        }
        let changes = pool.take_changes();
        assert!(changes.dropped.iter().all(|name| !changes.added.contains(name)));
        changes.dropped.iter().for_each(|name| assert!(reported.remove(name) || !pool.named.contains_key(name)));
        reported.extend(changes.added);
        assert_eq!(reported, pool.named.keys().copied().collect());
    }
    assert!(!reported.is_empty());
}

/// A table of a session, whose `tokens` are cached after those of `shares`.
fn cache_of(pool: &mut BlockPool, owner: Option<CacheOwner>, tokens: &[Token]) -> BlockTable {
    let (mut found, mut names, scope) = (Vec::new(), Vec::new(), salt(""));
    pool.name_blocks(&scope, tokens, &mut names);
    let mut chain = pool.find(&scope, &names, tokens, &mut found);
    let mut table = BlockTable::default();
    table.set_owner(owner);
    for &id in &found {
        pool.share(&mut table, id);
    }
    assert!(pool.grow(&mut table, names.len()));
    for (name, block) in names.iter().zip(tokens.chunks_exact(pool.block_size)).skip(found.len()) {
        pool.seal(&table, &mut chain, *name, block, 0);
    }
    table
}

/// Caches the tokens of a request that ends.
fn serve(pool: &mut BlockPool, owner: Option<CacheOwner>, tokens: &[Token]) {
    let mut table = cache_of(pool, owner, tokens);
    pool.release(&mut table);
    pool.check(std::iter::empty());
}

/// Number of leading blocks of `tokens` that are cached once `count` more blocks are evicted, for each count.
fn evictions(pool: &mut BlockPool, prompts: &[&[Token]]) -> Vec<Vec<usize>> {
    let mut table = BlockTable::default();
    let unused = pool.unused();
    assert!(pool.grow(&mut table, unused));
    let mut left = Vec::new();
    while pool.free() > 0 {
        let len = table.ids().len() + 1;
        assert!(pool.grow(&mut table, len));
        pool.check(std::iter::once(&table));
        left.push(prompts.iter().map(|tokens| hits(pool, "", tokens).len()).collect());
    }
    pool.release(&mut table);
    left
}

#[test]
fn blocks_of_a_parked_session_go_first_and_hot_ones_are_as_old_as_their_use() {
    let mut pool = BlockPool::new(20, 1, BlockHasher::new(0));
    let [parked, idle] = [pool.open_owner(User::new(1)), pool.open_owner(User::new(1))];
    serve(&mut pool, Some(idle), &[1, 2]);
    serve(&mut pool, None, &[5]);
    serve(&mut pool, None, &[5]);
    serve(&mut pool, None, &[6]);
    serve(&mut pool, Some(parked), &[3, 4]);
    pool.rank_owner(parked, EvictionClass::Parked);
    let left = evictions(&mut pool, &[&[3, 4], &[6], &[1, 2], &[5]]);
    // The parked session, what one request used, the idle session, and what two requests used after it.
    let expected = [[1, 1, 2, 1], [0, 1, 2, 1], [0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]];
    assert_eq!(left, expected);
}

#[test]
fn of_parked_sessions_the_least_recently_used_goes_first_and_of_waiting_ones_the_last() {
    for (class, left) in [(EvictionClass::Parked, [0, 1]), (EvictionClass::ParkedWaiting, [1, 0])] {
        let mut pool = BlockPool::new(20, 1, BlockHasher::new(0));
        let [first, second] = [pool.open_owner(User::new(1)), pool.open_owner(User::new(1))];
        serve(&mut pool, Some(first), &[1]);
        serve(&mut pool, Some(second), &[2]);
        pool.rank_owner(first, class);
        serve(&mut pool, None, &[9]);
        pool.rank_owner(second, class);
        assert_eq!(evictions(&mut pool, &[&[1], &[2]])[0], left, "{class:?}");
    }
}

#[test]
fn a_beginning_goes_after_the_sessions_that_need_it() {
    let mut pool = BlockPool::new(20, 1, BlockHasher::new(0));
    let [first, second] = [pool.open_owner(User::new(1)), pool.open_owner(User::new(1))];
    serve(&mut pool, Some(first), &[1, 2, 3]);
    serve(&mut pool, Some(second), &[1, 2, 4]);
    pool.rank_owner(second, EvictionClass::Parked);
    serve(&mut pool, None, &[9]);
    let left = evictions(&mut pool, &[&[1, 2, 4], &[9], &[1, 2, 3]]);
    assert_eq!(left, [[2, 1, 3], [2, 0, 3], [2, 0, 2], [1, 0, 1], [0, 0, 0]]);
}

#[test]
fn blocks_of_an_ended_owner_pass_to_the_next_one_and_its_number_is_reused() {
    let mut pool = BlockPool::new(20, 1, BlockHasher::new(0));
    let [first, second] = [pool.open_owner(User::new(1)), pool.open_owner(User::new(1))];
    serve(&mut pool, Some(first), &[1, 2]);
    pool.end_owner(first);
    assert_ne!(pool.open_owner(User::new(1)), first, "it has blocks");
    serve(&mut pool, Some(second), &[1, 2]);
    assert_eq!(pool.open_owner(User::new(1)), first);
    serve(&mut pool, None, &[8]);
    assert_eq!(evictions(&mut pool, &[&[8], &[1, 2]]), [[0, 2], [0, 1], [0, 0]]);
}
