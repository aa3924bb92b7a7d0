"""The shapes of tiny, small and large models, and units of memory."""

from chairlift.models.config import ModelConfig

MIB, GIB = 1 << 20, 1 << 30
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
}
TINY = SMALL | {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
    "tie_word_embeddings": True,
}
MODEL = ModelConfig.parse(SMALL)
LARGE_SHAPE = SMALL | {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
LARGE = ModelConfig.parse(LARGE_SHAPE)
