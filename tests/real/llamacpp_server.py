"""llama.cpp's own server, out of the wheel that carries our library: `MODEL.gguf PORT SLOTS CONTEXT`."""

import sys
import time

import xllamacpp


def main(model: str, port: str, slots: str, context: str) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.n_parallel = int(slots)
    params.n_ctx = int(context)
    params.model_alias = {"smol"}
    params.endpoint_slots = params.endpoint_metrics = params.endpoint_props = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(f"ready {server.listening_address}", flush=True)
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
