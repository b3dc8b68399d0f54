"""Starts a gateway for the rig: python run_gateway.py PORT POLICY ENGINE_PORT... ; auth, ledger, metrics and log on."""

import asyncio
import hashlib
import signal
import sys
import tempfile

import uvloop

from weighbridge.core.instance import Limits, Rates
from weighbridge.gateway import Gateway, GatewaySettings, InstanceSettings, KeySettings
from weighbridge.gateway.process import tune_collector
from weighbridge.routing.router import RouterSettings


async def main(port: int, policy: str, engines: list[str]) -> None:
    limits = Limits(max_context=8192, kv_blocks=4096)
    with tempfile.TemporaryDirectory(prefix="wb-bench-") as data_dir:
        gateway = Gateway(
            GatewaySettings(
                port=port,
                admin_port=0,
                data_dir=data_dir,
                router=RouterSettings(policy=policy),
                keys=(KeySettings(sha256=hashlib.sha256(b"sk-test").hexdigest(), tenant="t"),),
                instances=tuple(
                    InstanceSettings(
                        name=f"i{n}", url=f"http://127.0.0.1:{p}", kind="vllm", models=("mock",), limits=limits
                    )
                    for n, p in enumerate(engines)
                ),
            )
        )
        await gateway.start()
        tune_collector()
        from weighbridge.core.events import ProfileUpdated

        await gateway.wait_ready(10.0)
        await asyncio.sleep(1.0)
        for name in gateway.driver.endpoints:
            rates = Rates(prefill_tokens_per_s=50_000.0, decode_tokens_per_s=2_000.0)
            gateway.driver.feed(ProfileUpdated(instance=name, rates=rates))
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
        await gateway.stop()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
