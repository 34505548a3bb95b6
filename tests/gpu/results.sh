#!/usr/bin/env bash
# results.sh GPU INPUT OUT SEED...: policies, fixed k and servers under many loads, on one GPU: a server with
# speculation that replays recorded acceptance (off mode kv-only) beside one without speculation. INPUT holds
#   policy.safetensors, sglang-adaptive.safetensors, threshold.safetensors     (draftdial train, draftdial export-rule)
#   acceptance/{chat,code,finance,maths,poor,reasoning}.jsonl                  (draftdial export-acceptance)
#   lengths.csv, swing.csv                                                     (tests/gpu/short_requests.py)
# Leaves in OUT: off-500.json, off-2000.json, host.jsonl (how slow the host was, and when), and SEED/PART/bench.json.
# Each seed is one repeat over all parts, what matters most first, so that whatever is there when time runs out is whole.
set -uo pipefail
gpu=$1 input=$2 out=$3
shift 3
. "$(dirname "$0")/servers.sh"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
url=http://127.0.0.1:$((30000 + gpu)) plain_url=http://127.0.0.1:$((30100 + gpu))
# Idle servers must not take the host's time from the other one, nor logging from the scheduler.
common=(--mem-fraction-static 0.92 --max-total-tokens "${POOL_TOKENS:-310000}" --sleep-on-idle --log-level warning)
replay=()
for domain in chat code finance maths poor reasoning; do
  replay+=(--replay-acceptance "$input/acceptance/$domain.jsonl")
done
DRAFTDIAL_BENCHMARK=1 start "$gpu" "$out/spec.log" "$input/policy.safetensors" --off-mode kv-only "${replay[@]}" -- \
  "${target[@]}" "${draft[@]}" --port $((30000 + gpu)) "${common[@]}"
spec=$!
start "$gpu" "$out/plain.log" "$input/policy.safetensors" --warn -- "${target[@]}" --port $((30100 + gpu)) "${common[@]}"
plain=$!
await $plain_url $plain "$out/plain.log" || exit 1
await $url $spec "$out/spec.log" || exit 1

host() { python3 "$here/host_check.py" $url --out "$out/host.jsonl"; }

# bench PART ARGUMENTS...
bench() {
  local part=$1 begun=$SECONDS
  shift
  host
  mkdir -p "$out/$seed"
  $dial bench $url --deployed "$input/policy.safetensors" --repeats 1 --seed "$seed" --lengths "trace:$input/lengths.csv" \
    --out "$out/$seed/$part" "$@" >"$out/$seed/$part.txt" 2>&1
  echo "$seed/$part: status $?, $((SECONDS - begun)) s, at $SECONDS s"
}

host || echo "the host is slow"
python3 "$here/off_modes.py" $url $plain_url --batches 1,8,32,64,128,256 --context 500 --out "$out/off-500.json"
python3 "$here/off_modes.py" $url $plain_url --batches 1,8,32,64,128 --context 2000 --out "$out/off-2000.json"
echo "off modes at $SECONDS s"

adaptive=policy:$input/sglang-adaptive.safetensors
few="steer off fixed-1 fixed-2 $adaptive"
good=chat,code,reasoning mixed=finance,maths,chat,code,reasoning
high=(--closed 256,192,128,64 --per-slot 2 --requests 10)
low=(--closed 1,2,4,8,16,32 --per-slot 3 --requests 10)
swing=$(($(wc -l <"$input/swing.csv") - 1))
for seed in "$@"; do
  bench good-high --domains $good "${high[@]}" --arms $few fixed-3 fixed-5 --no-spec $plain_url
  bench mixed-high --domains $mixed --domain-span 40:160 "${high[@]}" --arms $few fixed-3 fixed-5
  bench good-low --domains $good "${low[@]}" --arms $few fixed-3 fixed-5 fixed-7 --no-spec $plain_url
  bench mixed-low --domains $mixed --domain-span 6:20 "${low[@]}" --arms $few fixed-3 fixed-5 fixed-7
  bench poor-high --domains poor "${high[@]}" --arms $few --no-spec $plain_url
  bench swing --domains $mixed,poor --domain-span 40:120 --trace "$input/swing.csv" --requests "$swing" \
    --arms $few fixed-3 "policy:$input/threshold.safetensors" --no-spec $plain_url
  bench poor-low --domains poor "${low[@]}" --arms $few fixed-3 --no-spec $plain_url
done
timeout 20 $dial status $url
get $url/server_info >"$out/server_info.json"
grep -nE "Traceback|Error|assert" "$out/spec.log" "$out/plain.log" | cut -c1-300 | head -20
echo "$SECONDS s in all"
