#!/usr/bin/env bash
# steer.sh POLICY OUT [GPUS]: a Llama-3.1-8B shape with EAGLE-3 on FA3, steered by POLICY while the load goes
# 1 -> 128 -> 1; then the control channel under load. Needs SGLang and draftdial on this machine's Python path
# and GPUS (1) Hopper GPUs. Weights are random, so acceptance is SGLang's simulated one. Leaves in OUT: the
# decision log, what each level of load did (steer.json), /server_info, metrics and the server's log.
set -euo pipefail
policy=$1 out=$2 gpus=${3:-1}
GRAPHS=${GRAPHS:-1 2 4 8 16 32 64 96 128}
PREFILL_GRAPHS=${PREFILL_GRAPHS:-none}
. "$(dirname "$0")/servers.sh"
url=http://127.0.0.1:30000
export SGLANG_SIMULATE_ACC_LEN=${SGLANG_SIMULATE_ACC_LEN:-2.5}

start "$(seq -s, 0 $((gpus - 1)))" "$out/server.log" "$policy" --log "$out/decisions.log" -- "${target[@]}" "${draft[@]}" \
  --tp "$gpus" --mem-fraction-static 0.7 --max-running-requests 136 --enable-metrics --port 30000
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
await $url $server "$out/server.log"

python3 "$here/step_load.py" $url --levels 1 4 16 32 64 96 128 96 64 32 16 4 1 --seconds "${LEVEL_S:-6}" --out "$out/steer.json"
$dial status $url
echo "== under load: mode off, forced k, steer again, deploy"
python3 "$here/step_load.py" $url --levels 32 32 32 32 --seconds 5 --out "$out/control.json" &
load=$!
sleep 3; $dial set $url --mode off
sleep 4; $dial set $url --mode steer
sleep 1; $dial set $url --force-k 3
sleep 4; $dial set $url --force-k none
sleep 1; $dial deploy "$policy" $url
wait $load
$dial status $url --json >"$out/status.json"
get $url/metrics | grep draftdial >"$out/metrics.txt" || true
get $url/server_info >"$out/server_info.json"
grep -nE "Traceback|Error|assert" "$out/server.log" | head -20 || true
python3 - "$out/status.json" <<'P'
import json, sys

print(json.dumps(json.load(open(sys.argv[1])))[:3000])
P
