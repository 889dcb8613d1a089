#!/usr/bin/env bash
# Run what needs a GPU, on a bare machine without a network: the kit that `python scripts/gpu.py pack` wrote is
# unpacked and installed in a folder of its own, then come the tests, then the benchmarks.
#
#   bash scripts/gpu.sh receive FOLDER     copy the parts in FOLDER to the kit; again for each transfer
#   bash scripts/gpu.sh                    all other steps
#   bash scripts/gpu.sh STEP...            some of them: see STEPS
#
# KIT is the kit's folder, PYTHON the interpreter. Where OUT names a folder, each step's output is copied there too.
# The exit status is 1 where a step failed, 2 where there is no such step.
set -euo pipefail

STEPS="unpack install tests bench-crops bench-dali bench-ffcv bench-load bench-step"
LIMIT=480 # seconds of each step

# Modules that are not in the kit, as a machine for PyTorch has them.
NEEDED="pip torch torchvision numpy scipy numba cv2 PIL lightning yaml packaging typing_extensions psutil tqdm rich
  pytest pytest_timeout xdist hypothesis"

export KIT PYTHON
KIT=$(realpath -m "${KIT:-${TMPDIR:-/tmp}/midepoch-gpu}")
PYTHON=${PYTHON:-python3}
OUT=${OUT:+$(realpath -m "$OUT")}
CALLED_IN=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD

fail() {
  echo "$1" >&2
  exit "${2:-1}"
}

receive() {
  shopt -s nullglob
  local files=("$1"/part-* "$1"/manifest.json*)
  ((${#files[@]})) || fail "There are no parts of a kit in $1. Name the folder that \`pack\` wrote."
  mkdir -p "$KIT/parts"
  cp "${files[@]}" "$KIT/parts/"
  ls -l "$KIT/parts"
}

unpack() {
  "$PYTHON" scripts/gpu.py unpack "$KIT/parts" --into "$KIT"
}

install() {
  [[ -d $KIT/copied ]] || fail "No kit is unpacked in $KIT. Run: bash scripts/gpu.sh unpack"
  # shellcheck disable=SC2086  # a list of words
  "$PYTHON" - $NEEDED <<'END'
import sys
from importlib.util import find_spec

missing = [name for name in sys.argv[1:] if find_spec(name) is None]
if missing:
    sys.exit(f"{sys.executable} lacks these modules: {', '.join(missing)}. Install them there.")
END
  rm -rf "$KIT/site" "$KIT/package"
  mkdir -p "$KIT/site" "$KIT/package/midepoch"
  shopt -s nullglob
  local wheels=("$KIT"/wheels/*.whl)
  if ((${#wheels[@]})); then
    # In one call: several of them share the folder nvidia/.
    "$PYTHON" -m pip install --quiet --root-user-action=ignore --no-index --no-deps --no-compile \
      --target "$KIT/site" "${wheels[@]}"
  fi
  cp -r "$KIT/copied/." "$KIT/site"
  # core/ is the package, and adapters/ is one inside it: see pyproject.toml.
  ln -s "$ROOT"/core/* "$ROOT/adapters" "$KIT/package/midepoch/"
  rm -f "$KIT/package/midepoch/__pycache__"
  echo "Installed $(find "$KIT/site" -maxdepth 1 -name '*.dist-info' | wc -l) packages into $KIT/site"
}

installed() {
  [[ -d $KIT/package ]] || fail "Nothing is installed in $KIT. Run: bash scripts/gpu.sh install"
  export PYTHONPATH="$KIT/package:$KIT/site${PYTHONPATH:+:$PYTHONPATH}"
  export LD_LIBRARY_PATH="$KIT/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

tests() {
  installed
  local files
  mapfile -t files < <(grep -rl 'pytest\.mark\.gpu' tests --include 'test_*.py')
  "$PYTHON" -m pytest -m gpu -q -rA -n 4 -p no:cacheprovider "${files[@]}"
}

bench() {
  installed
  "$PYTHON" benchmarks/gpu.py "$1"
}

if [[ ${1-} == --inside ]]; then # this script again, as `timeout` runs no functions
  case $2 in
    bench-*) bench "${2#bench-}" ;;
    *) "${@:2}" ;;
  esac
  exit
fi

# The whole command line is read before anything runs.
declare -a names=() folders=()
# shellcheck disable=SC2086  # a list of words
(($#)) || set -- $STEPS
while (($#)); do
  folder=
  if [[ $1 == receive ]]; then
    (($# > 1)) || fail "\`receive\` needs the folder of the parts: bash scripts/gpu.sh receive FOLDER" 2
    folder=$(cd "$CALLED_IN" && realpath -m "$2")
    shift
    names+=(receive)
  elif [[ " $STEPS " == *" $1 "* ]]; then
    names+=("$1")
  else
    fail "There is no step $1. Choose among: receive FOLDER, ${STEPS// /, }" 2
  fi
  folders+=("$folder")
  shift
done

failed=()
for index in "${!names[@]}"; do
  name=${names[index]}
  log=/dev/null
  if [[ $OUT ]]; then
    mkdir -p "$OUT"
    log=$OUT/$name.log
  fi
  echo "== $name"
  start=$SECONDS
  status=0
  timeout --kill-after=10 "$LIMIT" bash scripts/gpu.sh --inside "$name" ${folders[index]:+"${folders[index]}"} 2>&1 |
    tee "$log" || status=$?
  case $status in
    0) outcome=done ;;
    124 | 137) outcome="FAILED, stopped after $LIMIT s" ;;
    *) outcome="FAILED, exit status $status" ;;
  esac
  echo "== $name: $((SECONDS - start)) s, $outcome"
  if ((status)); then
    failed+=("$name")
    # Without a kit, every later step would only repeat that there is none.
    case $name in receive | unpack | install) break ;; esac
  fi
done
if ((${#failed[@]})); then
  fail "Failed: ${failed[*]}"
fi
