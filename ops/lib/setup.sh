# Sourced by the scripts in ops/: makes the machine and `.venv` ready, from nothing or from whatever an
# earlier run left. Callers set `root` to the repository's folder.
#
#   setup_python          Python packages in `.venv`, exactly as in ops/requirements.lock
#   setup_broker          a RabbitMQ that can be started as a private node (its service is not started)
#   setup_browser         a Chromium for the tests of the status page
#   setup_compiler        a C and C++ compiler, for the stand-ins of the GPU libraries that the tests make

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

setup_python() {
    mkdir -p "$root/.cache"
    # Two scripts may start at once; only one of them may build the environment.
    exec 9>"$root/.cache/setup.lock"
    flock 9
    _ensure_venv
    exec 9>&-
}

setup_broker() {
    mkdir -p "$root/.cache"
    exec 9>"$root/.cache/setup.lock"
    flock 9
    if ! _has_rabbitmq; then
        _apt_install rabbitmq-server
        _has_rabbitmq || die "rabbitmq-server was installed, but neither rabbitmq-server nor epmd can be found; look at 'dpkg -L rabbitmq-server'"
    fi
    exec 9>&-
}

setup_compiler() {
    mkdir -p "$root/.cache"
    exec 9>"$root/.cache/setup.lock"
    flock 9
    if ! command -v gcc >/dev/null || ! command -v g++ >/dev/null; then
        _apt_install gcc g++ libc6-dev
    fi
    exec 9>&-
}

setup_browser() {
    mkdir -p "$root/.cache"
    exec 9>"$root/.cache/setup.lock"
    flock 9
    command -v chromium >/dev/null || _apt_install chromium
    exec 9>&-
}

# --- Python -------------------------------------------------------------------------------------------

_ensure_venv() {
    local venv="$root/.venv" lock="$root/ops/requirements.lock" want have=""
    want=$(cat "$lock" "$root/pyproject.toml" | sha256sum | cut -d' ' -f1)
    [ -f "$venv/.qworker-stamp" ] && have=$(cat "$venv/.qworker-stamp")
    if [ "$have" = "$want" ] && _venv_works; then
        return
    fi
    # The marker stands while packages are being written: a run that was killed there left half a package.
    if [ -e "$venv/.qworker-installing" ] || ! _venv_works; then
        rm -rf "$venv"
    fi
    if [ ! -e "$venv" ]; then
        say "Creating .venv ..."
        _ensure_python
        "$PYTHON" -m venv "$venv"
    fi
    say "Installing the locked packages ..."
    rm -f "$venv/.qworker-stamp"
    : >"$venv/.qworker-installing"
    # Modules are compiled when they are first imported: most of these never are.
    _pip install --quiet --no-compile --requirement "$lock" || die "pip could not install ops/requirements.lock (see above): is a package index reachable?"
    _pip install --quiet --no-deps --no-build-isolation --editable "$root" || die "pip could not install this package itself (see above)"
    rm -f "$venv/.qworker-installing"
    echo "$want" >"$venv/.qworker-stamp"
}

_venv_works() {
    "$root/.venv/bin/python" -c 'import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

_pip() {
    "$root/.venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"
}

# Sets PYTHON to an interpreter that this package runs on and that can make virtual environments.
_ensure_python() {
    _find_python && return
    _apt_install python3 python3-venv ca-certificates
    _find_python || die "Python 3.11 to 3.14 with the venv module is needed; the newest found is '$(python3 --version 2>&1 || true)'. Install one and put it on PATH"
}

_find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.14; do
        # Asking it to run is the only sure test: version managers put stubs on PATH.
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; then
            PYTHON=$name
            return 0
        fi
    done
    return 1
}

# --- system packages ----------------------------------------------------------------------------------

_has_rabbitmq() {
    local server
    for server in /usr/lib/rabbitmq/bin/rabbitmq-server /usr/sbin/rabbitmq-server; do
        [ -x "$server" ] && command -v epmd >/dev/null && return 0
    done
    return 1
}

_apt_install() {
    command -v apt-get >/dev/null || die "these programs are missing: $*. Install them with your system's package tool, then run this again"
    [ "$(id -u)" = 0 ] || die "these packages are missing: $*. Run 'sudo apt-get install --no-install-recommends $*', then run this again"
    say "Installing $* ..."
    local policy=/usr/sbin/policy-rc.d ours="" status=0
    # Debian starts a service as soon as it is installed. We want the program only.
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        ours=yes
    fi
    {
        apt-get update -qq &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
    } </dev/null >"$root/.cache/apt.log" 2>&1 || status=$?
    [ -n "$ours" ] && rm -f "$policy"
    if [ "$status" != 0 ]; then
        tail -n 20 "$root/.cache/apt.log" >&2
        die "apt-get could not install: $* (the whole log is .cache/apt.log)"
    fi
}
