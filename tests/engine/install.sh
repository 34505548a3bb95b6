#!/usr/bin/env bash
# install.sh RELEASE: print the path of a venv that runs SGLang RELEASE on a CPU with this checkout of
# draftdial plugged in. Every checkout has a small one of its own, in front of a venv with SGLang that all share;
# that one is built first where it is missing or its requirements changed (1.6 GB, a minute or two).
set -euo pipefail
release=${1:?usage: install.sh RELEASE}
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
needs=("$here/requirements/common.txt" "$here/requirements/$release.txt" "$here/requirements/$release-no-deps.txt")
for file in "${needs[@]}"; do
  [ -f "$file" ] || { echo "install.sh: no requirements for SGLang $release: $file is missing" >&2; exit 2; }
done
shared=${XDG_CACHE_HOME:-$HOME/.cache}/draftdial/sglang-$release
torch=torch==2.13.0

hash_of() { cat "$@" | sha256sum | cut -d" " -f1; }
is_current() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }
install_into() { "$1/bin/python" -m pip install --disable-pip-version-check --quiet "${@:2}" >&2; }
packages_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

mkdir -p "$(dirname "$shared")"
exec 9>"$shared.lock"
flock 9 # two checkouts may ask at once

wanted=$(hash_of "${needs[@]}")
if ! is_current "$shared/.requirements" "$wanted"; then
  echo "install.sh: SGLang $release into $shared" >&2
  rm -rf "$shared"
  "${PYTHON:-python3}" -m venv "$shared"
  install_into "$shared" "$torch" # first and alone: everything else would choose its own build
  install_into "$shared" "$torch" -r "${needs[0]}" -r "${needs[1]}"
  install_into "$shared" --no-deps -r "${needs[2]}"
  echo "$wanted" > "$shared/.requirements"
fi

# Entry points are written down at installation, and an editable one names its checkout.
venv=$shared-for-$(hash_of <<< "$repository" | cut -c1-12)
wanted="$repository $wanted $(hash_of "$repository/pyproject.toml" "$here/cpu_sglang/pyproject.toml")"
if ! is_current "$venv/.checkout" "$wanted"; then
  rm -rf "$venv"
  "$shared/bin/python" -m venv --without-pip "$venv"
  packages=$(packages_of "$venv")
  packages_of "$shared" > "$packages/sglang.pth"
  echo "$here/cpu_sglang/stand_ins" > "$packages/zz_stand_ins.pth" # behind all packages: a real triton would win
  install_into "$venv" --no-deps -e "$repository" -e "$here/cpu_sglang"
  echo "$wanted" > "$venv/.checkout"
fi
echo "$venv"
