"""The architectures that Chairlift's own code computes, as values. A new one is a value in a file here; docs/models.md lists them all."""

import re

from chairlift.architectures.afmoe import AFMOE
from chairlift.architectures.architecture import (
    GEMMA_NORMS,
    PLAIN,
    Architecture,
    Code,
    GGUFFormat,
    Key,
    Mixture,
    Norms,
    Projections,
    Recurrence,
    RecurrentKind,
    Scores,
    Windows,
)
from chairlift.architectures.cohere import COHERE, COHERE2
from chairlift.architectures.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, YOUTU
from chairlift.architectures.dots import DOTS1
from chairlift.architectures.encoders import ENCODER_GGUF, ENCODERS, EncoderArchitecture
from chairlift.architectures.ernie import ERNIE4_5, ERNIE4_5_MOE
from chairlift.architectures.exaone import EXAONE4, EXAONE_MOE
from chairlift.architectures.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4
from chairlift.architectures.glm import GLM, GLM4, GLM4_MOE, SOLAR_OPEN
from chairlift.architectures.gpt_neox import GPT2, GPT_NEOX, GPTJ, OPT
from chairlift.architectures.gpt_oss import GPT_OSS
from chairlift.architectures.granite import GRANITE, GRANITE4, GRANITE_MOE, GRANITE_MOE_SHARED
from chairlift.architectures.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE
from chairlift.architectures.lfm2 import LFM2, LFM2_MOE
from chairlift.architectures.llama import ARCEE, CWM, HELIUM, JAIS2, LLAMA, MINISTRAL3, MISTRAL, SEED_OSS
from chairlift.architectures.mixtral import MINIMAX_M2, MIXTRAL
from chairlift.architectures.nemotron import NEMOTRON, NEMOTRON_H
from chairlift.architectures.olmo import FLEX_OLMO, OLMO2, OLMO3, OLMOE
from chairlift.architectures.phi import PHI, PHI3
from chairlift.architectures.qwen import MELLUM, QWEN2, QWEN2_MOE, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT, QWEN3_VL_MOE
from chairlift.architectures.smollm import SMOLLM3
from chairlift.architectures.stablelm import STABLELM
from chairlift.architectures.starcoder import STARCODER2

__all__ = [
    "ALIASES",
    "ARCHITECTURES",
    "ENCODERS",
    "ENCODER_GGUF",
    "GEMMA_NORMS",
    "GGUF",
    "GGUF_MIXTURES",
    "HEADLESS",
    "OLMO3",
    "PLAIN",
    "QWEN3",
    "WRAPPED",
    "Architecture",
    "Code",
    "EncoderArchitecture",
    "GGUFFormat",
    "Key",
    "Mixture",
    "Norms",
    "Projections",
    "Recurrence",
    "RecurrentKind",
    "Scores",
    "Windows",
]

DENSE = (
    *(LLAMA, MISTRAL, MINISTRAL3, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, GEMMA4, SMOLLM3, GRANITE, GRANITE4, PHI3, ARCEE),
    *(SEED_OSS, GLM, GLM4, ERNIE4_5, YOUTU),
    *(OLMO3, OLMO2, EXAONE4, HUNYUAN_DENSE, COHERE, COHERE2),
    *(STARCODER2, PHI, STABLELM, NEMOTRON, JAIS2, CWM, HELIUM),
    *(GPT_NEOX, GPT2, GPTJ, OPT),
    *(LFM2, QWEN3_5, NEMOTRON_H),
)
MIXTURES = (
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_VL_MOE,
    MELLUM,
    GLM4_MOE,
    SOLAR_OPEN,
    MINIMAX_M2,
    ERNIE4_5_MOE,
    HUNYUAN_MOE,
    EXAONE_MOE,
    AFMOE,
    DOTS1,
    FLEX_OLMO,
    GPT_OSS,
    OLMOE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    LFM2_MOE,
    QWEN3_NEXT,
    QWEN3_5_MOE,
)
LATENT = (DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE)
ARCHITECTURES = {known.name: known for known in DENSE + MIXTURES + LATENT}
"""The architectures by their names in config.json."""
ALIASES = {alias: known for known in ARCHITECTURES.values() for alias in known.aliases}
"""The architectures by the names of other classes that compute the same."""
HEADLESS = {re.sub("ForCausalLM|LMHeadModel", end, name): known for name, known in ARCHITECTURES.items() for end in ("Model", "TextModel")}
"""The architectures by the names of their classes without a head, of which transformers has one or the other: they compute embeddings."""

GGUF_MIXTURES: dict[str, tuple[Architecture, ...]] = {}
"""The architectures with experts by their names in GGUF files, which some share with dense models, or with other scores of experts."""
for known in ARCHITECTURES.values():
    for name in known.gguf.names if known.gguf and known.mixture else ():
        GGUF_MIXTURES[name] = (*GGUF_MIXTURES.get(name, ()), known)

GGUF = {name: known for known in DENSE if known.gguf for name in known.gguf.names}
"""The architectures by their names in GGUF files; the dense one of a shared name."""
GGUF |= {name: known[0] for name, known in GGUF_MIXTURES.items() if name not in GGUF}

WRAPPED = {(wrapper, text): known for known in ARCHITECTURES.values() for wrapper in known.wrappers for text in known.text_types}
"""The architectures of models of text inside of models that also read images, by class name and the `model_type` of `text_config`."""
