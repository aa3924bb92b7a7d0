"""The page of metrics."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from tables import code, table

from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.stats import Stats
from chairlift.outputs import Timing
from chairlift.server.observability.loop_monitor import LoopMonitor
from chairlift.server.observability.metrics import Metrics
from chairlift.server.observability.shadow import Shadow
from chairlift.server.tiers import Tier

_HEAD = """\
# All metrics

Every metric also has the labels `model_name` and `engine`. [Metrics](../metrics.md) explains them. The last column marks those that
`--metrics-alias vllm` shows under vLLM's names too.

"""


def page() -> str:
    """Returns the page, made of the metrics of a server with an engine that has reported."""
    families = {family.name: family for family in _server().families()}
    rows = []
    for name, family in sorted(families.items()):
        if name.startswith("vllm:"):
            continue
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"model_name", "engine", "le"})
        suffix = "_total" if family.type == "counter" else ""
        alias = "yes" if name.replace("chairlift_", "vllm:", 1) in families else ""
        rows.append((code(name + suffix), family.type, ", ".join(map(code, labels)), family.documentation.rstrip("."), alias))
    return _HEAD + table(("metric", "type", "labels", "meaning", "vLLM"), rows)


def _server() -> Metrics:
    """Returns metrics that have at least one sample each."""
    used = defaultdict[str, float](float)
    usage: dict[str, Any] = {"tenants": {"": used}, "classes": {0: used}}
    stats = Stats(slots=1, energy_uj=0, idle_energy_uj=0, accepted_draft_tokens_by_position=(0,), **usage)
    info = SimpleNamespace(**{field.name: "known" for field in dataclasses.fields(EngineInfo)})
    replica: Any = SimpleNamespace(number=0, restarts=0, engine=SimpleNamespace(stats=lambda: stats, info=info))
    metrics = Metrics("MODEL", lambda: [replica], alias=True)
    metrics.registry.register(LoopMonitor({"model_name": "MODEL", "engine": "0"}))
    shadow = Shadow((), {"model_name": "MODEL", "engine": "0"})
    proposal = {"settings": "", "figures": {"": defaultdict[str, float](float)}}
    shadow.report = {"covered": 1.0, "tenants": {"": {"shadow": defaultdict(float)}}, "proposal": proposal}
    metrics.registry.register(shadow)
    metrics.observe_targets("default", Tier(weight=1, ttft_ms=1), Timing(0, 0, 0, 0), 1)
    return metrics
