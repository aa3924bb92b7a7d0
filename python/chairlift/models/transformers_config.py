"""Configurations of models without native code, as transformers' own code defines them. Reads no weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from chairlift.errors import UnsupportedModel
from chairlift.models.entries import check_beside, check_entries
from chairlift.models.fields import NoNativeModel, read_json
from chairlift.models.quantization import described_beside
from chairlift.models.shape import KvSpec, ModelShape

ATTENTION = "chairlift"
"""The name of chairlift's attention among transformers' implementations, and of the argument that passes it the current step."""

DECODERS: Any = AutoModelForCausalLM
"""The factory of models from configs and checkpoints, which transformers does not type."""

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Supported layer types. A layer that keeps another state, or hides tokens only by its mask, would silently give wrong results."""
UNDERSTOOD = {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}
"""Arguments of attention that change its result and that chairlift's attention supports (there is no dropout in inference)."""
COPIED = {"ExaoneForCausalLM", "SarvamMoEForCausalLM", "SarvamMLAForCausalLM"}
"""Classes of code that comes with checkpoints, in whose place transformers has a class of another name."""
HARMLESS = {"position_ids", "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits"}
"""Arguments that reach attention only because a model forwards all of them. They are ignored."""
PROBE_TOKENS = 3
MAX_POSITIONS = 2048
"""The context length of a model whose config does not name one."""

Attend = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]
"""Attention of one layer for a step's T tokens: query [1, heads, T, head_dim], key and value likewise; returns [1, T, heads, value_dim]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelShape):
    """A model that transformers computes, except attention, which chairlift computes.

    `specs` and `weights` are found by building the model without memory for its weights and running it once. `theirs` is transformers' own
    config. `decoder` is the name of the module that computes hidden states, without the head.
    """

    decoder: str
    specs: tuple[KvSpec, ...]
    weights: int
    theirs: Any

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """The shape of each layer's KV cache."""
        return self.specs

    @property
    def num_weights(self) -> int:
        """The number of parameters."""
        return self.weights

    @classmethod
    def load(cls, directory: Path, reason: str) -> TransformersConfig:
        """Reads a checkpoint's config and probes its code.

        Raises UnsupportedModel if paged attention would not give the model's own results.
        """
        try:
            theirs = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        except Exception as error:
            why = "its own code (auto_map) is not run" if "custom code" in str(error) else brief(error)
            raise UnsupportedModel(f"{reason}, and transformers cannot read it either: {why}") from None
        if not getattr(theirs, "quantization_config", None) and (beside := described_beside(directory)):
            name, found = beside
            raise UnsupportedModel(
                f"{directory} is quantised with {found['quant_method']} ({name}), which transformers cannot read ({reason})"
            )
        try:
            config = cls.of(theirs, reason)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{error}; {reason}") from None
        return replace(config, unread=_unread(read_json(directory), theirs))

    @classmethod
    def of(cls, theirs: Any, reason: str) -> TransformersConfig:
        """Creates the configuration from one of transformers' configs."""
        architecture = _architecture(theirs)
        text = theirs.get_text_config(decoder=True)
        if getattr(text, "is_causal", None) is False:  # transformers says so in the masks alone, which are not used
            raise UnsupportedModel(f"{architecture} looks at later tokens too: its attention is not causal")
        if unknown := set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES:
            raise UnsupportedModel(
                f"{architecture} has layers of {', '.join(sorted(unknown))} (supported: {', '.join(sorted(LAYER_TYPES))})"
            )
        if "long_mscale" in (getattr(text, "rope_parameters", None) or ()):
            raise UnsupportedModel(f"{architecture} scales all positions by the longest sequence in a step, whoever's it is")
        try:
            model = skeleton(theirs)
        except ImportError as error:  # images need packages of their own
            if text is theirs:
                raise UnsupportedModel(f"{architecture}: transformers cannot build it: {brief(error)}") from None
            for name in ("dtype", "quantization_config"):
                if (value := getattr(theirs, name, None)) is not None:
                    setattr(text, name, value)
            return cls.of(text, reason)
        except Exception as error:
            raise UnsupportedModel(f"{architecture}: transformers cannot build it: {brief(error)}") from None
        heads, specs, decoder = _record(model, text.num_hidden_layers, architecture)
        # The activations of all experts of one token exist at the same time.
        wide = [max(p.shape[-2:]) for p in model.parameters() if p.ndim > 1 and text.vocab_size not in p.shape]
        dtype = getattr(text, "dtype", None) or theirs.dtype
        return cls(
            architecture=architecture,
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            intermediate_size=max(wide) * (getattr(text, "num_experts_per_tok", None) or 1),
            num_layers=len(specs),
            num_heads=heads,
            max_position_embeddings=getattr(text, "max_position_embeddings", None) or MAX_POSITIONS,
            dtype=str(dtype).removeprefix("torch.") if dtype is not None else None,
            decoder=decoder,
            specs=specs,
            weights=sum(parameter.numel() for parameter in model.parameters()),
            theirs=theirs,
            quantization=_quantization(theirs),
            not_ours=reason,
        )


