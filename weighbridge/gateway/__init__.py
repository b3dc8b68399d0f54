"""Driver in wall time: OpenAI surface, relay, engine adapters, health, admin API.

`Gateway(settings)`, then `await` its `start()`, `wait_ready(timeout_s)`, `drain()` and `stop()`.
"""

from weighbridge.gateway.gateway import Gateway
from weighbridge.gateway.settings import GatewaySettings, InstanceSettings, KeySettings

__all__ = ["Gateway", "GatewaySettings", "InstanceSettings", "KeySettings"]
