#!/usr/bin/env bash
# run.sh [RELEASE...]: check what the plugin relies on against the sources of each SGLang release, without a model.
# Wheels come through pip and stay in the cache, where they are unpacked; no release is installed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/draftdial/releases
releases=("$@")
[ $# -gt 0 ] || releases=(0.5.14 0.5.15.post1 0.5.16 0.5.17 0.5.18 0.5.19 0.5.20 0.5.21 0.5.22 0.5.23)

venv=$("$here/../engine/install.sh" 0.5.17) # has torch and all that SGLang's light modules import
mkdir -p "$cache"
failed=0
for release in "${releases[@]}"; do
  unpacked=$cache/$release
  if [ ! -e "$unpacked/.whole" ]; then
    if ! "$venv/bin/python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$cache" "sglang==$release"
    then
      echo "$release: no wheel to be had, not checked"
      continue
    fi
    rm -rf "$unpacked"
    "$venv/bin/python" -m zipfile -e "$cache"/sglang-"$release"-*.whl "$unpacked"
    rm "$cache"/sglang-"$release"-*.whl
    touch "$unpacked/.whole"
  fi
  echo "== SGLang $release"
  # In front of the venv's own release. SGLANG_RELEASE says which sources the test must find there.
  PYTHONPATH=$unpacked:$here/../engine SGLANG_RELEASE=$release OMP_NUM_THREADS=1 \
    "$venv/bin/python" -m pytest -q -p no:cacheprovider --confcutdir "$here" "$here" || failed=1
done
exit $failed
