#!/usr/bin/env bash
# install.sh RELEASE: print the path of a venv that runs SGLang RELEASE on a CPU with this checkout of
# draftdial plugged in; build it first where it is missing or its requirements changed (1.6 GB, a minute or two).
set -euo pipefail
release=${1:?usage: install.sh RELEASE}
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
needs=("$here/requirements/common.txt" "$here/requirements/$release.txt" "$here/requirements/$release-no-deps.txt")
for file in "${needs[@]}"; do
  [ -f "$file" ] || { echo "install.sh: no requirements for SGLang $release: $file is missing" >&2; exit 2; }
done
venv=${XDG_CACHE_HOME:-$HOME/.cache}/draftdial/sglang-$release
torch=torch==2.13.0

hash_of() { cat "$@" | sha256sum | cut -d" " -f1; }
is_current() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }
install() { "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$@" >&2; }

mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9 # two checkouts may ask for the same venv at once

wanted=$(hash_of "${needs[@]}")
if ! is_current "$venv/.requirements" "$wanted"; then
  echo "install.sh: SGLang $release into $venv" >&2
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  install "$torch" # first and alone: everything else would choose its own build
  install "$torch" -r "${needs[0]}" -r "${needs[1]}"
  install --no-deps -r "${needs[2]}"
  echo "$wanted" > "$venv/.requirements"
fi

# Entry points are written down at installation, and an editable one names its checkout.
wanted="$repository $(hash_of "$repository/pyproject.toml" "$here/cpu_sglang/pyproject.toml")"
if ! is_current "$venv/.checkout" "$wanted"; then
  install --no-deps -e "$repository" -e "$here/cpu_sglang"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$here/cpu_sglang/stand_ins" > "$site/zz_stand_ins.pth" # after site-packages: a real triton would win
  echo "$wanted" > "$venv/.checkout"
fi
echo "$venv"