def _unread(raw: dict[str, Any], theirs: Any) -> tuple[str, ...]:
    """Returns the entries of a config.json that transformers' class for the model of text does not have.

    Raises UnsupportedModel for one that would change answers.
    """
    text, nested = theirs.get_text_config(decoder=True), raw.get("text_config")
    own = nested if text is not theirs and isinstance(nested, dict) else raw
    known = {entry.name for entry in fields(text)} | text.attribute_map.keys()
    whole = own if own is raw else {name: raw[name] for name in raw if name in {entry.name for entry in fields(theirs)}} | own
    try:
        # What a class makes of earlier names is not among its attributes. Flags often say what its code does anyway.
        unread = {name: own[name] for name in own if name in vars(text) and name not in known}
        return check_entries(unread, experts=True, flags=False) + check_beside(raw, whole)
    except NoNativeModel as error:
        raise UnsupportedModel(f"config.json: {error}, and transformers' code does not read it: remove it if it changes nothing") from None


def skeleton(theirs: Any) -> Any:
    """Builds the model without memory for its weights. Raises any error that transformers raises."""
    with torch.device("meta"):
        # Copied because the model keeps the config that it is built from.
        return DECODERS.from_config(copy.deepcopy(theirs), attn_implementation=ATTENTION, trust_remote_code=False).eval()


def _architecture(theirs: Any) -> str:
    """Returns the name of transformers' decoder for a config.

    Raises UnsupportedModel if there is none or its attention cannot be replaced.
    """
    names = list(theirs.architectures or ())
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(theirs), ())
    kinds = {kind.__name__: kind for kind in (found if isinstance(found, tuple) else (found,))}
    by_type = not names or not COPIED.isdisjoint(names)
    name = next((name for name in names if name in kinds), next(iter(kinds), None) if by_type else None)
    if name is None:
        what, decoders = " or ".join(names) or theirs.model_type, " or ".join(kinds) or "none"
        raise UnsupportedModel(
            f"{what} is no model of text in transformers (model_type {theirs.model_type} has {decoders}), "
            "and no encoder of docs/api/embeddings.md"
        )
    if not kinds[name]._supports_attention_backend:
        raise UnsupportedModel(f"{name}: transformers' code for it does not let others compute its attention")
    return str(name)


