//! Held sequences: opened, forked, dropped and continued.

use super::op::{scope_of, tenant_name};
use super::{VOCABULARY, World};
use chairlift_core::{Continues, HeldId, Request, Token};

/// A held sequence from the test's view.
#[derive(Clone)]
pub(super) struct Held {
    pub(super) id: HeldId,
    pub(super) salt: u8,
    pub(super) tenant: u8,
    pub(super) tokens: Vec<Token>,
}

impl World {
    pub(super) fn open(&mut self, salt: u8, tenant: u8) {
        let id = self.scheduler.open(&tenant_name(tenant), &scope_of(salt), self.now);
        self.held.push(Held { id, salt, tenant, tokens: Vec::new() });
    }

    pub(super) fn fork_held(&mut self, held: usize) {
        let mut fork = self.held[held].clone();
        let free = self.scheduler.stats().free_blocks;
        fork.id = self.scheduler.fork_held(fork.id, self.now).expect("it was not dropped");
        assert_eq!(self.scheduler.stats().free_blocks, free, "a fork takes no block");
        self.held.push(fork);
    }

    pub(super) fn drop_held(&mut self, held: usize) {
        let held = self.held.swap_remove(held);
        assert!(self.scheduler.drop_held(held.id, self.now));
        assert!(!self.scheduler.drop_held(held.id, self.now), "dropped twice");
        assert_eq!(self.scheduler.fork_held(held.id, self.now), None);
    }

    pub(super) fn pick_held(&self, which: usize) -> Option<usize> {
        (!self.held.is_empty()).then(|| which % self.held.len())
    }

    pub(super) fn continue_held(&mut self, which: usize, less: usize, more: &[Token], new: u32, stop: bool) {
        let Some(held) = self.pick_held(which).map(|held| self.held[held].clone()) else { return };
        let kept = held.tokens.len().saturating_sub(less);
        let prompt = [&held.tokens[..kept], more].concat();
        if prompt.is_empty() {
            return;
        }
        let request = Request {
            tag: self.next_tag,
            prompt,
            max_new_tokens: new,
            stop: stop.then_some(VOCABULARY - 1).into_iter().collect(),
            scope: scope_of(held.salt),
            tenant: tenant_name(held.tenant),
            weight: 1 + u32::from(held.tenant),
            continues: Some(Continues { held: held.id, tokens: kept as u32 }),
            ..Request::default()
        };
        self.add(request, held.salt, self.now);
    }
}
