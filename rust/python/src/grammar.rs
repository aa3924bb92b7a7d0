//! Grammars over a model's vocabulary, compiled and matched by llguidance. The GIL is released for all work that can take long.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::Parser;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{Logger, Matcher, ParserFactory, regex_to_lark};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use tokenizers::Tokenizer;
use toktrie_hf_tokenizers::ByteTokenizer;

use crate::errors::invalid;
use crate::threads::lock;

/// The tokens of a model, over which grammars are compiled.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct GrammarVocabulary {
    factory: ParserFactory,
    /// The model's number of tokens. The tokenizer may have more: Gemma 3's text models lack its token of images.
    size: usize,
}

#[pymethods]
impl GrammarVocabulary {
    /// `file` is a tokenizer.json. Raises `ValueError` if it cannot be used, or if an end is not in the vocabulary.
    #[new]
    #[pyo3(signature = (file, *, size, ends))]
    fn new(py: Python<'_>, file: PyBackedBytes, size: usize, ends: Vec<u32>) -> PyResult<Self> {
        py.detach(|| {
            let mut tokenizer = ByteTokenizer::from_json_bytes(&file).map_err(invalid)?;
            let tokens = tokenizer.tokrx_info().vocab_size;
            if ends.is_empty() || ends.iter().any(|&end| end >= tokens) {
                return Err(PyValueError::new_err(format!("the tokens that end an answer, {ends:?}, are not all among its {tokens}")));
            }
            tokenizer.set_eos_tokens(&ends);
            tokenizer.hf_tokenizer = without_added_tokens(&tokenizer.hf_tokenizer);
            let tokens = tokenizer.into_tok_env(Some(size.max(tokens as usize))).map_err(invalid)?;
            Ok(Self { factory: ParserFactory::new_simple(&tokens).map_err(invalid)?, size })
        })
    }

    /// The bytes of a token.
    fn piece(&self, token: u32) -> Vec<u8> {
        self.factory.tok_env().tok_trie().decode(&[token])
    }
}

/// A tokenizer that reads the texts of control tokens as plain text.
///
/// llguidance tokenizes text that a grammar forces. A control token in there would be the only one that its mask allows, and then be refused.
fn without_added_tokens(tokenizer: &Tokenizer) -> Tokenizer {
    let mut plain = Tokenizer::new(tokenizer.get_model().clone());
    plain.with_normalizer(tokenizer.get_normalizer().cloned());
    plain.with_pre_tokenizer(tokenizer.get_pre_tokenizer().cloned());
    plain
}

/// The position of a sequence in a grammar. Copies share the states of the lexer.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct GrammarMatcher {
    matcher: Mutex<Matcher>,
    /// A parser at the start of the grammar, to look at the lexer, which a [`Matcher`] hides. None of an invalid grammar.
    start: Option<Arc<Mutex<Parser>>>,
    tokens: TokEnv,
    /// The model's number of tokens.
    size: usize,
}

#[pymethods]
impl GrammarMatcher {
    /// Compiles Lark, or llguidance's list of grammars. The matcher of an invalid grammar has an `error`.
    #[new]
    #[pyo3(signature = (vocabulary, grammar, *, max_items, max_lexer_states))]
    fn new(py: Python<'_>, vocabulary: &GrammarVocabulary, grammar: &str, max_items: usize, max_lexer_states: usize) -> Self {
        let limits = ParserLimits {
            max_items_in_row: max_items,
            step_max_items: max_items,
            max_lexer_states,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        let compiled = py.detach(|| {
            let init = GrammarInit::Serialized(TopLevelGrammar::from_lark_or_grammar_list(grammar)?);
            vocabulary.factory.create_parser_from_init_ext(init, Logger::new(0, 0), InferenceCapabilities::default(), limits)
        });
        let start = compiled.as_ref().ok().map(|compiled| Arc::new(Mutex::new(compiled.parser.clone())));
        let tokens = vocabulary.factory.tok_env().clone();
        Self { matcher: Mutex::new(Matcher::new(compiled)), start, tokens, size: vocabulary.size }
    }

    /// A grammar in Lark for a regular expression.
    #[staticmethod]
    fn regex(text: &str) -> String {
        format!("start: /{}/", regex_to_lark(text, ""))
    }

    /// A matcher at the same position.
    fn copy(&self) -> Self {
        let matcher = Mutex::new(lock(&self.matcher).clone());
        Self { matcher, start: self.start.clone(), tokens: self.tokens.clone(), size: self.size }
    }

    /// Why the matcher failed: the grammar is invalid, a token was not allowed, or a limit was reached.
    #[getter]
    fn error(&self) -> Option<String> {
        lock(&self.matcher).get_error()
    }

    /// Bytes of the lexer's states, which all copies share: about what llguidance takes for them. 0 if the grammar is invalid, or if the
    /// lexer has failed.
    #[getter]
    fn lexer_bytes(&self, py: Python<'_>) -> usize {
        let Some(start) = &self.start else { return 0 };
        // The lexer's lock panics after a panic of llguidance, which its matchers report as an error.
        py.detach(|| catch_unwind(AssertUnwindSafe(|| lock(start).lexer_stats().num_bytes)).unwrap_or(0))
    }

    /// Which tokens may come next: int32 [vocabulary / 32, rounded up] as bytes, a bit for each token. After the grammar's end, and after a
    /// failure, only tokens that end an answer may.
    fn mask(&self, py: Python<'_>) -> Cow<'static, [u8]> {
        py.detach(|| {
            let mask = lock(&self.matcher).compute_mask_or_eos().unwrap_or_else(|_| self.tokens.tok_trie().eos_token_set());
            let mut words = mask.as_slice()[..self.size.div_ceil(32)].to_vec();
            if !self.size.is_multiple_of(32) {
                words[self.size / 32] &= (1 << (self.size % 32)) - 1; // the model has no further tokens
            }
            Cow::Owned(words.iter().flat_map(|word| word.to_ne_bytes()).collect())
        })
    }

    /// Advances by one token. If it is not allowed, the matcher fails.
    fn consume(&self, py: Python<'_>, token: u32) {
        py.detach(|| {
            let mut matcher = lock(&self.matcher);
            // After the end of the grammar an answer may end more than once.
            if !(matcher.is_stopped() && self.tokens.tok_trie().eos_tokens().contains(&token)) {
                let _ = matcher.consume_token(token); // the matcher keeps the error
            }
        });
    }

    /// The tokens that must come next, one after the other.
    fn forced(&self, py: Python<'_>) -> Vec<u32> {
        let mut tokens = py.detach(|| lock(&self.matcher).compute_ff_tokens());
        let known = tokens.iter().take_while(|&&token| (token as usize) < self.size).count();
        tokens.truncate(known);
        tokens
    }

    /// Whether these tokens may come next, one after the other.
    fn allows(&self, py: Python<'_>, tokens: Vec<u32>) -> bool {
        py.detach(|| lock(&self.matcher).validate_tokens(&tokens).is_ok_and(|allowed| allowed == tokens.len()))
    }
}
