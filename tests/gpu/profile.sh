#!/usr/bin/env bash
# profile.sh POLICY OUT: `draftdial profile` on two GPUs: a server with speculation and off mode kv-only, one without,
# measured at the same time. On one GPU run `DRAFTDIAL_OFF_MODE=kv-only draftdial profile -- ...` with the same
# arguments. Leaves in OUT: profile.json, its measurements, the logs, and how fast either GPU is.
set -euo pipefail
policy=$1 out=$2
. "$(dirname "$0")/servers.sh"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
start 0 "$out/spec.log" "$policy" --off-mode kv-only -- "${target[@]}" "${draft[@]}" --port 30000 --mem-fraction-static 0.8
spec=$!
start 1 "$out/plain.log" "$policy" --warn -- "${target[@]}" --port 30100 --mem-fraction-static 0.9 --max-total-tokens 590000
plain=$!
await http://127.0.0.1:30100 $plain "$out/plain.log"
await http://127.0.0.1:30000 $spec "$out/spec.log"
python3 "$here/gpu_speed.py" >"$out/gpu_speed.json"
python3 "$here/profile_both.py" http://127.0.0.1:30000 --no-spec http://127.0.0.1:30100 --out "$out/h200-llama3-8b.json" \
  --batches "${graphs// /,}" --rounds "${ROUNDS:-20}" --held-out "${HELD_OUT:-5}"
$dial status http://127.0.0.1:30000
get http://127.0.0.1:30000/server_info >"$out/server_info.json"
grep -nE "Traceback|Error|assert|draftdial" "$out/spec.log" "$out/plain.log" | cut -c1-300 | head -40 || true
echo "$SECONDS s in all"
