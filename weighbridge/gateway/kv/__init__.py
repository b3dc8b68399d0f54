"""What engines say of their KV caches, told to the Router in its own terms: KV events in, prefix block events out."""

from weighbridge.gateway.kv.index import KvIndex

__all__ = ["KvIndex"]
