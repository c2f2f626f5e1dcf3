"""Sharded embedding tables to use at once."""

from __future__ import annotations

from .adapters.nn import ShardedEmbeddingBag

__all__ = ["ShardedEmbeddingBag"]
