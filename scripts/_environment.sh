# Sourced by scripts/demo and scripts/test. `install NAME [EXTRA...]` makes the virtual environment once, installs this
# checkout with what this machine can use, and sets $python. CUDNN_GRAPHS_VENV names another folder than .venv;
# CUDNN_GRAPHS_EXTRAS adds extras (cuda13,aot: kernels and cuDNN plans compile without a GPU).

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${CUDNN_GRAPHS_VENV:-$root/.venv}
python=$venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1

base_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "python3: got none from 3.11 to 3.13 with the venv module; need one; on Debian and Ubuntu: apt-get install python3 python3-venv" >&2
    return 1
}

make_venv() {       # make_venv BASE_PYTHON [OPTION]
    if "$python" -c '' 2>/dev/null; then return; fi
    if "$1" -c 'import ensurepip' 2>/dev/null; then
        "$1" -m venv --clear ${2:+"$2"} "$venv"
    else            # Debian without python3-venv: the base Python's own pip serves the environment
        "$1" -m venv --clear --without-pip ${2:+"$2"} "$venv"
    fi
}

pip_install() {     # pip_install BASE_PYTHON ARGUMENT...
    local base=$1 quiet=--quiet
    shift
    if [ -t 1 ]; then quiet=; fi
    if "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m pip install $quiet "$@"
    else
        "$base" -m pip --python "$python" install $quiet "$@"
    fi
}

install() {         # install NAME [EXTRA...]
    local name=$1 more=${CUDNN_GRAPHS_EXTRAS:-} base options torch extra extras stamp wanted
    shift
    base=$(base_python)
    { read -r options; read -r torch; read -r extra; } < <("$base" "$root/scripts/choose_install.py")
    extras=$(printf '%s\n' $extra "$@" ${more//,/ } | paste -sd, -)
    stamp=$venv/.installed-$name
    wanted="$torch $extras $(cksum < "$root/pyproject.toml") $root"
    if "$python" -c '' 2>/dev/null && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    extras=${extras:+[$extras]}
    echo "Installing into $venv: ${torch:-the torch that is here}, cudnn-graphs$extras"
    make_venv "$base" "$options"
    pip_install "$base" ${torch:+"$torch"} -e "$root$extras"
    echo "$wanted" > "$stamp"
}
