#!/usr/bin/env bash
# results.sh GPU SEED INPUT OUT: the table of docs/results.md, once, on one GPU: a server with speculation that replays
# recorded acceptance (off mode kv-only) beside a server without speculation. INPUT holds what it needs:
#   policy.safetensors, sglang-adaptive.safetensors, threshold.safetensors     (draftdial train, draftdial export-rule)
#   acceptance/{chat,code,finance,maths,poor,reasoning}.jsonl                  (draftdial export-acceptance)
#   lengths.csv, swing.csv                                                     (tests/gpu/short_requests.py)
# Leaves in OUT: off.json and a folder of `draftdial bench` for each part; what matters most comes first.
set -uo pipefail
gpu=$1 seed=$2 input=$3 out=$4
. "$(dirname "$0")/servers.sh"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
url=http://127.0.0.1:$((30000 + gpu)) plain_url=http://127.0.0.1:$((30100 + gpu))
pool=(--mem-fraction-static 0.92 --max-total-tokens ${POOL_TOKENS:-310000})
replay=()
for domain in chat code finance maths poor reasoning; do
  replay+=(--replay-acceptance "$input/acceptance/$domain.jsonl")
done
export DRAFTDIAL_BENCHMARK=1
start "$gpu" "$out/spec.log" "$input/policy.safetensors" --off-mode kv-only "${replay[@]}" --log "$out/decisions.log" -- \
  "${target[@]}" "${draft[@]}" --port $((30000 + gpu)) "${pool[@]}"
spec=$!
start "$gpu" "$out/plain.log" "$input/policy.safetensors" --warn -- "${target[@]}" --port $((30100 + gpu)) "${pool[@]}"
plain=$!
await $plain_url $plain "$out/plain.log" || exit 1
await $url $spec "$out/spec.log" || exit 1

# bench FOLDER ARGUMENTS...
bench() {
  local folder=$1 begun=$SECONDS
  shift
  $dial bench $url --deployed "$input/policy.safetensors" --repeats 1 --seed "$seed" --lengths "trace:$input/lengths.csv" \
    --out "$out/$folder" "$@" >"$out/$folder.txt" 2>&1
  echo "$folder: status $?, $((SECONDS - begun)) s, at $SECONDS s"
}
adaptive=policy:$input/sglang-adaptive.safetensors
every="steer fixed-1 fixed-2 fixed-3 fixed-5 fixed-7 $adaptive"
good=chat,code,reasoning mixed=finance,maths,chat,code,reasoning
high=(--closed 256,192,128,64 --per-slot 2 --requests 10)
low=(--closed 1,2,4,8,16,32 --per-slot 3 --requests ${LEAST:-10})

python3 "$here/off_modes.py" $url $plain_url --batches 1,8,32,64,128,256 --context 500 --out "$out/off-500.json"
echo "off modes at $SECONDS s"
bench good-high --domains $good "${high[@]}" --arms $every off --no-spec $plain_url
bench poor-high --domains poor "${high[@]}" --arms $every off --no-spec $plain_url
bench mixed-high --domains $mixed --domain-span 40:160 "${high[@]}" --arms $every
bench good-low --domains $good "${low[@]}" --arms $every off --no-spec $plain_url
bench mixed-low --domains $mixed --domain-span 6:20 "${low[@]}" --arms $every
bench swing --domains $mixed,poor --domain-span 40:120 --trace "$input/swing.csv" --requests $(($(wc -l <"$input/swing.csv") - 1)) \
  --arms steer off fixed-1 fixed-2 fixed-3 $adaptive "policy:$input/threshold.safetensors" --no-spec $plain_url
bench poor-low --domains poor "${low[@]}" --arms $every off --no-spec $plain_url
python3 "$here/off_modes.py" $url $plain_url --batches 1,8,32,64,128 --context 2000 --out "$out/off-2000.json"
timeout 20 $dial status $url
get $url/server_info >"$out/server_info.json"
grep -nE "Traceback|Error|assert" "$out/spec.log" "$out/plain.log" | cut -c1-300 | head -20
echo "$SECONDS s in all"
