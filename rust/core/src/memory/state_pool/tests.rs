use super::*;

/// A pool that limits nothing but its slots.
fn pool(slots: u32) -> StatePool {
    StatePool::new(slots, 0)
}

fn end(content: Content) -> End {
    End { content, name: BlockHash::from_bits(content) }
}

/// Saves a lasting state of a run in a step.
fn save(pool: &mut StatePool, run: Run, content: Content, step: u64) -> Option<StateSlot> {
    pool.save(run, 16, Some(end(content)), step, SaveKind::Turn)
}

#[test]
fn the_state_that_was_used_last_stays_longest() {
    let mut pool = pool(3);
    let [first, second, third] = [1, 2, 3].map(|content| save(&mut pool, 1, content, content).expect("a free slot"));
    assert!(pool.touch(1));
    assert_eq!(save(&mut pool, 1, 4, 4), Some(second));
    assert_eq!([1, 2, 3, 4].map(|content| pool.find(content)), [Some(first), None, Some(third), Some(second)]);
    // A sequence that begins takes the next one.
    assert_eq!(pool.begin(None).0, third);
}

#[test]
fn a_step_evicts_no_state_that_it_saves_itself() {
    let mut pool = pool(2);
    let (live, run) = pool.begin(None);
    let slot = save(&mut pool, run, 1, 5).expect("a free slot");
    assert_eq!(save(&mut pool, run, 2, 5), None);
    assert_eq!(save(&mut pool, run, 2, 6), Some(slot));
    pool.check(&[(live, run)], &[], &[], |content| content == 2);
}

#[test]
fn a_state_is_found_once_its_block_is_named_and_never_if_its_run_ends_before() {
    let mut pool = pool(4);
    let (live, run) = pool.begin(None);
    let slot = pool.save(run, 16, None, 5, SaveKind::Rolling);
    assert_eq!(pool.find(9), None);
    pool.name(run, 32, end(8));
    pool.name(run + 1, 16, end(8));
    assert_eq!((pool.find(8), pool.saved()), (None, 1));
    pool.name(run, 16, end(9));
    assert_eq!(pool.find(9), slot);
    pool.save(run, 32, None, 6, SaveKind::Rolling);
    pool.end(live, run);
    assert_eq!((pool.find(9), pool.saved()), (slot, 1));
    pool.check(&[], &[], &[], |content| content == 9);
}

#[test]
fn what_a_failed_run_saved_since_a_step_is_dropped() {
    let mut pool = pool(4);
    for (run, content, step) in [(1, 1, 4), (1, 2, 5), (2, 3, 5)] {
        save(&mut pool, run, content, step);
    }
    pool.forget(1, 5);
    assert_eq!([1, 2, 3].map(|content| pool.find(content).is_some()), [true, false, true]);
}

#[test]
fn what_a_failed_run_saved_is_dropped_though_the_conversation_is_resumed() {
    let mut pool = pool(4);
    let (live, run) = pool.begin(None);
    let slot = save(&mut pool, run, 1, 5).expect("a free slot");
    let before = pool.conversation(slot);
    assert_eq!(before, Some(run));
    let (other, next) = pool.begin(before);
    assert_eq!(pool.conversation(slot), Some(next));
    pool.forget(run, 5);
    assert_eq!(pool.find(1), None);
    pool.check(&[(live, run), (other, next)], &[], &[], |_| false);
}

#[test]
fn a_conversation_has_as_many_states_as_its_kv_is_worth_and_its_last_turn_counts_most() {
    let mut pool = StatePool::new(9, 10);
    let (_, run) = pool.begin(None);
    let save = |pool: &mut StatePool, run, position: u32, kind| {
        pool.save(run, position, Some(end(position.into())), position.into(), kind).is_some()
    };
    assert!(save(&mut pool, run, 9, SaveKind::Turn), "a short text has no limit");
    assert!(!save(&mut pool, run, 19, SaveKind::Turn));
    assert!(save(&mut pool, run, 18, SaveKind::Shared), "it is of use to others");
    assert!(!save(&mut pool, run, 19, SaveKind::Rolling), "an answer replaces no turn");
    assert!(save(&mut pool, run, 20, SaveKind::Rolling) && save(&mut pool, run, 29, SaveKind::Rolling));
    assert_eq!([9, 18, 20, 29].map(|content| pool.find(content).is_some()), [true, true, false, true]);
    // The next turn replaces what the conversation used least recently.
    pool.touch(29);
    let (_, run) = pool.begin(Some(run));
    assert!(save(&mut pool, run, 25, SaveKind::Turn));
    assert_eq!([9, 29, 25].map(|content| pool.find(content).is_some()), [false, true, true]);
}

