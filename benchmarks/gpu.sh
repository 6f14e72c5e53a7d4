#!/usr/bin/env bash
# The tests for a GPU and the gpu suite in one command of under 10 minutes, on a machine that has torch and torchvision,
# but perhaps neither a network nor what else mptrain needs.
#
#   benchmarks/gpu.sh pack FOLDER [3.12]   where there is a network: wheels of what such a machine lacks, for its Python
#   benchmarks/gpu.sh run FOLDER [OUT]     on the machine with the GPU, in a copy of this repository: results into OUT
#   benchmarks/gpu.sh rehearse FOLDER OUT  the same on a CPU, in sizes whose numbers mean nothing
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

# What mptrain and its tests need, as pyproject.toml says, but torch, torchvision and what comes with them.
needed() {
    "$python" - <<'END'
import re

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = [*project["dependencies"], "mptrain[test]"]
while wanted:
    name, extras, rest = re.fullmatch(r"([\w-]+)(?:\[(.*)\])?(.*)", wanted.pop(0)).groups()
    if name == project["name"]:
        wanted += [one for extra in extras.split(",") for one in project["optional-dependencies"][extra]]
    elif name not in ("torch", "torchvision"):
        print(name + (f"[{extras}]" if extras else "") + rest)
END
}

pack() {
    local folder=$1 version=${2:-3.12}
    mkdir -p "$folder"
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" antlr4-python3-runtime==4.9.3 # there is no wheel of it
    local platforms=() list wanted
    for name in manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64; do platforms+=(--platform "$name"); done
    list=$(needed)
    mapfile -t wanted <<<"$list"
    "$python" -m pip download --quiet --only-binary=:all: --python-version "$version" --implementation cp \
        "${platforms[@]}" --find-links "$folder" --dest "$folder" "${wanted[@]}"
    torch_wheels "$folder" -delete # timm requires torch, but the machine's own torch is the one that fits its driver
}

# The wheels of torch, torchvision and what comes with them in a folder; more words are actions of find.
torch_wheels() {
    find "$1" -maxdepth 1 -regextype posix-extended \
        -iregex '.*/(torch|torchvision|triton|(nvidia|cuda)_[^-/]*)-[^/]*\.whl' "${@:2}"
}

# A virtual environment of the wheels, this repository and what the machine's own Python has, which programs that tests start see too.
environment() {
    "$python" -m venv --without-pip "$1"
    local packages
    packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$packages" "$2"/*.whl
    { pwd; "$python" -c 'import sys; print("\n".join(path for path in sys.path if path.endswith("-packages")))'; } >"$packages/machine.pth"
}

run() {
    local folder=$1 out=$2 rehearse=${3:-}
    compgen -G "$folder/*.whl" >/dev/null || fail "there are no wheels in $folder: $0 pack $folder makes them, where there is a network"
    [[ -z $(torch_wheels "$folder") ]] || fail "$folder has wheels of torch or CUDA, which would hide this machine's own: pack it again with $0 pack $folder"
    venv=$(mktemp -d)
    trap 'rm -rf "$venv"' EXIT
    environment "$venv" "$folder"
    python=$venv/bin/python
    export PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 # plugins of other people's may warn
    mkdir -p "$out"
    local failed=0
    timeout 240 "$python" -m pytest -p xdist -p pytest_timeout -n "$(nproc)" --maxprocesses 12 -q -p no:cacheprovider -m gpu \
        --junitxml "$out/tests.xml" tests/gpu || failed=$?
    timeout 300 "$python" -m benchmarks.run --suite gpu --out "$out/gpu.json" ${rehearse:+--rehearse} \
        --budget "${BUDGET:-280}" || failed=$?
    return "$failed"
}

fail() {
    echo "$1" >&2
    exit 2
}

case "${1:-} $#" in
    "pack 2" | "pack 3") pack "$2" "${3:-}" ;;
    "run 2" | "run 3") run "$2" "${3:-benchmarks/results}" ;;
    "rehearse 3") run "$2" "$3" rehearse ;;
    *) fail "$(sed -n '2,8s/^# \{0,1\}//p' "$0")" ;;
esac
