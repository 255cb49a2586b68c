"""Specs from ``transformers`` configurations. Replaced below by the full table."""

from typing import Any

from kvcore.spec.model import CacheSpec


def from_hf_config(config: Any) -> CacheSpec:
    raise NotImplementedError
