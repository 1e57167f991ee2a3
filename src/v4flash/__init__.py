"""v4flash: a single-stream speculative decoder for DeepSeek-V4-Flash and V4.1-Flash in JAX.

Public names: `load` (a checkpoint folder to a `LanguageModel`), `LanguageModel`, `Generation`, `StepRecord`,
`Session`, `Statistics`, `ModelConfig`, `demo_path` (the folder of the demonstration checkpoint), and the errors.
They are imported on first use, so that light commands stay light.
"""

import importlib

_PUBLIC = {
    "load": "v4flash.engine.language_model",
    "LanguageModel": "v4flash.engine.language_model",
    "Generation": "v4flash.engine.language_model",
    "StepRecord": "v4flash.engine.language_model",
    "Session": "v4flash.engine.session",
    "Statistics": "v4flash.engine.statistics",
    "ModelConfig": "v4flash.config",
    "demo_path": "v4flash.demo",
    "V4FlashError": "v4flash.errors",
    "UsageError": "v4flash.errors",
    "CheckpointError": "v4flash.errors",
    "CapacityError": "v4flash.errors",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'v4flash' has no attribute {name!r}")
