"""Serve a model of transformers on kvcore: an engine, and an HTTP endpoint for it."""

from examples.serve.engine import Ask, Engine

__all__ = ["Ask", "Engine"]
