"""Architecture names and the classes that implement them."""

from __future__ import annotations

from flashspark.models.config import DraftConfig, TargetConfig
from flashspark.models.dflash import DFlashDraft
from flashspark.models.dflash2 import DFlash2Draft
from flashspark.models.dspark import DSparkDraft
from flashspark.models.qwen3 import Qwen3

TARGETS: dict[str, type[Qwen3]] = {"Qwen3ForCausalLM": Qwen3}
DRAFTS: dict[str, type[DFlashDraft]] = {
    "dflash": DFlashDraft,
    "dflash2": DFlash2Draft,
    "dspark": DSparkDraft,
}


def target_class(config: TargetConfig) -> type[Qwen3]:
    """The class of a target configuration (which refuses names that are not in `TARGETS`)."""
    return TARGETS[config.architecture]


def draft_class(config: DraftConfig) -> type[DFlashDraft]:
    """The class of a draft configuration, by family."""
    return DRAFTS[config.family]