@torch.inference_mode()
def _record(model: PreTrainedModel, layers: int, name: str) -> tuple[int, tuple[KvSpec, ...], str]:
    """Runs a few tokens. Returns the number of query heads, each layer's attention inputs and the name of the decoder.

    Raises UnsupportedModel if the model does not delegate all of its attention or needs an unsupported feature.
    """
    heads: list[int] = []
    specs: list[KvSpec] = []
    called: list[str] = []
    counted = _Counting(called)
    paths = {part: path for path, part in model.named_modules()}

    def attend(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
        if any(f"{path}.".startswith(f"{paths[module]}.") for path in counted.within):
            raise UnsupportedModel(f"{name} counts the positions of attention by itself, as if each step were a whole sequence")
        if getattr(module, "layer_idx", None) != len(specs):
            raise UnsupportedModel(f"{name} does not run each of its layers once, in their order")
        _check_attention(module, how, name)
        heads.append(query.shape[1])
        specs.append(KvSpec(key.shape[1], key.shape[3], value.shape[3], how.get("sliding_window")))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def noted(path: str) -> Callable[[torch.nn.Module, Any], None]:
        return lambda module, _: called.append(path)

    settle(model)
    if early := next((path for path, part in model.named_modules() if hasattr(part, "create_position_ids_from_input_ids")), None):
        raise UnsupportedModel(f"{name} counts positions from its padding token's number on ({early}), and not from 0")
    hooks = [part.register_forward_pre_hook(noted(path)) for part, path in paths.items() if path]
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=model.device)
    try:
        with counted:
            model(input_ids=ids, position_ids=ids, use_cache=False, **{ATTENTION: attend})
    except UnsupportedModel:
        raise
    except Exception as error:
        if "meta" in str(error):  # the device of tensors without memory
            raise UnsupportedModel(f"{name}: transformers' code for it cannot be tried before the weights are loaded") from None
        raise UnsupportedModel(f"{name}: transformers' code for it does not run: {brief(error)}") from None
    finally:
        for hook in hooks:
            hook.remove()
    if len(specs) != layers:
        raise UnsupportedModel(f"{name} has {layers} layers, of which {len(specs)} have attention: the others would forget what was")
    if not isinstance(model.get_submodule(called[0]), PreTrainedModel):
        raise UnsupportedModel(f"{name}: transformers' code for it has no decoder apart from its head")
    return max(heads), tuple(specs), called[0]


def _check_attention(module: torch.nn.Module, how: dict[str, Any], name: str) -> None:
    """Raises UnsupportedModel if a module asks for attention that chairlift does not compute."""
    if others := {argument for argument, given in how.items() if given is not None} - UNDERSTOOD - HARMLESS:
        raise UnsupportedModel(f"{name} gives attention {', '.join(sorted(others))}, which ours does not know")
    if not getattr(module, "is_causal", False) or how.get("is_causal") is False:
        raise UnsupportedModel(f"{name} looks at later tokens too: its attention is not causal")


class _Counting(TorchFunctionMode):
    """Notes in `within` which of the modules `called` was entered last when a range of numbers was made."""

    def __init__(self, called: list[str]) -> None:
        super().__init__()
        self.called, self.within = called, list[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.arange and self.called:
            self.within.append(self.called[-1])
        return function(*args, **kwargs or {})


def settle(model: PreTrainedModel, longest: int | None = None) -> None:
    """Removes computations that inspect a whole step at once, because a step contains sequences of all lengths.

    These are a search for padding, done for a warning, and rotary frequencies that depend on the longest sequence at hand (longrope,
    dynamic). As in vLLM, all sequences get the frequencies of the length `longest`, because cached keys stay rotated. If `longest` is None,
    the frequencies do not change.
    """
    parts: Iterable[Any] = model.modules()
    for part in parts:
        if hasattr(part, "warn_if_padding_and_no_attention_mask"):
            part.warn_if_padding_and_no_attention_mask = lambda *_: None
        kinds = getattr(part, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        changing = [layer for layer, kind in by_layer.items() if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")]
        for layer in changing:
            if longest is not None:
                last = torch.full((1, 1), longest - 1, device=model.device)
                part(last.float(), last, **({} if layer is None else {"layer_type": layer}))
            by_layer[layer] = "default"
        if changing:
            part.rope_type = kinds if isinstance(kinds, dict) else "default"


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **how: Any
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls instead of its own."""
    attend: Attend | None = how.pop(ATTENTION, None)
    if attend is None:
        raise UnsupportedModel(f"{type(module).__name__} of transformers does not hand on what it is given for attention")
    return attend(module, query, key, value, how | {"attention_mask": attention_mask}), None


# Registered without a mask function of the same name, so models create no masks. A mask would treat the whole step as one sequence.
AttentionInterface.register(ATTENTION, _attention)


def _quantization(theirs: Any) -> str | None:
    found = getattr(theirs, "quantization_config", None)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method or "an unnamed method"))


def brief(error: Exception) -> str:
    """Returns the first line of a library's error message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