#[test]
fn the_end_of_the_users_turn_stays_while_the_conversation_may_have_other_states() {
    for (state_tokens, kept) in [(10, [true, false, true]), (20, [false, false, true])] {
        let mut pool = StatePool::new(9, state_tokens);
        let (mut live, mut run) = pool.begin(None);
        for position in [20, 25, 29] {
            assert!(pool.save(run, position, Some(end(position.into())), position.into(), SaveKind::Turn).is_some());
            pool.end(live, run);
            (live, run) = pool.begin(Some(run));
            pool.keep_user_turn(run, 20);
            pool.check(&[(live, run)], &[], &[], |_| true);
        }
        assert_eq!([20, 25, 29].map(|content| pool.find(content).is_some()), kept);
    }
}

#[test]
fn a_run_that_is_computed_again_saves_no_more_states_than_its_kv_is_worth() {
    let mut pool = StatePool::new(9, 10);
    let (live, run) = pool.begin(None);
    assert!(pool.save(run, 10, Some(end(10)), 1, SaveKind::Turn).is_some());
    assert!(pool.save(run, 5, Some(end(5)), 2, SaveKind::Turn).is_none());
    pool.check(&[(live, run)], &[], &[], |_| true);
}

#[test]
fn a_short_text_beside_the_states_of_a_longer_one_has_its_limit() {
    let mut pool = StatePool::new(9, 10);
    let (live, run) = pool.begin(None);
    let save =
        |pool: &mut StatePool, run, position: u32| pool.save(run, position, Some(end(position.into())), run, SaveKind::Turn).is_some();
    assert!(save(&mut pool, run, 7) && !save(&mut pool, run, 12) && save(&mut pool, run, 25));
    pool.end(live, run);
    // The conversation resumes from its first state, and parts from the long text.
    let (live, run) = pool.begin(Some(run));
    pool.touch(7);
    assert!(save(&mut pool, run, 8) && save(&mut pool, run, 9));
    assert_eq!([7, 8, 9, 25].map(|content| pool.find(content).is_some()), [true, true, true, false]);
    pool.end(live, run);
    pool.check(&[], &[], &[], |_| true);
}

#[test]
fn a_parked_state_leaves_slots_for_all_that_may_run() {
    let mut pool = pool(3);
    let (slot, run) = pool.begin(None);
    assert!(pool.can_reserve(2) && !pool.can_reserve(3));
    pool.park(slot);
    assert!(pool.can_reserve(1) && !pool.can_reserve(2));
    pool.check(&[], &[(slot, run)], &[], |_| false);
    pool.unpark(slot);
    pool.end(slot, run);
    assert!(pool.can_reserve(2));
}

#[test]
fn a_rejected_draft_leaves_the_state_before_it_and_nothing_that_was_saved_after_it() {
    let mut pool = pool(4);
    let (live, run) = pool.begin(None);
    let undo = pool.begin_draft();
    assert!(pool.can_reserve(2) && !pool.can_reserve(3));
    for position in [16, 32] {
        pool.save(run, position, None, 5, SaveKind::Rolling);
    }
    pool.check(&[(live, run)], &[], &[undo], |_| false);
    pool.reject_draft(undo, live, run, 20);
    assert_eq!(pool.saved(), 1);
    pool.check(&[(undo, run)], &[], &[], |_| false);
    let other = pool.begin_draft();
    pool.accept_draft(other);
    pool.check(&[(undo, run)], &[], &[], |_| false);
}
